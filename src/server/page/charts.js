// Line charts, the gauge and bars, as SVG and text. Colour is never alone: lines differ in their dashes, every value is written.

import { el, svg } from "./base.js";

const WIDTH = 300, HEIGHT = 72, GAP = 5; // seconds

// 1, 2 or 5 times a power of ten, not below `value`.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((limit) => limit >= value * 0.999);
}

// Points of a line in pieces: it ends at a value that is null and where nobody looked for a while.
function pieces(values, times, span, max) {
  const all = [], end = times.at(-1);
  values.forEach((value, i) => {
    if (value == null) return;
    const x = WIDTH * (1 - (end - times[i]) / span);
    const y = HEIGHT - (Math.min(value, max) / max) * (HEIGHT - 2) - 1;
    if (values[i - 1] == null || times[i] - times[i - 1] > GAP) all.push([]);
    all.at(-1).push(`${x.toFixed(1)} ${y.toFixed(1)}`);
  });
  return all;
}

function line(all) {
  return all.map((piece) => `M${piece.join("L")}h0.1`).join(""); // "h0.1": a single value is a dot
}

function area(all) {
  return all.map((piece) => `M${piece[0].split(" ")[0]} ${HEIGHT}L${piece.join("L")}V${HEIGHT}Z`).join("");
}

// lines: names, at most three. format: a value as text. max: a fixed scale. span: seconds of the time axis.
export class LineChart {
  constructor(title, { lines, format, max, span }) {
    this.title = title;
    this.lines = lines;
    this.format = format;
    this.max = max;
    this.span = span;
    this.values = lines.map((_, i) => el("dd", { class: `line${i}` }, "–"));
    this.paths = lines.map((_, i) => svg("path", { class: `line${i}` }));
    this.scale = el("span", { class: "scale" });
    this.area = svg("path", { class: "area" });
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": title }, this.area, ...this.paths);
    const legend = lines.map((name, i) => [el("dt", {}, key(i), name), this.values[i]]).flat();
    this.node = el("figure", { class: "card" }, el("figcaption", {}, title, this.scale), el("dl", {}, ...legend), this.picture);
  }

  // series: one list of values for each line, the newest last; times: their seconds
  draw(series, times) {
    const known = series.flat().filter((value) => value != null && value > 0);
    const max = this.max || (known.length ? roundUp(Math.max(...known)) : 1);
    const now = series.map((values) => this.format(values.at(-1)));
    const drawn = series.map((values) => pieces(values, times, this.span, max));
    this.area.setAttribute("d", area(drawn[0]));
    this.paths.forEach((path, i) => path.setAttribute("d", line(drawn[i])));
    this.values.forEach((value, i) => (value.textContent = now[i]));
    this.scale.textContent = known.length ? `to ${this.format(max)}` : "";
    this.picture.setAttribute("aria-label", `${this.title}: ${this.lines.map((name, i) => `${name} ${now[i]}`).join(", ")}`);
  }
}

// The dash of line i, for the legend.
function key(i) {
  return svg("svg", { class: "key", viewBox: "0 0 18 6", "aria-hidden": "true" }, svg("path", { class: `line${i}`, d: "M0 3h18" }));
}

// Half a circle from 0 to 1; null: nothing to show.
export class Gauge {
  constructor(title, about) {
    this.title = title;
    this.about = about;
    this.value = svg("path", { class: "value", d: "M10 60a50 50 0 0 1 100 0", pathLength: "100", "stroke-dasharray": "0 200" });
    this.text = el("p", { class: "big" }, "not measured");
    this.note = el("p", { class: "soft" }, about);
    this.picture = svg("svg", { viewBox: "0 0 120 66", role: "img", "aria-label": title }, svg("path", { class: "rest", d: "M10 60a50 50 0 0 1 100 0" }), this.value);
    this.node = el("figure", { class: "card gauge" }, el("figcaption", {}, title), this.picture, this.text, this.note);
  }

  draw(share, text, note) {
    this.text.textContent = text;
    this.note.textContent = note || this.about;
    this.value.setAttribute("stroke-dasharray", `${100 * Math.min(share ?? 0, 1)} 200`);
    this.picture.setAttribute("aria-label", `${this.title}: ${text}`);
  }
}

function width(share) {
  return `${Math.max(0, Math.min(1, share)) * 100}%`;
}

// rows: {name, text, share: of the longest, part: of the bar in full colour (all of it when absent)}.
export function bars(rows) {
  return el("ul", { class: "bars" }, ...rows.map(({ name, text, share, part = 1 }) => {
    const full = el("span", { class: "full" }), bar = el("span", { class: "bar" }, full);
    bar.style.width = width(share);
    full.style.width = width(part);
    return el("li", {}, el("span", { class: "name" }, name), el("span", { class: "track", "aria-hidden": "true" }, bar), el("span", { class: "amount" }, text));
  }));
}
