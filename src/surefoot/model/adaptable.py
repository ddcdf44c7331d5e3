"""The weight matrices of a model that LoRA can adapt, and why it leaves the others alone.

A matrix is the weight of a linear layer, or all matrices of one kind of a layer's experts, which
transformers fuses into one parameter with three dimensions. Names are those of the model without
its adapter, so that a model can be read before and after PEFT has wrapped it.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from ..errors import RecipeError
from ..storage.tensor_names import KINDS

HEAD = "the output head"
ROUTER = "a router"
UNREACHED = "text does not pass through it"
READ = "its layer reads the weight itself, past any adapter"
# what an architecture raises that needs values when it is made, or called
_NEEDS_VALUES = (
    RuntimeError,
    NotImplementedError,
    AttributeError,
    IndexError,
    TypeError,
    ImportError,
)
_WRAPPER = re.compile(r"\.(token_adapter\.base_layer|base_layer|original_module)(?=\.|$)")
_ADDED = re.compile(rf"\.(({'|'.join(KINDS)})_\w+|modules_to_save|trainable_tokens_\w+)\.")
_ROUTERS = ("router", "topk")  # in the name or class of a router, or of a module around it


@dataclass(frozen=True)
class Matrix:
    """A weight matrix."""

    name: str  # of the parameter
    is_fused: bool = False  # all experts' of one kind, in a parameter with three dimensions
    left_out: str = ""  # why it has no adapter unless it is named; empty if it has one
    is_adaptable: bool = True  # whether it can have one at all

    @property
    def target(self) -> str:
        """The name that recipes and PEFT know it by: of its linear layer, or its own."""
        return self.name if self.is_fused else self.name.removesuffix(".weight")


def plain_name(name: str) -> str:
    """The name that a module or parameter had before PEFT wrapped it."""
    return _WRAPPER.sub("", name.removeprefix("base_model.model."))


def is_added(name: str) -> bool:
    """Whether PEFT has added the module or parameter ``name``."""
    return _ADDED.search(f"{name}.") is not None


def matrices(model: PreTrainedModel) -> list[Matrix]:
    """All matrices of ``model``, in its order."""
    modules, routers = _modules(model), router_names(model)
    head, unreached = model.get_output_embeddings(), unreached_by_text(model)
    found = []
    for name, module in modules.items():
        if isinstance(module, nn.Linear | Conv1D):
            parent = modules[name.rpartition(".")[0]]
            why, can = _left_out(name, module, parent, routers, is_head=module is head)
            found.append(Matrix(f"{name}.weight", left_out=why, is_adaptable=can))
        found += [Matrix(f"{name}.{own}", is_fused=True) for own, _ in _fused(name, module)]
    return [
        replace(m, left_out=UNREACHED, is_adaptable=False) if m.name in unreached else m
        for m in found
    ]


def unreached_by_text(model: PreTrainedModel) -> Collection[str]:
    """The parameters of ``model`` that get no gradient from a row of text, such as those of a tower
    for pictures: found on its meta twin, so that they are the same whatever the model holds.
    Nothing, where it reads nothing but text, or computes with values that a meta tensor lacks."""
    kind: type = type(model)
    if model.input_modalities in ("text", ("text",)):
        return ()
    return _without_gradient(kind, model.config.to_json_string(use_diff=False))


@cache
def _without_gradient(kind: type, config: str) -> Collection[str]:
    """The parameters of a ``kind`` of model without a gradient; seconds for a large one."""
    settings, made_by = json.loads(config), cast("type[PreTrainedModel]", kind)
    try:
        with torch.device("meta"):
            twin = made_by._from_config(
                made_by.config_class.from_dict(settings),
                dtype=torch.bfloat16,
                attn_implementation="eager",
            ).requires_grad_(True)
            ids, mask = torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 1, 8, 8)
            rows = {"input_ids": ids, "attention_mask": mask.bfloat16(), "use_cache": False}
            twin(**rows).logits.sum().backward()
    except _NEEDS_VALUES:
        return ()
    return {name for name, parameter in twin.named_parameters() if parameter.grad is None}


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer, perhaps a quantized one, which is of the same class."""
    return isinstance(module, nn.Linear | Conv1D)


def adapted(model: nn.Module) -> dict[str, nn.Module]:
    """PEFT's layers in ``model`` by the parameter that each adapts, but for rows of tokens."""
    from peft.tuners.lora import ParamWrapper
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and not isinstance(module, TrainableTokensLayer):
            own = module.parameter_name if isinstance(module, ParamWrapper) else "weight"
            found[f"{plain_name(name)}.{own}"] = module
    return found


def names_of_parts(model: PreTrainedModel, fused: Collection[str]) -> dict[str, set[str]]:
    """The last part of each fused parameter's name -> the names that its matrices have in files:
    ``gate_up_proj`` -> ``gate_proj``, ``up_proj``. Empty if the files have it as it is."""
    shapes = {name: model.get_parameter(name) for name in fused}
    kinds = {name.rpartition(".")[2]: name for name in reversed(shapes)}  # one of each will do
    found = {}
    for kind, name in kinds.items():
        parts = revert_weight_conversion(model, {name: shapes[name].detach().to("meta")})
        found[kind] = {part.removesuffix(".weight").rpartition(".")[2] for part in parts} - {kind}
    return found


def router_names(model: PreTrainedModel) -> set[str]:
    """The names of the routers, and of all modules in them: they are called so, or have as many
    outputs as the experts beside them."""
    modules = _modules(model)
    counts = {}  # of experts, by the block around them
    for name, module in modules.items():
        for _, parameter in _fused(name, module):
            counts[name.rpartition(".")[0]] = len(parameter)
    return {
        name
        for name, module in modules.items()
        if any(_is_called_router(part, modules[part]) for part in _around(name))
        or (
            isinstance(module, nn.Linear)
            and any(counts.get(part) == module.out_features for part in _around(name))
        )
    }


def parameters_inside(model: PreTrainedModel, called: str, key: str) -> list[nn.Parameter]:
    """The parameters of all modules whose names end in ``called``; ``experts`` and ``routers`` are
    those of a mixture. Raises ``RecipeError``, which names the setting ``key``, if there are
    none."""
    modules = _modules(model)
    routers = router_names(model) if called in ("experts", "routers") else set()
    chosen = {n for n in modules if n.rpartition(".")[2] == called}
    if called == "experts":  # a router may be inside of their module
        chosen |= {n for n, m in modules.items() if _fused(n, m)}
    elif called == "routers":
        chosen, routers = routers, set()
    inside = {id(p) for name in routers for p in modules[name].parameters()}
    found = {id(p): p for name in chosen for p in modules[name].parameters()}
    found = {key: p for key, p in found.items() if key not in inside}
    if not found:
        known = {name for n in modules if (name := n.rpartition(".")[2]) and not name.isdecimal()}
        raise RecipeError(
            f"{key}: the model has no {called!r}; expected some of {', '.join(sorted(known))}"
        )
    return list(found.values())


def _fused(name: str, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The fused matrices that ``module`` itself contains."""
    is_expert = "expert" in type(module).__name__.lower() or "expert" in name.rpartition(".")[2]
    own = module.named_parameters(recurse=False) if is_expert else ()
    return [(n, p) for n, p in own if p.ndim == 3]


def _modules(model: PreTrainedModel) -> Mapping[str, nn.Module]:
    """The modules that ``model`` had before PEFT wrapped some of them."""
    return {plain_name(n): m for n, m in model.named_modules() if not is_added(n)}


def _around(name: str) -> Iterator[str]:
    """``name``, and the modules around it, up to but without the model."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _is_called_router(name: str, module: nn.Module) -> bool:
    own = name.rpartition(".")[2].lower()
    return any(word in own or word in type(module).__name__.lower() for word in _ROUTERS)


def _left_out(
    name: str, module: nn.Module, parent: nn.Module, routers: Collection[str], *, is_head: bool
) -> tuple[str, bool]:
    """Why a linear layer has no adapter unless it is named, and whether it can have one."""
    if is_head:
        return HEAD, True
    kind: type = type(parent)
    is_read = reads_weight(kind, name.rpartition(".")[2])
    if name in routers:  # one with a forward pass of its own may return more than a product
        return ROUTER, not is_read and type(module).forward is nn.Linear.forward
    return (READ, False) if is_read else ("", True)


def refuse_read_weights(model: PreTrainedModel) -> None:
    """Raise ``RecipeError`` if a weight of ``model`` is read past the forward pass of its layer,
    which is where tensor parallelism gathers or replicates it. Convolutions, which are often read
    so, are left to the plan of tensor parallelism."""
    modules = _modules(model)
    for place, module in modules.items():
        parent, _, name = place.rpartition(".")
        has_weights = any(True for _ in module.parameters(recurse=False))
        if not name or not has_weights or isinstance(module, nn.Conv1d):
            continue
        kind: type = type(modules[parent])
        if reads_weight(kind, name):
            raise RecipeError(
                f"parallel.tp: {type(model).__name__} does not support tensor parallelism: "
                f"{kind.__name__} reads the weight of {place} itself; leave tp at 1 and use "
                "parallel.dp_shard"
            )


@cache
def reads_weight(parent: type, name: str) -> bool:
    """Whether the code of ``parent`` multiplies by the weight of its linear layer ``name`` instead
    of calling the layer, perhaps in a fused kernel that only GPUs have. Then an adapter of that
    layer has no effect: Mamba's ``dt_proj``, and ``out_proj``, which PEFT refuses."""
    used = rf"self\.{re.escape(name)}\.weight\b(?!\s*(\[|\.(dtype|device|shape)))"
    return re.search(used, _source(parent)) is not None


@cache
def _source(kind: type) -> str:
    """The code of the class ``kind``, empty where it cannot be read; 50 ms each."""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""
