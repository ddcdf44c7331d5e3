"""Merge a PEFT adapter into the base it was trained on, box by box.

``merged`` finds out what the adapter's tensors change, and ``Merged`` computes any box of the
result when it is read.

PEFT's names carry the module of the base and the role of the tensor:
``base_model.model.<module>.lora_A.weight`` belongs to the base tensor ``<module>.weight``, unless
transformers gives it another name in memory, or fuses it there with others.

Shapes: O outputs, I inputs, R rank. LoRA (Hu et al. 2021): ``W_OI + scale * B_OR @ A_RI``. DoRA
(Liu et al. 2024) then scales every row to a learned length: ``m_O / ||V_OI|| * V_OI`` with
``V = W + scale * B A`` and the norm over I. Experts, of which a model may have all E in one tensor,
have an update each: PEFT stores A as [E R, I] and B as [O, R E].
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ...parallel.sharding import Box
from ...storage import files
from ...storage.weight_files import ADAPTER_PREFIX
from ..disk import strict_json
from ..disk.folder import ADAPTER_CONFIG
from ..sources import FolderSource, Renamed, Shape, TensorSource, once, read_whole, rounded
from .detection import open_weights

PREFIX = ADAPTER_PREFIX
HEAD = "lm_head.weight"
TOKENS = ".token_adapter.trainable_tokens_delta"  # the embeddings of some tokens
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_ROLES = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_B.bias": "bias",
    "lora_embedding_A": "embedding_a",
    "lora_embedding_B": "embedding_b",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
# Settings whose adapters are not "base + scale * B A", or need a base that was changed first.
_UNMERGEABLE = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "megatron_config",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)
# They subtract from the base what the adapter starts with (decisions/0050).
CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_ELSEWHERE = "merge it with peft's own merge_and_unload()"


# Of an adapter of another kind, its tensors and configuration as those of a LoRA adapter; from its
# own, and the shape of each adapted module's weight.
AsLoRA = Callable[
    [TensorSource, Mapping[str, Any], Mapping[str, Shape]],
    tuple[TensorSource, Mapping[str, Any]],
]


@dataclass(frozen=True)
class Updated:
    """What the update of one of PEFT's modules changes."""

    tensors: Mapping[str, ExpertSlice | None]  # names in the files; of experts, where they lie
    scale: float | None = None  # None: as the configuration says
    is_transposed: bool = False  # of experts


def merged(
    base: TensorSource,
    adapter_folder: Path,
    updated: Mapping[str, Updated] | None = None,
    as_lora: AsLoRA | None = None,
) -> Merged:
    """``base`` with the LoRA or DoRA adapter in ``adapter_folder`` merged in, or with one that
    ``as_lora`` makes LoRA. ``updated`` are the modules that change other tensors than
    ``<module>.weight``, and the parameters of modules trained in full that have another name in
    the base.

    A base with tied embeddings stores no ``lm_head.weight``. If the adapter has values of its own
    for the head, the result has that tensor, and its configuration must have
    ``tie_word_embeddings: false``.
    """
    with files.raising(CheckpointError):
        config: Mapping[str, Any] = strict_json.read_object(adapter_folder / ADAPTER_CONFIG)
    if config.get("target_parameters") and updated is None:
        raise CheckpointError(
            f"{adapter_folder / ADAPTER_CONFIG}: an adapter with target_parameters cannot be "
            f"merged without its model; {_ELSEWHERE}"
        )

    adapter: TensorSource = FolderSource(open_weights(adapter_folder))
    renamed = {name: next(iter(update.tensors)) for name, update in (updated or {}).items()}
    if as_lora is not None:
        stored = base.shapes()
        weight_shapes = {module: stored[name] for module, name in renamed.items() if name in stored}
        try:
            adapter, config = as_lora(adapter, config, weight_shapes)
        except CheckpointError as error:
            raise CheckpointError(f"{adapter_folder}: {error}") from None
    _check_config(config, adapter_folder / ADAPTER_CONFIG)
    modules, replaced, rows = _sort(adapter, adapter_folder)
    replaced = {renamed.get(name, name): key for name, key in replaced.items()}
    replaced = _without_tied(adapter, replaced, base.shapes())
    plain = {module: Updated({f"{module}.weight": None}) for module in modules}
    updates = {module: (updated or {}).get(module, usual) for module, usual in plain.items()}
    base = _with_rows(base, adapter, adapter_folder, rows, config)
    changed = {name for update in updates.values() for name in update.tensors}
    base = _with_head(base, {*replaced, *changed})
    shapes = base.shapes()
    for name, key in replaced.items():
        if name not in shapes:
            raise _other_model(adapter_folder, key, name)
    shapes = {**shapes, **{name: adapter.shapes()[key] for name, key in replaced.items()}}
    deltas, added = dict[str, Delta](), {}
    for module, roles in modules.items():
        for name, at in updates[module].tensors.items():
            if name not in shapes:
                raise _other_model(adapter_folder, next(iter(roles.values())), name)
            if at is not None:
                deltas[name] = _of_experts(
                    adapter, adapter_folder, module, roles, updates[module], at
                )
                continue
            deltas[name] = _delta(adapter, adapter_folder, module, roles, shapes[name], config)
            if "bias" in roles:
                bias = f"{name.removesuffix('.weight')}.bias"
                if bias not in shapes:
                    raise CheckpointError(
                        f"{adapter_folder}: {roles['bias']} (lora_bias) cannot be merged into "
                        f"{name}: this layer of the base has no bias; open base and adapter with "
                        "PEFT, without a merge, or train without lora_bias"
                    )
                added[bias] = (roles["bias"], deltas[name].scale)
    return Merged(base, adapter, deltas, replaced, added)


def _check_config(config: Mapping[str, Any], where: Path) -> None:
    """Raise ``CheckpointError`` unless the adapter is one that can be merged into its base."""
    if config.get("peft_type") != "LORA":
        kind = str(config.get("peft_type"))[:40]
        raise CheckpointError(f"{where}: peft_type {kind} cannot be merged here; {_ELSEWHERE}")
    if odd := [name for name in _UNMERGEABLE if config.get(name)]:
        raise CheckpointError(
            f"{where}: an adapter with {odd[0]} cannot be merged here; {_ELSEWHERE}"
        )
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(CHANGED_BASE):
        raise CheckpointError(
            f"{where}: init_lora_weights {init!r} changed the base at the start of training; "
            f"convert the adapter with peft's path_initial_model_for_weight_conversion first"
        )
    for name in ("lora_alpha", "r"):
        if not isinstance(config.get(name), int | float):
            raise CheckpointError(f"{where}: {name} must be a number, found {config.get(name)!r}")


def _sort(
    adapter: TensorSource, folder: Path
) -> tuple[dict[str, dict[str, str]], dict[str, str], dict[str, str]]:
    """Low-rank tensors by module and role, full tensors by the base tensor that they replace, and
    embeddings of some tokens by the module that they belong to."""
    modules: dict[str, dict[str, str]] = {}
    replaced, rows = {}, {}
    for key in adapter.shapes():
        name = key.removeprefix(PREFIX)
        for ending, role in _ROLES.items():
            if name.endswith(f".{ending}"):
                module = name.removesuffix(f".{ending}")
                modules.setdefault(module, {})[role] = key
                break
        else:
            if name.endswith(TOKENS):
                rows[name.removesuffix(TOKENS)] = key
                continue
            if "lora_" in name or "token_adapter" in name or name == key:
                raise CheckpointError(
                    f"{folder}: {key!r} is a tensor this cannot merge; {_ELSEWHERE}"
                )
            replaced[name.replace(".base_layer.", ".")] = key
    return modules, replaced, rows


def _with_rows(
    base: TensorSource,
    adapter: TensorSource,
    folder: Path,
    rows: Mapping[str, str],
    config: Mapping[str, Any],
) -> TensorSource:
    """``base`` with the embeddings of tokens that the adapter has trained."""
    token_indices = config.get("trainable_token_indices")
    if token_indices and not rows:
        raise CheckpointError(
            f"{folder}: the embeddings of trainable_token_indices in {ADAPTER_CONFIG} are missing"
        )
    replaced_rows = {}
    for module, key in rows.items():
        by_module = token_indices if isinstance(token_indices, Mapping) else {module: token_indices}
        ids = next(
            (ids for name, ids in by_module.items() if f".{module}".endswith(f".{name}")), None
        )
        name, shapes = f"{module}.weight", base.shapes()
        if name not in shapes:  # a copy of another one's, where the embeddings are tied
            _check_tied(adapter, folder, key, [each for each in rows.values() if each != key])
            continue
        if not isinstance(ids, list) or adapter.shapes()[key] != (len(ids), shapes[name][1]):
            raise CheckpointError(
                f"{folder}: {key} does not fit trainable_token_indices in {ADAPTER_CONFIG}"
            )
        if not all(isinstance(row, int) and 0 <= row < shapes[name][0] for row in ids):
            raise CheckpointError(
                f"{folder / ADAPTER_CONFIG}: trainable_token_indices are tokens that {name} of the "
                "base does not have"
            )
        replaced_rows[name] = (key, ids)
    return ReplacedRows(base, adapter, replaced_rows) if replaced_rows else base


def _check_tied(adapter: TensorSource, folder: Path, key: str, others: Collection[str]) -> None:
    """Raise ``CheckpointError`` unless ``key``, which the base has no place for, has the values of
    one of ``others``: the live state of tied embeddings has their rows twice."""
    if not others:
        raise _other_model(folder, key, f"{key.removeprefix(PREFIX).removesuffix(TOKENS)}.weight")
    if not any(same_values(adapter, key, other) for other in others):
        raise CheckpointError(
            f"{folder}: {key} and {min(others)} are rows of tied embeddings, and differ; merge it "
            "with peft's own merge_and_unload()"
        )


def _without_tied(
    adapter: TensorSource, replaced: Mapping[str, str], shapes: Mapping[str, Shape]
) -> dict[str, str]:
    """Skip a copy of a replaced tensor that the base does not store, because it is tied."""
    stored = {name: key for name, key in replaced.items() if name in shapes}
    untied = {
        name: key
        for name, key in replaced.items()
        if name not in shapes and not any(same_values(adapter, key, k) for k in stored.values())
    }
    return stored | untied


def _with_head(base: TensorSource, touched: Collection[str]) -> TensorSource:
    """``base``, with the tied head as a tensor of its own if the adapter changes it."""
    shapes = base.shapes()
    tied = [name for name in shapes if name.endswith(_EMBEDDINGS)]
    if HEAD not in touched or HEAD in shapes or len(tied) != 1:
        return base
    return Renamed(base, {**{name: name for name in shapes}, HEAD: tied[0]})


def _delta(
    adapter: TensorSource,
    folder: Path,
    module: str,
    roles: Mapping[str, str],
    shape: Shape,
    config: Mapping[str, Any],
) -> Delta:
    is_embedding = "embedding_a" in roles
    try:
        a, b = (
            (roles["embedding_a"], roles["embedding_b"])
            if is_embedding
            else (roles["a"], roles["b"])
        )
    except KeyError as error:
        raise CheckpointError(f"{folder}: half of the adapter of {module} is missing") from error
    a_shape, b_shape = adapter.shapes()[a], adapter.shapes()[b]
    if len(a_shape) != 2 or len(b_shape) != 2 or len(shape) != 2 or a_shape[0] != b_shape[1]:
        raise CheckpointError(
            f"{folder}: the adapter of {module} has shapes {list(a_shape)} and {list(b_shape)} for "
            f"a weight of {list(shape)}; only linear and embedding layers can be merged here"
        )
    update = (b_shape[0], a_shape[1])
    # The shape of a square weight does not tell; PEFT writes fan_in_fan_out for GPT-2's Conv1D.
    is_square = update[0] == update[1]
    is_transposed = is_embedding or (
        bool(config.get("fan_in_fan_out")) if is_square else update[::-1] == shape
    )
    if shape != (update[::-1] if is_transposed else update):
        raise CheckpointError(
            f"{folder}: an adapter of another model: {b} x {a} gives {list(update)}, but "
            f"{module}.weight of the base is {list(shape)}"
        )
    return Delta(
        a, b, _scale(module, a_shape[0], config, folder), roles.get("magnitude"), is_transposed
    )


def _of_experts(
    adapter: TensorSource,
    folder: Path,
    module: str,
    roles: Mapping[str, str],
    updated: Updated,
    at: ExpertSlice,
) -> Delta:
    if missing := {"a", "b"} - roles.keys():
        raise CheckpointError(f"{folder}: {module} has no lora_{min(missing).upper()}")
    (a_rows, _), (_, b_columns) = (adapter.shapes()[roles[role]] for role in ("a", "b"))
    if a_rows != b_columns or a_rows % at.num_experts or updated.scale is None:
        raise CheckpointError(
            f"{folder}: the adapter of {module} has {a_rows} and {b_columns} rows and columns for "
            f"{at.num_experts} experts; it is of another model"
        )
    return Delta(
        roles["a"],
        roles["b"],
        updated.scale,
        is_transposed=updated.is_transposed,
        experts=at,
    )


def _scale(module: str, rank: int, config: Mapping[str, Any], folder: Path) -> float:
    """alpha / r, or alpha / sqrt(r) with rank-stabilized LoRA; alpha may differ by module."""
    alpha = config["lora_alpha"]
    for pattern, module_alpha in (config.get("alpha_pattern") or {}).items():
        try:
            # As PEFT matches (`get_pattern_key`): the first pattern
            # that ends the name, from a dot on.
            matches = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            raise CheckpointError(f"{folder}: alpha_pattern {pattern!r}: {error}") from error
        if matches:
            alpha = module_alpha
            break
    # The rank of the factors, not `r`: rank_pattern may give a module another one.
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _other_model(folder: Path, key: str, name: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: an adapter of another model: {key} belongs to {name}, which the base does "
        "not have"
    )


_BLOCK = 4 << 20  # elements computed at a time


@dataclass(frozen=True, slots=True)
class ExpertSlice:
    """The position of a tensor of the files in the weights of all experts: [E, O, I] in memory."""

    num_experts: int
    start: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Delta:
    """The update of one weight: names in the adapter, and its settings."""

    a: str  # [R, I]
    b: str  # [O, R]
    scale: float
    magnitude: str | None = None  # [O], DoRA only
    is_transposed: bool = False  # the weight is stored as [I, O]: embeddings, GPT-2's Conv1D
    experts: ExpertSlice | None = None  # it is an update of experts


@dataclass(frozen=True)
class Merged:
    """A base whose tensors are replaced, or updated, by an adapter.

    Computed in float32 (float64 for a float64 base) and rounded once, to the dtype of the base.
    """

    base: TensorSource
    adapter: TensorSource
    deltas: Mapping[str, Delta]  # by base name
    replaced: Mapping[str, str] = field(default_factory=dict)  # base name -> adapter name
    added: Mapping[str, tuple[str, float]] = field(default_factory=dict)  # biases: name, scale
    _norms: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)
    _factors: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    @once
    def shapes(self) -> Mapping[str, Shape]:
        """Those of the base, except for replaced tensors: a resized vocabulary has more rows."""
        shapes = self.adapter.shapes()
        return {**self.base.shapes(), **{name: shapes[new] for name, new in self.replaced.items()}}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Those of the base."""
        return self.base.dtypes()

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The merged values."""
        dtype = self.base.dtypes()[name]
        if name not in self.deltas and name not in self.added:
            return rounded(self._plain(name, box), dtype, name)
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        if name in self.added:
            bias, scale = self.added[name]
            update = self.adapter.read(bias, box).to(exact) * scale
            return rounded(self._plain(name, box).to(exact) + update, dtype, name)
        delta = self.deltas[name]
        if delta.magnitude is None:
            return rounded(self._with_update(name, box, delta, exact), dtype, name)
        return rounded(self._scaled(name, box, delta, exact), dtype, name)

    def _plain(self, name: str, box: Box) -> torch.Tensor:
        if name in self.replaced:
            return self.adapter.read(self.replaced[name], box)
        return self.base.read(name, box)

    def _with_update(self, name: str, box: Box, delta: Delta, exact: torch.dtype) -> torch.Tensor:
        """V = W + scale * B A in ``box``."""
        weight = self._plain(name, box).to(exact)
        if delta.experts is not None:
            return self._with_experts(weight, box, delta, delta.experts)
        out, inner = (1, 0) if delta.is_transposed else (0, 1)
        a_RI, b_OR = self._factor(delta.a, exact), self._factor(delta.b, exact)
        a_RI = a_RI[:, box.start[inner] : box.stop[inner]]
        b_OR = b_OR[box.start[out] : box.stop[out]]
        left, right = (a_RI.T, b_OR.T) if delta.is_transposed else (b_OR, a_RI)
        return torch.addmm(weight, left, right, alpha=delta.scale)

    def _with_experts(
        self, weight: torch.Tensor, box: Box, delta: Delta, at: ExpertSlice
    ) -> torch.Tensor:
        """The same for one expert's matrix, or for the matrices of several."""
        a, b = self._factor(delta.a, weight.dtype), self._factor(delta.b, weight.dtype)
        # PEFT orders the rows of A by expert, then rank, and the columns of B by rank, then expert.
        a_ERI, b_ORE = a.view(at.num_experts, -1, a.shape[1]), b.view(len(b), -1, at.num_experts)
        missing = 3 - len(box.shape)  # of one expert, the files may have a matrix
        start, shape = (0,) * missing + box.start, (1,) * missing + box.shape
        first, row, column = map(add, at.start, start)
        rows, columns = slice(row, row + shape[1]), slice(column, column + shape[2])
        outs, ins = (columns, rows) if delta.is_transposed else (rows, columns)
        merged = weight.reshape(shape).clone()
        for index, expert_weight in enumerate(merged):
            update = b_ORE[outs, :, first + index] @ a_ERI[first + index, :, ins]
            expert_weight.add_(update.T if delta.is_transposed else update, alpha=delta.scale)
        return merged.view(weight.shape)

    def _factor(self, name: str, exact: torch.dtype) -> torch.Tensor:
        """A or B; the last few are cached, because every block of a weight needs them, and experts
        take turns with two kinds of weights."""
        if name not in self._factors:
            while len(self._factors) > 3:
                del self._factors[next(iter(self._factors))]
            self._factors[name] = read_whole(self.adapter, name).to(exact)
        return self._factors[name]

    def _scaled(self, name: str, box: Box, delta: Delta, exact: torch.dtype) -> torch.Tensor:
        """DoRA: rows of V scaled to their learned lengths; the norm is over complete rows."""
        assert delta.magnitude is not None  # or there is nothing to scale to
        out = 1 if delta.is_transposed else 0
        outs = Box((box.start[out],), (box.shape[out],))
        m_O: torch.Tensor = self.adapter.read(delta.magnitude, outs).to(exact)
        if delta.is_transposed:
            value = self._with_update(name, box, delta, exact)
            norm_O = self._column_norms(name, delta, exact)[box.start[1] : box.stop[1]]
            return value * (m_O / norm_O)[None, :]
        whole = self.shapes()[name]
        rows = Box((box.start[0], 0), (box.shape[0], whole[1]))
        value_OI = self._with_update(name, rows, delta, exact)
        norm_O = value_OI.square().sum(1).sqrt()
        scaled_OI = value_OI * (m_O / norm_O)[:, None]
        return scaled_OI[:, box.start[1] : box.stop[1]]

    def _column_norms(self, name: str, delta: Delta, exact: torch.dtype) -> torch.Tensor:
        """Norms over the stored rows; cached, because every block of rows needs them."""
        if name not in self._norms:
            shape = self.shapes()[name]
            # Blocks of rows are added up one after another, so the sum
            # has more digits than its terms.
            total = torch.zeros(shape[1], dtype=torch.float64)
            for box in Box.whole(shape).blocks(max(shape[1], _BLOCK)):
                total += self._with_update(name, box, delta, exact).double().square().sum(0)
            self._norms[name] = total.sqrt().to(exact)
        return self._norms[name]


def same_values(source: TensorSource, a: str, b: str) -> bool:
    """Whether two tensors of a source are equal."""
    if source.shapes()[a] != source.shapes()[b]:
        return False
    return torch.equal(read_whole(source, a), read_whole(source, b))


@dataclass(frozen=True)
class ReplacedRows:
    """``base`` with rows from ``adapter``: by the name of a matrix, the adapter's tensor, and the
    row that each row of it replaces."""

    base: TensorSource
    adapter: TensorSource
    rows: Mapping[str, tuple[str, Sequence[int]]]

    def shapes(self) -> Mapping[str, Shape]:
        """Those of the base: rows are replaced, and none is added."""
        return self.base.shapes()

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Those of the base, to which the new rows are cast."""
        return self.base.dtypes()

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The values of the base, but for those rows."""
        values = self.base.read(name, box)
        if name not in self.rows:
            return values
        key, ids = self.rows[name]
        values = values.clone()
        for adapter_row, row in enumerate(ids):
            if box.start[0] <= row < box.stop[0]:
                part = Box((adapter_row, *box.start[1:]), (1, *box.shape[1:]))
                new = self.adapter.read(key, part)[0]
                values[row - box.start[0]] = rounded(new, values.dtype, name)
        return values
