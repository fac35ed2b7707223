// Starts the page: parts, theme, key, keyboard, the state of the server.

import { api, find, recall, remember } from "./base.js";
import { newChat, regenerate, setModel, startChat, stop } from "./chat.js";
import { startLive } from "./live.js";
import { loadServer, startLog } from "./server.js";

// ---------------------------------------------------------------- parts

function showView() {
  const view = location.hash.slice(1);
  document.body.dataset.view = ["chat", "live", "server"].includes(view) ? view : "chat";
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === document.body.dataset.view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

function go(view) {
  location.hash = view;
  showView();
}

// ---------------------------------------------------------------- theme

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  find("theme").textContent = theme;
  find("theme").setAttribute("aria-label", `Theme: ${theme}`);
}

function startTheme() {
  let at = Math.max(0, THEMES.indexOf(recall("nibble-theme")));
  setTheme(THEMES[at]);
  find("theme").addEventListener("click", () => {
    at = (at + 1) % THEMES.length;
    setTheme(THEMES[at]);
    remember("nibble-theme", THEMES[at]);
  });
}

// ---------------------------------------------------------------- key

function askKey(note) {
  find("key-note").textContent = note;
  if (!find("key").open) find("key").showModal();
}

function takeKey(event) {
  event.preventDefault();
  const key = find("key-text").value.trim();
  if (/[^!-~]/.test(key)) {
    askKey("A key has printable ASCII characters only, no blanks.");
    return;
  }
  remember("nibble-key", key || null);
  find("key-text").value = "";
  find("key").close();
  connect();
}

function startKey() {
  find("set-key").addEventListener("click", () => askKey("It is kept until this tab is closed. Empty: none is sent."));
  find("key-close").addEventListener("click", () => find("key").close());
  find("key-form").addEventListener("submit", takeKey);
  document.addEventListener("needs-key", () => {
    askKey(recall("nibble-key") === null ? "This server asks for a key. It is kept until this tab is closed." : "The server does not know this key.");
  });
}

// ---------------------------------------------------------------- state

async function connect() {
  const info = await loadServer().catch(() => null);
  if (!info) return; // the state in the header, or the question for the key, says why
  find("model").textContent = info.served_model_names[0];
  setModel(info.served_model_names[0]);
}

async function progress() {
  const health = await (await fetch("health", { cache: "no-store" })).json();
  return health.state === "loading" ? `loading ${Math.round(100 * health.progress)} %` : health.state;
}

let before = "";

async function onState(state) {
  const text = state === "loading" ? await progress().catch(() => state) : state;
  if (find("state").textContent !== text) find("state").textContent = text;
  find("state").dataset.state = state;
  // it became ready, or another one has taken its place
  if (state === "ready" && before !== "ready" && !find("key").open) connect();
  before = state;
}

// ---------------------------------------------------------------- keyboard

const ALT = {
  KeyR: regenerate,
  KeyN: newChat,
  KeyP: () => {
    find("parameters").open = !find("parameters").open;
    if (find("parameters").open) find("parameters").querySelector("input").focus();
  },
  Digit1: () => go("chat"),
  Digit2: () => go("live"),
  Digit3: () => go("server"),
};

function onKey(event) {
  if (document.querySelector("dialog[open]")) return;
  const writes = event.target.matches("input, textarea, select");
  if (event.key === "Escape") stop();
  else if (event.key === "/" && !writes) {
    event.preventDefault();
    go("chat");
    find("prompt").focus();
  } else if (event.altKey && ALT[event.code]) {
    event.preventDefault();
    ALT[event.code]();
  }
}

// ---------------------------------------------------------------- start

startTheme();
showView();
addEventListener("hashchange", showView);
addEventListener("keydown", onKey);
find("show-help").addEventListener("click", () => find("help").showModal());
startKey();
startChat();
startLive(onState);
startLog();
find("prompt").focus();
