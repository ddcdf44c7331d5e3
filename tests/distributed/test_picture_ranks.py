"""Rows with and without pictures on some ranks: loss and gradients are those of one rank."""

import json
from functools import partial

import pytest
from torch.distributed.tensor import DTensor

import pictures
import ranks
from surefoot.model.numerics import seed_everything
from surefoot.parallel.world import ALONE
from surefoot.run.assembly import build

NUM_ROWS = 8
FORMS = [(size, packing) for size in (1, 2) for packing in (True, False)]


@pytest.fixture
def folder(kind, tmp_path):
    """A model, and a window of rows of which two have pictures: four ranks cannot have one each."""
    pictures.save_model(tmp_path / "base", kind)
    made = pictures.rows(tmp_path, 18)
    rows = [row for row in made if not row["images"]] + made[1:3]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert len(rows) == NUM_ROWS
    return tmp_path


def first_step(folder, world=ALONE, size=1, packing=False, **parallel):
    """Mean loss, gradient norm, and the full gradients of the first window."""
    made = pictures.recipe(
        folder,
        folder / "base",
        packing=packing,
        train={"global_batch_size": NUM_ROWS, "micro_batch_size": size},
        parallel=parallel,
    )
    trainer = build(made, world=world)
    policy = trainer.policy
    policy.module.train()
    policy.step.optimizer = policy.optimizer_at(0)
    figures = policy.step.gradients(
        trainer.windows.next_turn().window,
        partial(trainer.stage.loss, "policy"),
        step=0,
        before=lambda index: seed_everything(0, index),
        after=lambda index: None,
    ).read()
    gradients = {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
        for name, p in policy.module.named_parameters()
        if p.grad is not None
    }
    return figures.loss / figures.weight, figures.grad_norm, gradients


def assert_as_alone(found, expected):
    loss, norm, gradients = found
    expected_loss, expected_norm, expected_gradients = expected
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert norm == pytest.approx(expected_norm, rel=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        # softmax does not see a bias of keys: its gradient is rounding, of the size of its weight's
        of = name.replace("k_proj.bias", "k_proj.weight")
        bound = 1e-5 * expected_gradients[of].abs().max() + 1e-9
        assert (gradient - expected_gradients[name]).abs().max() <= bound, name


def compare(folder, count, forms, **parallel):
    expected = first_step(folder)
    assert any("vision" in name or "visual" in name for name in expected[2])

    def work(world):
        return [first_step(folder, world, size, packing, **parallel) for size, packing in forms]

    for results in ranks.run(count, work, timeout=120, **parallel):
        for found in results:
            assert_as_alone(found, expected)


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["qwen2_vl"])
def test_four_ranks_of_which_some_have_no_picture_have_the_gradients_of_one(folder):
    compare(folder, 4, [(1, True), (2, False)], dp_shard=4)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("count", "parallel"),
    [
        (1, {}),
        (2, {"dp_shard": 2}),
        (2, {"dp_replicate": 2}),
        (4, {"dp_shard": 4}),
        (4, {"dp_shard": 2, "dp_replicate": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", pictures.KINDS)
def test_proof_of_ranks_micro_batches_and_forms(folder, count, parallel):
    compare(folder, count, FORMS, **parallel)
