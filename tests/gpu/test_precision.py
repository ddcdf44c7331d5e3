"""Weights and products of less precision learn what float32 weights learn, over 200 steps."""

from importlib.util import find_spec

import pytest
import torch

import small
import tiny
from each import some
from surefoot.model.layers import use_float8
from surefoot.optim._variants.adamw import AdamW
from surefoot.parallel.sharded_model import layers

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
BF16 = torch.bfloat16


def final_loss(folder, device, *, dtype=torch.float32, float8=None, mode="stochastic"):
    """The mean of the last five losses."""
    steps = 200 if device.type == "cuda" else 24
    model = tiny.model("qwen3", dtype=dtype, **SIZES)
    if float8 is not None:
        use_float8(layers(model), float8, emulate=device.type == "cpu")
    seen = small.Seen()
    optim = AdamW(learning_rate=1e-3, bf16_weights=mode)
    options = {"max_steps": steps, "save_steps": None, "precision": "bf16"}
    small.trainer(folder, seen, model=model, optim=optim, **options).fit()
    found = [seen.losses[step] for step in range(steps - 4, steps + 1)]
    return sum(found) / len(found)


@pytest.fixture(scope="module")
def expected(device, tmp_path_factory):
    """Of float32 weights, in bf16."""
    return final_loss(tmp_path_factory.mktemp("float32"), device)


@pytest.mark.parametrize("mode", some(["stochastic", "master"], ["master"]))
def test_bfloat16_weights_learn_as_float32_weights(mode, device, tmp_path, expected):
    found = final_loss(tmp_path, device, dtype=BF16, mode=mode)
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_float8_products_learn_as_others(device, tmp_path, expected):
    found = final_loss(tmp_path, device, float8="rowwise")
    assert found == pytest.approx(expected, rel=0.02)
