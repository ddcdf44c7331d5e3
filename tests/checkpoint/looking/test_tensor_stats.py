"""Figures of tensors agree with torch's own in 64 bits, whatever the blocks."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.checkpoint.disk._bytes import DTYPES
from surefoot.checkpoint.looking import diff as module
from surefoot.checkpoint.looking.diff import norm, norms
from surefoot.checkpoint.sources import TensorsInMemory

MEMORY = """
import json, os, resource, sys
from pathlib import Path
from surefoot.checkpoint.layouts.detection import open_contents
from surefoot.checkpoint.looking.diff import compare_tensors
from surefoot.checkpoint.looking.diff import norms
from surefoot.checkpoint.sources import FolderSource

folder = Path(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert norms(FolderSource(open_contents(folder)), "model/x").maximum == 0.0
assert [t.verdict for t in compare_tensors(folder, folder)] == ["equal"]
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def of(tensor):
    return norms(TensorsInMemory({"x": tensor}), "x")


@given(
    st.lists(st.floats(width=32), max_size=30),
    st.integers(1, 7),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_figures_are_those_of_numpy_in_64_bits(values, block, dtype):
    tensor = torch.tensor(values, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        found = of(tensor)
    array = tensor.double().numpy()
    finite = array[np.isfinite(array)]
    assert (found.num_nan, found.num_inf) == (np.isnan(array).sum(), np.isinf(array).sum())
    if not finite.size:
        assert (found.l2, found.minimum, found.maximum, found.mean) == (0.0, None, None, None)
        return
    assert (found.minimum, found.maximum) == (finite.min(), finite.max())
    assert found.l2 == pytest.approx(np.linalg.norm(finite), rel=1e-12)
    assert found.mean == pytest.approx(finite.mean(), rel=1e-12, abs=1e-12 * abs(finite).max())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_every_type_has_figures(dtype):
    ones = torch.ones(4).to(dtype)
    found = of(ones)
    assert found.maximum == 1.0 and found.l2 == pytest.approx(2.0)
    assert found.mean == (0.5 if dtype.is_complex else 1.0)


def test_a_scalar_and_an_empty_tensor():
    assert of(torch.tensor(-3.0)).l2 == 3.0
    assert of(torch.empty(0, 5)).minimum is None


def test_squares_neither_overflow_nor_vanish():
    assert norm(torch.tensor([3e200, 4e200], dtype=torch.float64)) == pytest.approx(5e200)
    assert norm(torch.tensor([3e-200, 4e-200], dtype=torch.float64)) == pytest.approx(5e-200)
    assert norm(torch.tensor([math.inf], dtype=torch.float64)) == math.inf
    assert norm(torch.zeros(0)) == norm(torch.zeros(3)) == 0.0


@pytest.mark.proof
def test_memory_does_not_grow_with_the_tensor(tmp_path):
    length = 128 << 20
    header = b'{"x":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}' % (length // 4, length)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + length)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) * 1024 < 100 << 20
