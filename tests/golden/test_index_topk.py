"""An index_topk beyond the prompt is dense attention: what the indexer's weights are then decides nothing (C53).

Two checkpoints that differ in the indexer alone are compared bit for bit, at lengths around a KV page.
"""
import os
import sys

import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import compare  # noqa: E402
import hostile  # noqa: E402
import stfile  # noqa: E402

LENGTHS = (1, 2, 63, 64, 65)


def write(folder, topk, changed):
    folder.mkdir()
    f = hostile.Folder("glm5-bf16", folder)
    f.config["index_topk"] = topk
    if changed:
        rng = np.random.default_rng(1)
        for name, tensor in f.tensors.items():
            if ".indexer." in name:
                f.tensors[name] = stfile.f32(rng.permutation(stfile.floats(tensor).ravel()),
                                             tensor[1])
    f.save()
    return folder


def logits(nibble, tmp_path, topk, changed, *options):
    folder = write(tmp_path / f"{topk}-{changed}", topk, changed)
    ids = [[(7 * i + n) % 119 for i in range(n)] for n in LENGTHS]
    return compare.score(nibble, folder, ids, tmp_path, *options)


@pytest.mark.parametrize("options", [("--cpu-level", "reference"), ("--chunk-size", "16")],
                         ids=["reference", "chunks"])
def test_fewer_keys_than_topk(nibble, tmp_path, options):
    one, other = (logits(nibble, tmp_path, 2048, changed, *options) for changed in (False, True))
    assert np.isfinite(one).all()
    np.testing.assert_array_equal(one, other)


def test_the_indexer_decides_where_keys_are_dropped(nibble, tmp_path):
    """The comparison above can fail: with two keys kept the same change is seen."""
    one, other = (logits(nibble, tmp_path, 2, changed, "--cpu-level", "reference")
                  for changed in (False, True))
    np.testing.assert_array_equal(one[:3], other[:3])  # lengths 1 and 2 drop nothing
    assert not np.array_equal(one[3:], other[3:])
