"""LoRA (arXiv:2106.09685) through PEFT: low-rank updates beside frozen weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .. import model as models
from ..errors import RecipeError
from ..model.section import ModelSection
from ..model.targets import linear_names
from ..schema import Problem
from .rules import every_name

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from ..network.method import UnshardedWeights


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Train a low-rank update ``scale * B A`` of chosen linear layers; the base is frozen."""

    saves_base_model: ClassVar[bool] = False
    packages: ClassVar[Sequence[str]] = ("peft",)
    trainable = every_name

    rank: int = 8
    """Rank of the update."""
    alpha: float | None = None
    """The update is scaled by ``alpha / rank`` (by ``alpha / sqrt(rank)`` with rslora). Unset:
    twice the rank."""
    dropout: float = 0.0
    """Dropout on the input of the update."""
    targets: tuple[str, ...] = ("all",)
    """Linear layers to adapt by the last part of their name (``q_proj``); ``all`` is every one
    except the head.
    """
    modules_to_save: tuple[str, ...] = ()
    """Modules to train in full and save with the adapter, such as ``embed_tokens`` or
    ``lm_head``."""
    rslora: bool = False
    """Scale by ``alpha / sqrt(rank)`` (arXiv:2312.03732)."""
    dora: bool = False
    """Train magnitude and direction separately (arXiv:2402.09353)."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}")
        if self.alpha is not None and self.alpha <= 0:
            raise ValueError(f"alpha must be positive, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if not self.targets:
            raise ValueError("targets must name at least one module, or all")

    def apply(self, model: nn.Module) -> nn.Module:
        """Wrap ``model`` as PEFT does. Raises ``RecipeError`` if a target is not in it."""
        from peft import LoraConfig, get_peft_model

        self._check(model)
        config = LoraConfig(
            r=self.rank,
            lora_alpha=2 * self.rank if self.alpha is None else self.alpha,
            lora_dropout=self.dropout,
            target_modules="all-linear" if self.targets == ("all",) else sorted(self.targets),
            modules_to_save=list(self.modules_to_save) or None,
            use_rslora=self.rslora,
            use_dora=self.dora,
            task_type="CAUSAL_LM",
        )
        wrapped: nn.Module = get_peft_model(model, config)
        return wrapped

    def weights(self, module: nn.Module, inner: PreTrainedModel) -> UnshardedWeights:
        """The adapter alone."""
        return models.AdapterWeights(module)

    def problems(self, model: ModelSection) -> Iterator[Problem]:
        """A base that stays frozen may be quantized, and an adapter continued; but float8 is for
        weights that are trained."""
        if model.float8 is not None:
            yield Problem(
                ("model", "float8"),
                "method lora trains no linear layer of the model; use method: full or freeze, or "
                "leave it unset",
            )

    def _check(self, model: nn.Module) -> None:
        linear = linear_names(model)
        known = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
        for name in self.targets:
            if name != "all" and name not in known:
                raise RecipeError(
                    f"method.lora.targets: no module {name!r} in the model; "
                    f"expected all, or some of {', '.join(linear)}"
                )
        for name in self.modules_to_save:
            if name not in known:
                raise RecipeError(f"method.lora.modules_to_save: no module {name!r} in the model")
