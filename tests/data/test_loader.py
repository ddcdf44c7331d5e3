"""Windows whose order is a function of (seed, epoch) and whose position is two integers."""

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.data.order.loader import Loader, Prefetch, Shuffle
from surefoot.data.order.micro_batches import Batching, Collation
from surefoot.data.store.dataset import EncodedDataset, in_memory
from surefoot.data.text.collation import collate
from surefoot.errors import DataError
from unpacked import unpack

COLLATE = Collation(collate)


def numbers(length):
    """A dataset whose item i is the token i, twice: the second is learnt."""
    return in_memory([{"input_ids": [i, i], "labels": [-100, i]} for i in range(length)])


def loader(length=23, **changes):
    return of(numbers(length), **changes)


def of(data, *, shuffle=True, global_batch_size=8, prefetch=None, **changes):
    settings = {"micro_batch_size": 2, **changes}
    order = Shuffle(data, settings.pop("seed", 1), shuffle)
    batching = Batching(settings.pop("collate", COLLATE), **settings)
    return Loader(order, batching, global_batch_size=global_batch_size, prefetch=prefetch)


def items(window):
    return [[item["input_ids"][0] for item in unpack(batch)] for batch in window]


def flat(window):
    return [item for batch in items(window) for item in batch]


def test_every_example_comes_once_an_epoch_in_a_new_order():
    it = loader()
    first, second = ([i for _ in range(3) for i in flat(it.next_window())] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(23))
    assert first != second
    assert (it.epoch, it.window) == (2, 0)


def test_the_last_window_of_an_epoch_is_smaller_and_evenly_spread():
    it = loader()
    assert it.steps_per_epoch == 3
    assert [[len(b) for b in items(it.next_window())] for _ in range(3)] == [
        [2, 2, 2, 2],
        [2, 2, 2, 2],
        [2, 2, 2, 1],
    ]


def test_without_shuffling_the_order_is_that_of_the_data():
    it = loader(10, shuffle=False, micro_batch_size=8)
    assert flat(it.next_window()) == list(range(8))
    assert flat(it.next_window()) == [8, 9]
    assert flat(it.next_window()) == list(range(8))


@given(
    length=st.integers(1, 40),
    seed=st.integers(0, 5),
    ranks=st.sampled_from([1, 2, 4]),
    micro=st.sampled_from([1, 2]),
)
def test_a_step_has_the_same_examples_whatever_the_ranks_and_micro_batches(
    length, seed, ranks, micro
):
    alone = loader(length, seed=seed, micro_batch_size=8)
    crowd = [
        loader(length, seed=seed, micro_batch_size=micro, rank=rank, world_size=ranks)
        for rank in range(ranks)
    ]
    for _ in range(2 * alone.steps_per_epoch):
        all_windows = [each.next_window() for each in crowd]
        windows = [items([b for b in window if b.num_trained]) for window in all_windows]
        assert sorted(i for w in windows for b in w for i in b) == sorted(flat(alone.next_window()))
        assert max(len(batch) for w in windows for batch in w) <= micro, "all are equally long"
        assert len({len(window) for window in all_windows}) == 1, "ranks run equally often"


@given(steps=st.integers(0, 12), more=st.integers(1, 7), shuffle=st.booleans())
def test_a_resumed_loader_goes_on_where_the_saved_one_was(steps, more, shuffle):
    saved = loader(shuffle=shuffle)
    for _ in range(steps):
        saved.next_window()
    resumed = loader(shuffle=shuffle)
    resumed.load_state_dict(saved.state_dict())
    for _ in range(more):
        assert items(resumed.next_window()) == items(saved.next_window())


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_examples_of_a_window_are_the_same_on_every_rank_and_dealt_as_a_window_is(shuffle):
    sizes = {"world_size": 2, "shuffle": shuffle}
    for rank in range(2):
        given, dealt, plain = (loader(rank=each, **sizes) for each in (0, rank, rank))
        for _ in range(7):
            examples = dealt.next_examples()
            wanted = [item["input_ids"][0] for item in given.next_examples()]
            assert [item["input_ids"][0] for item in examples] == wanted
            assert items(dealt.deal(examples)) == items(plain.next_window())
            assert dealt.state_dict() == plain.state_dict()


def test_the_examples_of_a_window_are_views_of_the_data():
    data = numbers(23)
    examples = of(data).next_examples()
    flat = data.stores[0].features["input_ids"].flat
    assert all(np.shares_memory(item["input_ids"], flat) for item in examples)
    assert np.shares_memory(examples[2:4][1]["input_ids"], flat)


def test_what_a_stage_made_of_examples_is_dealt_by_its_own_lengths():
    its = [loader(rank=rank, world_size=2) for rank in range(2)]
    windows = []
    for it in its:
        count = 2 * len(it.next_examples())
        made = [{"input_ids": [7] * (n + 2), "labels": [7] * (n + 2)} for n in range(count)]
        windows.append(it.deal(made))
    lengths = [[len(item["input_ids"]) for b in w for item in unpack(b)] for w in windows]
    assert sorted(lengths[0] + lengths[1]) == list(range(2, 18))
    assert [len(window) for window in windows] == [4, 4]
    assert abs(sum(lengths[0]) - sum(lengths[1])) <= 2
    assert flat(its[0].next_window()) == flat(loader(world_size=2).window_at(0, 1))


def test_the_state_is_plain_values():
    it = loader()
    it.next_window()
    state = it.state_dict()
    assert {type(value) for value in state.values()} <= {int, str, bool}
    assert (state["epoch"], state["window"]) == (0, 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"length": 22}, "the number of examples was 22 in the checkpoint and is 23"),
        ({"seed": 2}, "train.seed was 2 .* and is 1 now"),
        ({"global_batch_size": 4}, "train.global_batch_size was 4 .* and is 8 now"),
        ({"shuffle": False}, "data.shuffle was False .* and is True now; set data.shuffle back"),
    ],
)
def test_a_position_in_other_data_is_refused(changes, reason):
    here = loader()
    with pytest.raises(DataError, match=reason):
        here.load_state_dict(loader(**changes).state_dict())
    assert (here.epoch, here.window) == (0, 0)


def test_a_position_in_data_of_other_content_is_refused():
    data = numbers(23)
    other = EncodedDataset(data.stores, np.arange(23)[::-1].copy())
    state = of(other).state_dict()
    with pytest.raises(DataError, match="the fingerprint of the encoded examples was"):
        of(data).load_state_dict(state)


def test_batch_sizes_that_do_not_divide_are_refused():
    with pytest.raises(DataError, match=r"global_batch_size \(8\) is not a multiple of .* \(2 x 3"):
        loader(world_size=3)


def test_nothing_to_load_is_refused():
    with pytest.raises(DataError, match="no examples"):
        loader(0)


def test_every_position_of_packed_rows_is_a_token_whatever_the_lengths():
    """Of the bundled data, in bytes, on four ranks: 100 % of what is computed is the data."""
    path = Path(__file__).parents[2] / "examples" / "data" / "orders_train.jsonl"
    lines = [list(line.encode()) for line in path.read_text(encoding="utf-8").splitlines()]
    data = in_memory([{"input_ids": ids, "labels": ids} for ids in lines])
    loaders = [of(data, rank=rank, world_size=4) for rank in range(4)]
    windows = [it.next_window() for it in loaders for _ in range(it.steps_per_epoch)]
    batches = [batch for window in windows for batch in window if batch.num_trained]
    positions = sum(batch.input_ids.numel() for batch in batches)
    assert sum(batch.num_tokens for batch in batches) == positions == sum(map(len, lines))


# windows that are made ahead


def ahead(**changes):
    return loader(prefetch=Prefetch(list), **changes)


@pytest.mark.parametrize("share", [{}, {"rank": 1, "world_size": 2}])
def test_windows_and_positions_are_those_of_a_loader_that_makes_them_on_the_spot(share):
    one, other = loader(**share), ahead(**share)
    for _ in range(7):
        assert one.state_dict() == other.state_dict()
        assert items(one.next_window()) == items(other.next_window())


def test_a_skip_a_resume_and_a_way_back_get_the_window_of_their_place():
    one, other = loader(), ahead()
    windows = [items(loader().window_at(0, number)) for number in range(3)]
    for each in (one, other):
        each.next_window()
        each.skip()
        assert items(each.next_window()) == windows[2]
        assert (each.epoch, each.window) == (1, 0)
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
    it = ahead(collate=Collation(broken))
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


def test_no_thread_is_left():
    it = ahead()
    it.next_window()
    it.prefetch.take((9, 9))
    for thread in threading.enumerate():
        if thread.name == "surefoot-prefetch":
            thread.join(timeout=5)
            assert not thread.is_alive()
