"""Draws docs/figures-h200.json as docs/figures-h200.svg: a bar for each case, a mark where it is required to be and one at the aim.

  python tools/bench/figures.py      (make figures)

A case has value, required and aim; with "less" a smaller value is better. A panel with "of_aim" draws aim ÷ value or value ÷ aim.
"""
import json
import pathlib
from xml.sax.saxutils import escape

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
LEFT, WIDTH, RIGHT = 230, 460, 110  # names, bars, figures
TOP, ROW, BAR, GAP = 62, 26, 14, 74
MET, MISSED, REQUIRED, AIM = "#2f855a", "#2b6cb0", "#c05621", "#1a202c"
STYLE = ("text{font:12px sans-serif;fill:#4a5568}.title{font-weight:bold;fill:#1a202c}.end{text-anchor:end}.mid{text-anchor:middle}"
         ".grid{stroke:#e2e8f0}")


def met(case):
    return case["value"] <= case["required"] if case.get("less") else case["value"] >= case["required"]


def percent(panel, case, key):
    """Where the case's figure stands on the panel's axis."""
    if not panel.get("of_aim"):
        return case[key]
    return 100 * (case["aim"] / case[key] if case.get("less") else case[key] / case["aim"])


def x_of(panel, value):
    return LEFT + WIDTH * min(value, panel["end"]) / panel["end"]


def text(x, y, words, kind=""):
    return f'<text x="{x:.1f}" y="{y:.1f}"{f" class={chr(34)}{kind}{chr(34)}" if kind else ""}>{escape(words)}</text>'


def mark(panel, case, key, y, colour):
    x = x_of(panel, percent(panel, case, key))
    return f'<path class="{key}" stroke="{colour}" stroke-width="2.5" d="M{x:.1f} {y - 4:.1f}V{y + BAR + 4:.1f}"/>'


def draw_case(panel, case, y):
    end = x_of(panel, percent(panel, case, "value"))
    unit = case.get("unit", "%")
    return [text(LEFT - 8, y + 11, case["name"], "end"),
            f'<rect class="bar" x="{LEFT}" y="{y:.1f}" width="{end - LEFT:.1f}" height="{BAR}" fill="{MET if met(case) else MISSED}"/>',
            mark(panel, case, "required", y, REQUIRED), mark(panel, case, "aim", y, AIM),
            text(LEFT + WIDTH + 8, y + 11, f"{case['value']:g} {unit}")]


def draw_panel(panel, top):
    lines, bottom = [text(LEFT, top - 12, panel["title"], "title")], top + ROW * len(panel["cases"])
    for value in range(0, panel["end"] + 1, 25):
        x = x_of(panel, value)
        lines += [f'<path class="grid" d="M{x:.1f} {top - 4}V{bottom}"/>', text(x, bottom + 16, str(value), "mid")]
    for i, case in enumerate(panel["cases"]):
        lines += draw_case(panel, case, top + ROW * i + (ROW - BAR) / 2)
    return lines, bottom


def draw(data):
    """The whole SVG as text."""
    lines, y = [], TOP + 18
    for panel in data["panels"]:
        more, bottom = draw_panel(panel, y)
        lines, y = lines + more, bottom + GAP
    height = y - GAP + 54
    key = [(MISSED, "figure"), (MET, "figure, requirement met"), (REQUIRED, "required"), (AIM, "aim")]
    for i, (colour, words) in enumerate(key):
        x = LEFT + (0, 70, 240, 330)[i]
        lines += [f'<rect x="{x}" y="{height - 25}" width="10" height="10" fill="{colour}"/>', text(x + 14, height - 16, words)]
    width = LEFT + WIDTH + RIGHT
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
            f"<style>{STYLE}</style>", f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            text(16, 26, data["title"], "title")]
    return "\n".join([*head, *lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    (DOCS / "figures-h200.svg").write_text(draw(json.loads((DOCS / "figures-h200.json").read_text())))
