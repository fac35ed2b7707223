"""Ranks under mpiexec. Skipped where Open MPI is not installed."""

import pathlib
import shutil
import sys

import pytest

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[1]), str(pathlib.Path(__file__).resolve().parent)]

from server_fixtures import model_dir, sanitized, serve  # noqa: E402,F401


def pytest_collection_modifyitems(items):
    if shutil.which("mpiexec"):
        return
    for item in items:
        if pathlib.Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs openmpi-bin"))
