"""The weight matrices of a model, and what each of them is for.

A matrix is the weight of a linear layer, or all matrices of one kind of a layer's experts, which
transformers fuses into one parameter with three dimensions. ``matrices`` lists them, with the
reason if a method leaves one out by itself: the output head, a router, a weight that its layer
reads past any adapter. Names are those of the model without its adapter, so that a model can be
read before and after PEFT has wrapped it.

Nothing here knows an architecture by its name. What text reaches is seen from gradients on the meta
device, what a layer does with a weight from the source of its class.
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
from transformers.pytorch_utils import Conv1D

from ..errors import ModelError, RecipeError
from ..storage.weight_files import KINDS
from .parts import LANGUAGE, parts_of, sound_towers

HEAD = "the output head"
ROUTER = "a router"
UNREACHED = "text does not pass through it"
READ = "its layer reads the weight itself, past any adapter"
# what an architecture raises that needs values when it is made, or called
_NEEDS_VALUES = (RuntimeError, AttributeError, IndexError, TypeError, ImportError)
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
    part: str = LANGUAGE  # of a model that reads pictures

    @property
    def target(self) -> str:
        """The name that recipes and PEFT know it by: of its linear layer, or its own."""
        return self.name if self.is_fused else self.name.removesuffix(".weight")


def matrices(model: PreTrainedModel) -> list[Matrix]:
    """All matrices of ``model``, in its order."""
    modules, routers = _modules(model), router_names(model)
    head, unreached = model.get_output_embeddings(), unreached_by_text(model)
    parts = names_in_parts(model)
    all_matrices = []
    for name, module in modules.items():
        if is_linear(module):
            parent = modules[name.rpartition(".")[0]]
            why, can = _left_out(name, module, parent, routers, is_head=module is head)
            all_matrices.append(Matrix(f"{name}.weight", left_out=why, is_adaptable=can))
        fused = _fused(name, module)
        all_matrices += [Matrix(f"{name}.{leaf}", is_fused=True) for leaf, _ in fused]
    for i, matrix in enumerate(all_matrices):
        if matrix.name in parts:
            all_matrices[i] = replace(matrix, part=parts[matrix.name])
        elif matrix.name in unreached:
            all_matrices[i] = replace(matrix, left_out=UNREACHED, is_adaptable=False)
    return all_matrices


def names_in_parts(model: PreTrainedModel) -> dict[str, str]:
    """The part of each parameter that is of another part than the language model, which has all
    that text passes through. A tower for sounds is of none: no row has any."""
    parts, unreached = parts_of(model), unreached_by_text(model)
    by_parameter = {p: part for part in parts if part != LANGUAGE for p in parts[part]}
    for parameter in (p for encoder in sound_towers(model) for p in encoder.parameters()):
        by_parameter.pop(parameter, None)
    names = {plain_name(name): p for name, p in model.named_parameters()}
    return {
        name: by_parameter[p]
        for name, p in names.items()
        if p in by_parameter and (name in unreached or not unreached)
    }


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
    settings, model_class = json.loads(config), cast("type[PreTrainedModel]", kind)
    try:
        with torch.device("meta"):
            twin = model_class._from_config(
                model_class.config_class.from_dict(settings),
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


def _fused(name: str, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The fused matrices that ``module`` itself contains."""
    is_expert = "expert" in type(module).__name__.lower() or "expert" in name.rpartition(".")[2]
    parameters = module.named_parameters(recurse=False) if is_expert else ()
    return [(n, p) for n, p in parameters if p.ndim == 3]


def _modules(model: PreTrainedModel) -> Mapping[str, nn.Module]:
    """The modules that ``model`` had before PEFT wrapped some of them."""
    return {plain_name(n): m for n, m in model.named_modules() if not is_added(n)}


def plain_name(name: str) -> str:
    """The name that a module or parameter had before PEFT wrapped it."""
    return _WRAPPER.sub("", name.removeprefix("base_model.model."))


def is_added(name: str) -> bool:
    """Whether PEFT has added the module or parameter ``name``."""
    return _ADDED.search(f"{name}.") is not None


def _left_out(
    name: str, module: nn.Module, parent: nn.Module, routers: Collection[str], *, is_head: bool
) -> tuple[str, bool]:
    """Why a linear layer has no adapter unless it is named, and whether it can have one."""
    if is_head:
        return HEAD, True
    parent_class: type = type(parent)
    is_read = _reads_weight(parent_class, name.rpartition(".")[2])
    if name in routers:  # one with a forward pass of its own may return more than a product
        return ROUTER, not is_read and type(module).forward is nn.Linear.forward
    return (READ, False) if is_read else ("", True)


@cache
def _reads_weight(parent: type, name: str) -> bool:
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


def refuse_read_weights(model: PreTrainedModel) -> None:
    """Raise ``RecipeError`` if a weight of ``model`` is read past the forward pass of its layer,
    which is where tensor parallelism gathers or replicates it. Convolutions, which are often read
    so, are left to the plan of tensor parallelism."""
    modules = _modules(model)
    for name, module in modules.items():
        parent, _, leaf = name.rpartition(".")
        has_weights = any(True for _ in module.parameters(recurse=False))
        if not leaf or not has_weights or isinstance(module, nn.Conv1d):
            continue
        parent_class: type = type(modules[parent])
        if _reads_weight(parent_class, leaf):
            raise RecipeError(
                f"parallel.tp: {type(model).__name__} does not support tensor parallelism: "
                f"{parent_class.__name__} reads the weight of {name} itself; leave tp at 1 and use "
                "parallel.dp_shard"
            )


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


def _around(name: str) -> Iterator[str]:
    """``name``, and the modules around it, up to but without the model."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _is_called_router(name: str, module: nn.Module) -> bool:
    leaf = name.rpartition(".")[2].lower()
    return any(word in leaf or word in type(module).__name__.lower() for word in _ROUTERS)


def parameters_inside(model: PreTrainedModel, called: str, key: str) -> list[nn.Parameter]:
    """The parameters of all modules whose names end in ``called``; ``experts`` and ``routers`` are
    those of a mixture, ``tower``, ``projector`` and ``language`` those parts of a model that reads
    pictures. Raises ``RecipeError``, which names the setting ``key``, if there are none."""
    if part := parts_of(model).get(called):
        return part
    modules = _modules(model)
    routers = router_names(model) if called in ("experts", "routers") else set()
    chosen = {n for n in modules if n.rpartition(".")[2] == called}
    if called == "experts":  # a router may be inside of their module
        chosen |= {n for n, m in modules.items() if _fused(n, m)}
    elif called == "routers":
        chosen, routers = routers, set()
    of_routers = {id(p) for name in routers for p in modules[name].parameters()}
    of_chosen = (p for name in chosen for p in modules[name].parameters())
    parameters = {id(p): p for p in of_chosen if id(p) not in of_routers}
    if not parameters:
        module_names = {
            name for n in modules if (name := n.rpartition(".")[2]) and not name.isdecimal()
        }
        expected = ", ".join(sorted(module_names))
        raise RecipeError(f"{key}: the model has no {called!r}; expected some of {expected}")
    return list(parameters.values())


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers in order. They may be of several classes, as in hybrids of attention and
    state space models."""
    return list(layer_list(model))


def layer_list(model: nn.Module) -> nn.ModuleList:
    """The list of decoder layers: the ``ModuleList`` with most parameters. Those of a tower for
    pictures, which may have more than the language model, are none."""
    decoder: nn.Module = model
    if isinstance(model, PreTrainedModel) and parts_of(model):
        decoder = model.get_decoder()
    lists = [m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) > 0]
    if not lists:
        raise ModelError(
            f"{type(model).__name__}: found no list of layers; use method full or lora"
        )
    return max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()))


def adapted(model: nn.Module) -> dict[str, nn.Module]:
    """PEFT's layers in ``model`` by the parameter that each adapts, but for rows of tokens."""
    from peft.tuners.lora import ParamWrapper
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and not isinstance(module, TrainableTokensLayer):
            parameter_name = module.parameter_name if isinstance(module, ParamWrapper) else "weight"
            layers[f"{plain_name(name)}.{parameter_name}"] = module
    return layers
