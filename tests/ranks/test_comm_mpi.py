"""Collectives over Open MPI: results, and what the ranks say when one is lost."""

import re
import subprocess

import pytest
from ranks_util import MPIEXEC


@pytest.fixture(scope="session")
def rank_calls(nibble_bin):
    path = nibble_bin.parent / "tests" / "rank_calls"
    if not path.exists():
        pytest.skip("this build has no MPI")
    return path


def run(rank_calls, n, *args):
    return subprocess.run([*MPIEXEC, "-n", str(n), rank_calls, *args], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_results(rank_calls, n):
    done = run(rank_calls, n)
    assert done.returncode == 0 and done.stdout == "ok\n", done


@pytest.mark.parametrize("how,sentence", [
    ("die", r"rank 2 \(process \d+\) is gone: killed, or ended without a word"),
    ("stop", r"rank 2 \(process \d+\) is stopped"),
    ("error", r"rank 2: the disk is on fire"),
])
def test_lost(rank_calls, tmp_path, how, sentence):
    """Rank 2 of 3 goes wrong: both others say why, the same, and no process stays."""
    done = run(rank_calls, 3, how, tmp_path / "heard")
    assert done.returncode != 0
    heard = sorted((tmp_path / "heard").read_text().splitlines())
    assert len(heard) == 2, done
    for rank, line in enumerate(heard):
        assert re.fullmatch(f"rank {rank}: {sentence}", line), done
