// The chat: messages, streaming, stop, regenerate, parameters. A conversation lasts as long as its tab.

import { api, el, find, number, recall, remember, seconds } from "./base.js";

const NEAR_END = 60; // pixels: who has scrolled up further than that reads and is not moved

let messages = []; // {role, content, reasoning, calls: [{id, name, arguments}], note, error}; tool: {role, content, id}
let running = null; // AbortController of the answer that streams
let modelName = null;

const log = find("messages"), form = find("composer"), prompt = find("prompt");

export function setModel(name) {
  modelName = name;
}

// ---------------------------------------------------------------- showing

// Text grows where it stands: who has selected some of it keeps that, and the focus stays where it is.
function setText(node, text) {
  const old = node.firstChild;
  if (old && text.startsWith(old.data)) old.appendData(text.slice(old.data.length));
  else node.textContent = text;
}

// Text with code blocks between lines of ```; everything else as it is.
function setBody(node, text) {
  const parts = text.split(/^```/m).map((part, i) => (i % 2 ? ["PRE", part.slice(part.indexOf("\n") + 1).trimEnd()] : ["P", part.trim()]));
  const shown = parts.filter(([tag, part]) => tag === "PRE" || part);
  shown.forEach(([tag, part], i) => {
    if (node.children[i]?.tagName !== tag) node.replaceChildren(...[...node.children].slice(0, i), el(tag));
    setText(node.children[i], part);
  });
  while (node.children.length > shown.length) node.lastChild.remove();
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // still being written
  }
}

function showCall(call) {
  return el("div", { class: "call" }, el("p", {}, "Calls ", el("code", {}, call.name)), el("pre", {}, pretty(call.arguments)));
}

// Makes the node of a message; refresh() fills it.
function show(message) {
  const who = { user: "You", assistant: "Answer", tool: "Result of the call" }[message.role];
  const parts = {
    reasoning: el("details", { class: "reasoning" }, el("summary"), el("p")),
    body: el("div", { class: "body" }),
    calls: el("div", { class: "calls" }),
    error: el("p", { class: "error", role: "alert" }),
    note: el("p", { class: "note" }),
  };
  message.node = el("article", { class: message.role, "aria-label": who }, ...Object.values(parts));
  message.parts = parts;
  refresh(message);
  return message.node;
}

function refresh(message) {
  const { reasoning, body, calls, error, note } = message.parts;
  const thinks = message.streaming && !message.content && !message.calls.length;
  message.node.setAttribute("aria-busy", Boolean(message.streaming));
  if (message.reasoning) setText(reasoning.firstChild, thinks ? "Thinking …" : "Thinking");
  setText(reasoning.lastChild, (message.reasoning || "").trim());
  setBody(body, message.content);
  calls.replaceChildren(...(message.calls || []).map(showCall));
  setText(error, message.error || "");
  setText(note, message.note || (thinks && !message.reasoning ? "…" : ""));
  reasoning.hidden = !message.reasoning;
  for (const part of [body, calls, error, note]) part.hidden = !part.firstChild?.textContent;
}

function follow(change) {
  const stay = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
  change();
  if (stay) log.scrollTop = log.scrollHeight;
}

function openCalls() {
  const last = messages.at(-1);
  return last?.role === "assistant" && !last.streaming ? last.calls : [];
}

// Fields for the results of calls that nobody has answered yet.
function showResults() {
  find("results")?.remove();
  const calls = openCalls();
  if (!calls.length) return;
  const rows = calls.map((call) => el("label", {}, `Result of ${call.name}`, el("textarea", { rows: "2", "data-call": call.id })));
  log.append(el("form", { id: "results", submit: sendResults }, ...rows, el("button", {}, "Send results")));
}

function update() {
  const busy = running !== null;
  find("send").hidden = busy;
  find("stop").hidden = !busy;
  find("again").disabled = busy || !messages.some((message) => message.role === "user");
  find("new").disabled = busy || !messages.length;
  showResults();
}

function say(text) {
  find("chat-state").textContent = text;
}

// ---------------------------------------------------------------- the request

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

// Throws where the tools are no JSON.
function parameters() {
  const body = {};
  for (const name of NUMBERS) {
    if (form.elements[name].value !== "") body[name] = Number(form.elements[name].value);
  }
  const thinking = form.elements.thinking.value;
  if (thinking) body.chat_template_kwargs = { enable_thinking: thinking === "on" };
  const tools = form.elements.tools.value.trim();
  if (tools) {
    try {
      body.tools = JSON.parse(tools);
    } catch (error) {
      throw new Error(`the tools are not JSON: ${error.message}`);
    }
  }
  return body;
}

function asSent(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.id, content: message.content };
  const sent = { role: message.role, content: message.content };
  if (message.reasoning) sent.reasoning_content = message.reasoning;
  if (message.calls?.length) {
    sent.tool_calls = message.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  }
  return sent;
}

// The data of the events of a stream, parsed.
async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

function take(message, delta) {
  message.reasoning += delta.reasoning_content || "";
  message.content += delta.content || "";
  for (const part of delta.tool_calls || []) {
    const call = (message.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id = part.id || call.id;
    call.name += part.function?.name || "";
    call.arguments += part.function?.arguments || "";
  }
}

const ENDS = { stop: "", length: "cut at the limit", tool_calls: "", abort: "aborted" };

function noteOf(usage, begin, first, finish) {
  const all = (performance.now() - begin) / 1000, parts = [];
  // of the whole time: what came behind the first token may have waited somewhere and come at once
  if (usage) parts.push(`${number(usage.completion_tokens)} tokens in ${seconds(all)} (${number(usage.completion_tokens / all)} per second)`);
  if (first) parts.push(`first after ${seconds((first - begin) / 1000)}`);
  if (ENDS[finish] ?? finish) parts.push(ENDS[finish] ?? finish);
  return parts.join(", ");
}

async function stream(message, body, signal) {
  const begin = performance.now();
  let first = 0, usage = null, finish = "", drawn = 0;
  const reply = await api("v1/chat/completions", { body, signal });
  for await (const event of events(reply)) {
    if (event.error) throw new Error(event.error.message);
    usage = event.usage || usage;
    const choice = event.choices?.[0];
    if (!choice) continue;
    take(message, choice.delta);
    finish = choice.finish_reason || finish;
    if (!first && (message.content || message.reasoning || message.calls.length)) {
      first = performance.now();
      say("Answering");
    }
    drawn ||= requestAnimationFrame(() => {
      drawn = 0;
      follow(() => refresh(message));
    });
  }
  cancelAnimationFrame(drawn);
  if (!finish) throw new Error("the connection ended before the answer did");
  message.note = noteOf(usage, begin, first, finish);
}

async function answer() {
  const message = { role: "assistant", content: "", reasoning: "", calls: [], streaming: true };
  running = new AbortController();
  try {
    const system = form.elements.system.value.trim();
    const sent = messages.filter((one) => one.role !== "assistant" || one.content || one.calls.length).map(asSent);
    if (system) sent.unshift({ role: "system", content: system });
    messages.push(message);
    update();
    follow(() => log.append(show(message)));
    say("Waiting for the first token");
    const body = { ...parameters(), messages: sent, stream: true, stream_options: { include_usage: true } };
    if (modelName) body.model = modelName;
    await stream(message, body, running.signal);
    say("Answer complete");
  } catch (error) {
    if (error.name === "AbortError") message.note = "stopped";
    else message.error = error instanceof TypeError ? "the server cannot be reached" : error.message;
    say(message.error ? "Failed" : "Stopped");
  }
  message.streaming = false;
  running = null;
  follow(() => {
    refresh(message);
    update();
  });
  save();
}

function add(message) {
  messages.push(message);
  follow(() => log.append(show(message)));
  log.scrollTop = log.scrollHeight;
}

function send(event) {
  event.preventDefault();
  const text = prompt.value.trim();
  if (running || !text) return;
  prompt.value = "";
  add({ role: "user", content: text });
  answer();
}

function sendResults(event) {
  event.preventDefault();
  if (running) return;
  const fields = [...find("results").querySelectorAll("textarea")];
  find("results").remove();
  for (const field of fields) add({ role: "tool", id: field.dataset.call, content: field.value });
  answer();
  prompt.focus();
}

// ---------------------------------------------------------------- commands

export function stop() {
  running?.abort();
}

export function regenerate() {
  if (find("again").disabled) return;
  while (messages.at(-1).role === "assistant") messages.pop().node.remove();
  answer();
}

export function newChat() {
  if (running) return;
  messages = [];
  log.replaceChildren();
  say("");
  update();
  save();
  prompt.focus();
}

// ---------------------------------------------------------------- start

function save() {
  const kept = messages.map(({ node, parts, streaming, ...message }) => (streaming ? { ...message, note: "stopped" } : message));
  remember("nibble-chat", messages.length ? JSON.stringify(kept) : null);
}

function showChanged() {
  const changed = [...form.elements].filter((field) => field.name && field.value !== "").map((field) => field.name.replace("_", " "));
  find("changed").textContent = changed.join(", ");
}

export function startChat() {
  try {
    messages = JSON.parse(recall("nibble-chat")) || [];
  } catch {
    messages = [];
  }
  log.append(...messages.map(show));
  log.scrollTop = log.scrollHeight;
  form.addEventListener("submit", send);
  form.addEventListener("input", showChanged);
  find("stop").addEventListener("click", stop);
  find("again").addEventListener("click", regenerate);
  find("new").addEventListener("click", newChat);
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  });
  addEventListener("beforeunload", stop); // so that the answer is kept as stopped, not as failed
  addEventListener("pagehide", save);
  showChanged();
  update();
}
