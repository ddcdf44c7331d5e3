"""The routers of a mixture of experts: the loss that balances the experts.

transformers computes it of each micro-batch. It is no sum over tokens, so of a whole batch it is
another number; here it is that of the batch (see ``RouterSums``), as arXiv:2501.11873 has it, whose
experts specialize where those of small micro-batches cannot.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from ..batch import RouterSums
from ..errors import ModelError
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
