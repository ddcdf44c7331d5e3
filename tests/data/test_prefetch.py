"""Windows made ahead are those that would have been made, at the place where they are taken."""

import threading

import pytest

from surefoot.data.order.loader import Loader, Prefetch
from surefoot.data.order.micro_batches import Batching, Collation
from surefoot.data.order.shuffle import Shuffle
from surefoot.data.store.dataset import in_memory
from surefoot.data.text.collation import collate
from unpacked import unpack

COLLATE = Collation(collate)
DATA = in_memory([{"input_ids": [i, i], "labels": [-100, i]} for i in range(23)])


def loader(*, collation=COLLATE, prefetch=None, **changes):
    batching = Batching(collation, micro_batch_size=2, **changes)
    return Loader(Shuffle(DATA, 1), batching, global_batch_size=8, prefetch=prefetch)


def ahead(**changes):
    return loader(prefetch=Prefetch(list), **changes)


def items(window):
    return [[item["input_ids"][0] for item in unpack(batch)] for batch in window]


@pytest.mark.parametrize("share", [{}, {"rank": 1, "world_size": 2}])
def test_windows_and_positions_are_those_of_a_loader_that_makes_them_on_the_spot(share):
    one, other = loader(**share), ahead(**share)
    for _ in range(7):
        assert one.state_dict() == other.state_dict()
        assert items(one.next_window()) == items(other.next_window())


def test_a_skip_a_resume_and_a_way_back_get_the_window_of_their_place():
    one, other = loader(), ahead()
    for each in (one, other):
        each.next_window()
        each.skip()
    assert items(one.next_window()) == items(other.next_window())
    for each in (one, other):
        each.load_state_dict(loader().state_dict())
    assert items(one.next_window()) == items(other.next_window())
    one.epoch = other.epoch = 3
    assert items(one.next_window()) == items(other.next_window())


def test_what_is_made_ahead_is_made_ready_by_a_thread():
    names = []

    def ready(window):
        names.append(threading.current_thread().name)
        return window

    it = loader(prefetch=Prefetch(ready))
    it.next_window()
    it.next_window()
    assert names[:2] == ["MainThread", "surefoot-prefetch"]


def test_an_error_arrives_at_the_window_that_has_it():
    def broken(features, *, packing):
        if any(item["input_ids"][0] == bad for item in features):
            raise ValueError("this example is broken")
        return collate(features, packing=packing)

    bad = items(loader().window_at(0, 1))[0][0]
    it = ahead(collation=Collation(broken))
    it.next_window()
    for _ in range(2):  # the position is that of the window that failed
        with pytest.raises(ValueError, match="this example is broken"):
            it.next_window()
    it.skip()
    assert items(it.next_window()) == items(loader().window_at(0, 2))


def test_a_window_that_a_stage_replaces_is_not_made_ahead():
    made = []
    it = loader(prefetch=Prefetch(lambda window: made.append(window) or window))
    for _ in range(3):
        it.deal(list(it.next_examples()))
    assert len(made) == 3
    assert it.prefetch.take((1, 0)) is None


def test_examples_are_those_whose_window_was_made_ahead():
    it, other = ahead(), loader()
    for _ in range(7):
        examples = it.next_examples()
        assert items(it.deal(examples)) == items(other.next_window())
        assert it.state_dict() == other.state_dict()


def test_no_thread_is_left():
    it = ahead()
    it.next_window()
    it.prefetch.take((9, 9))
    for thread in threading.enumerate():
        if thread.name == "surefoot-prefetch":
            thread.join(timeout=5)
            assert not thread.is_alive()
