// Elements, numbers and requests: what the other files share.
//
// Every element of the page is made by el() or svg(): children are nodes or text, and text stays text. There is no other way from
// a string to the document here, and the Content-Security-Policy of the page (trusted types) forbids those that the browser has.

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

export function find(id) {
  return document.getElementById(id);
}

// ---------------------------------------------------------------- numbers

export function number(value, digits = 3) {
  if (value == null || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  if (Math.abs(value) < 1e-4) return value.toExponential(digits - 1);
  const whole = Math.abs(value) >= 10 ** (digits - 1);
  return value.toLocaleString("en", whole ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: digits });
}

export function seconds(value) {
  if (value == null) return "–";
  if (value < 0.0009995) return `${number(value * 1e6)} µs`;
  return value < 0.9995 ? `${number(value * 1e3)} ms` : `${number(value)} s`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit++;
  }
  return `${number(value)} ${units[unit]}`;
}

export function percent(share, digits) {
  return share == null ? "–" : `${number(100 * share, digits)} %`;
}

// ---------------------------------------------------------------- what the tab remembers

export function remember(name, value) {
  try {
    if (value == null) sessionStorage.removeItem(name);
    else sessionStorage.setItem(name, value);
  } catch {
    // full or forbidden: the page works without
  }
}

export function recall(name) {
  try {
    return sessionStorage.getItem(name);
  } catch {
    return null;
  }
}

// ---------------------------------------------------------------- requests

// Paths are relative to the page, so that it works below a gateway's path too. A reply that is no success becomes an Error with the
// server's sentence and `status`; 401 also asks for the key, unless `quiet`.
export async function api(path, { body, signal, quiet } = {}) {
  const headers = {};
  const key = recall("nibble-key");
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const reply = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal, cache: "no-store" });
  if (reply.ok) return reply;
  if (reply.status === 401 && !quiet) document.dispatchEvent(new Event("needs-key"));
  const error = new Error(`${reply.status} ${reply.statusText}`);
  error.status = reply.status;
  try {
    error.message = (await reply.json()).error.message;
  } catch {
    // not the API's own reply, a gateway's perhaps
  }
  throw error;
}
