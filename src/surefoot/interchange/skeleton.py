"""A run's model without weights: the names of its parameters, and which are trainable."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..errors import ModelError
from ..model.pretrained.weights import AdapterWeights, FullWeights, trained
from ..recipe.recipe import Recipe


@dataclass(frozen=True)
class Skeleton:
    """On the meta device, without memory for values."""

    policy: nn.Module  # with the adapter, if the run trains one
    inner: PreTrainedModel
    weights: FullWeights | AdapterWeights

    def names(self) -> dict[str, str]:
        """The trainable parameters' names in the model -> in the optimizer's state."""
        ours = {id(parameter): name for name, parameter in trained(self.policy, self.weights)}
        return {
            name: ours[id(parameter)]
            for name, parameter in self.policy.named_parameters()
            if parameter.requires_grad
        }

    def converted(self) -> bool:
        """Whether the weight files of this architecture contain other tensors than its modules."""
        if not isinstance(self.weights, FullWeights):
            return False
        tied = set(self.inner.all_tied_weights_keys)
        return set(self.inner.state_dict()) - tied != set(self.weights.state_dict())


def build_skeleton(model: Path, adapter: Path | None, recipe: Recipe) -> Skeleton:
    """The model of a run of ``recipe``, from its configuration alone.

    Args:
        model: the folder with ``config.json``.
        adapter: the folder with ``adapter_config.json``, if the run trains an adapter.
    """
    trust = recipe.model.trust_remote_code
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust)
        with torch.device("meta"):
            inner = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
            policy = recipe.method.apply(inner) if adapter is None else _wrapped(inner, adapter)
    except (ValueError, OSError, ImportError, KeyError) as error:
        raise ModelError(f"{model}: cannot read the model: {str(error).splitlines()[0]}") from None
    return Skeleton(
        policy, inner, FullWeights(inner) if adapter is None else AdapterWeights(policy)
    )


def _wrapped(model: PreTrainedModel, adapter: Path) -> nn.Module:
    from peft import PeftConfig, get_peft_model

    config = PeftConfig.from_pretrained(str(adapter))
    config.inference_mode = config.init_lora_weights = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say was said when the run began
        wrapped: nn.Module = get_peft_model(model, config)
    return wrapped
