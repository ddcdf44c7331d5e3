"""Rewards of the responses in a file, by a reward model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from ..batch import SCORES, Features
from ..data.example import Dropped, Example, Truncated
from ..data.rows.catalog import Catalog
from ..data.rows.row_sources import BrokenRow
from ..data.rows.rows import form_of, read_examples
from ..data.section import DataSection
from ..data.text.codec import Codec
from ..data.text.collation import collate
from ..data.text.ranking import answered, up_to_last_label
from ..errors import DataError, ModelError
from ..generate.generation import context_length
from ..model.loading import device
from ..parallel.world import World
from ..recipe.prediction import Prediction, load
from ..schema.locations import DatasetReference
from .model_loading import LoadedModel, open_model
from .prediction import Progress

Rewards = dict[str, float]  # reward, or reward_chosen and reward_rejected


def read_responses(path: Path, section: DataSection | None = None) -> list[Example]:
    """All rows of a file, as a dataset's; each ends in a response, or has two. Rows with the
    columns of an entry of ``section``, which the model was trained by, are read as that says.
    Raises ``DataError``: the file is missing, or a row cannot be read, or has no response."""
    reference = DatasetReference.of(str(path.expanduser().absolute()))
    entry = Catalog(DataSection(datasets=(reference,))).entry(str(reference))
    row = next((row for row in entry.source.rows() if not isinstance(row, BrokenRow)), {})
    if section and (form := form_of(row, Catalog(section).forms())) is not None:
        entry = replace(entry, format=form, columns=(str(getattr(form, form.main)),))
    found = [e for e in read_examples(entry) if isinstance(e, Example)]
    for number, example in enumerate(found):
        is_pair = example.chosen is not None and example.rejected is not None
        if not is_pair and (not example.messages or example.messages[-1].role != "assistant"):
            raise DataError(
                f"{path}: row {number} (the first is 0) has no response; a reward model scores "
                "conversations that end in one, or pairs of chosen and rejected"
            )
    return found


def score_rows(
    asked: Prediction,
    path: str,
    overrides: Sequence[str],
    examples: Sequence[Example],
    world: World,
    *,
    progress: Progress,
) -> tuple[list[dict[str, object]], list[Rewards]]:
    """The rows of ``examples`` with their rewards, and these (see ``score``), by the model that
    ``path`` and ``overrides``, of which ``asked`` was made, name. Raises as ``open_model`` and
    ``score`` do."""
    for example in examples:
        if taken := [name for name in _names(example) if name in example.columns]:
            raise DataError(
                f"{example.origin}: the key {taken[0]!r} is used for the reward; give it another "
                "name"
            )
    opened = open_model(**asdict(asked.model), world=world, parallel=asked.parallel)
    size = load(path, overrides, generate=opened.generate).generate.batch_size
    count = sum(len(_names(example)) for example in examples)
    with progress("rewards", count) as advance:
        rewards = score(opened, examples, batch_size=size, on_scored=advance)
    rows = [{**e.columns, **found} for e, found in zip(examples, rewards, strict=True)]
    return rows, rewards


def score(
    opened: LoadedModel,
    examples: Sequence[Example],
    *,
    batch_size: int,
    on_scored: Callable[[int], None] = lambda _: None,
) -> list[Rewards]:
    """The reward of each response, in order, on every rank, read at its end token: ``reward``, or
    ``reward_chosen`` and ``reward_rejected``. ``on_scored`` gets the number of responses of each
    batch. Raises ``ModelError``: not a reward model; ``DataError``: a response that cannot be
    encoded within ``data.cutoff_len``."""
    if opened.network.heads.values is None:
        raise ModelError(f"{opened.folder}: not a reward model; train one with stage: rm")
    items = list(_encoded(_codec(opened), examples))
    order = sorted(range(len(items)), key=lambda i: -len(items[i]["input_ids"]))
    rewards = dict[int, float]()
    with opened.network.evaluating():
        for start in range(0, len(order), batch_size):
            group = order[start : start + batch_size]
            batch = collate([items[i] for i in group], packing=False).to(device())
            values = opened.network.forward(batch, SCORES).values
            assert values is not None
            rewards |= zip(group, values.double().tolist(), strict=True)
            on_scored(len(group))
    each = iter(rewards[i] for i in range(len(items)))
    return [{name: next(each) for name in _names(example)} for example in examples]


def _codec(opened: LoadedModel) -> Codec:
    """As in training; of a reward model without a recipe, any text that fits its positions."""
    if opened.recipe is not None:
        return opened.codec
    limit = context_length(opened.model) or sys.maxsize
    return opened.codec.with_section(replace(opened.codec.section, cutoff_len=limit))


def _names(example: Example) -> Sequence[str]:
    return ("reward",) if example.chosen is None else ("reward_chosen", "reward_rejected")


def _encoded(codec: Codec, examples: Sequence[Example]) -> Iterator[Features]:
    """Each response after its prompt, up to its end token."""
    chats = [chat for example in examples for chat in _conversations(example)]
    for chat, outcome in zip(chats, codec.encode_chats(chats), strict=True):
        if isinstance(outcome, Dropped):
            raise DataError(f"{chat.origin}: cannot be scored: {outcome.reason}")
        if isinstance(outcome, Truncated):
            raise DataError(
                f"{chat.origin}: cannot be scored: it is longer than data.cutoff_len = "
                f"{codec.section.longest:,}, and its reward is read at its end"
            )
        yield up_to_last_label(outcome[-1])


def _conversations(example: Example) -> list[Example]:
    if example.chosen is not None and example.rejected is not None:
        return [answered(example, one) for one in (example.chosen, example.rejected)]
    *before, last = example.messages
    return [answered(replace(example, messages=tuple(before)), last)]
