"""Run a transformers model over slots: prompts at once, then one token of each row. Each row has
its keys and values in a slot of its own, from column 0 on.

Prompts of the same padded length share a pass. They are padded on the right, where nothing that
counts sees the padding, so that the pass has the architecture's own masks. In a slot no row is
padded on the left: a row of n tokens is in columns 0 to n - 1, and a mask says which columns it
sees. A slot whose row has ended is taken by the next one.

Where rows are to be the same whatever is beside them (``batch_invariant``), columns are read in
multiples of 16, and rows are computed in multiples of 4. On some CPUs in float32, the fused
attention then gives a row the same bits whatever the others' lengths are, and a matrix product does
whatever the number of rows and of threads. (Threads divide the rows of a product: of 5 rows, one of
two threads has 2, and rounds differently from one with 4.) Otherwise as many rows are computed as
there are, and rows of one length, such as a row alone, read their own columns without a mask.

Shapes: S slots, B rows, H heads of keys, C columns, E size of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from ._replay import RecordedSteps
from .section import Ids

_UNIT = 16  # lengths of prompts in a pass are multiples of it
_MASKED = ("sdpa", "eager")  # attention that takes a mask of each row
Prefix = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values of each layer, [H, T, E]


def inner_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper, or ``model`` itself."""
    is_plain = isinstance(model, PreTrainedModel)
    return cast(PreTrainedModel, model if is_plain else model.get_base_model())  # type: ignore[operator]


def cache_argument(inner: PreTrainedModel) -> str:
    """The argument of the model's forward pass that has the keys and values. transformers 5.24 has
    renamed it from ``past_key_values`` in its own models; code beside a checkpoint may have the
    former name."""
    return "cache" if "cache" in inspect.signature(inner.forward).parameters else "past_key_values"


def padded_length(prompt: Ids) -> int:
    """The length of the pass of all tokens of ``prompt`` but the last one: it depends on no other
    prompt, so that the values do not either."""
    return rounded(len(prompt) - 1, _UNIT)


class RowAdapters(Protocol):
    """Adapters of which each row of a pass has its own, or none."""

    @property
    def version(self) -> int:
        """It differs after adapters came or went."""

    def on(self, names: Sequence[str | None]) -> AbstractContextManager[None]:
        """A block in which the rows of a pass have these."""


@dataclass(frozen=True)
class Driver:
    """A model whose keys and values may be kept in slots."""

    model: nn.Module  # with its adapter
    inner: PreTrainedModel
    masks: Masks
    adapters: RowAdapters | None = None  # None: all rows have what the model has
    batch_invariant: bool = False  # compute a row in the same shapes whatever is beside it
    is_replayed: bool = False  # compute steps without the Python of the model, where that can be

    def slots(self, count: int, capacity: int, bound: int) -> SlotCache:
        """Slots with so many columns at first, and at most."""
        invariant = self.batch_invariant
        step = StepColumns(count, rounded(capacity), rounded(bound), batch_invariant=invariant)
        return SlotCache(step)

    def prefill(self, prompts: Sequence[Ids], adapters: Sequence[str | None] = ()) -> list[Prefix]:
        """The keys and values of each prompt without its last token, computed with its adapter. All
        have the same padded length."""
        if len(prompts[0]) == 1:
            return [[] for _ in prompts]
        # The last token is the first step in a slot: so one pass serves all samples of a prompt,
        # and all logits that are sampled from come from one kernel (decisions/0053).
        counts = [len(prompt) - 1 for prompt in prompts]
        length = padded_length(prompts[0]) if self.batch_invariant else max(counts)
        ids = [[*prompt[:-1], *[0] * (length - len(prompt) + 1)] for prompt in prompts]
        cache = DynamicCache()
        with self._with(adapters):
            self.model(
                input_ids=torch.tensor(ids, device=self.inner.device),
                use_cache=True,
                **{self._cache_argument: cache},
                **self._last_logits,
            )
        return [
            [(layer.keys[row, :, :count], layer.values[row, :, :count]) for layer in cache.layers]
            for row, count in enumerate(counts)
        ]

    def decode(
        self,
        cache: SlotCache,
        tokens: Sequence[int],
        positions: Sequence[int],
        adapters: Sequence[str | None] = (),
    ) -> torch.Tensor:
        """[B, V] the logits after one more token in each of the first slots."""
        device, count, step = self.inner.device, len(tokens), cache.step
        step.set(positions, device)
        filler = step.num_rows(count) - count  # rows that are computed as the first one
        tokens_B = torch.tensor([*tokens, *[tokens[0]] * filler], device=device)
        positions_B = torch.tensor([*positions, *[positions[0]] * filler], device=device)
        # nobody reads what becomes of a filler; but all rows alike need no indices
        is_alike = len(set(adapters)) <= 1
        of_filler = adapters[0] if adapters and is_alike else None
        is_eager = self.inner.config._attn_implementation == "eager"
        added_as = self.inner.dtype if is_eager else None
        mask = self.masks.at(positions_B, step, added_as)
        ids_B1, positions_B1 = tokens_B[:, None], positions_B[:, None]

        def compute() -> torch.Tensor:
            with self._with([*adapters, *[of_filler] * filler]):
                outputs = self.model(
                    input_ids=ids_B1,
                    attention_mask=mask,
                    position_ids=positions_B1,
                    use_cache=True,
                    **{self._cache_argument: cache},
                )
            logits_BV: torch.Tensor = outputs.logits[:count, -1]
            return logits_BV

        # Ranks must run the same collectives, whichever of them replay.
        has_ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        is_plain = is_alike and not has_ranks and not torch.is_autocast_enabled(device.type)
        if not (self.is_replayed and is_plain and cache.reserve()):
            return compute()
        masks = list(mask.values()) if isinstance(mask, dict) else [mask]
        places = [] if step.is_full else [step.rows, step.columns]
        inputs = [ids_B1, positions_B1, *masks, *places, *cache.tensors]
        return self._recorded_steps.logits(
            (count, step.is_full, *(each is None for each in masks), of_filler),
            compute,
            [tensor for tensor in inputs if tensor is not None],
            step.length,
            version=0 if self.adapters is None else self.adapters.version,
        )

    def _with(self, adapters: Sequence[str | None]) -> AbstractContextManager[None]:
        return nullcontext() if self.adapters is None else self.adapters.on(adapters)

    @cached_property  # to read a signature takes as long as a layer of a small model
    def _cache_argument(self) -> str:
        return cache_argument(self.inner)

    @cached_property
    def _recorded_steps(self) -> RecordedSteps:
        return RecordedSteps(self.model)

    @property
    def _last_logits(self) -> dict[str, int]:
        """The argument that keeps the head from computing all logits."""
        names = inspect.signature(self.inner.forward).parameters
        return {"logits_to_keep": 1} if "logits_to_keep" in names else {}


@contextmanager
def masked_attention(inner: PreTrainedModel) -> Iterator[None]:
    """An attention that takes a mask of each row, meanwhile."""
    config = inner.config
    parts = {name: getattr(config, name) for name in config.sub_configs}  # such as a tower
    before = {name: part._attn_implementation for name, part in parts.items() if part is not None}
    before[""] = config._attn_implementation
    if before[""] not in _MASKED:
        inner.set_attn_implementation("sdpa" if inner._supports_sdpa else "eager")
    try:
        yield
    finally:
        if config._attn_implementation != before[""]:
            inner.set_attn_implementation(before)


# Seen on AMD EPYC in float32: the fused attention gives one query the same bits for any length that
# is a multiple of 16, and ``F.linear`` gives a row the same for any number of rows from 4 on
# (decisions/0053). With AMX on an Intel processor it is not so: what is promised is equal up to
# rounding (decisions/0073).
COLUMNS = 16
ROWS = 4


def rounded(count: int, unit: int = COLUMNS) -> int:
    """The next multiple of ``unit``."""
    return -(-count // unit) * unit


@dataclass
class StepColumns:
    """Where the tokens of one step are written, and what is read."""

    num_slots: int
    capacity: int  # columns that a slot has
    bound: int  # columns that a slot will ever need
    batch_invariant: bool = False
    rows: torch.Tensor | None = None  # [B] the slots, 0 to B - 1
    columns: torch.Tensor | None = None  # [B]
    length: int = 0  # columns that are read
    is_full: bool = False  # whether each row has a token in each of these columns

    def num_rows(self, count: int) -> int:
        """The rows that are computed for ``count`` of them."""
        return rounded(count, ROWS) if self.batch_invariant else count

    def set(self, positions: Sequence[int], device: torch.device) -> None:
        """Those of tokens at ``positions`` of the first slots."""
        if self.rows is None or len(self.rows) != len(positions):
            self.rows = torch.arange(len(positions), device=device)
        self.columns = torch.tensor(positions, device=device)
        longest = max(positions) + 1
        self.is_full = not self.batch_invariant and min(positions) + 1 == longest
        self.length = longest if self.is_full else rounded(longest)
        if self.length > self.capacity:
            grown = max(self.length, rounded(self.capacity * 3 // 2))
            self.capacity = max(self.length, min(grown, self.bound))


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer: [S, H, C, E] each."""

    is_sliding = False

    def __init__(self, step: StepColumns) -> None:
        super().__init__()
        self._step = step

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Zeros: what a mask hides must be a number."""
        self.keys, self.values = (self._blank(like) for like in (key_states, value_states))
        self.is_initialized = True

    def _blank(self, like: torch.Tensor) -> torch.Tensor:
        step = self._step
        slots = step.num_rows(step.num_slots)
        return like.new_zeros(slots, like.shape[-3], step.capacity, like.shape[-1])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token of each row; what the rows may read, [B, H, C, E]. Rows beyond those of
        ``step`` fill the batch up to a multiple of ``ROWS``: they read whatever is in slots."""
        self.reserve(key_states, value_states)
        step = self._step
        assert step.rows is not None
        count, filled = len(step.rows), key_states.shape[0]
        visible = []
        for stored, new in ((self.keys, key_states), (self.values, value_states)):
            # In place, where transformers' own cache copies all keys and values at every step
            # (``torch.cat``).
            if step.is_full:  # a copy takes 6 us, an index 8 to 12
                stored[:count, :, step.length - 1] = new[:, :, 0]
            else:
                # Under autocast, values are bfloat16 beside keys that a rotation has made float32;
                # transformers' cache of the prefix has one type for both.
                stored[step.rows, :, step.columns] = new[:count, :, 0].to(stored.dtype)
            visible.append(stored[:filled, :, : step.length])
        return visible[0], visible[1]

    def reserve(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Memory for all slots, and as many columns as a slot is to have."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots, _, columns, _ = self.keys.shape
        if slots < self._step.num_rows(self._step.num_slots) or columns < self._step.capacity:
            for name in ("keys", "values"):
                old = getattr(self, name)
                setattr(self, name, self._blank(old))
                getattr(self, name)[:slots, :, :columns] = old

    def put(self, slot: int, key_HTE: torch.Tensor, value_HTE: torch.Tensor) -> None:
        """Fill the first columns of a slot."""
        self.reserve(key_HTE, value_HTE)
        self.keys[slot, :, : key_HTE.shape[1]] = key_HTE
        self.values[slot, :, : value_HTE.shape[1]] = value_HTE

    def move(self, source: int, target: int, count: int) -> None:
        """Copy the first columns of a slot to another one."""
        for stored in (self.keys, self.values):
            stored[target, :, :count] = stored[source, :, :count]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As many columns as are read."""
        return self._step.length, 0

    def get_seq_length(self) -> int:
        """Columns before those of this step."""
        return self._step.length - 1

    def get_max_length(self) -> int:
        """They grow."""
        return -1


class SlotCache(Cache):  # type: ignore[misc]
    """The slots of all layers."""

    def __init__(self, step: StepColumns) -> None:
        self.step = step
        super().__init__(layer_class_to_replicate=self._layer)

    def _layer(self) -> SlotLayer:
        return SlotLayer(self.step)

    def grow(self, num_slots: int, length: int) -> None:
        """Have at least so many slots, each with room for ``length`` tokens."""
        self.step.num_slots = max(self.step.num_slots, num_slots)
        self.step.capacity = max(self.step.capacity, rounded(length))

    def put(self, slot: int, prefix: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Fill the first columns of a slot in all layers; there is no layer for no columns."""
        while len(self.layers) < len(prefix):
            self.layers.append(self._layer())
        for index, (key_HTE, value_HTE) in enumerate(prefix):
            self.layers[index].put(slot, key_HTE, value_HTE)

    def reserve(self) -> bool:
        """Memory for the step that was set; False if layers are not known yet."""
        if not self.layers or not all(layer.is_initialized for layer in self.layers):
            return False
        for layer in self.layers:
            layer.reserve(layer.keys, layer.values)
        return True

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Keys and values of all layers."""
        return [stored for layer in self.layers for stored in (layer.keys, layer.values)]

    def move(self, source: int, target: int, count: int) -> None:
        """Copy the first columns of a slot to another one in all layers."""
        for layer in self.layers:
            layer.move(source, target, count)


_ONE = ""  # instead of a layer type: all layers have the same mask
_FULL, _SLIDING = "full_attention", "sliding_attention"
_LIMITS = ("window", "chunk", "local", "block")  # in names of settings that limit what is seen


@dataclass(frozen=True)
class Masks:
    """Which columns of its slot a row sees, in the form that an architecture takes it: one mask for
    each type of layers, or one for all."""

    windows: Mapping[str, int | None]  # tokens that a query sees; None: all before it
    may_be_none: bool = True  # where a query sees all columns

    def at(
        self, positions_B: torch.Tensor, step: StepColumns, added_as: torch.dtype | None
    ) -> torch.Tensor | dict[str, torch.Tensor | None] | None:
        """[B, 1, 1, length] what tokens at ``positions_B`` see, as booleans, or added to scores of
        a type."""
        masks: dict[str, torch.Tensor | None] = {}
        for name, window in self.windows.items():
            sees_all = step.is_full and (window is None or step.length <= window)
            is_none = sees_all and self.may_be_none
            masks[name] = None if is_none else _seen(positions_B, step.length, window, added_as)
        return masks.get(_ONE, masks)


def _seen(
    positions_B: torch.Tensor, length: int, window: int | None, added_as: torch.dtype | None
) -> torch.Tensor:
    """[B, 1, 1, length] the mask of a type of layers."""
    columns_L = torch.arange(length, device=positions_B.device)
    seen_BL = columns_L <= positions_B[:, None]
    if window is not None:
        seen_BL &= columns_L > positions_B[:, None] - window
    if added_as is not None:
        hidden_BL = torch.zeros(seen_BL.shape, dtype=added_as, device=seen_BL.device)
        seen_BL = hidden_BL.masked_fill(~seen_BL, torch.finfo(added_as).min)
    return seen_BL[:, None, None]


def candidates(config: PretrainedConfig) -> Iterator[Masks]:
    """The forms that an architecture may take, to be tried in turn; none if some layers have no
    keys and values of all tokens."""
    # Tried, not looked up by name: of the zoo's 100 architectures, 79 pass the trial of ``_proof``
    # with one of these forms, and the others give the same tokens without slots (decisions/0053).
    types = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if types - {_FULL, _SLIDING}:
        return
    forms: list[dict[str, int | None]] = [{_ONE: window}]
    if types:
        forms = [{name: window if name == _SLIDING else None for name in sorted(types)}]
        forms += [{_ONE: next(iter(forms[0].values()))}] if len(types) == 1 else []
    elif window is not None:
        forms += [{_ONE: None}]
    for may_be_none in (True, False):
        yield from (Masks(windows, may_be_none) for windows in forms)


def longest_limit(config: PretrainedConfig, longest: int) -> int:
    """The most tokens, below ``longest``, at which what a query sees may change by a setting: a
    window that a row of ``longest`` tokens exceeds. 0 if there is none."""
    settings = config.to_dict()
    names = [name for name in settings if any(part in name for part in _LIMITS)]
    limits = [settings[name] for name in names if isinstance(settings[name], int)]
    return max((limit for limit in limits if limit < longest), default=0)
