"""Evaluate a model on examples that it was not trained on: its loss, and its own responses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ..batch import IGNORE_INDEX, Batch, Features, Outputs, OutputSpec
from ..data.encoded import Dropped, Truncated
from ..data.example import Example
from ..data.order.micro_batches import Collate
from ..data.text.codec import Codec
from ..data.text.ranking import answered
from ..data.text.templates import load_template
from ..errors import DataError
from ..generate.decode import decoder
from ..generate.generation import room
from ..model.attention.packed import PromptSharing, use_packed
from ..model.precision import autocast, choose
from ..parallel.model_runner import Forward
from ..parallel.section import ParallelSection
from ..parallel.world import ALONE, World
from ..recipe.recipe import Recipe
from ..references import reference_model
from ..run.data_loading import build_collate
from ..training.evaluation import evaluate
from ..training.stage import comparing, is_likelihood, measured, smoothing
from .held_out_set import held_out
from .model_loading import PLAINLY, LoadedModel, open_start
from .prediction import answers_of

logger = logging.getLogger(__name__)
Said = list[list[float]]  # of each example, what a reference says of chosen and rejected
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


def adopt(opened: LoadedModel, recipe: Recipe) -> LoadedModel:
    """``opened`` with the recipe's settings; with its template, too, if the model has none."""
    template = opened.template
    if not recipe.stage.uses_template:
        template = None
    elif template is None:
        template = load_template(recipe.data.template, opened.tokenizer)
    return replace(opened, recipe=recipe, template=template)


def measure(
    opened: LoadedModel,
    recipe: Recipe,
    examples: Sequence[Example],
    *,
    said: Said | None = None,
    on_batch: Callable[[], None] | None = None,
) -> dict[str, float]:
    """The metrics of training's evaluations: loss, perplexity, token accuracy and so on.
    ``said`` are the reference log-probabilities, if the stage needs them (see ``references``).
    The same on every rank.
    """
    items = _items(opened, recipe, examples)
    if said is not None:
        if len(said) != len(items):
            raise DataError(
                f"the reference model tokenized {len(said)} examples, this model {len(items)}: "
                "their tokenizers differ, so log-probabilities cannot be compared"
            )
        items = [{**item, "reference": told} for item, told in zip(items, said, strict=True)]  # type: ignore[dict-item]
    with _running(opened, recipe) as (forward, collate):
        return evaluate(
            _batches(collate, items, recipe.train.micro_batch_size),
            forward,
            recipe.stage.loss,
            device=opened.device,
            after=on_batch or (lambda: None),
            is_likelihood=is_likelihood(recipe.stage),
        )


def references(
    recipe: Recipe,
    *,
    dataset: str | None = None,
    limit: int | None = None,
    world: World = ALONE,
    parallel: ParallelSection = PLAINLY,
) -> dict[str, Said]:
    """Reference log-probabilities of each evaluation example (see ``held_out``) under the initial
    model, by dataset; empty if the stage needs none.

    That model is freed when this returns.
    """
    stage = comparing(recipe.stage)
    if stage is None:
        return {}
    begun = replace(recipe, model=reference_model(recipe))
    start = adopt(open_start(begun, world=world, parallel=parallel), recipe)
    with world.main_first():  # which fills the cache
        parts = held_out(recipe, start.codec, dataset=dataset, limit=limit)
    found: dict[str, Said] = {part.name: [] for part in parts}
    with _running(start, recipe) as (forward, collate), torch.no_grad():
        for part in parts:
            items = _items(start, recipe, part.examples)
            for batch in _batches(collate, items, recipe.train.micro_batch_size):
                here = batch.to(start.device)
                found[part.name] += stage.answers(forward(here), here).tolist()
    return found


@contextmanager
def _running(opened: LoadedModel, recipe: Recipe) -> Iterator[tuple[Forward, Collate]]:
    """How a batch is run through the model and measured, and how it is built."""
    spec = OutputSpec(measured(recipe.stage), smoothing=smoothing(recipe.stage))

    def forward(batch: Batch) -> Outputs:
        with autocast(choose(recipe.train.precision), opened.device):
            return opened.network.forward(batch, spec)

    with _packed(opened, recipe) as sharing:
        yield forward, build_collate(recipe, sharing)


def _items(opened: LoadedModel, recipe: Recipe, examples: Sequence[Example]) -> list[Features]:
    outcomes = recipe.stage.encode(examples, opened.codec)
    dropped = [outcome for outcome in outcomes if isinstance(outcome, Dropped)]
    if len(dropped) == len(outcomes):
        reason = dropped[0].reason if dropped else "there are none"
        raise DataError(f"no example of {len(outcomes)} can be evaluated: {reason}")
    if dropped:
        logger.warning(
            "dropped %d of %d examples: %s", len(dropped), len(outcomes), dropped[0].reason
        )
    kept = (outcome for outcome in outcomes if not isinstance(outcome, Dropped))
    return [f for o in kept for f in (o.features if isinstance(o, Truncated) else o)]


def num_batches(recipe: Recipe, num_examples: int) -> int:
    """The approximate number of batches of ``measure``."""
    return -(-num_examples // recipe.train.micro_batch_size)


def _batches(collate: Collate, items: Sequence[Features], size: int) -> Iterator[Batch]:
    return (collate(items[start : start + size]) for start in range(0, len(items), size))


@contextmanager
def _packed(opened: LoadedModel, recipe: Recipe) -> Iterator[PromptSharing]:
    """Packed attention inside the block; generation needs the ordinary one."""
    inner = opened.inner
    plain = inner.config._attn_implementation
    try:
        yield PromptSharing(recipe.data.packing and use_packed(inner))
    finally:
        inner.set_attn_implementation(plain)


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
        logger.warning("%d prompts fill the model's context length and get no response", full)
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
        on_too_long="cut",
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
