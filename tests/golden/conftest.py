"""Golden tests: the program is the build's, or the one named by NIBBLE_BIN."""
import os
import pathlib

import pytest

ROWS = []


@pytest.fixture(scope="session")
def nibble(request):
    named = os.environ.get("NIBBLE_BIN")
    if not named:
        return request.getfixturevalue("nibble_bin")
    path = pathlib.Path(named).resolve()
    if not path.exists():
        pytest.fail(f"NIBBLE_BIN: {path} does not exist")
    return path


@pytest.fixture(scope="session")
def table():
    """Rows printed at the end of the run."""
    return ROWS


def pytest_terminal_summary(terminalreporter):
    if ROWS:
        terminalreporter.section("golden logits: relative error per position")
        for row in ROWS:
            terminalreporter.write_line(row)
