"""Every process gets to the end of its order, and expects first what is sent first."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.parallel.pipeline import order

SIZES = {"size": st.integers(2, 8), "parts": st.integers(1, 4), "count": st.integers(1, 40)}


def stage_of(op, rank, size):
    return op.part * size + rank


def needed(op, rank, size, last):
    """What ``op`` waits for: the direction, the stage that it enters (or leaves), the index."""
    stage = stage_of(op, rank, size)
    if op.is_forward:
        return ("forward", stage, op.index) if stage else None
    return ("backward", stage + 1, op.index) if stage < last else None


def sent(op, rank, size, last):
    stage = stage_of(op, rank, size)
    if op.is_forward:
        return ("forward", stage + 1, op.index) if stage < last else None
    return ("backward", stage, op.index) if stage else None


def orders(name, size, parts, count):
    return [order(name, rank, size, parts, count) for rank in range(size)]


def names(parts):
    return ["interleaved"] if parts > 1 else ["1f1b", "gpipe", "interleaved"]


@given(**SIZES)
@settings(max_examples=150, deadline=None)
def test_each_micro_batch_goes_once_through_each_stage_each_way(size, parts, count):
    for name in names(parts):
        for ops in orders(name, size, parts, count):
            assert len(ops) == len(set(ops)) == 2 * parts * count


@given(**SIZES)
@settings(max_examples=150, deadline=None)
def test_nobody_waits_forever(size, parts, count):
    """Even if what was sent twice as many sends ago as there are stages must have been received."""
    last, most = size * parts - 1, 2 * size * parts
    for name in names(parts):
        ops = [deque(one) for one in orders(name, size, parts, count)]
        under_way, received, ready = [deque() for _ in ops], set(), set()
        is_moving = True
        while is_moving:
            is_moving = False
            for rank, todo in enumerate(ops):
                waiting = under_way[rank]
                while waiting and waiting[0] in received:
                    waiting.popleft()
                if not todo or len(waiting) > most:
                    continue
                need, gives = (f(todo[0], rank, size, last) for f in (needed, sent))
                if need is None or need in ready:
                    received.add(need)
                    ready.add(gives)
                    waiting.extend([gives] if gives else [])
                    todo.popleft()
                    is_moving = True
        assert not any(ops)


@given(**SIZES)
@settings(max_examples=150, deadline=None)
def test_what_one_sends_first_the_other_expects_first(size, parts, count):
    last = size * parts - 1
    for name in names(parts):
        found = orders(name, size, parts, count)
        for direction, step in (("forward", 1), ("backward", -1)):
            for rank, ops in enumerate(found):
                other = (rank + step) % size
                gone = [sent(op, rank, size, last) for op in ops]
                come = [needed(op, other, size, last) for op in found[other]]
                gone, come = ([x for x in xs if x and x[0] == direction] for xs in (gone, come))
                assert gone == come


@pytest.mark.parametrize("rank", range(4))
def test_1f1b_holds_few_micro_batches_at_a_time(rank):
    held = most = 0
    for op in order("1f1b", rank, 4, 1, 20):
        held += 1 if op.is_forward else -1
        most = max(most, held)
    assert most == 4 - rank
