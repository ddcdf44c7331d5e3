"""The models that requests name: the one that was served, checkpoints of its run, adapters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NoReturn

from ...checkpoint.disk.commit import committed
from ...data.text.tool_calls import syntax_of
from ...errors import CheckpointError, ModelError
from ...generate.decode import Decode, decoder
from ...generate.driver import RowAdapters
from ...generate.generation import context_length
from ...generate.live import Rows, SlotRows, rows_of
from ...generate.onednn import pack_weights
from ...use.model_loading import LoadedModel, ModelFolders, find_parts, is_reward, open_model
from ..errors import ApiError
from .engine import EngineThread, Lane
from .settings import ServeSettings
from .shared_base import FIRST, SharedBase

_UNLIMITED = 1 << 20  # tokens of models whose positions have no limit
BASE = "base"  # the name of the model under the adapter that is served


@dataclass(eq=False)
class ServedModel:
    """A model that answers requests."""

    name: str
    opened: LoadedModel
    lane: Lane
    longest: int  # tokens of prompt and response
    activate: Callable[[], None] = lambda: None  # compute with its weights alone
    is_apart: bool = False  # with a copy of the base of its own
    parent: str | None = None
    after_settings: bool = False  # log-probabilities after penalties and temperature
    created: int = field(default_factory=lambda: int(time.time()))
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
    def tool_syntax(self) -> str | None:
        """The syntax of tool calls in its responses."""
        template = self.opened.template
        return syntax_of(template.source) if template is not None else None

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
        self._found: dict[str, ServedModel] = {}
        self._adapters: dict[str, str] = {}  # folders of adapters by the names that requests give
        self._updated = ""  # the name of the weights that came last through ``replace``
        self._lock = asyncio.Lock()
        self._run: Path | None = None
        self._shared: SharedBase | None = None
        self._rows: Rows  # of the model that is served first
        self.first: ServedModel

    def open_first(self) -> None:
        """Open the model that is served, before the event loop runs."""
        settings = self.settings
        parts = _find_writer(settings.path, settings.base)
        opened = self._open(settings.path, base=settings.base)
        assert opened.folder is not None
        self._run = _run_of(settings.path, opened.folder)
        adapter = opened.folder if parts.adapter is not None else None
        shared = SharedBase(opened, parts.model, adapter)
        is_shared = shared.is_shareable
        self._shared = shared if is_shared else None
        opened = shared.opened if is_shared else opened
        longest = self._longest(opened)
        self._rows = self._rows_of(opened, longest, shared.by_row if is_shared else None)
        own = FIRST if adapter is not None else None
        lane = self._lane(shared, own, longest) if is_shared else Lane(self._rows)
        activate = (lambda: shared.use(own)) if is_shared else None
        self.first = self._served(settings.name or _name_of(settings.path), opened, lane, activate)
        self._found[self.first.name] = self.first
        self._engine.add_lane(lane)

    async def load_given(self) -> None:
        """Load the adapters of the command line."""
        for name, folder in self.settings.adapters:
            await self.load_adapter(name, folder)

    @property
    def names(self) -> list[str]:
        """All names that requests may give."""
        extra = [BASE] if self._has_base else []
        return list(dict.fromkeys([self.first.name, *self._checkpoints, *extra, *self._found]))

    @property
    def cards(self) -> list[dict[str, object]]:
        """The entries of ``/v1/models``."""
        known = self._found
        return [
            known[name].card
            if name in known
            else {
                "id": name,
                "object": "model",
                "created": self.first.created,
                "owned_by": "surefoot",
                "root": None,
                "parent": self.first.name,
                "max_model_len": self.first.longest,
            }
            for name in self.names
        ]

    async def get(self, name: str | None) -> ServedModel:
        """The model that a request names; the one that is served, if it names none. Raises
        ``ApiError``."""
        if name is None or name == self.first.name:
            return self.first
        async with self._lock:
            if name in self._found:
                found = self._found.pop(name)
                self._found[name] = found  # the last that was used
                return found
            if name == BASE and self._has_base:
                return self._keep(self._under_adapter())
            if name in self._checkpoints and self._run is not None:
                return await self._load(name, str(self._run / name))
        raise self._unknown(name)

    def refuse(self, name: str) -> NoReturn:
        """Raise the ``ApiError`` of an unknown name."""
        raise self._unknown(name)

    async def load_adapter(self, name: str, folder: str) -> ServedModel:
        """Serve the adapter in ``folder`` as ``name``. Raises ``ApiError``: there is such a
        name; ``SurefootError``: it cannot be loaded."""
        async with self._lock:
            if name in self.names:
                raise ApiError(
                    f"lora_name: {name!r} is served already; unload it first, or choose another "
                    "name",
                    param="lora_name",
                )
            found = await self._load(name, folder, is_adapter=True)
            self._adapters[name] = folder
            return found

    async def unload_adapter(self, name: str) -> None:
        """Let an adapter go; requests to it that have begun are answered. Raises ``ApiError``."""
        async with self._lock:
            if name not in self._adapters:
                raise ApiError(
                    f"lora_name: no adapter {name!r} was loaded", status=404, param="lora_name"
                )
            del self._adapters[name]
            self._drop(name)

    async def replace(self, folder: str, *, is_adapter: bool, name: str) -> ServedModel:
        """Serve the weights in ``folder`` as ``name``, in place of those loaded so before."""
        async with self._lock:
            if name in self.names:
                raise ApiError(f"name: {name!r} is served already", param="name")
            before, found = self._updated, await self._load(name, folder, is_adapter=is_adapter)
            self._updated = name
            if before in self._found:
                self._drop(before)
            return found

    async def _load(self, name: str, path: str, *, is_adapter: bool = False) -> ServedModel:
        """Open a checkpoint, a model or an adapter."""
        base = self._shared.folder if self._shared is not None and is_adapter else None
        parts = await asyncio.to_thread(_find_writer, path, base)
        if is_adapter and parts.adapter is None:
            raise ModelError(f"{path}: contains no adapter")
        shared = self._shared
        if shared is not None and await asyncio.to_thread(shared.fits, parts):
            return self._keep(await self._beside(name, shared, parts))
        self._make_room()
        opened = await asyncio.to_thread(self._open, path, base=base)
        rows = await asyncio.to_thread(self._rows_of, opened, self._longest(opened))
        found = self._served(name, opened, Lane(rows))
        found.is_apart, found.parent = True, self.first.name
        self._engine.add_lane(found.lane)
        return self._keep(found)

    async def _beside(self, name: str, shared: SharedBase, parts: ModelFolders) -> ServedModel:
        """An adapter on the base that is in memory."""
        longest = self.first.longest

        def add() -> tuple[str, LoadedModel, Lane]:
            adapter, opened = shared.add(parts)
            try:
                return adapter, opened, self._lane(shared, adapter, longest)
            except BaseException:
                shared.remove(adapter)
                raise

        adapter, opened, lane = await asyncio.wrap_future(self._engine.call(add))
        found = self._served(name, opened, lane, lambda: shared.use(adapter))
        found.release = lambda: shared.remove(adapter)
        found.parent = self.first.name
        self._engine.add_lane(lane)
        return found

    def _under_adapter(self) -> ServedModel:
        """The base under the adapter that is served."""
        shared = self._shared
        assert shared is not None
        lane = self._lane(shared, None, self.first.longest)
        found = self._served(BASE, shared.opened, lane, lambda: shared.use(None))
        self._engine.add_lane(lane)
        return found

    def _lane(self, shared: SharedBase, adapter: str | None, longest: int) -> Lane:
        """For requests to an adapter of the base, or to the base itself: among the rows of the
        others, if it can be, otherwise rows that take turns with them."""
        rows = self._rows
        if isinstance(rows, SlotRows) and (adapter is None or shared.can_be_by_row(adapter)):
            return Lane(rows, lambda: shared.use(None), adapter)
        return Lane(self._rows_of(shared.opened, longest), lambda: shared.use(adapter))

    def _keep(self, model: ServedModel) -> ServedModel:
        self._found[model.name] = model
        return model

    def _make_room(self) -> None:
        """Drop the model apart that was used least recently, if there are too many."""
        apart = [name for name, model in self._found.items() if model.is_apart]
        if self.settings.max_models < 2:
            raise ApiError(
                "this model needs a copy of the weights of its own, and the server keeps one in "
                "memory (--max-models 1)"
            )
        if len(apart) + 2 > self.settings.max_models:
            self._drop(apart[0])

    def _drop(self, name: str) -> None:
        model = self._found.pop(name)
        self._engine.remove_lane(model.lane, model.release)

    def _open(self, path: str, *, base: str | Path | None) -> LoadedModel:
        settings = self.settings
        opened = open_model(
            path,
            base=base,
            dtype=settings.dtype,
            trust_remote_code=settings.trust_remote_code,
        )
        pack_weights(opened.inner)
        return opened

    def _longest(self, opened: LoadedModel) -> int:
        length = context_length(opened.model) or _UNLIMITED
        return min(length, self.settings.max_length or length)

    def _rows_of(
        self, opened: LoadedModel, longest: int, adapters: RowAdapters | None = None
    ) -> Rows:
        return rows_of(opened.model, longest, self.settings.max_batch, adapters)

    def _served(
        self, name: str, opened: LoadedModel, lane: Lane, activate: Callable[[], None] | None = None
    ) -> ServedModel:
        after, longest = self.settings.sampled_logprobs, self._longest(opened)
        return ServedModel(
            name, opened, lane, longest, activate or lane.activate, after_settings=after
        )

    @property
    def _has_base(self) -> bool:
        return self._shared is not None and self._shared.first is not None

    @property
    def _checkpoints(self) -> list[str]:
        """The checkpoints of the run that is served, as they are now."""
        try:
            return [] if self._run is None else [folder.name for folder in committed(self._run)]
        except (OSError, CheckpointError):
            return []

    def _unknown(self, name: str) -> ApiError:
        known = ", ".join(map(repr, self.names[:20]))
        return ApiError(
            f"the model {name[:200]!r} does not exist; this server has {known}",
            status=404,
            param="model",
            code="model_not_found",
        )


def _find_writer(path: str, base: str | Path | None) -> ModelFolders:
    """The folders of a model. Raises ``ModelError`` if it gives rewards, not responses."""
    parts = find_parts(path, base=base)
    if is_reward(parts):
        raise ModelError(
            f"{parts.folder}: a reward model writes no responses; score those of a file with "
            "`surefoot predict`"
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
