"""The loss that balances the experts of a mixture, as transformers computes it."""

from __future__ import annotations

import inspect
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel

from ...errors import ModelError

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


def check_router_loss(model: PreTrainedModel) -> None:
    """Raise ``ModelError`` unless ``model`` computes the loss: some configurations have settings
    that no code reads."""
    if _SWITCH not in inspect.signature(type(model).forward).parameters:
        raise ModelError(
            f"{_KEY}: {type(model).__name__} computes no loss of its routers; remove it"
        )
