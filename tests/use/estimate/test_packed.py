"""A base in 4 or 8 bits, as a plan counts it, against the bytes that bitsandbytes takes."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from each import some
from project import Project
from surefoot.errors import RecipeError
from surefoot.model.config import num_elements
from surefoot.recipe.recipe import load
from surefoot.use.estimate._dry_run import describe, dry_run_batch
from surefoot.use.estimate._fake_tensors import scales_size, shape_of, will_be_packed
from surefoot.use.estimate._rank_memory import Machine
from surefoot.use.estimate.plan import make_plan

from .scene import batch, kept, policy, recipe, skeleton

needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
LORA = {"lora": {"rank": 4}}
WAYS = [
    {"quantization_bit": 4},
    {"quantization_bit": 4, "double_quantization": False},
    {"quantization_bit": 8},
]


def quantized(folder, kind="llama", **model):
    return recipe(folder, kind, model=model, method=LORA)


def frozen_bytes(weights):
    return sum(w.size * w.item_size for w in weights if not w.is_trained)


@pytest.mark.parametrize(
    ("way", "rows", "scales"),
    [
        (WAYS[0], 48, 48 + 4 + 64 + 1028),  # 48 blocks, one block of these
        (WAYS[0], 1000, 1000 + 4 * 4 + 64 + 1028),
        (WAYS[1], 48, 48 * 4 + 64),
        (WAYS[2], 48, 48 * 4),
    ],
)
def test_scales_take_what_the_arithmetic_of_the_library_says(tmp_path, way, rows, scales):
    assert scales_size((rows, 64), quantized(tmp_path, **way).model) == scales


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.proof), "qwen2"])
def test_matrices_of_layers_shrink_and_nothing_else_does(tmp_path, kind, way):
    whole = skeleton(recipe(tmp_path, kind, method=LORA))
    made = skeleton(quantized(tmp_path, kind, **way))
    matrices = [
        tuple(module.weight.shape)
        for name, module in whole.network.inner.named_modules()
        if name.endswith("base_layer")
    ]
    assert len(matrices) == 14
    part = way["quantization_bit"] / 8
    saved = sum(rows * columns * (4 - part) for rows, columns in matrices)
    saved -= sum(scales_size(shape, made.parts.models.policy.section) for shape in matrices)
    before, after = (frozen_bytes(describe(each)) for each in (whole, made))
    assert before - after == saved
    models = (each.network.module for each in (whole, made))
    count = [sum(num_elements(p) for p in model.parameters()) for model in models]
    assert count[0] == count[1], "as many weights, in fewer bytes"


@needs_bitsandbytes
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_it_is_what_the_library_really_takes_and_keeps(tmp_path, kind, way):
    made = quantized(tmp_path, kind, **way)
    real, without_memory = policy(made), skeleton(made)
    frozen = [p for p in real.parameters() if not p.requires_grad]
    beside = sum(scales.nbytes for module in real.modules() for scales in _scales(module))
    expected = sum(tensor.nbytes for tensor in [*frozen, *real.buffers()]) + beside
    assert frozen_bytes(describe(without_memory)) == expected
    micro_batch = batch(made, 20, 33, 11)
    found = dry_run_batch(without_memory, micro_batch).kept.total
    assert found == pytest.approx(kept(real, micro_batch), rel=0.02)


def _scales(module):
    """What bitsandbytes holds beside the weights of ``module``."""
    weight = vars(module).get("_parameters", {}).get("weight")
    state = getattr(weight, "quant_state", None)
    if "state" in vars(module):
        return [module.state.SCB]
    if state is None:
        return []
    outer = state.state2
    return [state.absmax, state.code] + (
        [] if outer is None else [state.offset, outer.absmax, outer.code]
    )


@pytest.mark.parametrize("way", some(WAYS, WAYS[:1]), ids=str)
def test_a_pass_makes_whole_matrices_one_at_a_time(tmp_path, way):
    sizes = {"hidden_size": 64, "intermediate_size": 512}
    whole = recipe(tmp_path, changes=sizes, method=LORA)
    micro_batch = batch(whole, 6, 5)
    packed = replace(whole, model=replace(whole.model, **way))
    plain, found = (dry_run_batch(skeleton(each), micro_batch) for each in (whole, packed))
    matrix = 64 * 512 * 4
    assert matrix <= found.at_peak.total - found.kept.activations < 2 * matrix + plain.at_peak.total


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.proof)])
def test_a_plan_of_a_quantized_base_takes_less(tmp_path, bits):
    sizes = {"global_batch_size": 3, "micro_batch_size": 3}
    made = load(Project(tmp_path / "project", train=sizes, method=LORA).recipe)
    packed = replace(made, model=replace(made.model, quantization_bit=bits))
    before, after = (make_plan(each, Machine(1, on_gpu=False)) for each in (made, packed))
    assert after.memory.weights < before.memory.weights
    assert after.parameters == before.parameters
    assert after.trained_parameters == before.trained_parameters
    assert after.saving.size.weights == before.saving.size.weights


def test_several_processes_are_refused_as_in_training(tmp_path):
    made = quantized(tmp_path, quantization_bit=4)
    with pytest.raises(RecipeError, match="on one rank only, not on 2"):
        make_plan(made, Machine(2, on_gpu=False))


@pytest.mark.proof
def test_on_a_gpu_products_are_of_bfloat16(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 512}
    made = recipe(tmp_path, changes=sizes, method=LORA, model={"quantization_bit": 4})
    micro_batch = batch(made, 6, 5)
    in_float, in_bfloat = (
        dry_run_batch(skeleton(made, quantized=dtype), micro_batch).at_peak.total
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert in_bfloat < in_float - 64 * 512


def test_maps_that_lie_the_other_way_round_are_quantized_as_well():
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=30, n_positions=8)
    model = GPT2LMHeadModel(config)
    found = [shape_of(module) for module in will_be_packed(model)]
    assert found == [(48, 16), (16, 16), (64, 16), (16, 64)]
