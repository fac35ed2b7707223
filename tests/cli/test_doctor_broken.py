"""nibble doctor on recorded machines whose files are cut, random, strange, missing or no files: it ends as always, in clean text. Run under
AddressSanitizer too.
"""

import json
import random
import subprocess

import pytest

from doctor_machines import MACHINES, Link, write

ODD = ["", "\0", "-1", "0x", "18446744073709551616", "-9223372036854775808", "9223372036854775807", "[", "[]", "0-", "-", "4294967295-",
       "0-8191,8192-99999999", "NaN", "%s%n%s", "\xff\xfe", "a" * 70000, "flags\t\t:", "Node 0 MemTotal: kB", "\n" * 300]


def broken(tree, seed):
    """Some files cut, some with strange text, some random bytes, some gone, links to themselves, folders in place of files."""
    chance = random.Random(seed)
    out = {}
    for path, content in tree.items():
        pick = chance.randrange(8)
        raw = content if isinstance(content, bytes) else content.encode()
        if pick == 0:
            out[path] = raw[:chance.randrange(len(raw) + 1)]
        elif pick == 1:
            out[path] = chance.choice(ODD).encode("latin-1")
        elif pick == 2:
            out[path] = chance.randbytes(chance.randrange(600))
        elif pick == 3:
            out[path] = Link(path.rsplit("/", 1)[-1])
        elif pick == 4:
            out[f"{path}/folder"] = "x"
        elif pick == 5 and raw and not isinstance(content, Link):
            mixed = bytearray(raw)
            for _ in range(chance.randrange(1, 6)):
                mixed[chance.randrange(len(mixed))] = chance.randrange(256)
            out[path] = bytes(mixed)
        elif pick == 6:
            out[path] = content
    return out


@pytest.mark.parametrize("machine", MACHINES)
def test_broken_files(nibble_bin, tmp_path, machine):
    for seed in range(8):
        root = write(broken(MACHINES[machine](), seed), tmp_path / str(seed))
        done = subprocess.run([nibble_bin, "doctor", "--root", root, "--model", "/model", "--json"], capture_output=True, timeout=60)
        assert done.returncode in (0, 1, 2) and done.stderr == b"", (seed, done.stderr)
        json.loads(done.stdout.decode("ascii"))
