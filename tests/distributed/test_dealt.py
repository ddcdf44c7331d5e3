"""Examples dealt by their lengths: another split for each number of ranks, the same step."""

import pytest
import torch

import ranks
import small
from spread import compare, learn, resume, save, trainer
from surefoot.optim._variants.adamw import AdamW
from surefoot.optim.plateau import Plateau
from surefoot.parallel.world import ALONE
from surefoot.training.evaluation import prefixed, record_evaluation

DOUBLE = {"dtype": torch.float64}
TRAIN = {"global_batch_size": 8, "micro_batch_size": 2}
CLOSE = 1e-10  # only the order of sums differs


def examples():
    """Of very different lengths."""
    return small.examples(26, seed=3)


def lengths(made, window):
    """Tokens of each micro-batch of this rank."""
    dealt = made.windows.loader.examples_at(0, window).lengths
    return [int(dealt[group].sum()) for group in made.windows.loader.batching.groups(dealt)]


@pytest.mark.parametrize(
    "packing",
    [pytest.param(True, marks=pytest.mark.proof), pytest.param(False, marks=pytest.mark.proof)],
)
def test_two_ranks_learn_what_one_does_to_float64(packing, tmp_path):
    changes = {"packing": packing, "train": TRAIN, "examples": examples(), **DOUBLE}
    compare(2, tmp_path, parallel={"dp_shard": 2}, steps=4, close=CLOSE, **changes)


def test_a_run_goes_on_with_another_number_of_ranks_and_another_split(tmp_path):
    changes = {"packing": True, "train": TRAIN, "examples": examples(), **DOUBLE}
    alone = trainer(ALONE, tmp_path, **changes)
    learn(alone, 2)
    folder = save(alone, tmp_path)
    expected = learn(alone, 3)  # into the second epoch

    def work(world):
        made = resume(trainer(world, tmp_path, **changes), folder)
        return learn(made, 3), lengths(made, 0)

    found = ranks.run(2, work, dp_shard=2)
    for ours, _ in found:
        assert ours == [pytest.approx(one, abs=CLOSE, rel=CLOSE) for one in expected]
    (_, first), (_, second) = found
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) <= 1, "of equal tokens"


def test_all_ranks_have_the_rate_that_evaluations_leave_and_one_goes_on_with_it(tmp_path):
    rule = Plateau(factor=0.5, patience=0, threshold=0.9)
    optim = AdamW(learning_rate=5e-3, schedule="reduce_lr_on_plateau", plateau=rule)
    held = small.examples(5, seed=9)
    measured = {"eval_steps": 1, "max_steps": 4, **TRAIN}
    changes = {"held": held, "optim": optim, "train": measured, "examples": examples()}

    def evaluate(made, count):
        """The rate of each of the next steps, with an evaluation after each."""
        rates = []
        for _ in range(count):
            learn(made, 1)
            rates.append(made.policy.step.optimizer.param_groups[0]["lr"])
            parts = {"": made.evaluation.measure(made.evals[""], lambda: None)}
            record_evaluation(made.section, made.callbacks, prefixed(parts, "eval"))
        return rates

    def work(world):
        made = trainer(world, tmp_path, **changes)
        return evaluate(made, 3), save(made, tmp_path)

    (first, folder), (second, _) = ranks.run(2, work, dp_shard=2)
    assert first == second == [5e-3, 5e-3, 2.5e-3]
    assert evaluate(resume(trainer(ALONE, tmp_path, **changes), folder), 2) == [1.25e-3, 0.625e-3]
