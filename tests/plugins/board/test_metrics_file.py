import json
import math
import random

import pytest

from surefoot.plugins.board.metrics import Column, MetricsFile, smoothed, thinned
from surefoot.training.callbacks.launches import Follower


def column(values):
    found = Column()
    found.steps.extend(range(1, len(values) + 1))
    found.values.extend(values)
    return found


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_new_lines_are_read_once_and_an_incomplete_one_when_it_is_complete(tmp_path):
    path = tmp_path / "metrics.jsonl"
    found = MetricsFile(path)
    found.refresh()
    assert not found.columns, "there is no file yet"
    path.write_text(lines({"step": 1, "loss": 2.0}) + '{"step": 2, "lo')
    found.refresh()
    assert list(found.columns["loss"].values) == [2.0]
    with path.open("a") as file:
        file.write('ss": 1.5}\n')
    found.refresh()
    assert list(found.columns["loss"].steps) == [1, 2]
    assert found.note() is None


def test_a_file_that_was_cut_or_replaced_is_read_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(*({"step": n, "loss": 1.0 * n} for n in range(9))))
    found, follower = MetricsFile(path), Follower(path)
    found.refresh()
    follower.read()
    path.write_text(lines(*({"step": n, "loss": 2.0 * n} for n in range(20))))  # and is longer
    found.refresh()
    assert list(found.columns["loss"].values) == [2.0 * n for n in range(20)]
    rows, is_other = follower.read()
    assert is_other
    assert len(rows) == 20
    path.unlink()
    found.refresh()
    assert not found.columns
    assert follower.read() == ([], True)


def test_broken_lines_are_counted_and_named_and_cost_no_other_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    odd = ["{half", '["list"]', '{"no": "step"}', '{"step": 1.5}', '{"step": true}', "\xff\x00"]
    path.write_text(
        lines({"step": 1, "loss": 1.0})
        + "\n".join(odd)
        + "\n"
        + lines({"step": 2, "loss": None, "word": "x", "huge": 10**400})
    )
    found = MetricsFile(path)
    found.refresh()
    assert found.num_broken == len(odd)
    assert "6 lines are not a record" in found.note()
    assert "line 2: '{half'" in found.note()
    assert list(found.columns["loss"].steps) == [1, 2]
    assert math.isnan(found.columns["loss"].values[1])


def test_thinning_keeps_every_spike_every_gap_and_both_ends():
    values = [random.Random(1).random() for _ in range(100_000)]
    values[777], values[50_001], values[99_000] = 90.0, -90.0, math.nan
    steps, shown = thinned(column(values), 500)
    assert len(steps) <= 520
    assert steps == sorted(steps)
    assert {90.0, -90.0, None} <= set(shown)
    assert (steps[0], steps[-1]) == (1, 100_000)
    near, values_near = thinned(column(values), 500, 700, 800)
    assert (near[0], near[-1]) == (699, 801), "the line leads out of the picture"
    assert 90.0 in values_near


def test_smoothing_is_a_centred_mean_and_so_never_late():
    line = [3.0 * n for n in range(50)]
    assert list(smoothed(column(line), 7).values) == [pytest_close(v) for v in line]
    bump = [0.0] * 101
    bump[50] = 1.0
    even = list(smoothed(column(bump), 10).values)
    assert list(smoothed(column([5.0, 1.0]), 3).values) == [5.0, 1.0], "no window at an end"
    assert even == even[::-1], "as far before the bump as after it"
    assert even[50] == pytest_close(1 / 21)
    holes = smoothed(column([1.0, math.nan, 3.0]), 1).values
    assert math.isnan(holes[1])


def pytest_close(value):
    return pytest.approx(value, abs=1e-9)
