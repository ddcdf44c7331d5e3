"""A model spread by FSDP learns what one process learns, activations kept or recomputed."""

import pytest

import ranks
from each import some
from spread import learn, trainer
from surefoot.methods import Full, LoRA
from surefoot.parallel.world import ALONE

CLOSE = 1e-5  # of mean losses (about 4) and of gradient norms: float32 sums in another order
STEPS = 2
ADAPTER = LoRA(rank=2, alpha=8.0)


@pytest.mark.parametrize("method", some([Full(), ADAPTER], [ADAPTER]), ids=["full", "lora"])
@pytest.mark.parametrize(
    "parallel",
    [{}, pytest.param({"dp_replicate": 2}, marks=pytest.mark.proof), {"tp": 2}],
    ids=str,
)
def test_recomputed_activations_change_nothing(parallel, method, tmp_path):
    expected = learn(trainer(ALONE, tmp_path, method=method), STEPS)

    def work(world):
        return learn(trainer(world, tmp_path, method=method, recompute=True), STEPS)

    for found in ranks.run(2, work, **parallel):
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert ours == pytest.approx(theirs, abs=CLOSE, rel=CLOSE), f"step {step}"
