import json
import math

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from surefoot.plugins.sweep.space import Space, SweptKey
from surefoot.plugins.sweep.study import (
    STUDY,
    add,
    gather,
    next_values,
    open_study,
    running,
    should_prune,
    values_of,
)

RANK = SweptKey("a.rank", "8..64", IntDistribution(8, 64))
SCHEDULE = SweptKey(
    "a.schedule", "linear,cosine", CategoricalDistribution(['"linear"', '"cosine"'])
)
RATE = SweptKey("a.rate", "1e-5..1e-3:log", FloatDistribution(1e-5, 1e-3, log=True))
SPACE = Space(None, (RATE, RANK, SCHEDULE))
FLAG = SweptKey("a.flag", "true,false", CategoricalDistribution(["true", "false"]))
FINITE = Space(None, (SweptKey("a.rank", "1,2,3", CategoricalDistribution(["1", "2", "3"])), FLAG))


def values(study, space=SPACE):
    return [values_of(space, trial) for trial in study.get_trials()]


def loss_of(values):
    return abs(values["a.rate"] - 3e-4) * 1e3 + values["a.rank"] / 640


def draw(study, sampler, seed=3):
    found = next_values(SPACE, study, sampler, seed)
    study.tell(add(study, SPACE, found), loss_of(found))


def continued(folder, count, sampler="tpe"):
    """The values of trials up to ``count``, each launch taking two."""
    while True:
        study = open_study(folder, "minimize")
        for _ in range(2):
            if len(study.get_trials()) == count:
                return values(study)
            draw(study, sampler)


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_sweep_that_is_started_again_has_the_trials_of_one_that_was_not(tmp_path, sampler):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    stopped = continued(tmp_path / "a", 14, sampler)
    study = open_study(tmp_path / "b", "minimize")
    for _ in range(14):
        draw(study, sampler)
    assert values(study) == stopped
    assert len({json.dumps(one) for one in stopped}) == 14, "no trial is repeated"
    assert all(1e-5 <= one["a.rate"] <= 1e-3 and 8 <= one["a.rank"] <= 64 for one in stopped)


def test_a_grid_has_every_combination_once_and_nothing_is_drawn_twice(tmp_path):
    study = open_study(tmp_path, "minimize")
    grid = []
    for sampler in ["random"] * 3 + ["tpe"] * 4:
        grid.append(next_values(FINITE, study, "grid", 0))
        found = next_values(FINITE, study, sampler, 0)
        if found is not None:
            study.tell(add(study, FINITE, found), 1.0)
    assert found is None, "all six have been tried"
    assert sorted(map(str, values(study, FINITE))) == sorted(map(str, FINITE.combinations()))
    assert grid == [*FINITE.combinations(), None]


def test_a_trial_is_in_the_journal_with_all_its_values_or_not_at_all(tmp_path):
    study = open_study(tmp_path, "minimize")
    first = {"a.rate": 1e-4, "a.rank": 8, "a.schedule": "cosine"}
    for _ in range(2):
        add(study, SPACE, first)
    journal = tmp_path / STUDY
    whole = journal.read_bytes()
    last = whole.rstrip(b"\n").rpartition(b"\n")[2]
    for length in range(1, len(last), 40):  # killed in the middle of the last line
        journal.write_bytes(whole[:-length])
        (tmp_path / f"{STUDY}.lock").touch()  # and while it held optuna's lock
        again = open_study(tmp_path, "minimize")
        assert values(again) == [first]
        assert add(again, SPACE, {**first, "a.rank": 16}) == 1


def trial(study, values, total=100):
    number = add(study, SPACE, {**{"a.rate": 1e-4, "a.rank": 8, "a.schedule": "cosine"}, **values})
    running(study, number).set_user_attr("total_steps", total)
    return number


def test_pruning_compares_equal_steps_of_trials_of_equal_length(tmp_path):
    study = open_study(tmp_path, "minimize")
    for value in (1.0, 2.0, 3.0):
        number = trial(study, {})
        for step in (10, 50, 100):
            running(study, number).report(value if step == 50 else 0.0, step)
        study.tell(number, value)

    def is_pruned(step, value, total=100, startup=3):
        number = trial(study, {}, total)
        running(study, number).report(value, step)
        return should_prune(study, number, startup)

    assert is_pruned(50, 2.5)
    assert not is_pruned(50, 1.5), "better than the median at that step"
    assert not is_pruned(50, 2.5, startup=4), "too few to compare with"
    assert not is_pruned(50, 2.5, total=200), "the others took 100 steps"
    assert not is_pruned(40, 9.0), "nobody has reported at this step"
    assert not is_pruned(10, 9.0), "in the first fifth"


def test_nan_wins_nothing_and_of_equal_trials_the_first_is_the_best(tmp_path):
    study = open_study(tmp_path, "maximize")
    for rank, state, value in [(8, "COMPLETE", 0.5), (16, "COMPLETE", 0.5), (24, "FAIL", None)]:
        number = trial(study, {"a.rank": rank})
        running(study, number).report(math.nan if value is None else value, 50)
        study.tell(number, value, TrialState[state])
    found = gather(study, SPACE, "eval_accuracy")
    assert [one.number for one in found.ranked] == [0, 1, 2]
    assert found.best.number == 0
    assert (found.trials[2].step, found.trials[2].value) == (50, None)
    json.dumps(found.as_data(), allow_nan=False)
