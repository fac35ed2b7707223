// What the server is: model, check, memory plan, flags, log.

import { api, bytes, el, find, number } from "./base.js";
import { bars } from "./charts.js";

const LOG_MS = 3000;
let lastLine = -1;

function table(head, rows) {
  return el("table", {},
    el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((cell) => (cell instanceof Node ? cell : el("td", {}, cell)))))));
}

function list(pairs) {
  return el("dl", { class: "facts" }, ...pairs.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function showFacts(info) {
  find("facts").replaceChildren(list([
    ["Model", info.served_model_names.join(", ")],
    ["Family", info.model_type],
    ["Layers", number(info.n_layers)],
    ["Context", `${number(info.max_model_len, 9)} tokens`],
    ["KV cache", `${number(info.max_total_num_tokens, 9)} tokens`],
    ["Device", info.device],
    ["MoE runner", info.moe_runner_backend],
    ["Version", info.version],
  ]));
}

// ---------------------------------------------------------------- the check

// Checks of one path as one: the worst of them and how many there are.
function byPath(checks) {
  const paths = new Map();
  for (const check of checks) {
    const name = `${check.kind}: ${check.path}`, one = paths.get(name);
    if (!one) paths.set(name, { name, n: 1, worst: check });
    else {
      one.n++;
      if (check.error / check.bound > one.worst.error / one.worst.bound) one.worst = check;
    }
  }
  return [...paths.values()];
}

function verdict(check) {
  if (!check.supported) return el("td", { class: "soft" }, "not here");
  return check.chosen ? el("td", { class: "good" }, "ok, in use") : el("td", {}, "can be used");
}

function detail(check, n) {
  if (!check.supported) return check.why;
  if (check.error == null) return "";
  return `error ${number(check.error, 2)} of at most ${number(check.bound, 2)}${n > 1 ? `, the worst of ${n}` : ""}; ${check.where}`;
}

function showChecks(checks) {
  const node = find("checks");
  if (!checks.length) {
    node.replaceChildren(el("p", { class: "soft" }, "The kernels were not compared at the start (--skip-check)."));
    return;
  }
  const rows = byPath(checks).map(({ name, n, worst }) => [el("th", { scope: "row" }, name), verdict(worst), el("td", { class: "soft" }, detail(worst, n))]);
  node.replaceChildren(table(["Path", "Here", "Compared with sums in double at the start"], rows));
}

// ---------------------------------------------------------------- memory

function showMemory(memory) {
  const parts = [
    ["weights", memory.weight_bytes],
    ["KV pages", memory.kv_bytes],
    ["workspace", memory.workspace_bytes],
    ["requests, at most", memory.request_bytes],
    ["batches", memory.batch_bytes],
    ["prefix tree", memory.prefix_tree_bytes],
  ];
  const most = Math.max(...parts.map(([, size]) => size), 1);
  const rows = parts.map(([name, size]) => ({ name, text: bytes(size), share: size / most }));
  const sum = parts.reduce((all, [, size]) => all + size, 0);
  const of = memory.available_bytes ? ` of ${bytes(memory.available_bytes)} that were planned into` : "";
  find("memory").replaceChildren(bars(rows), el("p", { class: "soft" }, `Together ${bytes(sum)}${of}.`));
}

function showFlags(flags) {
  const text = (value) => (Array.isArray(value) ? value.join(", ") : String(value ?? ""));
  find("flags").replaceChildren(list(Object.entries(flags).map(([name, value]) => [`--${name.replaceAll("_", "-")}`, text(value) || "–"])));
}

// ---------------------------------------------------------------- the log

async function showLog() {
  const { lines } = await (await api("ui/log", { quiet: true })).json();
  if (!lines.length || lines.at(-1).n === lastLine) return;
  lastLine = lines.at(-1).n;
  const node = find("log"), stay = node.scrollHeight - node.scrollTop - node.clientHeight < 40;
  node.replaceChildren(...lines.map((line) => el("p", { class: line.level },
    el("time", {}, new Date(1000 * line.time).toLocaleTimeString("en-GB")), line.level === "info" ? null : `${line.level}: `, line.text)));
  if (stay) node.scrollTop = node.scrollHeight;
}

// Fills the section; throws where the server does not answer yet. Returns what it said.
export async function loadServer() {
  const info = await (await api("server_info")).json();
  showFacts(info);
  showChecks(info.checks);
  showMemory(info.memory);
  showFlags(info.flags);
  return info;
}

export function startLog() {
  const tick = async () => {
    try {
      if (!document.hidden && find("server").checkVisibility()) await showLog();
    } catch {
      // the state in the header says so
    }
    setTimeout(tick, LOG_MS);
  };
  tick();
  addEventListener("hashchange", () => showLog().catch(() => {}));
}
