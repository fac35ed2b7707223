"""The plot of docs/performance.md belongs to its data, and shows it."""
import copy
import json
import pathlib
import sys
import xml.etree.ElementTree as ElementTree

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import figures  # noqa: E402

DATA = json.loads((figures.DOCS / "figures-h200.json").read_text())
CASES = [(p, c) for p in DATA["panels"] for c in p["cases"]]


def parts(svg, kind):
    return [e for e in ElementTree.fromstring(svg).iter() if e.get("class") == kind]


def test_the_plot_is_of_this_data():
    assert (figures.DOCS / "figures-h200.svg").read_text() == figures.draw(DATA), "make figures"
    assert "figures-h200.svg" in (figures.DOCS / "performance.md").read_text()


def test_bars_and_marks():
    """Read back from the SVG: lengths and places are the figures."""
    svg = figures.draw(DATA)
    bars, required, aims = (parts(svg, kind) for kind in ("bar", "required", "aim"))
    assert len(bars) == len(required) == len(aims) == len(CASES)
    for (panel, case), bar, least, aim in zip(CASES, bars, required, aims):
        scale = figures.WIDTH / panel["end"]
        of = (lambda v: 100 * (case["aim"] / v if case.get("less") else v / case["aim"])) if panel.get("of_aim") else (lambda v: v)
        assert float(bar.get("width")) == pytest.approx(scale * min(of(case["value"]), panel["end"]), abs=0.06)
        for e, key in ((least, "required"), (aim, "aim")):
            assert float(e.get("d")[1:].split()[0]) - figures.LEFT == pytest.approx(scale * of(case[key]), abs=0.06)
        ok = case["value"] <= case["required"] if case.get("less") else case["value"] >= case["required"]
        assert bar.get("fill") == (figures.MET if ok else figures.MISSED)


def test_another_figure_is_another_plot():
    other = copy.deepcopy(DATA)
    other["panels"][0]["cases"][0]["value"] += 1
    assert figures.draw(other) != figures.draw(DATA)
