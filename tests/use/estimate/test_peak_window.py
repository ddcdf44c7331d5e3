"""What is under way in a process of a pipeline, counted by hand."""

import pytest

from surefoot.parallel.pipeline.schedule import order
from surefoot.use.estimate.memory_model import Pass, Snapshot
from surefoot.use.estimate.peak_window import Route, window

ONE = Pass(Snapshot(100, 0, 0), Snapshot(130, 20, 0), 140, growing=160)


def taken(schedule, place, count, *, size=4, passed=ONE, learns=True, num_bytes=0, parts=1):
    ops = order(schedule, place, size, parts, count)
    route = Route(place, size, [learns] * size * parts, num_bytes, [2] * parts)
    return window([passed] * parts, ops, route)


@pytest.mark.parametrize("place", range(4))
def test_1f1b_has_as_many_under_way_as_there_are_stages_from_here_on(place):
    found = taken("1f1b", place, 12)
    others = 100 * (3 - place)
    assert found.kept.total == others + 100
    assert found.at_peak.total == others + 150
    assert found.growing == others + 160
    assert found.last == 140 - 50, "the others are gone, and one of two layers"


def test_gpipe_has_all_under_way():
    found = taken("gpipe", 1, 12)
    assert found.growing == 11 * 100 + 160
    assert found.at_peak.total == 10 * 100 + 150, "the first one is back when gradients are there"


def test_interleaved_has_more_under_way_than_1f1b():
    plain, woven = (taken(name, 0, 12, parts=n) for name, n in (("1f1b", 1), ("interleaved", 2)))
    assert woven.kept.total > plain.kept.total


def test_stages_that_learn_nothing_keep_what_waits_for_its_turn():
    still = Pass(Snapshot(10, 0, 0), Snapshot(60, 0, 0), 60, growing=60)
    assert taken("1f1b", 0, 12, passed=still, learns=False).at_peak.total == 3 * 10 + 60


def test_what_is_sent_and_what_comes_counts_as_well():
    without, with_it = (taken("1f1b", 1, 12, num_bytes=n).at_peak.total for n in (0, 1))
    assert 0 < with_it - without <= 2 * 4 + 1 + 1
