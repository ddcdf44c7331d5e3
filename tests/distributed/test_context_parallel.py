"""Ranks that share each packed row learn what one process learns from padded rows: losses, and
every gradient on every rank."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import folders
import forks
import ranks
import surefoot
from each import some
from spread import UNEVEN, learn, resume, save, trainer
from surefoot.batch import IGNORE_INDEX, with_router_loss
from surefoot.methods import LoRA
from surefoot.model.numerics import seed_everything
from surefoot.parallel.world import ALONE
from surefoot.stages import STAGES
from test_spread_pairs import Prefer, pairs
from test_stages import CLOSE as STAGE_CLOSE
from test_stages import losses

EXACT = 1e-12  # of models that compute in float64 throughout
ROUNDED = 1e-6  # norms or softmax compute in float32, and sums of other parts round otherwise
TWO, FOUR = {"dp_shard": 2, "cp": 2}, {"dp_shard": 4, "cp": 4}
SIZES = {"kind": "starcoder2", "num_hidden_layers": 2, **UNEVEN}
TRAIN = {"global_batch_size": 8, "micro_batch_size": 4}
ADAPTER = LoRA(rank=3, alpha=8.0)
PAIRS = pairs(24, 17, 9, 11)  # share a prompt, which the ends of parts divide anywhere


def documents(count=24, longest=40, seed=3):
    """Examples of 2 to ``longest`` tokens; of every ninth nothing is trained."""
    random, found = np.random.default_rng(seed), []
    for index in range(count):
        ids = random.integers(3, 64, random.integers(2, longest)).tolist()
        prompt = len(ids) if index % 9 == 8 else max(1, len(ids) // 3)
        found.append({"input_ids": ids, "labels": [IGNORE_INDEX] * prompt + ids[prompt:]})
    return found


def learnt(world, folder, **changes):
    """Every gradient of a window, unsharded, and loss and gradient norm of the next two steps."""
    made = trainer(
        world,
        folder,
        **{"dtype": torch.float64, "examples": documents(), "train": TRAIN, **SIZES, **changes},
    )
    made.policy.module.train()
    made.policy.network.forward_backward(
        made.windows.loader.next_window(),
        lambda outputs, batch: with_router_loss(made.stage.loss("policy", outputs, batch), outputs),
        spec=made.stage.spec,
        before=lambda index: seed_everything(0, index, *world.draws),
        after=lambda index: None,
    )
    gradients = {}
    for name, parameter in made.policy.network.named.items():
        if (gradient := parameter.grad) is not None:
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            gradients[name] = whole.clone()
    made.policy.module.zero_grad()
    return [number for step in learn(made, 2) for number in step], gradients


def compare(folder, parallel, *, close=EXACT, **changes):
    """Ranks that share rows learn what one process learns from padded rows."""
    figures, gradients = learnt(ALONE, folder, **changes)
    size = parallel.get("dp_shard", 1) * parallel.get("dp_replicate", 1) * parallel.get("tp", 1)
    changes |= {"packing": True, "parallel": parallel}
    for found, of_rank in ranks.run(size, lambda w: learnt(w, folder, **changes), **parallel):
        assert found == pytest.approx(figures, rel=close, abs=close)
        assert of_rank.keys() == gradients.keys()
        for name, expected in gradients.items():
            error = float((of_rank[name] - expected).abs().max())
            assert error <= close * float(expected.abs().max()), name


CASES = {
    "full": (TWO, {}),
    "adapter": (TWO, {"method": ADAPTER}),
    "four ranks": (FOUR, {}),
    "a window": (FOUR, {"sliding_window": 6}),
    "replicas": ({"dp_replicate": 2, "cp": 2}, {"method": ADAPTER}),
    "two rows at a time": ({"dp_shard": 4, "cp": 2}, {}),
    "recomputed": (FOUR, {"recompute": True}),
    "recomputed adapter": (TWO, {"recompute": True, "method": ADAPTER}),
    "pairs": (FOUR, {"stage": Prefer(), "examples": PAIRS}),
    "pairs in a window": (TWO, {"stage": Prefer(), "examples": PAIRS, "sliding_window": 6}),
    "one long document": (
        FOUR,
        {"examples": documents(24, 60)[::2], "train": TRAIN | {"micro_batch_size": 1}},
    ),
    "short documents": (TWO, {"examples": documents(24, 5)}),
    "tensor parallel": ({"dp_shard": 2, "cp": 2, "tp": 2}, {"method": ADAPTER}),
    "sequence parallel": (
        {"dp_shard": 2, "cp": 2, "tp": 2, "sequence_parallel": True},
        {"method": ADAPTER},
    ),
}


@pytest.mark.parametrize("case", some(CASES, ["four ranks", "pairs"]))
def test_ranks_that_share_rows_learn_what_one_process_does(case, tmp_path):
    parallel, changes = CASES[case]
    compare(tmp_path, parallel, **changes)


OTHER_MODELS = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"method": ADAPTER},
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 6, "recompute": True, "packing": True},  # caps its scores
    "gpt_oss": {
        "sliding_window": 6,
        "dtype": torch.float32,
        "intermediate_size": 48,
        "attention": "eager",
        "packing": True,
    },  # has sinks
    "qwen3_moe": {
        "experts_implementation": "eager",
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
    },
}


@pytest.mark.proof
@pytest.mark.parametrize("kind", OTHER_MODELS)
def test_other_models_agree_but_for_the_rounding_of_their_norms(kind, tmp_path):
    compare(tmp_path, FOUR, close=ROUNDED, kind=kind, **OTHER_MODELS[kind])


@pytest.mark.proof
def test_dropout_is_drawn_again_where_layers_are_recomputed(tmp_path):
    """Other masks than one process draws, so ranks are compared with themselves."""
    changes = {"packing": True, "parallel": TWO, "attention_dropout": 0.2}
    changes["method"] = LoRA(rank=3, alpha=8.0, dropout=0.2)

    def work(world, **more):
        return learnt(world, tmp_path, **changes, **more)

    kept = ranks.run(2, work, **TWO)
    again = ranks.run(2, lambda world: work(world, recompute=True), **TWO)
    plain = ranks.run(2, lambda world: learnt(world, tmp_path, packing=True, parallel=TWO), **TWO)
    assert kept[0][0] != pytest.approx(plain[0][0], rel=1e-4)
    for (figures, gradients), (expected, others) in zip(again, kept, strict=True):
        assert figures == pytest.approx(expected, rel=EXACT)
        for name, gradient in gradients.items():
            assert torch.allclose(gradient, others[name], rtol=1e-10, atol=1e-13), name


OTHER_MESHES = [{"dp_shard": 2, "cp": 2}, {"tp": 2}, {"dp_shard": 4}, {"pp": 2}, {}]


@pytest.mark.proof
def test_what_is_saved_with_shared_rows_resumes_on_any_mesh_and_back(tmp_path):
    changes = {"dtype": torch.float64, "examples": documents(), "packing": True, **SIZES}
    changes |= {"kind": "qwen2", "method": ADAPTER}
    changes["train"] = {"global_batch_size": 8, "micro_batch_size": 2}
    alone = learn(trainer(ALONE, tmp_path, **changes), 4)

    def begun(world):
        made = trainer(world, tmp_path, parallel={"dp_shard": 4, "cp": 2}, **changes)
        return learn(made, 1), str(save(made, tmp_path / "shared"))

    first, path = ranks.run(4, begun, dp_shard=4, cp=2)[0]
    for number, mesh in enumerate(OTHER_MESHES):

        def resumed(world, mesh=mesh, number=number):
            made = resume(trainer(world, tmp_path, parallel=mesh, **changes), Path(path))
            return learn(made, 2), str(save(made, tmp_path / f"other-{number}"))

        size = math.prod(n for axis, n in mesh.items() if axis != "cp")
        second, other = ranks.run(size, resumed, **mesh)[0]

        def ended(world, other=other):
            made = resume(trainer(world, tmp_path, parallel=TWO, **changes), Path(other))
            return learn(made, 1)

        (third, _) = ranks.run(2, ended, **TWO)
        figures = [number for step in (*first, *second, *third) for number in step]
        expected = [number for step in alone for number in step]
        assert figures == pytest.approx(expected, rel=1e-6), mesh  # norms are in float32


@pytest.mark.parametrize("name", some(STAGES, ["distill", "classify"]))
def test_each_stage_trains_the_same_on_ranks_that_share_rows(name, tmp_path):
    """PPO and GRPO sample with every rank, and divide the rows again among pairs of ranks."""
    expected, close = losses(ALONE, tmp_path, name), STAGE_CLOSE.get(name, 1e-9)
    changes = {"packing": True, "micro_batch_size": 3}
    for found in ranks.run(2, lambda w: losses(w, tmp_path, name, **changes, **TWO), **TWO):
        assert found == pytest.approx(expected, rel=close, abs=close)


@pytest.mark.proof
def test_a_run_begins_with_shared_rows_and_ends_without_them(tmp_path):
    """From YAML, by the command and its own launcher, in float32."""
    shared = {"num_processes": 2, "cp": 2}
    optim = {"adamw": {"learning_rate": 0.003, "schedule": "constant"}}
    recipe = folders.save_recipe(tmp_path, parallel=shared, optim=optim)
    begun = forks.run(
        [sys.executable, "-m", "surefoot", "train", str(recipe), "train.max_steps=2"],
        capture_output=True,
        text=True,
    )
    assert begun.returncode == 0, begun.stderr
    alone = {"parallel.num_processes": 1, "parallel.cp": 1}
    surefoot.train(recipe, **alone)
    surefoot.train(recipe, **alone, **{"train.output_dir": str(tmp_path / "alone")})
    weights, expected = (
        load_file(tmp_path / name / "checkpoint-4" / "model.safetensors")
        for name in ("run", "alone")
    )
    for name, tensor in expected.items():
        assert torch.allclose(weights[name], tensor, rtol=0, atol=1e-5), name
