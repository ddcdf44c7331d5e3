"""What methods need that train blocks in turn: the most of one turn, not of all parameters."""

import pytest
import torch

import surefoot
from each import some
from project import Project
from surefoot.errors import RecipeError
from surefoot.optim._variants.adamw import AdamW
from surefoot.recipe.recipe import load
from surefoot.use.estimate._dry_run import dry_run_batch
from surefoot.use.estimate._rank_memory import Machine
from surefoot.use.estimate.plan import make_plan

from .scene import batch, kept, opened, policy, recipe, skeleton

ALONE = Machine(1, on_gpu=False)
LAYERS = [{}, {"embeddings_and_head": True}, {"order": "fixed", "start_block": 1}]
METHODS = [*({"badam": one} for one in LAYERS), {"lisa": {"num_layers": 1}}]


@pytest.mark.parametrize(
    ("method", "recomputes"),
    some(
        [*((one, False) for one in METHODS), (METHODS[0], True)],
        [(METHODS[0], True), (METHODS[-1], False)],
    ),
    ids=str,
)
def test_activations_are_those_of_the_deepest_turn(tmp_path, method, recomputes):
    made = recipe(tmp_path, method=method, model={"gradient_checkpointing": recomputes})
    network = opened(made)
    trained, micro_batch = network.trained(AdamW()), batch(made, 25, 31)
    saved = []
    for turn in range(4):
        trained.at(turn * network.blocks.interval)
        saved.append(kept(network.module.train(), micro_batch))
    found = dry_run_batch(skeleton(made), micro_batch).kept.total
    assert found == pytest.approx(max(saved), rel=0.1, abs=2 * 56 * 8 * 4)
    if method == {"badam": {}} and not recomputes:  # two layers: of the upper one half is saved
        assert min(saved) < 0.7 * max(saved)


def test_new_layers_are_counted(tmp_path):
    layer = sum(p.numel() for p in policy(recipe(tmp_path / "full")).model.layers[0].parameters())
    made = recipe(tmp_path / "deeper", method={"llama_pro": {"num_new_layers": 1}})
    found = skeleton(made)
    assert sum(weight.size for weight in found.weights if weight.is_trained) == layer
    assert found.network.num_parameters == skeleton(recipe(tmp_path)).network.num_parameters + layer
    expected = kept(policy(made), batch(made, 25, 31))
    kept_by_plan = dry_run_batch(found, batch(made, 25, 31)).kept.total
    assert kept_by_plan == pytest.approx(expected, rel=0.1, abs=2 * 56 * 8 * 4)


def test_gradients_and_state_are_those_of_the_largest_block(tmp_path):
    layer = sum(p.numel() for p in policy(recipe(tmp_path / "full")).model.layers[0].parameters())
    for method, expected in (("badam", layer), ({"lisa": {"num_layers": 1}}, None)):
        made = recipe(tmp_path / str(method), method=method)
        found = skeleton(made)
        trained = [weight for weight in found.weights if weight.is_trained]
        assert sum(weight.size for weight in trained) == (expected or found.num_at_once)
        assert sum(w.state for w in trained) == 8 * sum(w.size for w in trained)
        assert not any(weight.state for weight in found.weights if not weight.is_trained)
    assert found.num_at_once == found.network.num_parameters - layer  # of two layers, one


def test_gradients_and_state_are_those_of_the_trained_entries(tmp_path):
    found = skeleton(recipe(tmp_path, method={"badam_ratio": {"update_ratio": 0.25}}))
    trained = [weight for weight in found.weights if weight.is_trained]
    vectors = sum(weight.size for weight in trained if len(weight.shape) < 2)
    at_once = vectors + (sum(weight.size for weight in trained) - vectors) // 4
    assert found.num_at_once == at_once
    copied = at_once - vectors  # for the optimizer
    assert sum(weight.state for weight in trained) == 8 * at_once + 4 * copied
    assert sum(weight.gradient(1) for weight in trained) == 4 * at_once
    assert 2 * sum(weight.gradient(2) for weight in trained) == 4 * at_once
    optim = {"muon": {}}
    with pytest.raises(RecipeError, match="Muon updates matrices as a whole"):
        skeleton(recipe(tmp_path / "muon", method="badam_ratio", optim=optim))


def test_masters_are_counted_for_one_block(tmp_path):
    optim = {"adamw": {"bf16_weights": "master"}}
    made = recipe(tmp_path, method="badam", model={"dtype": "bfloat16"}, optim=optim)
    found = skeleton(made, dtype=torch.bfloat16)
    trained = sum(weight.size for weight in found.weights if weight.is_trained)
    assert trained < 0.5 * sum(weight.size for weight in found.weights)
    assert sum(weight.state for weight in found.weights) == 12 * trained


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("badam", marks=pytest.mark.proof),
        pytest.param("badam_ratio", marks=pytest.mark.proof),
    ],
)
def test_a_saved_checkpoint_has_the_size_that_was_told(name, tmp_path):
    sizes = {"max_steps": 3, "global_batch_size": 3, "micro_batch_size": 3}
    method = {name: {"switch_interval": 2}}
    project = Project(tmp_path / "project", method=method, train=sizes)
    found = make_plan(load(project.recipe), ALONE)
    assert found.trained_at_once < found.trained_parameters
    surefoot.train(load(project.recipe))
    newest = project.run / "checkpoint-3"
    assert found.saving.size.optimizer == (newest / "optimizer.safetensors").stat().st_size
    total = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    assert found.saving.size.total == pytest.approx(total, rel=0.02)


def test_a_pipeline_is_refused_by_the_plan_as_by_the_run(tmp_path):
    project = Project(tmp_path / "project", method="badam")
    with pytest.raises(RecipeError, match=r"parallel\.pp: the method changes its trainable"):
        make_plan(load(project.recipe, ["parallel.pp=2"]), Machine(2, on_gpu=False))


@pytest.mark.parametrize("change", ["method=badam_ratio", "optim=adamw_8bit"])
def test_a_mesh_that_the_run_refuses_is_refused(change, tmp_path):
    project = Project(tmp_path / "project", train={"global_batch_size": 8})
    machine = Machine(2, on_gpu=False)
    with pytest.raises(RecipeError, match=r"parallel\.tp"):
        make_plan(load(project.recipe, [change, "parallel.tp=2"]), machine)
