"""MindSpore Transformers' names for the weights of Hugging Face's models.

There are two families of names, ``legacy`` and ``mcore``, and each may fuse projections: the rows
of queries, keys and values are interleaved by groups of heads, those of gate and up one by one, and
``experts`` are in one tensor. Values are not changed, and the rotary halves are in Hugging Face's
order.

Fused projections with interleaved rows: a group of queries, its key, its value, the next group.

So equal shards of the fused tensor contain complete groups. ``InterleavedSource`` fuses tensors in
this way, ``DeinterleavedSource`` splits them again; both read only the requested rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from ...checkpoint.disk import strict_json
from ...checkpoint.sources import (
    JoinedSource,
    Renamed,
    ReplacingSource,
    Shape,
    TensorSource,
    rounded,
)
from ...errors import CheckpointError
from ...parallel.sharding import Box
from ...storage import files
from .experts import MCORE, MIXTRAL, Experts, stacked, unstacked
from .ranks import root_of
from .tensor_layout import MOMENTS

_FEW = 16  # rows of a turn; fewer are read together with those in between


@dataclass(frozen=True)
class Turn:
    """The rows of one tensor in a fused one, where several tensors take turns with their rows."""

    name: str  # of the tensor to read
    first: int  # row in a period of the fused tensor
    rows: int  # in each period
    period: int  # rows of all of them together

    def place_of(self, row: torch.Tensor) -> torch.Tensor:
        """The rows of the fused tensor that are these ``row``s of the single one."""
        return row // self.rows * self.period + self.first + row % self.rows

    def rows_before(self, place: int) -> int:
        """How many rows of the single tensor come before a row of the fused one."""
        periods, inside = divmod(place, self.period)
        return periods * self.rows + min(max(inside - self.first, 0), self.rows)


def turns_of(names: Sequence[str], rows: Sequence[int]) -> list[Turn]:
    """The turns of tensors that contribute so many ``rows`` each to a period."""
    starts = accumulate(rows, initial=0)
    period = sum(rows)
    # one start more than there are tensors: the sum of all rows
    return [Turn(n, first, num_rows, period) for n, num_rows, first in zip(names, rows, starts)]  # noqa: B905


@dataclass(frozen=True)
class InterleavedSource(ReplacingSource):
    """Tensors fused along the first dimension, each contributing its rows in turn."""

    turns: Mapping[str, Sequence[Turn]]  # by the name of the fused tensor

    def made(self) -> Mapping[str, tuple[Shape, Sequence[str]]]:
        """The fused tensors."""
        shapes = self.source.shapes()
        fused_tensors: dict[str, tuple[Shape, Sequence[str]]] = {}
        for fused, turns in self.turns.items():
            names = [turn.name for turn in turns]
            fused_tensors[fused] = (sum(shapes[n][0] for n in names), *shapes[names[0]][1:]), names
        return fused_tensors

    def read_made(self, name: str, box: Box) -> torch.Tensor:
        """From each part, only the rows that are in ``box``, which follow one another there."""
        values = torch.empty(box.shape, dtype=self.dtypes()[name])
        for turn in self.turns[name]:
            first, last = turn.rows_before(box.start[0]), turn.rows_before(box.stop[0])
            if first < last:
                # They are one range in the part, and every period has some of them.
                places = turn.place_of(torch.arange(first, last)) - box.start[0]
                rows = _rows(self.source, turn.name, first, last - first, box)
                values[places] = rounded(rows, values.dtype, turn.name)
        return values


@dataclass(frozen=True)
class DeinterleavedSource(ReplacingSource):
    """The tensors that were fused into another one."""

    turns: Mapping[str, Turn]  # by the name of the part

    def made(self) -> Mapping[str, tuple[Shape, Sequence[str]]]:
        """The parts."""
        shapes = self.source.shapes()
        return {
            name: ((shapes[t.name][0] // t.period * t.rows, *shapes[t.name][1:]), (t.name,))
            for name, t in self.turns.items()
        }

    def read_made(self, name: str, box: Box) -> torch.Tensor:
        """The requested rows of the fused tensor, and those in between if turns are short."""
        turn, values = self.turns[name], torch.empty(box.shape, dtype=self.dtypes()[name])
        row = box.start[0]
        while row < box.stop[0]:
            end = (row // turn.rows + 1) * turn.rows if turn.rows >= _FEW else box.stop[0]
            places = turn.place_of(torch.arange(row, min(end, box.stop[0])))
            first, count = int(places[0]), int(places[-1] - places[0]) + 1
            rows = _rows(self.source, turn.name, first, count, box)[places - first]
            values[row - box.start[0] :][: len(places)] = rows
            row += len(places)
        return values


def _rows(source: TensorSource, name: str, first: int, count: int, box: Box) -> torch.Tensor:
    """``count`` rows of a tensor, in the columns of ``box``."""
    return source.read(name, Box((first, *box.start[1:]), (count, *box.shape[1:])))


_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


@dataclass(frozen=True)
class Family:
    """One way to name the tensors of a model."""

    layer: str  # before the number of a layer
    tops: Mapping[str, str]  # Hugging Face's name -> the name here, outside of layers
    modules: Mapping[str, str]  # the same for the modules of a layer
    qkv: str | None = None  # of the fused projections; None: they are apart
    gate_up: str | None = None
    is_contiguous: bool = False  # fused ones lie end to end; otherwise their rows take turns
    experts: Experts | None = None  # laid together in one tensor; None: they are apart


_LEGACY_TOPS = {
    "model.embed_tokens.weight": "model.tok_embeddings.embedding_weight",
    "model.norm.weight": "model.norm_out.weight",
    "lm_head.weight": "lm_head.weight",
}
_LEGACY = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "block_sparse_moe.gate": "feed_forward.router.dense",
    **{f"block_sparse_moe.experts.w{i}": f"feed_forward.ffn.w{i}" for i in (1, 2, 3)},
}
_MCORE_TOPS = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
_MCORE = {
    "self_attn.q_proj": "self_attention.linear_q",
    "self_attn.k_proj": "self_attention.linear_k",
    "self_attn.v_proj": "self_attention.linear_v",
    "self_attn.o_proj": "self_attention.linear_proj",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
    "mlp.gate_proj": "mlp.gating",
    "mlp.up_proj": "mlp.hidden",
    "mlp.down_proj": "mlp.linear_fc2",
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.gate": "mlp.router",
}
_UNFUSED = {"gate_proj": "gating", "up_proj": "hidden", "down_proj": "linear_fc2"}
_APART = {f"mlp.experts.*.{old}": f"mlp.experts.*.{new}" for old, new in _UNFUSED.items()}
_SHARED = {f"mlp.shared_experts.{o}": f"mlp.shared_experts.{n}" for o, n in _UNFUSED.items()}
_LATENT = {
    "self_attn.q_a_proj": "self_attention.linear_q_down_proj",
    "self_attn.q_a_layernorm": "self_attention.q_layernorm",
    "self_attn.q_b_proj": "self_attention.linear_q_up_proj",
    "self_attn.kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
    "self_attn.kv_a_layernorm": "self_attention.kv_layernorm",
    "self_attn.kv_b_proj": "self_attention.linear_kv_up_proj",
    "self_attn.o_proj": "self_attention.linear_proj",
}
_PLAIN = {old: new for old, new in _MCORE.items() if not old.startswith("self_attn.")}
_TOGETHER = {"mlp.experts": "mlp.experts"}  # weight1 and weight2
_KINDS = {  # what stands last in a name, there and here
    **{kind: kind for kind in ("weight", "bias", "weight1", "weight2")},
    "e_score_correction_bias": "expert_bias",
}
_FC1 = "mlp.linear_fc1"
_FUSED = ("self_attention.linear_qkv", _FC1)
FAMILIES: dict[str, Family] = {
    "legacy": Family("model.layers.", _LEGACY_TOPS, _LEGACY, experts=MIXTRAL),
    "legacy-fused": Family(
        "model.layers.", _LEGACY_TOPS, _LEGACY, "attention.w_qkv", "feed_forward.w_gate_hidden"
    ),
    "mcore": Family("decoder.layers.", _MCORE_TOPS, _MCORE | _APART | _SHARED),
    "mcore-mla": Family("decoder.layers.", _MCORE_TOPS, _PLAIN | _LATENT | _APART | _SHARED),
    "mcore-v1": Family("decoder.layers.", _MCORE_TOPS, _MCORE | {"mlp.up_proj": _FC1}),
    "mcore-fused": Family(
        "decoder.layers.", _MCORE_TOPS, _MCORE | _TOGETHER, *_FUSED, experts=MCORE
    ),
    "mcore-contiguous": Family(
        "decoder.layers.", _MCORE_TOPS, _MCORE | _TOGETHER, *_FUSED, True, MCORE
    ),
}


@dataclass(frozen=True)
class AttentionHeads:
    """How many heads the queries have, and how many the keys and values."""

    queries: int
    keys: int


def heads_of(folder: Path) -> AttentionHeads | None:
    """The numbers of heads in the ``config.json`` of a model's folder; None if there is none."""
    where = folder / "config.json"
    if not files.exists(where):
        return None
    config = strict_json.read_object(where)
    inner = config.get("text_config")
    text_config = inner if isinstance(inner, dict) else config
    queries = text_config.get("num_attention_heads")
    keys = text_config.get("num_key_value_heads") or queries
    if not isinstance(queries, int) or not isinstance(keys, int) or min(queries, keys) < 1:
        return None
    return AttentionHeads(queries, keys)


def heads_near(folder: Path, base: Path | None = None) -> AttentionHeads | None:
    """The numbers of heads in the ``config.json`` of a model, in ``base`` or beside its weights."""
    for place in (base, folder, root_of(folder), root_of(folder).parent):
        if place is not None and (heads := heads_of(place)) is not None:
            return heads
    return None


def family_of(names: Mapping[str, Shape]) -> str | None:
    """The family of a source's names; None if they are not MindSpore's."""
    if "model.tok_embeddings.embedding_weight" in names:
        fused = any("attention.w_qkv." in name for name in names)
        return "legacy-fused" if fused else "legacy"
    if not any(name.startswith("decoder.layers.") for name in names):
        return None
    if any(".linear_kv_down_proj." in name for name in names):
        return "mcore-mla"
    has = {part: any(f".{part}." in name for name in names) for part in (*_FUSED, "mlp.gating")}
    # linear_fc1 is gate and up together, but beside mlp.gating it is up alone.
    if has[_FUSED[0]] or (has[_FC1] and not has["mlp.gating"]):
        return "mcore-fused"
    return "mcore-v1" if has[_FC1] else "mcore"


def usual(names: Mapping[str, Shape]) -> str:
    """The family that MindSpore Transformers uses for a model of Hugging Face's."""
    if any(".kv_a_proj_with_mqa." in name for name in names):
        return "mcore-mla"
    is_newer = any(".q_norm." in name or ".mlp.gate." in name for name in names)
    return "mcore" if is_newer else "legacy"


def to_mindspore(
    source: TensorSource, family: str, heads: AttentionHeads | None = None
) -> TensorSource:
    """Weights, and moments, with Hugging Face's names under those of a family in ``FAMILIES``."""
    return _each(source, lambda part: _named(part, FAMILIES[family], heads))


def to_huggingface(
    source: TensorSource, family: str, heads: AttentionHeads | None = None
) -> TensorSource:
    """Weights with a family's names under those of Hugging Face."""
    return _each(source, lambda part: _unnamed(part, FAMILIES[family], heads))


def _named(source: TensorSource, family: Family, heads: AttentionHeads | None) -> TensorSource:
    if family.experts is not None:
        source = stacked(source, family.experts)
    names = {_translated(name, family): name for name in source.shapes()}
    renamed: TensorSource = Renamed(source, names)
    for fused, parts in _fusions(family):
        turns = {}
        for name in list(renamed.shapes()):
            if fused is not None and (match := _inside(name, family, family.modules[parts[0]])):
                part_names = [f"{match[0]}{family.modules[part]}.{match[1]}" for part in parts]
                groups = _groups(renamed.shapes(), part_names, heads, family, name)
                rows = [renamed.shapes()[part][0] // groups for part in part_names]
                turns[f"{match[0]}{fused}.{match[1]}"] = turns_of(part_names, rows)
        renamed = InterleavedSource(renamed, turns) if turns else renamed
    return renamed


def _unnamed(source: TensorSource, family: Family, heads: AttentionHeads | None) -> TensorSource:
    unfused = source
    for fused, parts in _fusions(family):
        turns: dict[str, Turn] = {}
        for name, shape in unfused.shapes().items():
            if fused is not None and (match := _inside(name, family, fused)):
                rows = _rows_apart(parts, shape[0], heads, family, name)
                part_names = [f"{match[0]}{family.modules[part]}.{match[1]}" for part in parts]
                turns |= zip(part_names, turns_of([name] * len(part_names), rows), strict=True)
        unfused = DeinterleavedSource(unfused, turns) if turns else unfused
    unfused = Renamed(unfused, {_translated(n, family, back=True): n for n in unfused.shapes()})
    return unfused if family.experts is None else unstacked(unfused, family.experts)


def _fusions(family: Family) -> tuple[tuple[str | None, tuple[str, ...]], ...]:
    return ((family.qkv, _QKV), (family.gate_up, _GATE_UP))


def _inside(name: str, family: Family, module: str) -> tuple[str, str] | None:
    """Prefix and suffix of a layer's ``module`` in a name, if it is that module's."""
    if not name.startswith(family.layer):
        return None
    number, _, rest = name.removeprefix(family.layer).partition(".")
    path, _, kind = rest.rpartition(".")
    return (f"{family.layer}{number}.", kind) if path == module else None


def _groups(
    shapes: Mapping[str, Shape],
    parts: list[str],
    heads: AttentionHeads | None,
    family: Family,
    name: str,
) -> int:
    if missing := [part for part in parts if part not in shapes]:
        raise CheckpointError(f"{name}: cannot be fused with {missing[0]}, which is missing")
    if family.is_contiguous:
        return 1
    if len(parts) == len(_GATE_UP):
        # Gate and up take turns with single rows.
        return shapes[parts[0]][0]
    keys = _needed(heads, name).keys
    for part in parts:
        if shapes[part][0] % keys:
            raise CheckpointError(
                f"{part}: {shapes[part][0]} rows are no multiple of {keys} heads of keys"
            )
    return keys


def _rows_apart(
    parts: tuple[str, ...], rows: int, heads: AttentionHeads | None, family: Family, name: str
) -> list[int]:
    """The number of rows of each part in one group."""
    if len(parts) == len(_GATE_UP):
        shares, groups = [1, 1], rows // 2
    else:
        needed = _needed(heads, name)
        shares, groups = [needed.queries // needed.keys, 1, 1], needed.keys
        if needed.queries % needed.keys:
            raise CheckpointError(f"{name}: {needed} are no equal groups of heads")
    groups = 1 if family.is_contiguous else groups
    if not groups or rows % (groups * sum(shares)):
        raise CheckpointError(f"{name}: {rows} rows cannot be split into {sum(shares)} shares")
    return [rows // groups // sum(shares) * share for share in shares]


def _needed(heads: AttentionHeads | None, name: str) -> AttentionHeads:
    if heads is None:
        raise CheckpointError(
            f"{name}: queries, keys and values are fused by heads, whose number is in "
            "config.json; name the model with --base MODEL"
        )
    return heads


def _translated(name: str, family: Family, *, back: bool = False) -> str:
    tops, modules, kinds = (
        {new: old for old, new in table.items()} if back else table
        for table in (family.tops, family.modules, _KINDS)
    )
    if name in tops:
        return tops[name]
    layer, other = ("model.layers.", family.layer)[:: -1 if back else 1]
    if name.startswith(layer):
        number, _, rest = name.removeprefix(layer).partition(".")
        path, _, kind = rest.rpartition(".")
        expert = _EXPERT.search(path)
        # the tables contain one entry for all experts
        key = path if expert is None else path.replace(expert[0], ".experts.*.")
        if key in modules and number.isdecimal() and kind in kinds:
            module = modules[key].replace("*", expert[1] if expert else "*")
            return f"{other}{number}.{module}.{kinds[kind]}"
    whose = "Hugging Face" if back else "MindSpore Transformers"
    raise CheckpointError(
        f"{name[:200]!r} has no name in {whose} (known are Llama, Qwen2, Qwen3, Mixtral, Qwen3-MoE "
        "and DeepSeek-V3, each in its families); --names keep leaves names as they are"
    )


def _each(source: TensorSource, change: Callable[[TensorSource], TensorSource]) -> TensorSource:
    """``change`` applied to the weights, and in the same way to the moments."""
    prefixes = {n: next((p for p in MOMENTS if n.startswith(p)), "") for n in source.shapes()}
    parts = []
    for prefix in sorted(set(prefixes.values())):
        names = {n.removeprefix(prefix): n for n, before in prefixes.items() if before == prefix}
        parts.append((prefix, change(Renamed(source, names))))
    return JoinedSource(parts)
