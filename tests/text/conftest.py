"""Fixtures of the text tests: the program as a function, tokenizer folders."""

import json
import pathlib
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import styles  # noqa: E402


class Nibble:
    def __init__(self, program):
        self.program = program

    def run(self, folder, *args, data=b"", check=True):
        p = subprocess.run([str(self.program), "tokenize", "--model", str(folder), *args], input=data, capture_output=True,
                           timeout=120)
        if check:
            assert p.returncode == 0, p.stderr.decode("utf-8", "replace")
        return p

    def lines(self, folder, values, *args):
        """One JSON value per line in, one object per line out."""
        data = "\n".join(json.dumps(v, ensure_ascii=False) for v in values) + "\n"
        out = self.run(folder, "--lines", *args, data=data.encode()).stdout.decode().rstrip("\n").split("\n")
        assert len(out) == len(values)
        return [json.loads(line) for line in out]

    def encode(self, folder, texts, *args):
        return [r["ids"] for r in self.lines(folder, texts, *args)]

    def raw_ids(self, folder, data, *args):
        """Ids of bytes, which need not be valid UTF-8."""
        return [int(i) for i in self.run(folder, *args, data=data).stdout.split()]


@pytest.fixture(scope="session")
def nibble(nibble_bin):
    return Nibble(nibble_bin)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """made(style) -> (folder, reference tokenizer), made once per run."""
    root = tmp_path_factory.mktemp("tokenizers")
    cache = {}

    def get(style):
        if style not in cache:
            cache[style] = (root / style, styles.write(style, root / style))
        return cache[style]

    return get
