"""Faulty and unusual checkpoints: refused with the right words, or loaded with the right logits.

Run: pytest tests/golden/test_loading.py   (NIBBLE_BIN=PATH or --build DIR names the program)
"""
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import compare  # noqa: E402
import hostile  # noqa: E402


def check_refused(nibble, folder, expected, work):
    """Exit status of an error (no signal), every pattern in the message, no output file."""
    with pytest.raises(compare.Failed) as caught:
        compare.score(nibble, folder, [1, 2, 3], work)
    assert 0 < caught.value.code < 128, f"ended by a signal\n{caught.value}"
    for pattern in expected["patterns"]:
        assert re.search(pattern, caught.value.text, re.S), (
            f"the message does not match {pattern!r}:\n{caught.value.text}")
    assert not (work / "out.npy").exists()


def check_loads(nibble, folder, expected, work):
    case = compare.Case(compare.DATA / expected["base"])
    tokens, out = work / "ids.json", work / "out.npy"
    tokens.write_text(json.dumps(case.tokens))
    text = compare.run([nibble, "score", "--model", folder, "--token-ids", tokens, "--logits", out,
                        "--cpu-level", "reference"])
    verdict = compare.judge_float32(case, np.load(out) * np.float32(expected["sign"]), "loads")
    assert verdict.ok, verdict.row
    text += compare.run([nibble, "inspect", "--model", folder])
    for pattern in expected["patterns"]:
        assert re.search(pattern, text), f"nothing printed matches {pattern!r}:\n{text}"


def check_inspect(nibble, folder, must_load):
    """JSON on stdout when the folder is good; never a crash."""
    p = subprocess.run([nibble, "inspect", "--model", folder, "--json"], capture_output=True,
                       timeout=120, check=False)
    assert 0 <= p.returncode < 128, f"inspect ended with {p.returncode}: {p.stderr.decode()}"
    if must_load:
        assert p.returncode == 0, p.stderr.decode()
    if p.returncode == 0:
        assert isinstance(json.loads(p.stdout), dict)
    else:
        assert p.stderr.strip(), "an error without a word"


@pytest.mark.parametrize("name", sorted(hostile.BUILDERS))
def test_checkpoint(name, nibble, tmp_path):
    folder, work = tmp_path / "model", tmp_path / "work"
    folder.mkdir()
    work.mkdir()
    expected = hostile.BUILDERS[name](folder)
    check_inspect(nibble, folder, expected["outcome"] == "loads")
    check = check_loads if expected["outcome"] == "loads" else check_refused
    check(nibble, folder, expected, work)


@pytest.mark.parametrize("case", compare.all_cases(), ids=lambda c: c.name)
def test_inspect_of_good_cases(case, nibble):
    """The family and the rope base of the configuration are among what is reported."""
    text = compare.run([nibble, "inspect", "--model", case.folder, "--json"])
    assert case.meta["family"] in text


@pytest.mark.parametrize("case", compare.all_cases(), ids=lambda c: c.name)
def test_rope_base_is_printed(case, nibble):
    """A base that sits only in rope_parameters is used and shown, not a class default."""
    cfg = json.loads((case.folder / "config.json").read_text())
    theta = (cfg.get("rope_parameters") or {}).get("rope_theta") or cfg["rope_theta"]
    text = compare.run([nibble, "inspect", "--model", case.folder, "--json"])
    assert re.search(rf"\b{int(theta)}(\.0+)?\b", text), f"{theta} is not in\n{text}"
