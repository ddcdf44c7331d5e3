"""Processes that share a model learn from pairs with shared prompts what one learns from padded
rows."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

import ranks
from spread import CLOSE, learn, trainer
from surefoot.batch import IGNORE_INDEX, Loss, OutputSpec
from surefoot.data.store.dataset import in_memory
from surefoot.data.text.collation import collate_pairs
from surefoot.parallel.world import ALONE
from surefoot.training.stage import Stage


@dataclass(frozen=True)
class Prefer(Stage):
    """Chosen answers are to be likelier than rejected ones."""

    spec: ClassVar = OutputSpec(("logps",))

    def encode(self, examples, codec):
        raise AssertionError("its examples are encoded already")

    def collate(self, features, *, packing):
        return collate_pairs(features, packing=packing)

    def loss(self, role, outputs, batch):
        lengths, answer = batch.extras["answer_lengths"], batch.extras["answer"]
        sums = torch.zeros(len(lengths), dtype=outputs.logps.dtype)
        sums = sums.index_add(0, answer, outputs.logps).unflatten(0, (-1, 2))
        counts = lengths.unflatten(0, (-1, 2)).all(-1)
        return Loss(-(F.logsigmoid(sums[:, 0] - sums[:, 1]) * counts).sum(), counts.sum())


def pairs(count=10, prompts=7, chosen_ones=4, rejected_ones=5):
    """Pairs of so many different lengths each."""
    found = []
    for i in range(count):
        prompt, chosen = 2 + 3 * i % prompts, 1 + i % chosen_ones
        rejected = 1 + 2 * i % rejected_ones
        ids = [(7 * i + 3 * j) % 61 + 3 for j in range(prompt + chosen + rejected)]
        labels = [IGNORE_INDEX] * prompt + ids[prompt:]
        lengths = [prompt, chosen, rejected]
        found.append({"input_ids": ids, "labels": labels, "lengths": lengths})
    return in_memory(found)


def rows(made):
    """The tokens of the first micro-batch, and whether prompts are shared there."""
    batch = made.windows.loader.window_at(0, 0)[0]
    return batch.input_ids.numel(), batch.branches is not None


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"tp": 2}, marks=pytest.mark.proof),
        {"tp": 2, "sequence_parallel": True},
        {"pp": 2},
        pytest.param({"dp_shard": 2}, marks=pytest.mark.proof),
    ],
    ids=str,
)
def test_processes_learn_what_one_learns_from_padded_rows(parallel, tmp_path):
    changes = {"stage": Prefer(), "examples": pairs(), "kind": "mistral"}
    if "dp_shard" in parallel:  # the last window leaves nothing for one of them
        changes["train"] = {"global_batch_size": 6, "micro_batch_size": 1}
        changes["examples"] = pairs(7)
    expected = learn(trainer(ALONE, tmp_path, **changes), 2)
    changes |= {"packing": True, "parallel": parallel}

    def work(world):
        made = trainer(world, tmp_path, **changes)
        assert rows(made)[1]
        return learn(made, 2)

    for found in ranks.run(2, work, **parallel):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=CLOSE, rel=CLOSE)
