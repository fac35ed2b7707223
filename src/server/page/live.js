// Live charts from /metrics, asked for once a second while the page is seen. Percentiles are of what histograms counted lately.

import { api, el, find, number, percent, seconds } from "./base.js";
import { bars, Gauge, LineChart } from "./charts.js";

const EVERY_MS = 1000;
const SPAN = 120, WINDOW = 10; // seconds: of the charts; behind a percentile

let samples = []; // of one life of the server, the newest last
const charts = {};

// ---------------------------------------------------------------- reading

// "nibble:name{a="b"} 1" as name -> [{labels, value}].
export function parse(text) {
  const all = new Map();
  for (const line of text.split("\n")) {
    const match = /^nibble:(\w+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] || "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value;
    if (!all.has(match[1])) all.set(match[1], []);
    all.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  return all;
}

function one(all, name) {
  return all.get(name)?.[0].value ?? null;
}

// Counts up to each bound, ascending; the last bound is infinite.
function buckets(all, name) {
  return (all.get(`${name}_bucket`) || []).map(({ labels, value }) => ({ le: labels.le === "+Inf" ? Infinity : Number(labels.le), n: value }));
}

function sampleOf(all) {
  const mode = (name) => (all.get("realtime_tokens_total") || []).find(({ labels }) => labels.mode === name)?.value ?? 0;
  return {
    time: performance.now() / 1000,
    decode: mode("decode"),
    prefill: mode("prefill_compute"),
    running: one(all, "num_requests_running"),
    waiting: one(all, "num_requests_waiting"),
    used: one(all, "kv_cache_usage_perc"),
    cached: one(all, "kv_evictable_tokens") / one(all, "max_total_num_tokens"),
    ttft: buckets(all, "time_to_first_token_seconds"),
    token: buckets(all, "inter_token_latency_seconds"),
    floor: one(all, "decode_share_of_floor"),
    parts: new Map((all.get("step_component_seconds_total") || []).map(({ labels, value }) => [labels.component, value])),
  };
}

// ---------------------------------------------------------------- reckoning

function over(what) {
  return samples.map((sample) => sample[what]);
}

function rates(what) {
  return samples.map((b, i) => {
    const a = samples[i - 1];
    return a ? (b[what] - a[what]) / (b.time - a.time) : null;
  });
}

// The sample that a window begins with which ends with this one.
function beginOf(sample) {
  return samples.findLast(({ time }) => time <= sample.time - WINDOW) || samples[0];
}

// The value below which a share q of what came between two samples lies, linear within a bucket; null: nothing came.
export function quantile(before, after, q) {
  const added = after.map(({ le, n }, i) => ({ le, n: n - (before[i]?.n ?? 0) }));
  const all = added.at(-1)?.n ?? 0;
  if (all <= 0) return null;
  const i = added.findIndex(({ n }) => n >= q * all);
  const low = i ? added[i - 1] : { le: 0, n: 0 };
  if (!Number.isFinite(added[i].le)) return low.le; // all that is known: more than the last bound
  return low.le + ((added[i].le - low.le) * (q * all - low.n)) / (added[i].n - low.n);
}

function quantiles(what, q) {
  return samples.map((sample) => quantile(beginOf(sample)[what], sample[what], q));
}

// Seconds of each component since the window began, the largest first.
function components() {
  const after = samples.at(-1), before = beginOf(after);
  const rows = [...after.parts].map(([name, value]) => ({ name, value: value - (before.parts.get(name) ?? 0) }));
  return rows.filter(({ value }) => value > 0).sort((a, b) => b.value - a.value);
}

// ---------------------------------------------------------------- drawing

function drawComponents() {
  const rows = components(), sum = rows.reduce((all, { value }) => all + value, 0);
  const nothing = samples.at(-1).parts.size ? "no steps lately" : "not measured";
  const shown = rows.map(({ name, value }) => ({ name: name.replaceAll("_", " "), text: percent(value / sum), share: value / rows[0].value }));
  charts.parts.replaceChildren(rows.length ? bars(shown) : el("p", { class: "big" }, nothing));
}

function draw() {
  const times = over("time");
  charts.tokens.draw([rates("decode"), rates("prefill")], times);
  charts.requests.draw([over("running"), over("waiting")], times);
  charts.kv.draw([over("used"), over("cached")], times);
  charts.ttft.draw([quantiles("ttft", 0.5), quantiles("ttft", 0.95)], times);
  charts.token.draw([quantiles("token", 0.5), quantiles("token", 0.95), quantiles("token", 0.99)], times);
  const floor = samples.at(-1).floor;
  charts.floor.draw(floor, percent(floor));
  drawComponents();
}

function make() {
  charts.tokens = new LineChart("Tokens per second", { lines: ["answers", "prompts"], format: (v) => number(v), span: SPAN });
  charts.requests = new LineChart("Requests", { lines: ["running", "waiting"], format: (v) => number(v), span: SPAN });
  charts.kv = new LineChart("KV cache", { lines: ["in use", "kept for prefixes"], format: percent, max: 1, span: SPAN });
  charts.ttft = new LineChart("Time to first token", { lines: ["p50", "p95"], format: seconds, span: SPAN });
  charts.token = new LineChart("Between tokens", { lines: ["p50", "p95", "p99"], format: seconds, span: SPAN });
  charts.floor = new Gauge("Share of the floor", "What the memory's bandwidth allows for a decode step, over what it took.");
  charts.parts = el("div", {}, el("p", { class: "big" }, "not measured"));
  const parts = el("figure", { class: "card whole" }, el("figcaption", {}, "Time of steps by component"), charts.parts);
  const lines = [charts.tokens, charts.requests, charts.kv, charts.ttft, charts.token, charts.floor];
  find("charts").append(...lines.map((chart) => chart.node), parts);
}

// ---------------------------------------------------------------- asking

// What the server says it is: "ready", "loading", ...
function stateOf(all) {
  return all.get("server_state")?.find(({ value }) => value === 1)?.labels.state ?? "unknown";
}

function take(all) {
  const sample = sampleOf(all);
  if (sample.running == null) return; // still loading
  if (samples.length && sample.decode < samples.at(-1).decode) samples = []; // the server is another one
  samples = [...samples, sample].filter(({ time }) => time >= sample.time - SPAN);
  draw();
}

// Calls onState(state) after every look.
export function startLive(onState) {
  make();
  const look = async () => {
    try {
      const all = parse(await (await api("metrics")).text());
      take(all);
      onState(stateOf(all));
    } catch (error) {
      onState(error.status ? error.message : "unreachable");
    }
  };
  const tick = async () => {
    if (!document.hidden) await look();
    setTimeout(tick, EVERY_MS);
  };
  tick();
}
