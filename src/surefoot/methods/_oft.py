"""OFT (arXiv:2306.07280) through PEFT: rotations of the inputs of frozen weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from ..errors import RecipeError
from ..schema import KEPT, must
from .adapter import AdapterMethod, Part

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel

    from ..model.lora_targets import Targets


@dataclass(frozen=True, kw_only=True)
class OFT(AdapterMethod):
    """Train a rotation of each block of inputs of chosen linear layers; the base is frozen."""

    name: ClassVar[str] = "oft"
    peft_type: ClassVar[str] = "OFT"
    peft_names: ClassVar[Mapping[str, str]] = {
        "block_size": "oft_block_size",
        "dropout": "module_dropout",
    }
    does: ClassVar[str] = "a rotation"

    block_size: Annotated[int, KEPT] = 32
    """Inputs that are rotated together; a divisor of the inputs of every adapted layer."""
    dropout: float = 0.0
    """The share of blocks that are not rotated in a training step."""
    targets: tuple[str, ...] = ("all",)
    """The linear layers to adapt, by the last part of the name; ``all`` is every one except the
    head, routers and experts."""
    parts: tuple[Part, ...] = ("language",)
    """Parts of a model that reads pictures in which targets are adapted: ``tower``, ``projector``
    and ``language``. Each of them must have a target."""
    modules_to_save: tuple[str, ...] = ()
    """Modules to train in full and save with the adapter, such as ``embed_tokens``, ``lm_head``,
    or the ``projector`` of a model that reads pictures."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 2:
            raise ValueError(f"block_size must be at least 2, got {self.block_size}")
        must(self, "be in [0, 1)", "dropout")

    def config(self, **shared: Any) -> PeftConfig:
        """With a block size in place of a number of blocks."""
        from peft import OFTConfig

        return OFTConfig(oft_block_size=self.block_size, module_dropout=self.dropout, **shared)

    def chosen(self, model: PreTrainedModel) -> Targets:
        """The targets, all of them linear layers with a whole number of blocks."""
        targets = super().chosen(model)
        for name in targets.modules:
            layer: Any = model.get_submodule(name)
            # transformers' Conv1D has no in_features, and stores its weight as [inputs, outputs].
            inputs = getattr(layer, "in_features", None) or layer.weight.shape[0]
            if inputs % self.block_size:
                raise RecipeError(
                    f"method.oft.block_size: {self.block_size}, but {name} has {inputs} inputs; "
                    "choose a divisor of the inputs of every layer"
                )
        return targets
