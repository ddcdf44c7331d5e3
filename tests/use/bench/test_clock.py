"""Every moment of a step belongs to one phase."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.batch import Batch, Loss
from surefoot.use.bench import PHASES, Clock, split, timed


def test_a_phase_lasts_until_the_next_begins():
    begun = [("data", 0.0), ("rest", 1.0), ("forward", 1.5), ("backward", 3.5), ("rest", 7.5)]
    begun += [("forward", 8.0), ("optimizer", 9.0), ("data", 10.0), ("rest", 12.0), ("data", 13.0)]
    first, second = split(begun)
    assert first == {"data": 1, "rest": 1, "forward": 3, "backward": 4, "optimizer": 1}
    assert second == {"data": 2, "rest": 1, "forward": 0, "backward": 0, "optimizer": 0}


def test_the_wait_for_pictures_is_data_of_the_same_step():
    begun = [("data", 0.0), ("rest", 1.0), ("forward", 2.0), ("data", 2.5), ("forward", 6.5)]
    begun += [("backward", 7.0), ("optimizer", 9.0), ("data", 10.0), ("rest", 11.0)]
    first, second = split(begun)
    assert first == {"data": 5, "rest": 1, "forward": 1, "backward": 2, "optimizer": 1}
    assert second["data"] == 1


def test_reading_the_pictures_of_a_micro_batch_is_told():
    empty = [torch.zeros(1, 2, dtype=torch.int64) for _ in range(3)]
    told, batch = [], Batch(*empty)

    class Pictures:
        def read(self, unread):
            told.append("read")
            return replace(unread, pictures=None, media={"pixel_values": empty[0]})

    def run(window, loss_function, *, before, after):
        before(0)
        return [loss_function(None, window[0].read())]

    def loss(_outputs, item):
        assert item.media
        return Loss(torch.ones(()), torch.ones(()), {})

    window = [replace(batch, pictures=Pictures())]
    timed(run, told.append, lambda window: None)(window, loss, before=lambda i: None, after=None)
    assert told == ["forward", "data", "read", "forward", "backward", "optimizer"]


@given(st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 1000)), max_size=30))
def test_no_moment_is_lost_or_counted_twice(steps):
    begun, now = [("data", 0.0)], 0.0
    for phase, seconds in steps:
        now += seconds
        begun.append((phase, now))
    assert sum(sum(step.values()) for step in split(begun)) == now


def test_the_window_is_run_as_before_and_its_phases_are_told():
    told, seen = [], []
    batch = Batch(*[torch.zeros(1, 2, dtype=torch.int64) for _ in range(3)])

    def run(window, loss_function, *, before, after):
        losses = []
        for index, item in enumerate(window):
            before(index)
            losses.append(loss_function(None, item))
            after(index)
        return losses

    def loss(_outputs, item):
        assert item is batch
        return Loss(torch.ones(()), torch.ones(()), {})

    losses = timed(run, told.append, seen.append)(
        [batch, batch],
        loss,
        before=lambda i: told.append(f"before {i}"),
        after=lambda i: told.append(f"after {i}"),
    )
    assert len(losses) == 2
    assert seen == [[batch, batch]]
    one = ["before {}", "forward", "backward", "rest", "after {}"]
    assert told == [text.format(i) for i in range(2) for text in one] + ["optimizer"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_queue_tells_the_time():
    clock = Clock(torch.device("cuda"))
    for phase in ("data", "forward", "data"):
        clock.turn(phase)
    (step,) = clock.steps()
    assert step["data"] >= 0
