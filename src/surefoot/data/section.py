"""The recipe's ``data`` section."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator

from ..schema import FREE, ROUNDS, Needs, SameRows, must
from ..schema.locations import DatasetReference

DEFAULT_CUTOFF = 2048  # tokens


ANOTHER = "another dataset needs another name: {name: other, file_name: ...}"


def _separated(names: object) -> object:
    """``a,b`` as two names; a file with a comma in its name needs an entry."""
    if not isinstance(names, list | tuple):
        return names
    parts: list[object] = []
    for name in names:
        is_several = isinstance(name, str) and "," in name
        parts += [part.strip() for part in str(name).split(",")] if is_several else [name]
    return tuple(parts)


Datasets = Annotated[tuple[DatasetReference, ...], BeforeValidator(_separated)]
IF_HELD_OUT = SameRows(held_out_by=("val_size", "eval_datasets"))  # before they are mixed


@dataclass(frozen=True, kw_only=True)
class MediaSection:
    """Where the pictures of rows are, and how large they may be."""

    folder: Path | None = None
    """Folder that the paths of pictures in rows are relative to, and must be inside of; relative to
    the recipe file. Unset: ``data.dataset_dir``."""
    max_pixels: int | None = None
    """Pictures with more pixels are made smaller; fewer pixels are fewer tokens. It is the limit of
    the model's own processor, also in what is saved and exported; where that has none, pictures are
    made smaller before it sees them. Unset: as the processor does by itself."""

    def __post_init__(self) -> None:
        must(self, "be at least 1", "max_pixels")


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Which datasets to train on, and how rows become tokens."""

    datasets: Annotated[Datasets, SameRows(held_out_by=("eval_datasets",))]
    """What to train on, concatenated in this order: names in ``dataset_info.json``, files or
    folders such as ``rows.jsonl``, hub ids such as ``tatsu-lab/alpaca``, or entries such as
    ``{file_name: rows.csv, columns: {prompt: q, response: a}}``."""
    dataset_dir: Path = Path("data")
    """Folder with ``dataset_info.json``; relative to the recipe file."""
    text_unit: Literal["file", "paragraph", "line"] = "file"
    """What a document is of a ``.txt`` file: the file, a paragraph (blank lines are between them),
    or a line."""
    hub: Literal["huggingface", "modelscope"] = "huggingface"
    """Where hub ids are looked up, and entries of ``dataset_info.json`` that name both hubs."""
    eval_datasets: Datasets = ()
    """Datasets to evaluate on, named in the same ways. Excludes ``val_size``."""
    val_size: float = 0.0
    """Training rows held out for evaluation: a share below 1, or a number of rows."""
    mix_strategy: Annotated[
        Literal["concat", "interleave_under", "interleave_over", "interleave_once"],
        IF_HELD_OUT,
        Needs("datasets", above=1),
    ] = "concat"
    """How several datasets are mixed. ``concat``: all rows of each. The others take rows in turn,
    or by ``interleave_probs``: ``interleave_under`` until the first dataset is used up,
    ``interleave_over`` until each is, with the rows of the others again, ``interleave_once`` until
    each is, without repetition. Row for row as ``datasets.interleave_datasets`` with
    ``train.seed``."""
    interleave_probs: Annotated[tuple[float, ...] | None, IF_HELD_OUT] = None
    """With interleaving: the probability of each of ``datasets``; they sum to 1."""
    max_samples: int | None = None
    """Use at most this many rows of each dataset (the first ones)."""
    max_broken_rows: Annotated[int, FREE] = 10
    """Unreadable rows are reported and skipped; more than this in one dataset stop the run."""
    template: str = "auto"
    """Chat template: ``auto`` uses the tokenizer's own, otherwise the name of a bundled one."""
    tool_format: str | None = None
    """Syntax of tools and calls, in place of that of a bundled template: the name of one of
    docs/templates.md."""
    enable_thinking: bool | None = None
    """Whether the model thinks before it answers: passed to the chat template; ``false`` also
    removes the thoughts of the data. Unset: as the template does by itself."""
    preserve_thinking: bool = False
    """Keep the thoughts of earlier turns, with a chat template that can. Otherwise each response
    with a later turn is trained in a sequence of its own."""
    train_on_thoughts: Literal["all", "written", "none"] = "all"
    """``written`` masks the empty thoughts that a chat template adds, ``none`` all thoughts."""
    chat_template_kwargs: Mapping[str, str | int | float | bool] = field(
        default_factory=dict, hash=False
    )
    """Further arguments of the chat template, such as ``{reasoning_effort: low}``; they are saved
    with it."""
    default_system: str | None = None
    """System message for conversations that have none. Nothing is added unless this is set."""
    cutoff_len: int | None = None
    """Longest example in tokens. Unset: 2,048, or the positions of the model if these are fewer."""
    on_too_long: Literal["truncate", "drop"] = "truncate"
    """``truncate`` shortens a longer conversation: later turns, then the end of the last response;
    ``drop`` drops it."""
    train_on_prompt: bool = False
    """Also train on the tokens of the prompt, not only of the responses."""
    mask_history: bool = False
    """Train only on the last response of a conversation."""
    packing: Annotated[bool, ROUNDS] = True
    """Pack the examples of a micro-batch into one row, as documents that do not attend to each
    other."""
    shuffle: Annotated[bool, SameRows()] = True
    """Shuffle the examples in every epoch, as a function of (train.seed, epoch)."""
    streaming: bool = False
    """Train while the datasets are still being encoded, for large datasets. Needs
    ``train.max_steps``, unless all of it is in the cache (``surefoot encode``)."""
    buffer_size: Annotated[int, Needs("streaming", (True,))] = 16384
    """With ``streaming``: shuffle within blocks of this many examples. Training starts when the
    first block is encoded."""
    media: MediaSection = field(default_factory=MediaSection)
    """Where the pictures of rows are, and how large they may be."""
    cache_dir: Annotated[Path | None, FREE] = None
    """Folder for encoded datasets (default: ``surefoot`` in the user's cache folder)."""

    def __post_init__(self) -> None:
        self._check_names()
        if self.cutoff_len is not None and self.cutoff_len < 4:
            raise ValueError(f"cutoff_len must be at least 4 tokens, got {self.cutoff_len}")
        must(self, "be at least 1", "buffer_size", "max_samples")
        must(self, "not be negative", "val_size", "max_broken_rows")
        if self.val_size > 1 and self.val_size % 1:
            raise ValueError(
                f"val_size is a share below 1 or a whole number of rows, got {self.val_size}"
            )
        if self.streaming and 0 < self.val_size < 1:
            raise ValueError(
                f"val_size must be a number of rows with streaming, got {self.val_size}: the "
                "total is not known before all rows are encoded"
            )
        self._check_mixing()
        if self.train_on_prompt and self.mask_history:
            raise ValueError(
                "train_on_prompt and mask_history exclude each other; keep one of them"
            )
        if self.train_on_prompt and self.train_on_thoughts != "all":
            raise ValueError(
                "train_on_prompt trains on the whole text, and train_on_thoughts: "
                f"{self.train_on_thoughts} masks some of it; keep one of them"
            )

    def reference(self, name: str) -> DatasetReference:
        """The dataset that the section calls ``name``, or any other one."""
        references = (DatasetReference.of(each) for each in (*self.datasets, *self.eval_datasets))
        matches = (each for each in references if str(each) == str(name))
        return next(matches, None) or DatasetReference.of(name).located(Path())

    @property
    def template_arguments(self) -> Mapping[str, object]:
        """What the chat template gets beside messages and tools."""
        arguments: dict[str, object] = dict(self.chat_template_kwargs)
        if self.enable_thinking is not None:
            arguments["enable_thinking"] = self.enable_thinking
        return arguments | ({"preserve_thinking": True} if self.preserve_thinking else {})

    @property
    def longest(self) -> int:
        """``cutoff_len``, or its default for models of any length."""
        return DEFAULT_CUTOFF if self.cutoff_len is None else self.cutoff_len

    def cache_settings(self, names: Sequence[str]) -> dict[str, object]:
        """Settings by name, in the words by which encoded datasets are cached."""
        settings = {name: getattr(self, name) for name in names}
        if "cutoff_len" in settings:
            settings["cutoff_len"] = self.longest
        if settings.get("on_too_long") == "truncate":
            settings["on_too_long"] = "cut"  # the first word for it, so that caches are still found
        return settings

    def _check_mixing(self) -> None:
        probabilities = self.interleave_probs
        if self.streaming and self.val_size and self.mix_strategy != "concat":
            raise ValueError(
                f"val_size with streaming needs mix_strategy concat, got {self.mix_strategy}; name "
                "the rows to evaluate on in eval_datasets instead"
            )
        if probabilities is None:
            return
        if self.mix_strategy == "concat":
            raise ValueError("interleave_probs needs a mix_strategy that interleaves")
        if len(probabilities) != len(self.datasets):
            raise ValueError(
                f"interleave_probs: expected {len(self.datasets)} numbers, one for each of "
                f"datasets, got {len(probabilities)}"
            )
        total = math.fsum(probabilities)
        if min(probabilities) <= 0 or abs(total - 1) > 1e-8:
            raise ValueError(
                f"interleave_probs: expected positive numbers that sum to 1, got "
                f"{list(probabilities)}, which sum to {total:g}"
            )

    def _check_names(self) -> None:
        if not self.datasets:
            raise ValueError("datasets: name at least one dataset, such as a file of rows")
        for key in ("datasets", "eval_datasets"):
            names = [str(name) for name in getattr(self, key)]
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise ValueError(f"{key}: {twice!r} is named twice; {ANOTHER}")
        trained = {str(name): name for name in self.datasets}
        for name in self.eval_datasets:
            if str(name) in trained and name != trained[str(name)]:
                raise ValueError(f"eval_datasets: {name!r} is another one of datasets; {ANOTHER}")
        if self.val_size and self.eval_datasets:
            raise ValueError("val_size and eval_datasets exclude each other; keep one of them")


def without_datasets() -> DataSection:
    """The defaults, where a section is needed and no row is read."""
    return DataSection(datasets=(DatasetReference("none"),))
