"""The routers of a mixture of experts: the loss, or the biases, that balance the experts.

transformers computes it of each micro-batch. It is no sum over tokens, so of a whole batch it is
another number; here it is that of the batch (see ``RouterSums``), as arXiv:2501.11873 has it, whose
experts specialize where those of small micro-batches cannot.

DeepSeek-V3 balances without a loss: a bias, which is added to the scores that choose experts and to
nothing else, is raised for experts with few tokens and lowered for those with many.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ..batch import RouterSums
from ..errors import ModelError, RecipeError
from .section import ModelSection

COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")  # in a configuration
_SWITCH = "output_router_logits"  # in a configuration, and an argument of a model
_KEY = "model.router_aux_loss_coef"


def add_router_loss(config: PretrainedConfig, coefficient: float, folder: Path) -> None:
    """Let models of ``config`` compute the loss, weighted by ``coefficient``. Raises ``ModelError``
    if ``config`` has no setting for it."""
    text = config.get_text_config(decoder=True)
    names = [name for name in COEFFICIENTS if hasattr(text, name)]
    if not names or not hasattr(text, _SWITCH):
        raise ModelError(
            f"{_KEY}: {folder} has no loss of routers (model type {text.model_type}); remove it"
        )
    setattr(text, names[0], coefficient)
    setattr(text, _SWITCH, True)


def has_router_loss(model: PreTrainedModel) -> bool:
    """Whether ``model`` computes the loss of its routers: some configurations have settings that no
    code reads."""
    is_set = getattr(model.config.get_text_config(decoder=True), _SWITCH, False)
    return bool(is_set) and _SWITCH in inspect.signature(type(model).forward).parameters


def check_router_loss(model: PreTrainedModel, section: ModelSection) -> None:
    """Raise ``ModelError`` if ``section`` sets the loss of routers and ``model`` computes none, or
    it is not made of the sums of ``router_sums``."""
    if not has_router_loss(model):
        if section.router_aux_loss_coef is None:
            return
        raise ModelError(
            f"{_KEY}: {type(model).__name__} computes no loss of its routers; remove it"
        )
    dice = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(6, 5, generator=dice) for _ in range(2))
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    loss = RouterSums(1.0, *router_sums(logits, 2, mask.reshape(-1))).loss(torch.tensor(1.0))
    function = vars(sys.modules[type(model).__module__]).get("load_balancing_loss_func")
    try:
        is_known = function is not None and bool(function(logits, 5, 2, mask).isclose(loss))
    except (ValueError, TypeError, RuntimeError, IndexError):  # of routers of another kind
        is_known = False
    if not is_known:
        raise ModelError(
            f"{_KEY}: {type(model).__name__} computes another loss of its routers than that of the "
            "Switch Transformer, so it is not known of a whole batch; remove the setting, or set "
            "output_router_logits to false in config.json"
        )


def sums_of(model: PreTrainedModel, output: Any, mask_BT: torch.Tensor | None) -> RouterSums | None:
    """What the loss of a mixture's routers is made of, as the model itself would add it to that of
    labels: only where ``output_router_logits`` is set in its configuration. Raises
    ``ModelError`` if that has no coefficient."""
    if getattr(output, "aux_loss", None) is None:
        return None
    coefficient = _setting(model, COEFFICIENTS)
    if coefficient is None:
        raise ModelError(
            f"{type(model).__name__} computes a loss of its routers, but its configuration has no "
            "coefficient for it; set output_router_logits to false in config.json"
        )
    num_chosen = int(_setting(model, ("num_experts_per_tok",)))
    mask_N = None if mask_BT is None else mask_BT.reshape(-1)
    return RouterSums(float(coefficient), *router_sums(output.router_logits, num_chosen, mask_N))


def _setting(model: PreTrainedModel, names: Sequence[str]) -> Any:
    """The first of ``names`` that ``model`` or its configuration has."""
    places = (model, model.config.get_text_config())
    values = (getattr(place, name, None) for place in places for name in names)
    return next((value for value in values if value is not None), None)


def router_sums(
    logits: Sequence[torch.Tensor], num_chosen: int, mask_N: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``RouterSums.probabilities`` and ``counts`` of the routers' ``logits`` of all layers, each
    [N, E]. Tokens where ``mask_N`` is 0 do not count."""
    sums_E, counts = [], []
    for logits_NE in logits:
        probabilities_NE = logits_NE.softmax(-1)
        chosen_NK = probabilities_NE.detach().topk(num_chosen, -1).indices
        exact = torch.promote_types(logits_NE.dtype, torch.float32)
        real_N = torch.ones_like(chosen_NK[:, 0]) if mask_N is None else mask_N
        sums_E.append(real_N.to(exact) @ probabilities_NE.to(exact))
        each = torch.zeros(logits_NE.shape[1] + 2, dtype=torch.float64, device=real_N.device)
        each.scatter_add_(0, chosen_NK.reshape(-1), real_N.double().repeat_interleave(num_chosen))
        each[-2] = real_N.sum()
        counts.append(each)
    return torch.stack(sums_E).sum(0), torch.stack(counts).sum(0)


def refuse_stages(model: PreTrainedModel, rate: float | None) -> None:
    """Raise ``RecipeError`` if the routers of ``model`` are balanced, which stages of a pipeline
    cannot do; ``rate`` as in ``RouterBiases``."""
    if has_router_loss(model) or rate is not None:
        name = "output_router_logits is true in config.json"
        name, cure = (name, "false") if rate is None else (_RATE, "null")
        raise RecipeError(
            f"parallel.pp: {name}, but no stage of a pipeline sees the routers of all layers; set "
            f"it to {cure}, or leave pp at 1"
        )


_BIAS = "e_score_correction_bias"
_RATE = "model.router_bias_update_rate"


class RouterBiases:
    """The biases that choose the experts of ``model``, and how many tokens each expert gets in a
    step. After it each bias moves by ``rate`` towards equal shares (DeepSeek-V3, arXiv:2412.19437,
    section 2.1.2): up where an expert has fewer than the mean, else down. Tokens of all ranks and
    micro-batches count, but for padding.

    Raises ``ModelError`` if ``model`` has no such biases.
    """

    def __init__(self, model: PreTrainedModel, rate: float) -> None:
        self._rate = rate
        self._routers: list[nn.Module] = []
        self._counts: list[torch.Tensor] = []  # [E] float64 of each layer
        self._mask: torch.Tensor | None = None  # [B, T] of the micro-batch, 0 at padding
        self._is_counting = False
        for name, router in list(model.named_modules()):
            if (bias := router._buffers.get(_BIAS)) is None:
                continue
            experts = _experts_of(model, name, len(bias))
            router._buffers[_BIAS] = bias.float()  # in 16 bits small steps would be lost
            experts.register_forward_pre_hook(
                partial(self._count, len(self._routers)), with_kwargs=True
            )
            self._routers.append(router)
        if not self._routers:
            raise ModelError(f"{_RATE}: {type(model).__name__} has no {_BIAS}; remove it")
        self.take()
        model.register_forward_pre_hook(self._note_mask, with_kwargs=True)

    @contextmanager
    def counting(self, *, counts: bool) -> Iterator[None]:
        """A forward pass whose tokens count, if they do. A layer that the backward pass recomputes
        is outside of it, and so are evaluations."""
        self._is_counting = counts
        try:
            yield
        finally:
            self._is_counting = False

    def take(self) -> torch.Tensor:
        """[all E] float64: the tokens of each expert of each layer since the last call."""
        counts = torch.cat(self._counts) if self._counts else torch.empty(0)
        self._counts = [torch.zeros_like(bias, dtype=torch.float64) for bias in self._biases]
        return counts

    @torch.no_grad()
    def update(self, counts: torch.Tensor, is_bad: torch.Tensor) -> None:
        """Move the biases by the ``counts`` of all ranks, unless the step ``is_bad``; the host does
        not wait to know."""
        parts = torch.split(counts, [len(bias) for bias in self._biases])
        for bias, counts_E in zip(self._biases, parts, strict=True):
            step_E = self._rate * (counts_E.mean() - counts_E).sign() * (is_bad == 0)
            bias.add_(step_E.to(bias.dtype))

    @property
    def _biases(self) -> list[torch.Tensor]:
        return [router.get_buffer(_BIAS) for router in self._routers]

    def _note_mask(
        self, _model: nn.Module, _args: tuple[object, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._mask = kwargs.get("attention_mask")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _count(
        self, layer: int, _experts: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        if not self._is_counting:
            return
        inputs = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        chosen_NK = next(tensor for tensor in inputs if not tensor.is_floating_point())
        real_NK = torch.ones_like(chosen_NK, dtype=torch.float64)
        if self._mask is not None:
            real_NK *= self._mask.reshape(-1, 1)
        self._counts[layer].scatter_add_(0, chosen_NK.reshape(-1), real_NK.reshape(-1))


def _experts_of(model: PreTrainedModel, router: str, num_experts: int) -> nn.Module:
    """The experts that ``router`` chooses: inside of it, or beside it. Raises ``ModelError``."""
    for block in (router, router.rpartition(".")[0]):
        for module in model.get_submodule(block).modules():
            fused = [p for p in module.parameters(recurse=False) if p.ndim == 3]
            if fused and all(len(p) == num_experts for p in fused):
                experts: nn.Module = module
                return experts
    raise ModelError(
        f"{_RATE}: {type(model).__name__} has no {num_experts} experts in one module beside "
        f"{router}; remove it"
    )
