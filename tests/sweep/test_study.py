import json

import pytest
from optuna.trial import TrialState

from surefoot.sweep.files import STUDY
from surefoot.sweep.objective import ReportedValue
from surefoot.sweep.ranges import parse_arguments
from surefoot.sweep.results import gather
from surefoot.sweep.sampling import next_values
from surefoot.sweep.space import Space
from surefoot.sweep.study import open_study

KEYS, _ = parse_arguments(["a.rate=1e-5..1e-3:log", "a.rank=8..64:8", "a.schedule=linear,cosine"])
SPACE = Space(None, tuple(KEYS))
FINITE, _ = parse_arguments(["a.rank=8,16,32", "a.flag=true,false"])


def loss_of(values):
    return abs(values["a.rate"] - 3e-4) * 1e3 + values["a.rank"] / 640


def continued(folder, count, sampler="tpe"):
    """The values of trials up to ``count``, each launch taking two."""
    while True:
        study = open_study(folder, KEYS, "minimize")
        for _ in range(2):
            trials = study.trials()
            if len(trials) == count:
                return [study.values(trial) for trial in trials]
            values = next_values(SPACE, study, trials, sampler=sampler, seed=3)
            study.end(study.add(values), TrialState.COMPLETE, loss_of(values))


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_sweep_that_is_started_again_has_the_trials_of_one_that_was_not(tmp_path, sampler):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    stopped = continued(tmp_path / "a", 14, sampler)
    study = open_study(tmp_path / "b", KEYS, "minimize")
    for _ in range(14):
        values = next_values(SPACE, study, study.trials(), sampler=sampler, seed=3)
        study.end(study.add(values), TrialState.COMPLETE, loss_of(values))
    assert [study.values(trial) for trial in study.trials()] == stopped
    assert len({json.dumps(one) for one in stopped}) == 14, "no trial is repeated"
    assert all(1e-5 <= one["a.rate"] <= 1e-3 and one["a.rank"] % 8 == 0 for one in stopped)


def test_a_grid_has_every_combination_once_and_nothing_is_drawn_twice(tmp_path):
    study = open_study(tmp_path, FINITE, "minimize")
    space = Space(None, tuple(FINITE))
    for sampler, seed in [("random", 0)] * 3 + [("tpe", 0)] * 4:
        values = next_values(space, study, study.trials(), sampler=sampler, seed=seed)
        if values is not None:
            study.end(study.add(values), TrialState.COMPLETE, 1.0)
    assert values is None, "all six have been tried"
    found = [study.values(trial) for trial in study.trials()]
    assert sorted(map(str, found)) == sorted(map(str, space.combinations()))
    grid = [next_values(space, study, study.trials()[:n], sampler="grid", seed=0) for n in range(7)]
    assert grid == [*space.combinations(), None]


def test_a_trial_is_in_the_journal_with_all_its_values_or_not_at_all(tmp_path):
    study = open_study(tmp_path, KEYS, "minimize")
    values = {"a.rate": 1e-4, "a.rank": 8, "a.schedule": "cosine"}
    for _ in range(2):
        study.add(values)
    journal = tmp_path / STUDY
    whole = journal.read_bytes()
    last = whole.rstrip(b"\n").rpartition(b"\n")[2]
    for length in range(1, len(last), 40):  # killed in the middle of the last line
        journal.write_bytes(whole[:-length])
        (tmp_path / f"{STUDY}.lock").touch()  # and while it held optuna's lock
        again = open_study(tmp_path, KEYS, "minimize")
        assert [again.values(trial) for trial in again.trials()] == [values]
        assert again.add({**values, "a.rank": 16}) == 1


def test_steps_of_a_tenth_are_values_that_the_study_takes(tmp_path):
    keys, _ = parse_arguments(["a.dropout=0..0.7:0.1", "a.ratio=-0.3..0.3:0.1"])
    study = open_study(tmp_path, keys, "minimize")
    for values in Space(None, tuple(keys)).combinations():
        number = study.add(values)
        assert study.values(study.trials()[number]) == values


def trial(study, values, total=100):
    number = study.add({**{"a.rate": 1e-4, "a.rank": 8, "a.schedule": "cosine"}, **values})
    study.note(number, total_steps=total)
    return number


def test_pruning_compares_equal_steps_of_trials_of_equal_length(tmp_path):
    study = open_study(tmp_path, KEYS, "minimize")
    for value in (1.0, 2.0, 3.0):
        number = trial(study, {})
        for step in (10, 50, 100):
            study.report(number, ReportedValue(step, value if step == 50 else 0.0))
        study.end(number, TrialState.COMPLETE, value)

    def is_pruned(step, value, total=100, startup=3):
        number = trial(study, {}, total)
        study.report(number, ReportedValue(step, value))
        return study.should_prune(number, startup)

    assert is_pruned(50, 2.5)
    assert not is_pruned(50, 1.5), "better than the median at that step"
    assert not is_pruned(50, 2.5, startup=4), "too few to compare with"
    assert not is_pruned(50, 2.5, total=200), "the others took 100 steps"
    assert not is_pruned(40, 9.0), "nobody has reported at this step"
    assert not is_pruned(10, 9.0), "in the first fifth"


def test_nan_wins_nothing_and_equal_losses_of_other_settings_are_remarked(tmp_path):
    study = open_study(tmp_path, KEYS, "maximize")
    for rank, state, value in [(8, "COMPLETE", 0.5), (16, "COMPLETE", 0.5), (24, "FAIL", None)]:
        number = trial(study, {"a.rank": rank}, total=100 + (rank == 24))
        study.note(number, losses="same")
        study.report(number, ReportedValue(50, value))
        study.end(number, TrialState[state], value)
    found = gather(study, 3, "eval_accuracy")
    assert found.best.number == 0
    assert [one.number for one in found.ranked()] == [0, 1, 2]
    json.dumps(found.as_data(), allow_nan=False)
    assert "trials 0, 1 have bitwise equal losses, so a.rank had no effect" in found.remarks[1]
    assert "from 100 to 101 steps" in found.remarks[0]


def test_the_setting_that_decides_is_the_important_one(tmp_path):
    study = open_study(tmp_path, KEYS, "minimize")
    for number in range(16):
        values = next_values(SPACE, study, study.trials(), sampler="random", seed=1)
        study.end(study.add(values), TrialState.COMPLETE, values["a.rank"] / 64)
        if number in (2, 3):
            assert bool(study.importances()) == (number == 3), "two trials show nothing"
    shares = study.importances()
    assert sum(shares.values()) == pytest.approx(1, abs=1e-3)
    assert max(shares, key=shares.get) == "a.rank"
