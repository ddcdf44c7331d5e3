"""Float8 products: near those of float32, resumed to the bit, counted by ``plan``; or refused."""

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest
import torch

import surefoot
import tiny
from project import Project, assert_same, final_weights, losses, model_folder
from surefoot.errors import ModelError, RecipeError
from surefoot.model import isolation, layers, loading
from surefoot.parallel import sharded_model
from surefoot.recipe.recipe import load
from surefoot.use.estimate._dry_run import LiveBytes, dry_run_batch
from use.estimate import scene

ROOT = Path(__file__).parents[2]
IS_INSTALLED = find_spec("torchao") is not None
needs_torchao = pytest.mark.skipif(not IS_INSTALLED, reason="torchao is not installed")
MANY = get_args(layers.Scaling)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


@needs_torchao
@pytest.mark.gpu
@pytest.mark.parametrize("scaling", MANY)
def test_losses_and_gradients_are_near_those_of_float32(scaling):
    device = loading.device()
    exact, model = (tiny.model("qwen3", **SIZES).to(device) for _ in range(2))
    emulate = device.type == "cpu"
    assert layers.use_float8(sharded_model.layers(model), scaling, emulate=emulate) == 3 * 7
    assert type(model.lm_head) is torch.nn.Linear
    assert model.state_dict().keys() == exact.state_dict().keys()
    ids = torch.randint(3, 64, (1, 23), generator=torch.Generator().manual_seed(0)).to(device)
    found = []
    for each in (model, exact):
        loss = each(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append((loss.detach(), {n: p.grad for n, p in each.named_parameters()}))
    (loss, gradients), (expected, exact_gradients) = found
    assert float(loss) == pytest.approx(float(expected), rel=0.02)
    assert not torch.equal(loss, expected)
    for name, gradient in exact_gradients.items():
        error = (gradients[name] - gradient).norm() / gradient.norm()
        assert error < 0.3, (name, float(error))


def project(folder, **model):
    optim = {"adamw": {"learning_rate": 0.003, "schedule": "constant"}}
    model = {"float8": "rowwise", **model}
    made = Project(folder, kind="qwen3", model=model, method="full", optim=optim)
    model_folder(made.folder / "model", "qwen3", **SIZES)
    return made


@needs_torchao
@pytest.mark.gpu
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_run_learns_and_resumes_to_the_bit(recomputes, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    settings = {"gradient_checkpointing": recomputes}
    whole, cut = (project(tmp_path / name, **settings) for name in ("whole", "cut"))
    surefoot.train(whole.recipe)
    assert "float8: 21 linear layers" in caplog.text
    seen = list(losses(whole.run).values())
    assert seen[-1] < seen[0] - 0.1
    surefoot.train(cut.recipe, **{"train.max_steps": 6})
    surefoot.train(cut.recipe)
    assert_same(final_weights(cut.run), final_weights(whole.run))


def drop(parameter):
    parameter.grad = None


@needs_torchao
@pytest.mark.parametrize("scaling", MANY)
def test_plan_counts_the_memory_of_a_real_pass(scaling, tmp_path):
    made = scene.recipe(tmp_path, "qwen3", model={"float8": scaling}, changes=SIZES)
    micro_batch = scene.batch(made, 20, 12)
    found = dry_run_batch(scene.skeleton(made), micro_batch)
    model = scene.policy(made)
    head = scene.head_of(model)
    assert found.kept.activations == pytest.approx(scene.kept(model, micro_batch), rel=0.02)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(drop)
    with LiveBytes([*model.parameters(), *model.buffers()], 64) as live:
        scene.total(model, micro_batch, head).backward()
    assert found.at_peak.total == pytest.approx(live.peak.total, rel=0.05)


@needs_torchao
def test_plan_runs_the_products_of_a_gpu_that_this_machine_has_not(tmp_path):
    made = scene.recipe(tmp_path, "qwen3", model={"float8": "rowwise"}, changes=SIZES)
    options = {"precision": "bf16", "emulates_float8": False}
    found = dry_run_batch(scene.skeleton(made, **options), scene.batch(made, 20, 12))
    assert found.kept.activations > 0


@needs_torchao
@pytest.mark.parametrize("scaling", MANY)
def test_documents_of_a_packed_row_do_not_change_each_other(scaling):
    model = tiny.model("qwen3", **SIZES)
    layers.use_float8(sharded_model.layers(model), scaling, emulate=True)
    assert isolation.use_packed(model)


@pytest.mark.skipif(IS_INSTALLED, reason="torchao is installed")
def test_without_torchao_the_error_says_what_to_install(tmp_path):
    said = r"model.float8 needs torchao.*pip install -e '.\[float8\]'"
    with pytest.raises(ModelError, match=said):
        surefoot.train(project(tmp_path).recipe)


@needs_torchao
def test_matrices_of_odd_sizes_are_left_alone():
    odd = tiny.model("qwen3", hidden_size=40, intermediate_size=96, head_dim=10)
    with pytest.raises(ModelError, match="no trained linear layer has sizes that are multiples"):
        layers.use_float8(sharded_model.layers(odd), "rowwise", emulate=True)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("method=lora", r"model.float8: method lora trains no linear layer"),
        ("parallel.tp=2", r"parallel.tp: model.float8 supports"),
        ("train.precision=fp16", r"train.precision: model.float8 needs bf16 or fp32"),
    ],
)
def test_what_float8_does_not_support_is_refused(override, problem, tmp_path):
    with pytest.raises(RecipeError, match=problem):
        load(project(tmp_path).recipe, [override])
