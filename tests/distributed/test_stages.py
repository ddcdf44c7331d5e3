"""Every stage trains the same, however its windows are dealt to ranks and micro-batches."""

import pytest
import torch

import ranks
from each import some
from spread import learn, trainer
from stage_data import CODEC, examples_of, stage_of
from surefoot.parallel.world import ALONE
from surefoot.stages import STAGES

STEPS = 5  # inside the second window of grpo, and past the last window of an epoch of 7 examples
# dpo's reference is kept in float32, and distill's teacher computes in it. The model's norms do
# not, or they would round the gradients of a prompt that responses share after they are summed.
CLOSE = {"dpo": 1e-6, "ppo": 1e-10, "distill": 1e-6}


def losses(
    world,
    folder,
    name,
    *,
    kind="starcoder2",
    packing=False,
    micro_batch_size=1,
    settings=None,
    count=14,
    **parallel,
):
    """Mean loss and gradient norm of a few steps, one after the other."""
    made = trainer(
        world,
        folder / f"{world.size}-{packing}-{micro_batch_size}",
        kind=kind,
        stage=stage_of(name, **(settings or {})),
        codec=CODEC,
        examples=examples_of(name, count),
        packing=packing,
        train={"global_batch_size": 8 if settings else 6, "micro_batch_size": micro_batch_size},
        dtype=torch.float64,
        **({"parallel": parallel} if parallel else {}),
    )
    return [figure for step in learn(made, STEPS) for figure in step]


# Each stage is in one of these two; `make proof` has all of them in both.
IN_PARTS = ("pt", "dpo", "rm", "classify", "grpo", "distill")
WITHOUT = [name for name in STAGES if name not in IN_PARTS]


@pytest.mark.parametrize("name", some(STAGES, IN_PARTS))
def test_micro_batches_packing_and_ranks_change_nothing(name, tmp_path):
    close = CLOSE.get(name, 1e-9)
    expected = losses(ALONE, tmp_path, name)
    for packing, size in ((False, 3), (True, 1), (True, 6)):
        found = losses(ALONE, tmp_path, name, packing=packing, micro_batch_size=size)
        assert found == pytest.approx(expected, rel=close, abs=close)
    changes = {"packing": True, "micro_batch_size": 3}
    for found in ranks.run(2, lambda w: losses(w, tmp_path, name, **changes), dp_shard=2):
        assert found == pytest.approx(expected, rel=close, abs=close)


def test_metrics_of_all_examples_are_those_of_one_rank(tmp_path):
    def measured(world, **parallel):
        made = trainer(
            world,
            tmp_path / f"{world.size}",
            stage=stage_of("classify"),
            codec=CODEC,
            examples=examples_of("classify"),
            held=examples_of("classify", 11, seed=6),
            train={"global_batch_size": 4, "micro_batch_size": 2, "eval_steps": 9},
            dtype=torch.float64,
            packing=True,
            **({"parallel": parallel} if parallel else {}),
        )
        learn(made, 2)
        return made.evaluation.measure(made.evals[""], lambda: None)

    expected = measured(ALONE)
    assert {"accuracy", "f1_macro", "auc", "confusion/small/huge"} <= expected.keys()
    assert sum(n for name, n in expected.items() if name.startswith("confusion/")) == 11
    for mesh in ({"dp_replicate": 2}, {"dp_shard": 2, "cp": 2}):
        for found in ranks.run(2, lambda world, mesh=mesh: measured(world, **mesh), **mesh):
            assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", some(STAGES, WITHOUT))
def test_a_rank_may_have_no_example(name, tmp_path):
    close = CLOSE.get(name, 1e-9)
    count = 6 + stage_of(name).min_window  # the second window has one, or as many as it needs
    expected = losses(ALONE, tmp_path, name, count=count)
    for found in ranks.run(2, lambda w: losses(w, tmp_path, name, count=count), dp_replicate=2):
        assert found == pytest.approx(expected, rel=close, abs=close)


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["tp", "pp"])
@pytest.mark.parametrize("name", STAGES)
def test_sharded_weights_change_nothing(name, kind, tmp_path):
    stage = stage_of(name)
    if (name, kind) == ("grpo", "pp") or stage.heads or stage.spec.divergence:
        pytest.skip(
            "the recipe is refused: a pipeline cannot generate, and heads and compared logits "
            "cannot be sharded"
        )
    close = CLOSE.get(name, 1e-9)
    settings = {"kind": "llama", "micro_batch_size": 3}
    expected = losses(ALONE, tmp_path, name, **settings)
    for found in ranks.run(
        2, lambda w: losses(w, tmp_path, name, **settings, **{kind: 2}), **{kind: 2}
    ):
        assert found == pytest.approx(expected, rel=close, abs=close)


VARIANTS = {
    "gspo": {"surrogate": "gspo", "average_over": "tokens"},
    "cispo": {"surrogate": "cispo", "advantage": "reinforce_plus_plus", "average_over": "tokens"},
    "dr_grpo": {"advantage": "dr_grpo", "average_over": "max_new_tokens", "drop_flat_groups": True},
    "rloo": {"advantage": "rloo", "surrogate": "dual_clip", "kl_estimator": "k1"},
}


@pytest.mark.proof
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_grpo_are_the_same_on_four_ranks(name, tmp_path):
    def found(world, **options):
        return losses(world, tmp_path, "grpo", settings=VARIANTS[name], **options)

    expected = found(ALONE)
    assert found(ALONE, packing=True, micro_batch_size=8) == pytest.approx(expected, rel=1e-9)
    for size, axes in ((2, {"dp_replicate": 2}), (4, {"dp_shard": 2, "dp_replicate": 2})):
        for one in ranks.run(size, found, **axes):
            assert one == pytest.approx(expected, rel=1e-9, abs=1e-9)
