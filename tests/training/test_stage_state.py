"""What a stage keeps from window to window, and the reference that a run keeps of its policy."""

import pytest
import torch

import ranks
from spread import learn, trainer
from stage_data import CODEC, examples_of, stage_of
from surefoot.parallel.world import ALONE
from surefoot.training.stage import POLICY


def made(world, folder, **parallel):
    return trainer(
        world,
        folder,
        stage=stage_of("ppo"),
        codec=CODEC,
        examples=examples_of("ppo", 14),
        packing=False,
        train={"global_batch_size": 6, "micro_batch_size": 3},
        dtype=torch.float64,
        **({"parallel": parallel} if parallel else {}),
    )


def state_of(run):
    return dict(run.windows.stage_state.values)


def test_it_is_saved_and_a_new_run_begins_without_it(tmp_path):
    run = made(ALONE, tmp_path)
    assert "stage" not in run.windows.state_dict()
    learn(run, 5)
    kept = state_of(run)
    assert {"kl_coefficient", "score_count", "flat_windows"} <= kept.keys()
    assert kept["score_count"] == 12
    other = made(ALONE, tmp_path / "other")
    other.windows.load_state_dict(run.windows.state_dict())
    assert state_of(other) == kept
    other.windows.load_state_dict(made(ALONE, tmp_path / "third").windows.state_dict())
    assert state_of(other) == {}


def test_a_turn_that_is_repeated_sees_what_it_saw_first(tmp_path):
    run = made(ALONE, tmp_path)
    first = run.windows.next_turn()
    kept = state_of(run)
    again = run.windows.repeat_turn()
    assert again.figures == first.figures
    assert state_of(run) == kept


def test_a_trial_and_an_evaluation_leave_it(tmp_path):
    run = made(ALONE, tmp_path)
    learn(run, 4)
    kept = state_of(run)
    run.windows.heaviest()
    context = run.evaluation.context((-1, 0))
    assert context.state == kept
    run.stage.prepare(context, [run.windows.loader.order.examples[i] for i in range(3)])
    assert state_of(run) == kept


def references(world, folder, **parallel):
    """Log-probabilities of policy and reference, before and after some steps."""
    run = made(world, folder, **parallel)
    items = list(run.stage.prepare(run.evaluation.context((0, 0)), prompts(run)).examples)
    found = []
    for _ in range(2):
        context = run.evaluation.context((0, 0))
        found += [
            torch.cat([one.logps for one in context.compute(role, items)])
            for role in (POLICY, "reference")
        ]
        learn(run, 3)
    return found


def prompts(run):
    return [run.windows.loader.order.examples[i] for i in range(5)]


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.proof)])
def test_the_reference_stays_the_policy_before_the_first_step(count, tmp_path):
    if count == 1:
        every = [references(ALONE, tmp_path)]
    else:
        every = ranks.run(2, lambda w: references(w, tmp_path, dp_shard=2), dp_shard=2)
    for policy, reference, later, still in every:
        assert torch.equal(reference, policy)
        assert torch.equal(still, policy)
        assert not torch.allclose(later, policy)
