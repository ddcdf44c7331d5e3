"""Pictures are read a few micro-batches ahead, in the order of their use, and then forgotten."""

import threading
import weakref

import pytest
import torch

from surefoot.batch import Batch
from surefoot.data.order.loader import PictureReader


class Numbered:
    """Pictures whose pixels are the number of their micro-batch; ``read_by`` says who read them."""

    def __init__(self, number, read_by, alive):
        self.number, self.read_by, self.alive = number, read_by, alive

    def read(self, batch):
        if self.number < 0:
            raise ValueError("this picture is broken")
        pixels = torch.tensor([float(self.number)])
        self.alive.add(pixels)
        self.read_by[self.number] = threading.current_thread().name
        return Batch(*batch_of(None), media={"pixel_values": pixels})


def batch_of(pictures):
    empty = [torch.zeros(1, 2, dtype=torch.int64) for _ in range(3)]
    return empty if pictures is None else Batch(*empty, pictures=pictures)


class Run:
    """A reader, windows of numbered micro-batches, and what was read of them."""

    def __init__(self):
        self.reader, self.read_by = PictureReader(lambda batch: batch), {}
        self.alive = weakref.WeakSet()

    def window(self, *numbers):
        batches = [batch_of(Numbered(n, self.read_by, self.alive)) for n in numbers]
        return self.reader.queued(batches)


def ended():
    for thread in threading.enumerate():
        if thread.name == "surefoot-pictures":
            thread.join(timeout=5)
            assert not thread.is_alive()


def taken(batch):
    return float(batch.read().media["pixel_values"])


def test_the_next_two_are_read_by_threads_and_no_others():
    run = Run()
    first = run.window(0, 1, 2)
    second = run.window(3, 4)
    for number, batch in enumerate([*first, *second]):
        ended()
        assert sorted(run.read_by) == list(range(min(5, number + 2)))
        assert len(run.alive) <= 2
        assert taken(batch) == number
        assert batch.media == {}
    ended()
    assert set(run.read_by.values()) == {"surefoot-pictures"}
    assert not run.alive, "whoever takes them has the only reference"


def test_a_micro_batch_of_text_is_passed_by():
    run = Run()
    text = Batch(*batch_of(None))
    pictures = batch_of(Numbered(0, run.read_by, run.alive))
    before, batch, after = run.reader.queued([text, pictures, text])
    assert before is text
    assert after is text
    assert taken(batch) == 0


def test_micro_batches_that_are_skipped_hold_up_no_other():
    run = Run()
    run.window(0, 1, 2)
    first, second, third = run.window(3, 4, 5)
    assert taken(first) == 3
    ended()
    assert taken(second) == 4
    assert taken(third) == 5
    ended()
    assert run.read_by[3] != "surefoot-pictures"
    assert run.read_by[5] == "surefoot-pictures"
    assert 2 not in run.read_by
    assert not run.alive


def test_a_micro_batch_that_is_taken_twice_is_read_twice():
    run = Run()
    (batch,) = run.window(7)
    assert taken(batch) == taken(batch) == 7


def test_an_error_is_raised_where_the_pictures_are_used_and_each_time():
    run = Run()
    good, bad, other = run.window(0, -1, 2)
    ended()
    assert taken(good) == 0
    for _ in range(2):
        with pytest.raises(ValueError, match="this picture is broken"):
            taken(bad)
    assert taken(other) == 2
