"""How good a model is on examples it has not seen, measured as training measures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from ..batch import Features
from ..data.example import Dropped, Example, Truncated
from ..data.text.codec import Codec
from ..data.text.templates import section_template
from ..errors import DataError
from ..model.isolation import PromptSharing, packed_meanwhile
from ..model.numerics import autocast, choose
from ..network.network import Network
from ..parallel.world import ALONE
from ..recipe.recipe import Recipe
from ..recipe.recipe_data import fitted
from ..run.contexts import build_evaluation
from ..training.evaluation import EvaluationSet
from ..training.precompute import NOTHING
from ..training.stage import POLICY, Stage, longest_row
from .model_loading import LoadedModel, refuse_reward_model

logger = logging.getLogger(__name__)


def adopt(opened: LoadedModel, recipe: Recipe) -> LoadedModel:
    """``opened`` with the recipe's settings; with its template, too, if the model has none. Raises
    ``RecipeError`` if ``data.cutoff_len`` is more than the model has positions."""
    if not recipe.stage.spec.is_reward:
        refuse_reward_model(opened)
    recipe = fitted(recipe, opened.inner.config, Path(opened.inner.name_or_path))
    template = opened.template
    if not recipe.stage.uses_template:
        template = None
    elif template is None:
        template = section_template(recipe.data, opened.tokenizer)
    return replace(opened, recipe=recipe, template=template)


def measure(
    opened: LoadedModel,
    recipe: Recipe,
    examples: Sequence[Example],
    *,
    columns: Sequence[Features] | None = None,
    others: Mapping[str, Network] = MappingProxyType({}),
    on_batch: Callable[[], None] | None = None,
) -> dict[str, float]:
    """The metrics of training's evaluations, the same on all ranks: loss, perplexity and token
    accuracy, say. ``columns`` are those that auxiliary models compute for each example, if the
    stage has any (see ``auxiliary_columns``), ``others`` the models that the policy is compared
    with, by role (see ``staying``)."""
    items = encoded(recipe.stage, examples, opened.codec)
    if columns is not None:
        items = _with_columns(items, columns)
    encoded_length = max(len(item["input_ids"]) for item in items)
    longest = longest_row(recipe.stage, encoded_length, recipe.data.longest)
    with ready_to_measure(opened, recipe, longest) as network:
        # ranks that share a network run in step, so each computes all batches
        networks = {POLICY: network.compared_with(others) if others else network, **others}
        found = build_evaluation(recipe, opened.codec, networks, ALONE)
        return found.measure(EvaluationSet(items, NOTHING), on_batch or (lambda: None))


def num_batches(recipe: Recipe, num_examples: int) -> int:
    """The approximate number of batches of ``measure``."""
    return -(-num_examples // recipe.train.fixed_micro_batch_size)


def encoded(stage: Stage, examples: Sequence[Example], codec: Codec) -> list[Features]:
    """The examples as ``stage`` reads them; drops are logged. Raises ``DataError`` if all are."""
    outcomes = stage.encode(examples, codec)
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


@contextmanager
def ready_to_measure(opened: LoadedModel, recipe: Recipe, longest: int = 0) -> Iterator[Network]:
    """While it lasts, the network of ``opened`` has the recipe's precision, and attention for rows
    of documents of up to ``longest`` tokens."""
    inner, device = opened.inner, opened.device
    with ExitStack() as stack:
        is_proven = recipe.data.packing and stack.enter_context(packed_meanwhile(inner, longest))
        stack.enter_context(autocast(choose(recipe.train.precision), device))
        yield replace(opened.network, sharing=PromptSharing(is_proven))


def _with_columns(items: Sequence[Features], columns: Sequence[Features]) -> list[Features]:
    if len(columns) != len(items):
        raise DataError(
            f"the reference has read {len(columns)} examples, this model reads {len(items)} of "
            "them: their tokenizers differ too much to be compared"
        )
    return [{**item, **more} for item, more in zip(items, columns, strict=True)]
