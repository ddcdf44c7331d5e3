"""Whatever order launches list, claim, upload, commit and delete in: the checkpoints that count are
one history, there is one to resume from, and nobody's deletions matter."""

import random
from itertools import pairwise

import pytest

from surefoot.errors import CheckpointError
from surefoot.plugins.cloud.lineage import (
    Lineage,
    StoredLaunch,
    claim_of,
    claims,
    name_of,
    stored_of,
)

LAST, KEEP, MOST = 6, 2, 3  # steps of a run, checkpoints that it keeps, launches at a time


class Bucket:
    """What a store has: claims, and of each committed checkpoint the launches of its steps."""

    def __init__(self):
        self.claims, self.committed = {}, {}
        self.ever = False  # whether a checkpoint has counted

    def lineage(self):
        return Lineage(dict(self.claims), frozenset(self.committed))

    def is_fenced(self, number):
        return number + 1 in self.claims


def launch(bucket):
    """One process that trains; between two requests to the store, all others may act."""
    while True:
        seen = bucket.lineage()
        yield
        base = max(seen.valid, default=None)
        own = seen.next_launch(base)
        if own.number in bucket.claims:
            continue
        bucket.claims[own.number] = own
        yield
        if base is None or seen.valid[base] in bucket.committed:
            break
        yield  # another has deleted it: list and claim again
    steps = () if base is None else bucket.committed[seen.valid[base]]
    mine = {} if base is None else dict(seen.valid)
    for step in range(len(steps) + 1, LAST + 1):
        steps = (*steps, own.number)
        yield
        if bucket.is_fenced(own.number):
            return
        yield
        bucket.committed[step, own.number] = steps
        mine[step] = step, own.number
        yield
        for old in sorted(mine)[:-KEEP]:
            if bucket.is_fenced(own.number):
                return
            yield
            bucket.committed.pop(mine.pop(old), None)
            yield


def fault(bucket):
    """What is wrong with what counts; None: nothing."""
    lineage = bucket.lineage()
    histories = [bucket.committed[stored] for stored in lineage.valid.values()]
    for earlier, later in pairwise(histories):
        if later[: len(earlier)] != earlier:
            return f"two histories: {earlier}, {later}"
    bucket.ever |= bool(histories)
    began_anew = lineage.latest is not None and lineage.latest.base is None
    if bucket.ever and not histories and not began_anew:
        return f"nothing to resume from: {sorted(bucket.claims)}, {sorted(bucket.committed)}"
    return None


def interleaved(seed):
    """Random launches over one store, paused and killed anywhere; what went wrong, and the steps of
    a last one that nothing disturbs."""
    draw, bucket, running, before = random.Random(seed), Bucket(), [], None
    for _ in range(400):
        if len(running) < MOST and draw.random() < 0.08:
            running.append(launch(bucket))
        if not running:
            continue
        process = draw.choice(running) if draw.random() < 0.5 else running[-1]
        if draw.random() < 0.01:
            running.remove(process)
            continue
        for _ in range(draw.choice([1, 1, 2, 6])):
            if next(process, running) is running:
                running.remove(process)
                break
            state = len(bucket.claims), frozenset(bucket.committed)
            if state != before and (wrong := fault(bucket)) is not None:
                return wrong, 0
            before = state
    for _ in launch(bucket):
        pass
    return fault(bucket), max(bucket.lineage().valid, default=0)


@pytest.mark.parametrize("runs", [2_000, pytest.param(40_000, marks=pytest.mark.proof)])
def test_no_order_of_launches_makes_two_histories_or_none(runs):
    outcomes = {interleaved(seed) for seed in range(runs)}
    assert outcomes == {(None, LAST)}


@pytest.mark.parametrize("rule", ["all count", "the newest counts"])
def test_the_check_finds_a_rule_that_is_wrong(rule, monkeypatch):
    """Without the history, or with a claim that counts though its base is gone."""
    if rule == "all count":
        monkeypatch.setattr(StoredLaunch, "has", lambda self, stored: True)
    else:
        newest = property(lambda self: self.launches.get(max(self.launches, default=None)))
        monkeypatch.setattr(Lineage, "latest", newest)
    assert any(interleaved(seed)[0] for seed in range(4000))


def test_a_history_has_each_launch_up_to_where_the_next_one_began():
    claims = {}
    for number, base in ((1, None), (2, (4, 1)), (3, (8, 2))):
        history = () if base is None else (*claims[number - 1].history, base)
        claims[number] = StoredLaunch(number, history)
    committed = {(2, 1), (4, 1), (6, 1), (6, 2), (8, 2), (10, 2), (10, 3), (12, 3)}
    valid = Lineage(claims, committed).valid
    assert list(valid.values()) == [(2, 1), (4, 1), (6, 2), (8, 2), (10, 3), (12, 3)]
    back = Lineage(claims, committed).next_launch(6)
    assert (back.number, back.history) == (4, ((4, 1), (6, 2)))
    assert Lineage(claims, committed).next_launch(None).history == ()


def test_runs_of_earlier_versions_have_one_launch_without_a_claim():
    lineage = Lineage({}, {(2, 1), (4, 1)})
    assert list(lineage.valid) == [2, 4]
    assert lineage.next_launch(4) == StoredLaunch(2, ((4, 1),))
    assert Lineage({}, ()).next_launch(None).number == 1


def test_names_are_read_back_and_no_others_are():
    for stored in ((4, 1), (4, 2), (0, 12)):
        assert stored_of(name_of(stored)) == stored
    for name in ("checkpoint-04", "checkpoint-4.launch-0", "checkpoint-4.launch-", "checkpoint-4x"):
        assert stored_of(name) is None
    own = StoredLaunch(12, ((4, 1),), "here", 5, "x")
    assert claim_of(own.file) == 12
    assert StoredLaunch.parse(12, own.dump()) == own
    assert claims([own.file, ".launches/x.json", "metrics.jsonl"]) == {12: own.file}
    for text in (b"{}", b"[]", b'{"history": [[1]]}', b'{"history": [[true, 1]]}', b"x"):
        with pytest.raises(CheckpointError):
            StoredLaunch.parse(12, text)
