"""KTO against a loop over its formula, in float64."""

import math
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from stage_data import examples_of
from surefoot.batch import IGNORE_INDEX, Outputs
from surefoot.data.encoded import Dropped
from surefoot.data.example import Example, Message
from surefoot.data.store.dataset import in_memory
from surefoot.errors import RecipeError
from surefoot.schema import read
from surefoot.stages.kto import KTO, mismatched


def likelihood(role, item):
    """A log-probability that depends on all tokens and where each one is."""
    pairs = enumerate(zip(item["input_ids"], item["labels"], strict=True))
    trained = [i * int(x) for i, (x, label) in pairs if label != IGNORE_INDEX]
    return -(0.3 if role == "policy" else 0.29) * math.log(sum(trained) + 2)


@dataclass(frozen=True)
class Models:
    """A context of models that are formulas."""

    def reduce(self, role, examples, function):
        return np.array([likelihood(role, item) for item in examples])


def prepared(stage, items):
    context = Models()
    return stage.prepare(context, stage.precompute(context, items))


def outputs(items):
    """Log-probabilities of tokens that add up to those of answers."""
    found = []
    for item in items:
        count = int((np.asarray(item["labels"])[1:] != IGNORE_INDEX).sum())
        found += [likelihood("policy", item) / count] * count
    return Outputs(logps=torch.tensor(found, dtype=torch.float64))


def expected(stage, items):
    """The loss of each answer by TRL's formula (KTOTrainer.kto_loss), and z."""
    ratios = [likelihood("policy", item) - likelihood("reference", item) for item in items]
    pairs = mismatched(items)
    z = np.mean([likelihood("policy", p) - likelihood("reference", p) for p in pairs])
    z = max(0.0, float(z)) if stage.loss_type == "kto" else 0.0
    losses = []
    for item, ratio in zip(items, ratios, strict=True):
        good = item["desirable"][0] > 0
        inner = stage.beta * ((ratio - z) if good else (z - ratio))
        weight = stage.desirable_weight if good else stage.undesirable_weight
        losses.append(weight * (1 - 1 / (1 + math.exp(-inner))))
    return losses, z, ratios


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(
    "stage",
    [KTO(), KTO(beta=0.7, undesirable_weight=1.5), KTO(loss_type="apo_zero_unpaired")],
    ids=str,
)
def test_the_loss_is_that_of_the_formula(stage, packing):
    items = list(examples_of("kto", 9))
    window = prepared(stage, items)
    losses, z, ratios = expected(stage, items)
    assert window.figures == ({"kl": pytest.approx(z)} if stage.loss_type == "kto" else {})
    batch = stage.collate(window.examples, packing=packing)
    loss = stage.loss("policy", outputs(items), batch)
    assert float(loss.total) == pytest.approx(sum(losses), rel=1e-12)
    assert loss.weight == 9
    good = [bool(item["desirable"][0]) for item in items]
    for kind, wanted in (("chosen", True), ("rejected", False)):
        rewards = [stage.beta * r for r, g in zip(ratios, good, strict=True) if g is wanted]
        mean = float(loss.metrics[f"rewards/{kind}"] / loss.weight)
        assert mean == pytest.approx(np.mean(rewards), rel=1e-9)


def test_each_prompt_gets_the_answer_of_the_example_before():
    items = [
        {"input_ids": [1, 2, 3], "labels": [-100, -100, 3]},
        {"input_ids": [4, 5, 6, 7], "labels": [-100, 5, 6, 7]},
        {"input_ids": [8, 9], "labels": [-100, 9]},
    ]
    assert [item["input_ids"] for item in mismatched(items)] == [[1, 2, 9], [4, 3], [8, 5, 6, 7]]
    assert [item["labels"] for item in mismatched(items)][2] == [-100, 5, 6, 7]
    longest = [items[0], {"input_ids": [4, *range(10, 20)], "labels": [-100, *range(10, 20)]}]
    assert max(len(item["input_ids"]) for item in mismatched(longest)) == 11


def test_the_baseline_is_never_below_0():
    items = list(examples_of("kto", 4))

    class Worse(Models):
        def reduce(self, role, examples, function):
            return np.full(len(examples), -2.0 if role == "policy" else -1.0)

    context = Worse()
    assert KTO().prepare(context, KTO().precompute(context, items)).figures == {"kl": 0}


class Chats:
    def encode_chats(self, examples):
        return [[{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}] for _ in examples]


def test_rows_without_a_label_are_dropped_and_only_last_answers_are_trained_on():
    asked = (Message("user", "Hi"), Message("assistant", "Ho"))
    rows = [Example(asked, label=True), Example(asked), Example(asked, label=False)]
    first, second, third = KTO().encode(rows, Chats())
    assert (first[0]["desirable"], third[0]["desirable"]) == ([1], [0])
    assert isinstance(second, Dropped)
    assert "kto_tag" in second.reason


@pytest.mark.parametrize("settings", [{"beta": 0}, {"desirable_weight": -1}])
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(RecipeError, match=next(iter(settings))):
        read(KTO, settings)


@pytest.mark.parametrize(
    ("kinds", "settings", "words"),
    [
        ([1, 1, 0, 0], {}, None),
        ([1] * 4 + [0] * 3, {}, None),
        ([1] * 9 + [0] * 3, {"undesirable_weight": 2.5}, None),
        (
            [1] * 30 + [0] * 3,
            {},
            "30 desirable .* weight 1 and 3 .* ratio 10, .* desirable_weight from 0.1 to 0.133, "
            "or undesirable_weight from 7.5 to 10$",
        ),
        ([1, 0, 0], {"desirable_weight": 1.5}, "ratio 0.75"),
        ([1, 1], {}, "all 2 examples are desirable"),
        ([0], {}, "all 1 examples are undesirable"),
    ],
)
def test_kinds_that_are_not_balanced_are_named_with_weights_that_would_be(kinds, settings, words):
    found = list(KTO(**settings).remarks(in_memory([{"desirable": [kind]} for kind in kinds])))
    assert len(found) == (words is not None)
    assert words is None or re.search(words, found[0])
    for name in ("desirable_weight", "undesirable_weight"):
        if words and (
            span := re.search(f"(?:Set|or) {name} from ([0-9.]+) to ([0-9.]+)", found[0])
        ):
            middle = (float(span[1]) + float(span[2])) / 2
            again = KTO(**{**settings, name: middle})
            assert not list(again.remarks(in_memory([{"desirable": [kind]} for kind in kinds])))
