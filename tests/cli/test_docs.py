"""What the documents name exists: docs/field-cases.md has every case once, and every test that it names can be run."""

import re
import subprocess
import sys

import pytest

N_CASES = 81
ROW = re.compile(r"^\| (C\d\d) \| (.+?) \| (.+) \|$", re.M)
TEST = re.compile(r"`(tests/[^`:]+)::([^`]+)`")


@pytest.fixture(scope="module")
def rows(repo):
    text = (repo / "docs" / "field-cases.md").read_text()
    rows = ROW.findall(text)
    assert len(rows) == len(re.findall(r"^\| C", text, re.M)), "a line of a table that is not read"
    return rows


def test_every_case_has_a_line(rows):
    assert [case for case, _, _ in rows] == [f"C{i:02d}" for i in range(1, N_CASES + 1)]
    for case, _, shown in rows:
        assert TEST.search(shown) or re.match(r"not yet: \w", shown), f"{case}: neither a test nor a reason"
        assert shown.count("::") == len(TEST.findall(shown)), f"{case}: a test that is not read"


def test_python_tests_exist(rows, repo):
    """As pytest collects them; a test of several parameters may be named without them."""
    named = {f"{file}::{test}" for _, _, shown in rows for file, test in TEST.findall(shown) if file.endswith(".py")}
    files = sorted({n.split("::")[0] for n in named})
    done = subprocess.run([sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files], cwd=repo,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    there = set(re.findall(r"^tests/\S+::.+$", done.stdout, re.M))
    there |= {n.split("[")[0] for n in there}
    assert there and not named - there, sorted(named - there)


def test_c_tests_exist(rows, repo):
    """Defined, and in the list that main() runs."""
    named = {(file, test) for _, _, shown in rows for file, test in TEST.findall(shown) if not file.endswith(".py")}
    assert named
    for file, test in sorted(named):
        assert re.fullmatch(r"tests/(unit|kernel|cuda)/\w+\.c", file), file
        source = (repo / file).read_text()
        assert re.search(rf"^static void {test}\(void \*\*state\)", source, re.M), f"{file} defines no {test}"
        assert re.search(rf"\bcmocka_unit_test\w*\(\s*{test}\b", source), f"{file} does not run {test}"
