"""Forward passes that take the place of those of PEFT's LoRA layers. Modules, names and files
remain PEFT's.

Fused LoRA, for training: y = W x + b + scale B A x in one autograd function. PEFT adds the update
to the base's output, and autograd adds the two gradients of x: each is an additional pass over
memory and another copy. Here the second product of each pair is accumulated into the result of the
first, forward and backward. The scale is applied where there are only ``rank`` columns.

DoRA's magnitudes and lengths in float32, whatever the type of the base. PEFT rounds both to the
type of the base. In bfloat16 a magnitude is then wrong by up to 0.4 %, in the first step as well as
in merged weights. PEFT also unpacks an 8-bit base in a way that a CPU does not survive.

Adapters by row, for serving: each row of a batch has its own adapter, or none. The layers of the
base compute all rows at once, with PEFT's adapters switched off. A forward hook then adds to the
rows of each adapter what PEFT's layer would. PEFT's own ``adapter_names`` does the same, but for
equal bits (see ``_MULTIPLE``), for types narrower than float32 (it rounds the product before it
adds it), and for a hook in every layer that it adds and removes in each pass.

Shapes: T tokens, I and O the sizes of input and output, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from .config import dequantized
from .expert_lora import computes_grouped, grouped_forward

if TYPE_CHECKING:
    from peft.tuners.lora import Linear, ParamWrapper
    from peft.tuners.lora.dora import DoraLinearLayer

Forward = Callable[..., torch.Tensor]


def enable_fused_lora(model: nn.Module) -> None:
    """Enable it for every linear layer that PEFT has adapted in ``model``, where possible, and the
    products of ``expert_lora`` for experts."""
    from peft.tuners.lora import Linear, ParamWrapper

    for layer in model.modules():
        if "forward" in vars(layer):
            continue
        if type(layer) is Linear or _adapts_parameter(layer):
            layer.forward = partial(_fused_forward, layer, layer.forward)
        elif isinstance(layer, ParamWrapper) and computes_grouped(layer.get_base_layer()):
            layer.forward = partial(grouped_forward, layer, layer.forward)


@contextmanager
def unadapted(model: nn.Module) -> Iterator[None]:
    """A block in which layers of ``model`` that PEFT has wrapped compute what their bases do, for
    what no adapter changes. PEFT's layers of fused experts ask for the autocast type of the device,
    and the meta device has none (0.21.2, tuners/lora/layer.py: _LoraFactorsProxy)."""
    if not getattr(model, "peft_config", None):  # PEFT is not imported for it
        yield
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    before = [layer.disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True  # its setter changes which parameters are trained
    try:
        yield
    finally:
        for layer, was_off in zip(layers, before, strict=True):
            layer._disable_adapters = was_off


def disable_fused_lora(model: nn.Module) -> None:
    """Restore PEFT's own forward passes, which a compiler fuses itself, but for the weights adapted
    as parameters: PEFT replaces a module's class while it computes these."""
    for layer in model.modules():
        if _is_fused(layer) and not _adapts_parameter(layer):
            del layer.forward


def count_fused(model: nn.Module) -> int:
    """The linear layers in which it is enabled."""
    return sum(map(_is_fused, model.modules()))


def _is_fused(layer: nn.Module) -> bool:
    forward = vars(layer).get("forward")
    return isinstance(forward, partial) and forward.func is _fused_forward


def _adapts_parameter(layer: nn.Module) -> bool:
    """Whether PEFT adapts the weight of a linear layer as a parameter in ``layer``."""
    from peft.tuners.lora import ParamWrapper

    return isinstance(layer, ParamWrapper) and isinstance(layer.base_layer, nn.Linear)


def forms_experts(model: nn.Module) -> bool:
    """Whether PEFT forms the updated weights of adapted experts in ``model``."""
    from peft.tuners.lora import ParamWrapper

    wrappers = (layer for layer in model.modules() if isinstance(layer, ParamWrapper))
    return any("forward" not in vars(layer) for layer in wrappers)


def _fused_forward(
    layer: Linear | ParamWrapper,
    peft_forward: Forward,
    x: torch.Tensor,
    *args: object,
    **kwargs: object,
) -> torch.Tensor:
    """The result of PEFT's own forward pass, by the first of three ways that the layer allows: one
    autograd function, if base and adapters are plain matrices of one type; the base, then its one
    adapter; PEFT's own, for anything else than a sum of products with one scale."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    pairs = [(layer.lora_A[name], layer.lora_B[name]) for name in names]
    scales = {layer.scaling[name] for name in names}
    is_off = layer.disable_adapters or layer.merged
    has_bias = any(b.bias is not None for _, b in pairs)
    if is_off or has_bias or layer.lora_variant or len(scales) != 1 or args or kwargs:
        return peft_forward(x, *args, **kwargs)
    base, scale, device_type = layer.base_layer, scales.pop(), x.device.type
    dropouts = [layer.lora_dropout[name] for name in names]

    is_autocast = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(
        device_type
    )
    # Cast once: autocast would cast it for each of the three products.
    x_cast = x.to(torch.get_autocast_dtype(device_type)) if is_autocast else x
    has_dropout = layer.training and any(type(module) is not nn.Identity for module in dropouts)
    is_plain = all(_is_plain(module) for pair in pairs for module in (base, *pair))
    if is_plain and not has_dropout and not base.weight.requires_grad:
        weights = (base.weight, base.bias, *_concatenated(pairs))
        if is_autocast:
            weights = tuple(w if w is None else w.to(x_cast.dtype) for w in weights)  # type: ignore[assignment]
        if all(w is None or w.dtype == x_cast.dtype for w in weights):
            fused: torch.Tensor = _LowRank.apply(x_cast, *weights, scale)  # type: ignore[no-untyped-call]
            return fused

    if len(pairs) > 1:
        return peft_forward(x)
    (a, b), (dropout,) = pairs[0], dropouts
    y: torch.Tensor = base(x_cast)
    x_of_a = dropout(x_cast if is_autocast else x.to(a.weight.dtype))
    update: torch.Tensor = b(a(x_of_a) * scale)
    return (y + update).to(y.dtype)


def _is_plain(module: nn.Module) -> bool:
    """Whether calling ``module`` is a product with its weight and nothing else."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return type(module) is nn.Linear and "forward" not in vars(module) and not hooks


def _concatenated(
    pairs: Sequence[tuple[nn.Linear, nn.Linear]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of all adapters as one pair: their sum is rounded once, so adapters that are
    large and nearly opposite lose no digits."""
    if len(pairs) == 1:
        return pairs[0][0].weight, pairs[0][1].weight
    return torch.cat([a.weight for a, _ in pairs]), torch.cat([b.weight for _, b in pairs], 1)


class _LowRank(torch.autograd.Function):
    """dy = g: dx = g W + scale (g B) A, dA = scale (g B)' x, dB = scale g' (A x)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        a_RI: torch.Tensor,
        b_OR: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        x_TI = x.reshape(-1, x.shape[-1])
        low_TR = x_TI @ a_RI.t()
        y_TO = F.linear(x_TI, weight_OI, bias_O).addmm_(low_TR, b_OR.t(), alpha=scale)
        saved_x = x if ctx.needs_input_grad[3] else None  # a frozen A needs no input
        ctx.save_for_backward(saved_x, weight_OI, a_RI, b_OR, low_TR)
        ctx.shape = x.shape
        ctx.scale = scale
        # what autograd takes for a view may not be changed in place, as some experts' layers do
        y: torch.Tensor = torch.ops.aten._unsafe_view(y_TO, [*x.shape[:-1], y_TO.shape[-1]])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight_OI, a_RI, b_OR, low_TR = ctx.saved_tensors
        needs_dx, _, _, needs_da, needs_db, _ = ctx.needs_input_grad
        g_TO = gradients[0].reshape(-1, gradients[0].shape[-1])
        g_TR = (g_TO @ b_OR).mul_(ctx.scale)
        dx = (g_TO @ weight_OI).addmm_(g_TR, a_RI).view(ctx.shape) if needs_dx else None
        da_RI = g_TR.t() @ x.reshape(-1, x.shape[-1]) if needs_da else None
        db_OR = (g_TO.t() @ low_TR).mul_(ctx.scale) if needs_db else None
        return dx, None, None, da_RI, db_OR, None


def enable_float32_lengths(model: nn.Module) -> None:
    """Compute lengths in float32 in every linear layer of ``model`` that has DoRA's magnitudes."""
    for module in _magnitudes(model).values():
        module.forward = partial(_dora_forward, module)


@torch.no_grad()
def set_magnitudes(model: nn.Module) -> None:
    """Let the magnitudes of a new adapter, whose ``B`` is 0, be the lengths of the base's rows."""
    for name, module in _magnitudes(model).items():
        base = model.get_submodule(name.rpartition(".lora_magnitude_vector.")[0])
        weight = dequantized(base.get_base_layer())  # type: ignore[operator]
        if not weight.is_meta:
            module.weight.copy_(lengths(weight.T if module.fan_in_fan_out else weight))


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
    modules = {n: m for n, m in model.named_modules() if "lora_magnitude_vector." in n}
    return {name: module for name, module in modules.items() if has_exact_lengths(module)}


def _dora_forward(
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
    # no gradient through the lengths: the paper's section 4.3 (arXiv:2402.09353)
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
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


# Rows in a product have the same bits whatever is beside them if their number is a multiple of 4,
# on some CPUs in float32 (docs/decisions/0073).
_MULTIPLE = 4


@dataclass(frozen=True)
class _AdapterRows:
    """The rows of one adapter."""

    adapter: str
    rows: torch.Tensor | None  # [n] in the batch; None: all of it
    padded_rows: torch.Tensor | None  # [m] the same, and the first again up to a multiple


class AdaptersByRow:
    """The adapters of PEFT's layers in one model, of which rows choose. Call ``attach`` after
    adapters came or went."""

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self.version = 0  # it differs after adapters came or went
        self._multiple = _MULTIPLE if batch_invariant else 1
        self._handles: list[Any] = []
        self._groups: list[_AdapterRows] = []
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
    def on(self, adapters: Sequence[str | None]) -> Iterator[None]:
        """A block in which the rows of a pass have these adapters; PEFT's must be switched off."""
        self._num_rows, self._groups = len(adapters), self._grouped(adapters)
        try:
            yield
        finally:
            self._groups = []

    def _grouped(self, adapters: Sequence[str | None]) -> list[_AdapterRows]:
        groups = []
        for adapter in dict.fromkeys(adapters):
            rows = [row for row, other in enumerate(adapters) if other == adapter]
            if adapter is None:
                continue
            if len(rows) == len(adapters) and not len(rows) % self._multiple:
                groups.append(_AdapterRows(adapter, None, None))
                continue
            padded_rows = [*rows, *rows[:1] * (-len(rows) % self._multiple)]
            both = (torch.tensor(indices, device=self._device) for indices in (rows, padded_rows))
            groups.append(_AdapterRows(adapter, *both))
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
            if group.adapter in layer.lora_A:  # type: ignore[operator]
                output = _added(layer, group, inputs[0], output)
        return output if self._groups else None


def _added(layer: Any, group: _AdapterRows, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """``output`` with the product of one adapter on its rows. As PEFT, it is added before it is
    rounded to the type of the output."""
    a, b = layer.lora_A[group.adapter], layer.lora_B[group.adapter]
    scaling = layer.scaling[group.adapter]
    if group.rows is None or group.padded_rows is None:
        sum_of_all: torch.Tensor = output + b(a(x.to(a.weight.dtype))) * scaling
        return sum_of_all.to(output.dtype)
    num_tokens = x.numel() // (len(x) * x.shape[-1])
    # a product has all tokens of all rows, so rows of 4, 8, ... tokens need no other rows
    rows = group.padded_rows if num_tokens % _MULTIPLE else group.rows
    update = b(a(x[rows].to(a.weight.dtype)))[: len(group.rows)] * scaling
    sums = (output[group.rows] + update).to(output.dtype)
    return output.index_copy(0, group.rows, sums)


def can_be_by_row(model: nn.Module, name: str) -> bool:
    """Whether all that the adapter ``name`` adds to ``model`` are plain products of linear layers:
    no DoRA or other variant, no embedding, no parameter, no quantized layer."""
    from peft.tuners.lora import Linear
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    adapted = [x for x in layers if any(name in getattr(x, n) for n in x.adapter_layer_names)]
    return all(type(layer) is Linear and name not in layer.lora_variant for layer in adapted)
