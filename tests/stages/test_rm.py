"""Reward models against a loop over pairs in float64, and what they read their rewards at."""

import math

import pytest
import torch

from surefoot.batch import IGNORE_INDEX, Outputs, ends
from surefoot.data.example import Dropped, Example, Message
from surefoot.data.section import DataSection
from surefoot.data.text.codec import Codec
from surefoot.data.text.templates import load_template
from surefoot.errors import DataError, RecipeError
from surefoot.schema import read
from surefoot.stages import RM
from tiny_tokenizers import tokenizer

ASKED = (Message("user", "What is 1 plus 1?"),)
GOOD, BAD = Message("assistant", "It is 2."), Message("assistant", "It is 3, or a bit more.")


def codec(**settings):
    made = tokenizer()
    section = DataSection(datasets=("any",), **{"cutoff_len": 64, **settings})
    return Codec(made, load_template("chatml", made), section)


def encoded(stage, margins, made=None):
    rows = [
        Example(ASKED, chosen=GOOD, rejected=BAD, columns={} if m is None else {"margin": m})
        for m in margins
    ]
    return stage.encode(rows, made or codec())


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(
    "stage", [RM(), RM(center_rewards_coefficient=0.1), RM(use_margins=True)], ids=str
)
def test_the_loss_is_that_of_the_formula(stage, packing):
    margins = [0.5, 2, "1.25"]
    items = [item for outcome in encoded(stage, margins) for item in outcome]
    batch = stage.collate(items, packing=packing)
    rewards = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = stage.loss("policy", Outputs(values=rewards), batch)
    total = 0.0
    for (chosen, rejected), margin in zip(rewards.view(-1, 2).tolist(), margins, strict=True):
        apart = chosen - rejected - (float(margin) if stage.use_margins else 0)
        total += math.log1p(math.exp(-apart))
        total += stage.center_rewards_coefficient * (chosen + rejected) ** 2
    assert float(found.total) == pytest.approx(total, rel=1e-12)
    assert found.weight == 3
    ahead = (rewards.view(-1, 2).diff(dim=1) < 0).sum()
    assert found.metrics["rewards/accuracies"] == ahead
    assert float(found.metrics["rewards/margins"]) == pytest.approx(
        float(-rewards.view(-1, 2).diff(dim=1).sum())
    )


@pytest.mark.parametrize("packing", [True, False])
def test_a_reward_is_read_at_the_end_token_of_the_response(packing):
    made = codec()
    (outcome,) = encoded(RM(), [None], made)
    batch = RM().collate(outcome, packing=packing)
    at = ends(batch)
    (stop,) = made.template.stop
    read_at = batch.input_ids[at.rows, at.columns].tolist()
    assert read_at == [made.tokenizer.convert_tokens_to_ids(stop)] * 2
    assert (batch.labels[at.rows, at.columns] != IGNORE_INDEX).all()


def test_a_response_whose_end_does_not_fit_is_dropped_and_its_reason_says_so():
    ((item,),) = encoded(RM(), [None])
    prompt, _, longer = item["lengths"]
    (outcome,) = encoded(RM(), [None], codec(cutoff_len=prompt + longer - 1))
    assert isinstance(outcome, Dropped)
    assert "end token" in outcome.reason


@pytest.mark.parametrize("margin", [None, "much", True, {"by": 1}, 1e300, 10**400, "inf"])
def test_margins_that_are_to_be_used_must_be_there(margin):
    items = [item for outcome in encoded(RM(), [1, margin]) for item in outcome]
    RM().collate(items, packing=True)
    with pytest.raises(DataError, match=r"use_margins: a pair has no number .* 'margin'"):
        RM(use_margins=True).collate(items, packing=True)


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(RecipeError, match="center_rewards_coefficient"):
        read(RM, {"center_rewards_coefficient": -1})
