"""The model's own responses to the prompts of data that it was not trained on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..batch import IGNORE_INDEX
from ..data.encoded import Dropped, Truncated
from ..data.example import Example
from ..data.text.codec import Codec
from ..data.text.ranking import answered
from ..errors import counted
from ..generate.decode import decoder
from ..generate.generation import room
from ..model.precision import autocast, choose
from ..recipe.recipe import Recipe
from .model_loading import LoadedModel
from .prediction import answers_of

logger = logging.getLogger(__name__)
UNCUT = 1_000_000_000  # tokens; more than any window


@dataclass(frozen=True)
class Generation:
    """A prompt of the data, the expected response, and the model's response."""

    origin: str  # "dataset:row"
    prompt: str  # as the model reads it, control tokens and all
    reference: str
    answer: str

    @property
    def is_match(self) -> bool:
        """Whether both are equal, except for white space at the ends."""
        return self.answer.strip() == self.reference.strip()


@dataclass(frozen=True)
class _Question:
    origin: str
    prompt: list[int]
    reference: list[int]


def generations(
    opened: LoadedModel,
    recipe: Recipe,
    examples: Sequence[Example],
    *,
    on_answered: Callable[[int], None] | None = None,
) -> list[Generation]:
    """The model's own last response in every conversation that ends in one, in order.

    The prompt is what precedes that response in training; the recipe's ``generate`` section sets
    how to generate. A prompt that fills the context length gets an empty response, and a warning is
    logged.
    """
    questions = _questions(opened, recipe, examples)
    full = sum(room(opened.model, question.prompt) == 0 for question in questions)
    if full:
        prompts = counted(full, "prompt fills", "prompts fill")
        logger.warning("%s the model's context length; no response is generated", prompts)
    with autocast(choose(recipe.train.precision), opened.device):
        answers = answers_of(
            opened,
            [question.prompt for question in questions],
            recipe.generate,
            seed=recipe.train.seed,
            on_answered=on_answered,
        )
    decode = decoder(opened.tokenizer)
    return [
        Generation(asked.origin, decode(asked.prompt), decode(asked.reference), decode(said))
        for asked, said in zip(questions, answers, strict=True)
    ]


def _questions(opened: LoadedModel, recipe: Recipe, examples: Sequence[Example]) -> list[_Question]:
    """Split conversations where training does: before the last response's first label."""
    section = replace(
        recipe.data,
        mask_history=True,
        train_on_prompt=False,
        cutoff_len=UNCUT,
        on_too_long="truncate",
    )
    codec = Codec(opened.tokenizer, opened.template, section)
    stops = frozenset(opened.stop_token_ids)
    found = []
    examples = [answered(e, e.chosen) if e.chosen else e for e in examples]
    for example, outcome in zip(examples, codec.encode_chats(examples), strict=True):
        if not isinstance(outcome, Dropped | Truncated):
            ids, labels = (list(outcome[-1][name]) for name in ("input_ids", "labels"))
            start, end = _last_span(labels)
            last = next((i for i in range(start, end) if ids[i] in stops), end)
            found.append(_Question(example.origin, ids[:start], ids[start:last]))
    return found


def _last_span(labels: Sequence[int]) -> tuple[int, int]:
    """The bounds of the last run of labels."""
    learnt = [i for i, label in enumerate(labels) if label != IGNORE_INDEX]
    breaks = [b for a, b in pairwise(learnt) if b > a + 1]
    return (breaks[-1] if breaks else learnt[0]), learnt[-1] + 1
