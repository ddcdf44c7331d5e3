"""The part of a layer that computes each token by itself, in tiles of tokens, where layers are
recomputed: the intermediate values of an MLP never exist for all tokens of a long row.

Such a module keeps its input and nothing else, and is recomputed tile by tile when its gradient
is there. So it is computed twice, as the whole layer is without tiles: recomputation of a layer
stops where nothing more is kept, which is before its MLP. Where a norm follows the MLP, as in
Gemma 2, this would not be so: it would be computed three times, and stays whole.

``tile_tokens`` finds the modules by trying, without names: two passes that differ in one token,
with drawn weights. A module qualifies if no other token has another result. One with dropout does
not, nor experts: their products want all tokens, and losses of routers are read from inside.

Shapes: T tokens of all rows, D hidden dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from .loading import on_meta, once_per_architecture
from .lora_layers import unadapted
from .packed_attention import one_document
from .rms_norm import tiles

TILE = 2048  # tokens: products of fewer are slower on GPUs; rows of two tiles and less are whole
_OF_CODE = (RuntimeError, ValueError, TypeError, IndexError, AttributeError)
Forward = Callable[..., torch.Tensor]


def tile_tokens(model: PreTrainedModel) -> int:
    """Compute in tiles what is found in the layers of ``model`` that are recomputed; returns how
    many modules that are. Values and gradients change by rounding, in long rows alone."""
    width, qualifies = model.config.get_text_config().hidden_size, dict[object, bool]()
    count = 0
    for name in _computed_last(model):
        layer = model.get_submodule(name.rpartition(".")[0])
        module = model.get_submodule(name)
        shapes = tuple((inner, p.shape) for inner, p in module.named_parameters())
        is_small = sum(len(shape) > 1 for _, shape in shapes) < 2
        if is_small or "forward" in vars(module) or not layer.gradient_checkpointing:
            continue
        key = (type(module), shapes)
        if key not in qualifies:
            qualifies[key] = _is_token_wise(module, width)
        if qualifies[key]:
            module.forward = partial(_in_tiles, module, module.forward)
            count += 1
    return count


@once_per_architecture
@torch.no_grad()
def _computed_last(model: PreTrainedModel) -> Sequence[str]:
    """The names of the modules that their layers compute last: nothing after them is kept. The
    model's code runs on two tokens, on the meta device unless it is quantized."""
    last, handles = dict[str, str](), []
    for name, layer in model.named_modules():
        if isinstance(layer, GradientCheckpointingLayer):
            for child_name, child in layer.named_children():
                note = partial(_note, last, name, f"{name}.{child_name}")
                handles.append(child.register_forward_hook(note))
    is_plain = all(type(p) is nn.Parameter for p in model.parameters())
    device = torch.device("meta") if is_plain else next(model.parameters()).device
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    arguments = {"input_ids": ids, "attention_mask": None, "use_cache": False}
    try:
        with on_meta(model) if is_plain else nullcontext(), unadapted(model):
            model(**{**arguments, **one_document(model, 2)})
    except _OF_CODE:
        return ()  # its layers stay whole
    finally:
        for handle in handles:
            handle.remove()
    return tuple(last.values())


def _note(last: dict[str, str], layer: str, child: str, *_: object) -> None:
    last[layer] = child


@torch.no_grad()
def _is_token_wise(module: nn.Module, width: int) -> bool:
    tensors = dict(module.named_parameters())
    if any(tensor.ndim > 2 for tensor in tensors.values()):
        return False
    generator = torch.Generator().manual_seed(0)
    # of rank one, which takes no memory: the weights of a dry run have no values
    drawn = {
        name: torch.randn(len(tensor), *[1] * (tensor.ndim - 1), generator=generator)
        .div(tensor.shape[-1] ** 0.5)
        .expand(tensor.shape)
        for name, tensor in tensors.items()
        if tensor.is_floating_point()
    }
    one = torch.randn(1, 6, width, generator=generator)
    other = one.clone()
    other[:, 2] = torch.randn(width, generator=generator)
    was_training = {inner: inner.training for inner in module.modules()}
    try:
        module.train()
        first, again, changed = (functional_call(module, drawn, (x,)) for x in (one, one, other))
    except _OF_CODE:
        return False  # it takes more than a row
    finally:
        for inner, mode in was_training.items():
            inner.training = mode
    if not isinstance(first, torch.Tensor) or first.shape != one.shape:
        return False
    differs = (first - changed).abs().amax(-1)[0] > 1e-4 * first.abs().max()
    return torch.equal(first, again) and differs.tolist() == [index == 2 for index in range(6)]


def _in_tiles(module: nn.Module, forward: Forward, x: torch.Tensor) -> torch.Tensor:
    """``forward(x)``, in tiles if there is something to keep for many tokens."""
    num_tokens = x.numel() // x.shape[-1]
    if not torch.is_grad_enabled() or not x.requires_grad or num_tokens <= 2 * TILE:
        return forward(x)
    # Kept by a function of its own, before anything is computed: recomputation of the layer stops
    # as soon as the last thing that it has kept is there again.
    node = _Keep.apply(x).grad_fn  # type: ignore[no-untyped-call]
    trained = [p for p in module.parameters() if p.requires_grad]
    y: torch.Tensor = _Tiles.apply(module, forward, node, x, *trained)  # type: ignore[no-untyped-call]
    return y


def _autocast(x: torch.Tensor) -> torch.autocast:
    """The autocast of now for later; a cache would keep weights without their gradients."""
    kind = x.device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)


class _Keep(torch.autograd.Function):
    """Saves a tensor; there is nothing to differentiate."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.new_empty(0)

    @staticmethod
    def backward(_: Any, *_gradients: torch.Tensor) -> None:
        return None


class _Tiles(torch.autograd.Function):
    """A token-wise module, whose gradients of weights are sums over tiles."""

    @staticmethod
    def forward(
        ctx: Any,
        module: nn.Module,
        forward: Forward,
        node: Any,
        x: torch.Tensor,
        *_trained: torch.Tensor,
    ) -> torch.Tensor:
        ctx.module, ctx.run, ctx.node, ctx.autocast = module, forward, node, _autocast(x)
        with ctx.autocast:
            x_TD = x.reshape(1, -1, x.shape[-1])
            y_TD: torch.Tensor | None = None
            for tile in tiles(x_TD, TILE, dim=1):
                part = forward(x_TD[:, tile])
                y_TD = part.new_empty(x_TD.shape) if y_TD is None else y_TD
                y_TD[:, tile] = part
        assert y_TD is not None
        return y_TD.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.node.saved_tensors
        # these of now: sharded weights have been gathered again
        trained = [p for p in ctx.module.parameters() if p.requires_grad]
        x_TD, dy_TD = (each.reshape(1, -1, x.shape[-1]) for each in (x, gradients[0]))
        dx_TD, sums = torch.empty_like(x_TD), list[torch.Tensor | None]([None] * len(trained))
        for tile in tiles(x_TD, TILE, dim=1):
            with torch.enable_grad(), ctx.autocast:
                leaf = x_TD[:, tile].detach().requires_grad_()
                y = ctx.run(leaf)
            dx_TD[:, tile], *parts = torch.autograd.grad(
                y, [leaf, *trained], dy_TD[:, tile], allow_unused=True
            )
            for place, part in enumerate(parts):
                before = sums[place]
                sums[place] = part if before is None else before.add_(part)
        return None, None, None, dx_TD.view(x.shape), *sums
