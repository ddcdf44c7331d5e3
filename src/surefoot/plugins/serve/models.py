"""The models that requests name: the one that was served, checkpoints of its run, adapters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ...checkpoint.disk.commit import committed
from ...data.text.tool_calls import syntax_of
from ...errors import CheckpointError, ModelError
from ...generate.generation import context_length
from ...generate.live import Rows, SlotRows, rows_of
from ...generate.onednn import pack_weights
from ...generate.responses import Decode, decoder
from ...log import fell_back
from ...model.lora_layers import AdaptersByRow
from ...storage.web import Hosts
from ...use.model_loading import (
    Dtype,
    LoadedModel,
    ModelFolders,
    find_parts,
    open_model,
)
from .body import ApiError
from .engine import EngineThread, Lane
from .shared_base import FIRST, SharedBase

if TYPE_CHECKING:  # an extra, and here only a name
    from llguidance import LLTokenizer

_UNLIMITED = 1 << 20  # tokens of models whose positions have no limit
_MOST_PIXELS = 16_000_000  # of a picture in a request; no model sees more of one
BASE = "base"  # the name of the model under the adapter that is served


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The options of ``surefoot serve``."""

    path: str
    name: str | None = None  # by which requests name it
    base: str | None = None
    adapters: tuple[tuple[str, str], ...] = ()  # names and folders
    dtype: Dtype = "auto"
    trust_remote_code: bool = False
    max_batch: int = 32  # responses that are generated at a time, of each model
    max_waiting: int = 256  # responses that wait at a time
    max_length: int | None = None  # tokens of prompt and response
    max_body: int = 8 << 20  # bytes of a request
    media_folder: Path | None = None  # of pictures that requests may name
    sampled_logprobs: bool = False  # log-probabilities after penalties and temperature
    batch_invariant: bool = False  # also without ``generate.batch_invariant`` of the run
    api_key: str | None = field(default=None, repr=False)
    hosts: Hosts = field(default_factory=Hosts)  # under which requests are answered


@dataclass(eq=False)
class ServedModel:
    """A model that answers requests."""

    name: str
    opened: LoadedModel
    lane: Lane
    longest: int  # tokens of prompt and response
    parent: str | None = None
    is_apart: bool = False  # with a copy of the base of its own
    after_settings: bool = False  # log-probabilities after penalties and temperature
    created: int = field(default_factory=lambda: int(time.time()))
    media_folder: Path | None = None  # of pictures that requests may name
    release: Callable[[], None] = lambda: None  # in the engine's thread

    @cached_property
    def exactly(self) -> Decode:
        """Ids to text with special tokens."""
        return decoder(self.opened.tokenizer)

    @cached_property
    def plainly(self) -> Decode:
        """Ids to text without special tokens."""
        return decoder(self.opened.tokenizer, hides_special=True)

    @cached_property
    def _letter(self) -> list[int]:
        """The end of a word, before which tokens are decoded."""
        return list(self.opened.tokenizer.encode("a", add_special_tokens=False))[-1:]

    def token_text(self, token_id: int, *, is_first: bool = False) -> str:
        """The text of a token in a response. Decoders in the style of SentencePiece drop the space
        of a token that stands alone, as they drop that of the first one."""
        before = [] if is_first else self._letter
        return self.exactly([*before, token_id])[len(self.exactly(before)) :]

    @cached_property
    def tool_syntax(self) -> str | None:
        """The syntax of tool calls in its responses."""
        template = self.opened.template
        return syntax_of(template.source) if template is not None else None

    @cached_property
    def grammar_tokenizer(self) -> LLTokenizer:
        """Its tokenizer as llguidance has it. Raises ``ValueError``: it supports no grammars."""
        from llguidance.hf import from_tokenizer

        tokenizer = self.opened.tokenizer
        count = max(self.vocabulary, len(tokenizer))
        stops = list(self.opened.stop_token_ids)
        return from_tokenizer(tokenizer, n_vocab=count, eos_token=stops)

    @cached_property
    def has_special_thoughts(self) -> bool:
        """Whether the words around thoughts are special tokens, which may not be hidden then."""
        template = self.opened.template
        special = self.opened.tokenizer.all_special_tokens
        words = template.thoughts if template is not None else ()
        return any(token in word for token in special for word in words)

    @cached_property
    def vocabulary(self) -> int:
        """Tokens that the model has logits for."""
        return int(self.opened.inner.config.get_text_config().vocab_size)

    def check_ids(self, ids: Iterable[int], param: str) -> None:
        """Raise ``ApiError`` if one of these is no token."""
        for number in ids:
            if not 0 <= number < self.vocabulary:
                raise ApiError(
                    f"{param}: token id {number} is outside the vocabulary of {self.vocabulary:,}",
                    param=param,
                )

    @cached_property
    def most_characters(self) -> int:
        """Of a prompt: as many tokens as there may be, each the longest of the vocabulary."""
        return self.longest * max(map(len, self.opened.tokenizer.get_vocab()))

    @property
    def card(self) -> dict[str, object]:
        """Its entry in ``/v1/models``."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "surefoot",
            "root": str(self.opened.folder),
            "parent": self.parent,
            "max_model_len": self.longest,
        }


class Models:
    """The table of models by name. Its methods belong to the event loop."""

    def __init__(self, settings: ServeSettings, engine: EngineThread) -> None:
        self.settings, self._engine = settings, engine
        self._loaded: dict[str, ServedModel] = {}
        self._adapters = set[str]()  # names under which requests have loaded them
        self._updated = ""  # the name of the weights that came last through ``replace``
        self._lock = asyncio.Lock()
        self._run: Path | None = None
        self._shared: SharedBase | None = None
        self._rows: Rows  # of the model that is served first
        self._is_invariant = False  # rows are computed in the same shapes whatever is beside them
        self.first: ServedModel

    def open_first(self) -> None:
        """Open the model that is served, before the event loop runs."""
        settings = self.settings
        parts = _find_writer(settings.path, settings.base)
        opened = self._open(settings.path, base=settings.base)
        assert opened.folder is not None
        self._run = _run_of(settings.path, opened.folder)
        adapter = opened.folder if parts.adapter is not None else None
        self._is_invariant = settings.batch_invariant or opened.generate.batch_invariant
        by_row = AdaptersByRow(batch_invariant=self._is_invariant)
        shared = SharedBase(opened, parts.model, adapter, by_row)
        name = settings.name or _name_of(settings.path)
        if shared.is_shareable:
            self._shared, opened = shared, shared.opened
            self._rows = self._rows_of(opened, shared.by_row)
            lane = self._lane(shared, FIRST if adapter is not None else None)
            self.first = self._serve(name, opened, lane)
        else:
            self._rows = self._rows_of(opened)
            self.first = self._serve(name, opened, Lane(self._rows))

    async def load_given(self) -> None:
        """Load the adapters of the command line."""
        for name, folder in self.settings.adapters:
            await self.load_adapter(name, folder)

    @property
    def _checkpoints(self) -> list[str]:
        """The checkpoints of the run that is served, as they are now."""
        try:
            return [] if self._run is None else [folder.name for folder in committed(self._run)]
        except (OSError, CheckpointError):
            return []

    @property
    def _over_base(self) -> SharedBase | None:
        """The base, if an adapter on it is served."""
        shared = self._shared
        return shared if shared is not None and shared.first is not None else None

    @property
    def cards(self) -> dict[str, dict[str, object]]:
        """The entries of ``/v1/models``, by all names that requests may give."""
        first = self.first
        unopened = {"root": None, "parent": first.name}
        names = [
            first.name,
            *self._checkpoints,
            *([BASE] if self._over_base else []),
            *self._loaded,
        ]
        return {
            name: self._loaded[name].card
            if name in self._loaded
            else {**first.card, "id": name, **unopened}
            for name in names
        }

    async def get(self, name: str | None) -> ServedModel:
        """The model that a request names; the one that is served, if it names none. Raises
        ``ApiError``."""
        if name is None or name == self.first.name:
            return self.first
        async with self._lock:
            if name in self._loaded:
                return self._loaded[name]
            if name == BASE and (shared := self._over_base) is not None:
                return self._serve(BASE, shared.opened, self._lane(shared, None))
            if name in self._checkpoints:
                return await self._load(name, str(self._run / name))  # type: ignore[operator]
        raise self.unknown(name)

    def unknown(self, name: str) -> ApiError:
        """The error of a name that no model has."""
        names = ", ".join(map(repr, [*self.cards][:20]))
        return ApiError(
            f"the model {name[:200]!r} does not exist; this server has {names}",
            status=404,
            param="model",
            code="model_not_found",
        )

    async def load_adapter(self, name: str, folder: str) -> None:
        """Serve the adapter in ``folder`` as ``name``. Raises ``ApiError``: there is such a
        name; ``SurefootError``: it cannot be loaded."""
        async with self._lock:
            if name in self.cards:
                raise ApiError(
                    f"lora_name: {name!r} is served already; unload it first, or choose another "
                    "name",
                    param="lora_name",
                )
            await self._load(name, folder, is_adapter=True)
            self._adapters.add(name)

    async def unload_adapter(self, name: str) -> None:
        """Let an adapter go; requests to it that have begun are answered. Raises ``ApiError``."""
        async with self._lock:
            if name not in self._adapters:
                raise ApiError(
                    f"lora_name: no adapter {name!r} was loaded", status=404, param="lora_name"
                )
            self._adapters.remove(name)
            self._drop(name)

    async def replace(self, folder: str, *, is_adapter: bool, name: str) -> None:
        """Serve the weights in ``folder`` as ``name``, in place of those loaded so before."""
        async with self._lock:
            if name in self.cards:
                raise ApiError(f"name: {name!r} is served already", param="name")
            await self._load(name, folder, is_adapter=is_adapter)
            if self._updated in self._loaded:
                self._drop(self._updated)
            self._updated = name

    async def _load(self, name: str, path: str, *, is_adapter: bool = False) -> ServedModel:
        """Open a checkpoint, a model or an adapter."""
        shared = self._shared
        base = shared.folder if shared is not None and is_adapter else None
        parts = await asyncio.to_thread(_find_writer, path, base)
        if is_adapter and parts.adapter is None:
            raise ModelError(f"{path}: contains no adapter")
        if shared is not None and await asyncio.to_thread(shared.fits, parts):
            return await self._beside(name, shared, parts)
        # one copy of weights beside the first model, or a run's checkpoints would fill the memory
        for apart in [name for name, model in self._loaded.items() if model.is_apart]:
            self._drop(apart)
        opened = await asyncio.to_thread(self._open, path, base=base)
        rows = await asyncio.to_thread(self._rows_of, opened)
        model = self._serve(name, opened, Lane(rows))
        model.is_apart = True
        return model

    async def _beside(self, name: str, shared: SharedBase, parts: ModelFolders) -> ServedModel:
        """An adapter on the base that is in memory."""

        def add() -> tuple[str, LoadedModel, Lane]:
            adapter, opened = shared.add(parts)
            try:
                return adapter, opened, self._lane(shared, adapter)
            except BaseException:
                shared.remove(adapter)
                raise

        adapter, opened, lane = await asyncio.wrap_future(self._engine.call(add))
        model = self._serve(name, opened, lane)
        model.release = lambda: shared.remove(adapter)
        return model

    def _lane(self, shared: SharedBase, adapter: str | None) -> Lane:
        """For requests to an adapter of the base, or to the base itself: among the rows of the
        others, if it can be, otherwise rows that take turns with them."""
        rows = self._rows
        if isinstance(rows, SlotRows) and (adapter is None or shared.can_be_by_row(adapter)):
            return Lane(rows, lambda: shared.use(None), adapter)
        if adapter is not None:
            why = "its layers, or the base, do not compute rows of several adapters at once"
            fell_back(f"requests to {adapter} take turns with the others", why, "is slower")
        return Lane(self._rows_of(shared.opened), lambda: shared.use(adapter))

    def _serve(self, name: str, opened: LoadedModel, lane: Lane) -> ServedModel:
        parent = self.first.name if self._loaded and name != BASE else None
        after = self.settings.sampled_logprobs
        model = ServedModel(name, opened, lane, self._longest(opened), parent, after_settings=after)
        model.media_folder = self.settings.media_folder
        self._loaded[name] = model
        self._engine.add_lane(lane)
        return model

    def _drop(self, name: str) -> None:
        model = self._loaded.pop(name)
        self._engine.remove_lane(model.lane, model.release)

    def _open(self, path: str, *, base: str | Path | None) -> LoadedModel:
        trusted = self.settings.trust_remote_code
        opened = open_model(path, base=base, dtype=self.settings.dtype, trust_remote_code=trusted)
        invariant = self.settings.batch_invariant or opened.generate.batch_invariant
        pack_weights(opened.inner, batch_invariant=invariant)
        return opened.within(_MOST_PIXELS)

    def _longest(self, opened: LoadedModel) -> int:
        length = context_length(opened.model) or _UNLIMITED
        return min(length, self.settings.max_length or length)

    def _rows_of(self, opened: LoadedModel, adapters: AdaptersByRow | None = None) -> Rows:
        return rows_of(
            opened.model,
            self._longest(opened),
            self.settings.max_batch,
            adapters,
            batch_invariant=self._is_invariant,
        )


def _find_writer(path: str, base: str | Path | None) -> ModelFolders:
    """The folders of a model. Raises ``ModelError`` if it scores texts and writes none."""
    parts = find_parts(path, base=base)
    if parts.gives_scores:
        raise ModelError(
            f"{parts.folder}: a reward model or classifier writes no responses; score those of a "
            "file with `surefoot predict`"
        )
    return parts


def _name_of(path: str) -> str:
    """The folder's name, or a hub id as it is."""
    local = Path(path)
    return local.resolve().name if local.exists() else path


def _run_of(path: str, folder: Path) -> Path | None:
    """The run whose folder was served; None if a single checkpoint or a model was."""
    is_run = Path(path).is_file() or Path(path).resolve() != folder.resolve()
    return folder.parent if is_run and folder in committed(folder.parent) else None
