"""A rank for which the others wait is named, with what it spends its time on."""

import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from surefoot.parallel.world import World
from surefoot.training.callback import TrainerState
from surefoot.training.callbacks._slow_ranks import SlowRanks, slow_rank


@pytest.mark.parametrize(
    ("seconds", "said"),  # of data, compute, and the complete step
    [
        ([[1, 8, 10], [1, 8, 10]], None),
        ([[1, 8, 10], [1, 7, 10], [1, 8, 10]], None),  # no rank is the same as another
        ([[6, 4, 10], [1, 4, 10], [1, 4, 10]], "rank 0 is slow in data: 60% of its step, 10% on"),
        ([[0, 5, 10], [0, 5, 10], [0, 9, 10]], "rank 2 is slow in compute: 90% of its step, 50%"),
        ([[0, 0, 10], [0, 0, 10]], None),  # of a GPU
    ],
)
def test_the_rank_that_others_wait_for_stands_out_by_its_own_seconds(seconds, said):
    message = slow_rank(np.array(seconds, float))
    assert message is None if said is None else str(message).startswith(said)


def test_it_is_named_once_until_another_one_is_slow(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    spent = {0: [0.0, 0.0, 0.0], 1: [0.0, 0.0, 0.0]}

    class Pair(World):
        def totals(self, values):
            """The other rank has computed as long, but prepared no batch."""
            other = torch.tensor([[0.0, values[0, 1], values[0, 2]]], dtype=torch.float64)
            return torch.cat([values[:1], other])

    callback = SlowRanks(Pair(0, 2, progress=SimpleNamespace(spent=None)), tmp_path)

    def log(data, compute, both):
        for i, more in enumerate((data, compute, both)):
            spent[0][i] += more
        callback.world.progress.spent = tuple(spent[0])
        callback.on_log(None, TrainerState(global_step=7), None, {"loss": 1.0})

    log(1, 1, 2)  # less than what says anything
    assert caplog.messages == []
    for _ in range(3):
        log(5, 4, 10)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("rank 0 is slow in data")
    callback.on_log(None, None, None, {"eval_loss": 1.0})  # no training
    log(0, 9, 10)
    log(5, 4, 10)
    assert len(caplog.messages) == 2
    rows = [json.loads(line) for line in (tmp_path / "launches.jsonl").read_text().splitlines()]
    assert [(row["event"], row["step"], row["rank"], row["what"]) for row in rows] == [
        ("slow_rank", 7, 0, "data")
    ] * 2
    expected = (0.5, 0.0, 0.5)  # five of ten seconds, for which the other one waits
    assert (rows[0]["share"], rows[0]["share_of_others"], rows[0]["waited"]) == expected
