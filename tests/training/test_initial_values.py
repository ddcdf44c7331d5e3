"""The reference of a window: the policy with its first values, put back whatever happens."""

import pytest
import torch

from spread import learn, trainer
from stage_data import CODEC, examples_of, stage_of
from surefoot.methods import LoRA
from surefoot.parallel.world import ALONE


@pytest.mark.parametrize("method", [None, LoRA(rank=2)], ids=["full", "lora"])
def test_the_reference_stays_as_the_policy_was(method, tmp_path):
    made = trainer(
        ALONE,
        tmp_path,
        stage=stage_of("grpo", beta=0.2),
        codec=CODEC,
        examples=examples_of("grpo"),
        train={"global_batch_size": 6, "micro_batch_size": 3},
        method=method,
        dtype=torch.float64,
    )
    context = made.windows.context((0, 0))
    items = [{"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, 8]}] * 2
    (policy, _), (first, _) = (context.compute(role, items) for role in ("policy", "reference"))
    # the base under an adapter; that of this test has not begun at it
    assert torch.equal(first.logps, policy.logps) == (method is None)
    learn(made, 2)
    now = {name: p.detach().clone() for name, p in made.policy.network.named.items()}
    (policy, _), (reference, _) = (context.compute(r, items) for r in ("policy", "reference"))
    assert torch.equal(reference.logps, first.logps)
    assert (policy.logps - reference.logps).abs().max() > 1e-4

    def fail(outputs, batch):
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        context.reduce("reference", items, fail)
    assert all(torch.equal(p, now[n]) for n, p in made.policy.network.named.items())
    assert torch.equal(context.compute("reference", items)[0].logps, first.logps)
