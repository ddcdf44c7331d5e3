"""Adapters beyond what PEFT computes: frozen ones beside the one that is trained, starts from the
weights, DoRA in float32, and one for each row of a batch.

Frozen adapters beside the one that is trained, on the same base.

A LoRA adapter that starts from a part of the weights needs that part to be subtracted. PEFT
subtracts it from the base, so such an adapter opens on no other base. Here the base remains as it
is, and a frozen adapter has the part with the opposite sign. All adapters of a layer together are
one ordinary adapter, whose rank is the sum of all ranks: the matrices A one above the other, the
matrices B side by side.

Low-rank factors of a weight, from which LoRA may start instead of from random numbers.

Shapes: O and I the sizes of output and input, R rank. All is computed in float32 by rules that
depend on the weight and a seed alone, so any rank may compute the factors of any weight.

DoRA's magnitudes and lengths in float32, whatever the type of the base.

PEFT rounds both to the type of the base. In bfloat16 a magnitude is then wrong by up to 0.4 %, in
the first step as well as in merged weights. It also unpacks an 8-bit base in a way that a CPU does
not survive. The forward pass here takes the place of that of PEFT's module of magnitudes; modules,
names and files remain PEFT's.

Shapes: O and I the sizes of output and input, R rank.

Several LoRA adapters in one pass: each row of a batch has its own, or none.

The layers of the base compute all rows at once, with PEFT's adapters switched off. A forward hook
then adds to the rows of each adapter what PEFT's layer would: ``x A^T B^T * scaling``. With
``batch_invariant``, the rows of an adapter are computed in multiples of 4: then a row has the same
bits whatever is beside it, on some CPUs in float32.

PEFT's own ``adapter_names`` does the same, but for that multiple, for types narrower than float32
(it rounds the product before it adds it), and for a hook in every layer that it adds and removes in
each pass.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import RecipeError
from .config import dequantized
from .lora_targets import endings, is_added, plain_name

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer
if TYPE_CHECKING:
    from peft.tuners.lora.dora import DoraLinearLayer


Computed = Literal["pissa", "olora"]
_OVERSAMPLING = 8  # more directions than wanted, so that the last ones are exact, too


@dataclass(frozen=True)
class Factors:
    """``scale * b @ a`` is the part of a weight that they stand for."""

    a: torch.Tensor  # [R, I]
    b: torch.Tensor  # [O, R]

    def to(self, dtype: torch.dtype) -> Factors:
        """The same on the CPU, in another type."""
        return Factors(*(t.to("cpu", dtype).contiguous() for t in (self.a, self.b)))


def factors_of(
    kind: Computed, weight_OI: torch.Tensor, rank: int, scale: float, *, iterations: int, seed: int
) -> Factors:
    """The factors of ``weight_OI`` by the rule ``kind``."""
    exact = torch.float64 if weight_OI.dtype == torch.float64 else torch.float32
    weight_OI = torch.empty(weight_OI.shape, dtype=exact, device=weight_OI.device).copy_(weight_OI)
    if kind == "olora":  # OLoRA (arXiv:2406.01775): the first columns and rows of the QR
        q_OK, r_KI = torch.linalg.qr(weight_OI)
        return Factors(r_KI[:rank], q_OK[:, :rank])
    return principal(weight_OI, rank, scale, iterations=iterations, seed=seed)


def principal(
    weight_OI: torch.Tensor, rank: int, scale: float, *, iterations: int, seed: int
) -> Factors:
    """PiSSA (arXiv:2404.02948): the largest singular values with their vectors, the root of each
    value in both factors. ``iterations`` of the randomized method (arXiv:0909.4061); 0: exact."""
    if iterations:
        u_OR, s_R, v_IR = _largest(weight_OI, rank, iterations, seed)
    else:
        u_OK, s_K, v_KI = torch.linalg.svd(weight_OI, full_matrices=False)
        u_OR, s_R, v_IR = u_OK[:, :rank], s_K[:rank], v_KI[:rank].T
    root_R = (s_R / scale).sqrt()
    return Factors(root_R[:, None] * v_IR.T, u_OR * root_R)


def seed_of(seed: int, name: str) -> int:
    """A seed for the weight ``name``, whatever the others are."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def _largest(
    weight_OI: torch.Tensor, rank: int, iterations: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The ``rank`` largest singular values with their vectors, by iterations in a subspace."""
    size = min(rank + _OVERSAMPLING, *weight_OI.shape)
    generator = torch.Generator().manual_seed(seed)  # on the CPU: the same numbers everywhere
    start_IS = torch.randn(weight_OI.shape[1], size, generator=generator).to(weight_OI)
    q_OS = torch.linalg.qr(weight_OI @ start_IS).Q
    for _ in range(iterations):
        q_IS = torch.linalg.qr(weight_OI.T @ q_OS).Q
        q_OS = torch.linalg.qr(weight_OI @ q_IS).Q
    u_SS, s_S, v_SI = torch.linalg.svd(q_OS.T @ weight_OI, full_matrices=False)
    return (q_OS @ u_SS)[:, :rank], s_S[:rank], v_SI[:rank].T


TRAINED, START = "default", "start"  # names of adapters, as PEFT has them
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class StackedLayer:
    """A layer with several adapters."""

    name: str  # in PEFT's model, as in files
    layer: LoraLayer
    adapters: Sequence[str]  # that it has, the trained one first

    @property
    def scale(self) -> float:
        """That of the first; it is the scale of all of them together."""
        return float(self.layer.scaling[self.adapters[0]])

    @property
    def rank(self) -> int:
        """Of all together."""
        return sum(self.layer.r[adapter] for adapter in self.adapters)

    def factors(self, part: str) -> dict[str, nn.Parameter]:
        """The matrices ``lora_A`` or ``lora_B``, by their names in the model."""
        matrices = getattr(self.layer, part)
        return {
            f"{self.name}.{part}.{adapter}.weight": matrices[adapter].weight
            for adapter in self.adapters
        }


@dataclass(frozen=True)
class StartRule:
    """How the initial values of an adapter follow from the weights that it adapts."""

    kind: Computed
    iterations: int


def add_start(model: nn.Module, config: LoraConfig, kind: Computed, iterations: int) -> None:
    """Add the frozen counterpart of the trained adapter ``config``, which is 0 until their values
    are computed. Raises ``RecipeError`` if a layer is too small."""
    for stacked in _layers(model):
        if (most := min(stacked.layer.in_features, stacked.layer.out_features)) < stacked.rank:
            raise RecipeError(
                f"method.lora.rank: {stacked.name.removeprefix(_PREFIX)} has at most rank {most}, "
                f"of which init: {kind} cannot take {stacked.rank}; lower it, or set rank_pattern"
            )
    frozen_config = copy(config)
    frozen_config.lora_dropout, frozen_config.modules_to_save = 0.0, None
    add_frozen(model, START, frozen_config)
    model.start_rule = StartRule(kind, iterations)  # type: ignore[assignment]


def add_frozen(model: nn.Module, name: str, config: LoraConfig) -> None:
    """Add an adapter that is active and never trained."""
    before = {p: p.requires_grad for p in model.parameters()}
    peft: Any = model
    peft.add_adapter(name, config)
    for stacked in _layers(model):  # PEFT leaves a second adapter of a meta model on the CPU
        if name in stacked.adapters:
            device = stacked.layer.get_base_layer().weight.device
            for part in (stacked.layer.lora_A, stacked.layer.lora_B):
                part.to(device)
    for stacked in _layers(model):  # not through the model, which would activate modules to save
        stacked.layer.set_adapter(list(peft.peft_config))
    for parameter in model.parameters():
        parameter.requires_grad_(before.get(parameter, False))


def start_rule(model: nn.Module) -> StartRule | None:
    """The rule of the initial values, if they follow from the weights."""
    return getattr(model, "start_rule", None)


def stacked_layers(model: nn.Module) -> list[StackedLayer]:
    """The layers of which PEFT's ``model`` has adapters beside the trained one."""
    return [stacked for stacked in _layers(model) if set(stacked.adapters) != {TRAINED}]


def has_frozen(model: nn.Module) -> bool:
    """Whether PEFT's ``model`` has adapters beside the trained one."""
    return bool(set(getattr(model, "peft_config", ())) - {TRAINED})


def together(config: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """``adapter_config.json`` of one adapter that is all of ``model``'s together."""
    layers = {stacked.name.removeprefix(_PREFIX): stacked for stacked in _layers(model)}
    root = bool(config.get("use_rslora"))
    ranks = {name: stacked.rank for name, stacked in layers.items()}
    alphas = {
        name: _number(stacked.scale * (math.sqrt(stacked.rank) if root else stacked.rank))
        for name, stacked in layers.items()
    }
    changed: dict[str, Any] = {"init_lora_weights": True}
    for values, usual, pattern in (
        (ranks, "r", "rank_pattern"),
        (alphas, "lora_alpha", "alpha_pattern"),
    ):
        most = Counter(values.values()).most_common(1)[0][0]
        changed[usual] = most
        changed[pattern] = {name: value for name, value in values.items() if value != most}
    if any(TRAINED not in stacked.adapters for stacked in layers.values()):
        every = {plain_name(name) for name, _ in model.named_modules() if not is_added(name)}
        changed["target_modules"] = endings(layers, every)
    return {**config, **changed}


def _number(value: float) -> float:
    """Without the last bits, in which a product with a quotient may differ, if it is whole."""
    return float(round(value)) if math.isclose(value, round(value)) else value


def _layers(model: nn.Module) -> Iterator[StackedLayer]:
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            order = sorted(module.r, key=lambda adapter: adapter != TRAINED)
            yield StackedLayer(name, module, order)


def enable_float32_lengths(model: nn.Module) -> None:
    """Compute lengths in float32 in every linear layer of ``model`` that has magnitudes."""
    for module in _magnitudes(model).values():
        module.forward = partial(_forward, module)


@torch.no_grad()
def set_magnitudes(model: nn.Module) -> None:
    """Let the magnitudes of a new adapter, whose ``B`` is 0, be the lengths of the base's rows."""
    for name, module in _magnitudes(model).items():
        base = model.get_submodule(name.rpartition(".lora_magnitude_vector.")[0])
        weight = dequantized(base.get_base_layer())  # type: ignore[operator]
        if not weight.is_meta:
            rows = weight.T if module.fan_in_fan_out else weight
            module.weight.copy_(lengths(rows))


def lengths(rows: torch.Tensor) -> torch.Tensor:
    """The length of each row, in float32 or the type of ``rows``, if that is more exact."""
    exact = torch.promote_types(rows.dtype, torch.float32)
    norms: torch.Tensor = torch.linalg.norm(rows.to(exact), dim=1)
    return norms


def has_exact_lengths(module: nn.Module) -> bool:
    """Whether a module of magnitudes is a linear layer's, not an embedding's."""
    from peft.tuners.lora.dora import DoraLinearLayer

    return type(module) is DoraLinearLayer


def _magnitudes(model: nn.Module) -> dict[str, DoraLinearLayer]:
    """Those of linear layers, by name."""
    modules = {n: m for n, m in model.named_modules() if n.count("lora_magnitude_vector.")}
    return {name: module for name, module in modules.items() if has_exact_lengths(module)}


def _forward(
    module: DoraLinearLayer,
    x: torch.Tensor,
    *,
    lora_A: nn.Linear,
    lora_B: nn.Linear,
    scaling: float,
    base_layer: Any,
    base_result: torch.Tensor | None = None,
    **_: object,  # the name of the adapter
) -> torch.Tensor:
    """What is added to the result of the base; the arguments are PEFT's."""
    weight = dequantized(base_layer)
    rows_OI = weight.T if module.fan_in_fan_out else weight
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):  # the paper's section 4.3
        exact = torch.promote_types(rows_OI.dtype, torch.float32)
        a_RI, b_OR = lora_A.weight.to(exact), lora_B.weight.to(exact)
        length_O = lengths(torch.addmm(rows_OI.to(exact), b_OR, a_RI, alpha=scaling))
    # in the type of the magnitudes, which sharding may round: at first both are the same
    scale_O = module.weight / length_O.to(module.weight.dtype)
    if base_result is None:
        base_result = F.linear(x, rows_OI.to(x.dtype))
    elif base_layer.bias is not None:
        base_result = base_result - base_layer.bias
    update = lora_B(lora_A(x)) * scaling
    delta: torch.Tensor = (scale_O - 1) * base_result + scale_O * update
    return delta


_ROWS = 4  # of which a product has a multiple, to be the same whatever is beside it


@dataclass(frozen=True)
class _Group:
    """The rows of one adapter."""

    name: str
    places: torch.Tensor | None  # [n] in the batch; None: all of it
    filled: torch.Tensor | None  # [m] the same, and perhaps the first again up to a multiple


class AdaptersByRow:
    """The adapters of PEFT's layers in one model, of which rows choose. Call ``attach`` after
    adapters came or went."""

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self.version = 0  # it differs after adapters came or went
        self._multiple = _ROWS if batch_invariant else 1
        self._handles: list[Any] = []
        self._groups: list[_Group] = []
        self._num_rows = 0
        self._device = torch.device("cpu")

    def attach(self, model: nn.Module) -> None:
        """Watch the layers that ``model`` has now."""
        from peft.tuners.lora import Linear

        self.version += 1
        for handle in self._handles:
            handle.remove()
        layers = [layer for layer in model.modules() if type(layer) is Linear]
        self._handles = [layer.register_forward_hook(self._add) for layer in layers]
        self._device = next(model.parameters()).device

    @contextmanager
    def on(self, names: Sequence[str | None]) -> Iterator[None]:
        """A block in which the rows of a pass have these adapters; PEFT's must be switched off."""
        self._num_rows, self._groups = len(names), self._grouped(names)
        try:
            yield
        finally:
            self._groups = []

    def _grouped(self, names: Sequence[str | None]) -> list[_Group]:
        groups = []
        for name in dict.fromkeys(names):
            places = [place for place, other in enumerate(names) if other == name]
            if name is None:
                continue
            if len(places) == len(names) and not len(names) % self._multiple:
                groups.append(_Group(name, None, None))
                continue
            filled = [*places, *places[:1] * (-len(places) % self._multiple)]
            both = (torch.tensor(each, device=self._device) for each in (places, filled))
            groups.append(_Group(name, *both))
        return groups

    def _add(
        self, layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> torch.Tensor | None:
        """The output of a layer of the base, with what the adapters of the rows add."""
        for group in self._groups:
            if len(inputs[0]) != self._num_rows:
                raise ValueError(
                    f"a layer got {len(inputs[0])} rows, where the batch has {self._num_rows}"
                )
            if group.name in layer.lora_A:  # type: ignore[operator]
                output = _added(layer, group, inputs[0], output)
        return output if self._groups else None


def _added(layer: Any, group: _Group, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """``output`` with the product of one adapter on its rows. As PEFT, it is added before it is
    rounded to the type of the output."""
    first, second = layer.lora_A[group.name], layer.lora_B[group.name]
    scaling = layer.scaling[group.name]
    if group.places is None or group.filled is None:
        whole: torch.Tensor = output + second(first(x.to(first.weight.dtype))) * scaling
        return whole.to(output.dtype)
    num_tokens = x.numel() // (len(x) * x.shape[-1])
    chosen = group.filled if num_tokens % _ROWS else group.places
    added = second(first(x[chosen].to(first.weight.dtype)))[: len(group.places)] * scaling
    mixed = (output[group.places] + added).to(output.dtype)
    return output.index_copy(0, group.places, mixed)


def can_be_by_row(model: nn.Module, name: str) -> bool:
    """Whether all that the adapter ``name`` adds to ``model`` are plain products of linear layers:
    no DoRA or other variant, no embedding, no parameter, no quantized layer."""
    from peft.tuners.lora import Linear
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    having = [x for x in layers if any(name in getattr(x, n) for n in x.adapter_layer_names)]
    return all(type(layer) is Linear and name not in layer.lora_variant for layer in having)
