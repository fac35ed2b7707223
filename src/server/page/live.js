// Live charts from /metrics, asked for once a second while the page is seen. Percentiles are of what histograms counted lately.

import { api, bytes, el, find, number, percent, seconds } from "./base.js";
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

function components(all, name) {
  return new Map((all.get(name) || []).map(({ labels, value }) => [labels.component, value]));
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
    reads: one(all, "achieved_bandwidth_bytes_per_second"),
    memory: one(all, "read_bandwidth_bytes_per_second"),
    timed: one(all, "timed_steps_total"),
    seconds: components(all, "step_component_seconds_total"),
    bytes: components(all, "step_component_bytes_total"),
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

// Of the steps that were timed while the charts look back: how many, and of each component its seconds and the least that its bytes
// take, the longest first.
function timedSteps() {
  const before = samples[0], after = samples.at(-1);
  const grown = (what, name) => (after[what].get(name) ?? 0) - (before[what].get(name) ?? 0);
  const rows = [...after.seconds.keys()].map((name) => ({ name, time: grown("seconds", name), floor: after.memory ? grown("bytes", name) / after.memory : 0 }));
  return { steps: after.timed - before.timed, rows: rows.filter(({ time }) => time > 0).sort((a, b) => b.time - a.time) };
}

// ---------------------------------------------------------------- drawing

function drawComponents() {
  const { steps, rows } = timedSteps();
  if (!rows.length) {
    charts.parts.replaceChildren(el("p", { class: "big" }, samples.at(-1).seconds.size ? "no steps lately" : "not measured"));
    return;
  }
  const sum = rows.reduce((all, { time }) => all + time, 0);
  const shown = rows.map(({ name, time, floor }) => ({
    name, text: `${seconds(time / steps)}, ${percent(time / sum, 2)}`, share: time / rows[0].time, part: floor / time,
  }));
  charts.parts.replaceChildren(bars(shown), el("p", { class: "soft" }, `Mean of ${number(steps)} timed steps; the full colour is the floor, what reading the bytes takes.`));
}

function drawFloor({ floor, reads, memory }) {
  if (floor == null || !memory) charts.floor.draw(null, "not measured");
  else if (!floor) charts.floor.draw(null, "no steps lately");
  else charts.floor.draw(floor, percent(floor), `${bytes(reads)}/s of the ${bytes(memory)}/s that the memory gives`);
}

function draw() {
  const times = over("time");
  charts.tokens.draw([rates("decode"), rates("prefill")], times);
  charts.requests.draw([over("running"), over("waiting")], times);
  charts.kv.draw([over("used"), over("cached")], times);
  charts.ttft.draw([quantiles("ttft", 0.5), quantiles("ttft", 0.95)], times);
  charts.token.draw([quantiles("token", 0.5), quantiles("token", 0.95), quantiles("token", 0.99)], times);
  drawFloor(samples.at(-1));
  drawComponents();
}

function make() {
  charts.tokens = new LineChart("Tokens per second", { lines: ["answers", "prompts"], format: (v) => number(v), span: SPAN });
  charts.requests = new LineChart("Requests", { lines: ["running", "waiting"], format: (v) => number(v), span: SPAN });
  charts.kv = new LineChart("KV cache", { lines: ["in use", "kept for prefixes"], format: percent, max: 1, span: SPAN });
  charts.ttft = new LineChart("Time to first token", { lines: ["p50", "p95"], format: seconds, span: SPAN });
  charts.token = new LineChart("Between tokens", { lines: ["p50", "p95", "p99"], format: seconds, span: SPAN });
  charts.floor = new Gauge("Share of the floor", "what decode steps read, over what the memory gives");
  charts.parts = el("div", {}, el("p", { class: "big" }, "not measured"));
  const parts = el("figure", { class: "card whole" }, el("figcaption", {}, "Time of a step by component"), charts.parts);
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
