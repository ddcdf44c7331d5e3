"""The layers and weight matrices of a model, and which of them LoRA adapts.

A matrix is the weight of a linear layer, or all matrices of one kind of a layer's experts, which
transformers fuses into one parameter with three dimensions. Names are those of the model without
its adapter, so that a model can be read before and after PEFT has wrapped it.

PEFT converts the names of linear layers to those of fused experts where transformers has fused
experts of the same name, and drops every linear layer that is still there: dense layers, shared
experts. It leaves parameters alone. So linear layers with such names are adapted as parameters,
which is the same update under the same names in files.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from ..errors import ModelError, RecipeError
from ..storage.weight_files import KINDS
from .parts import LANGUAGE, PROJECTOR, modules_of, parts_of, sound_towers

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


def endings(chosen: Iterable[str], every: Iterable[str]) -> list[str]:
    """The shortest endings, of whole parts, that only ``chosen`` names have among ``every``."""
    chosen = set(chosen)
    others = {ending for name in every if name not in chosen for ending in _parts(name)}
    return sorted({next((e for e in _parts(n) if e not in others), n) for n in chosen})


def _parts(name: str) -> list[str]:
    """``a.b.c`` -> ``c``, ``b.c``, ``a.b.c``."""
    words = name.split(".")
    return [".".join(words[start:]) for start in range(len(words) - 1, -1, -1)]


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
    parts = names_in_parts(model)
    all_matrices = []
    for name, module in modules.items():
        if isinstance(module, nn.Linear | Conv1D):
            parent = modules[name.rpartition(".")[0]]
            why, can = _left_out(name, module, parent, routers, is_head=module is head)
            all_matrices.append(Matrix(f"{name}.weight", left_out=why, is_adaptable=can))
        all_matrices += [
            Matrix(f"{name}.{leaf}", is_fused=True) for leaf, _ in _fused(name, module)
        ]
    return [
        replace(m, part=parts[m.name])
        if m.name in parts
        else replace(m, left_out=UNREACHED, is_adaptable=False)
        if m.name in unreached
        else m
        for m in all_matrices
    ]


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

    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and not isinstance(module, TrainableTokensLayer):
            parameter_name = module.parameter_name if isinstance(module, ParamWrapper) else "weight"
            layers[f"{plain_name(name)}.{parameter_name}"] = module
    return layers


def names_of_parts(model: PreTrainedModel, fused: Collection[str]) -> dict[str, set[str]]:
    """The last part of each fused parameter's name -> the names that its matrices have in files:
    ``gate_up_proj`` -> ``gate_proj``, ``up_proj``. Empty if the files have it as it is."""
    shapes = {name: model.get_parameter(name) for name in fused}
    kinds = {name.rpartition(".")[2]: name for name in reversed(shapes)}  # one of each will do
    part_names = {}
    for kind, name in kinds.items():
        parts = revert_weight_conversion(model, {name: shapes[name].detach().to("meta")})
        leaves = {part.removesuffix(".weight").rpartition(".")[2] for part in parts}
        part_names[kind] = leaves - {kind}
    return part_names


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


def in_full(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """``modules_to_save`` as PEFT has them: ``projector`` is the modules of that part, by their
    full names, since PEFT takes ``proj`` for ``q_proj``, too."""
    projector = frozenset(parts_of(model).get(PROJECTOR, ()))
    modules = {PROJECTOR: list(modules_of(model, projector))} if projector else {}
    return [module for name in names for module in modules.get(name, [name])]


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
    inside = {id(p) for name in routers for p in modules[name].parameters()}
    every = (p for name in chosen for p in modules[name].parameters())
    parameters = {id(p): p for p in every if id(p) not in inside}
    if not parameters:
        module_names = {
            name for n in modules if (name := n.rpartition(".")[2]) and not name.isdecimal()
        }
        expected = ", ".join(sorted(module_names))
        raise RecipeError(f"{key}: the model has no {called!r}; expected some of {expected}")
    return list(parameters.values())


def _fused(name: str, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The fused matrices that ``module`` itself contains."""
    is_expert = "expert" in type(module).__name__.lower() or "expert" in name.rpartition(".")[2]
    parameters = module.named_parameters(recurse=False) if is_expert else ()
    return [(n, p) for n, p in parameters if p.ndim == 3]


def _modules(model: PreTrainedModel) -> Mapping[str, nn.Module]:
    """The modules that ``model`` had before PEFT wrapped some of them."""
    return {plain_name(n): m for n, m in model.named_modules() if not is_added(n)}


def _around(name: str) -> Iterator[str]:
    """``name``, and the modules around it, up to but without the model."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _is_called_router(name: str, module: nn.Module) -> bool:
    leaf = name.rpartition(".")[2].lower()
    return any(word in leaf or word in type(module).__name__.lower() for word in _ROUTERS)


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


LORA = "method.lora.targets"  # the setting that names targets
# Layers other than linear ones that PEFT can adapt by the name of the module.
_OTHERS = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)


@dataclass(frozen=True)
class Targets:
    """What PEFT adapts: full names of modules, and of parameters."""

    modules: Sequence[str]
    parameters: Sequence[str]

    @property
    def all_parameters(self) -> set[str]:
        """The parameters that get an update, those of modules included."""
        return {*self.parameters, *(f"{name}.weight" for name in self.modules)}

    def inside(self, model: PreTrainedModel, parents: Collection[nn.Module]) -> Targets:
        """Those in modules ``parents`` of ``model``, and in other parts than the language model.
        Raises ``RecipeError`` if none is in ``parents``."""
        starts = tuple(f"{name}." for name, module in model.named_modules() if module in parents)
        inside = {name for name in self.all_parameters if name.startswith(starts)}
        if not inside:
            raise RecipeError(f"{LORA}: none of them is in method.lora.layers")
        inside |= names_in_parts(model).keys()
        return Targets(
            [name for name in self.modules if f"{name}.weight" in inside],
            [name for name in self.parameters if name in inside],
        )


def choose_targets(
    model: PreTrainedModel,
    targets: Collection[str],
    modules_to_save: Collection[str] = (),
    key: str = LORA,
    parts: Collection[str] = (LANGUAGE,),
) -> Targets:
    """The targets that ``key`` of the recipe names in ``parts`` of ``model``, except in modules
    that are trained in full. Raises ``RecipeError``: a name that is not there, or of what cannot be
    adapted, or a part without a target: the user would take it for trained."""
    setting = f"{key.removesuffix('targets')}parts"
    if missing := sorted({*parts} - {LANGUAGE, *parts_of(model)}):
        raise RecipeError(f"{setting}: {type(model).__name__} has no {missing[0]}; leave it out")
    every, of_parts = matrices(model), names_in_parts(model)
    within = [matrix for matrix in every if matrix.part in parts]
    chosen: dict[str, bool] = {}  # by parameter: whether PEFT must take it as a parameter
    for target in targets:
        if target == "all":
            chosen |= {m.name: m.is_fused for m in within if not m.left_out}
            continue
        named = _named(target, targets, model, within, key)
        named = named or _of_others(target, model, within, key)
        inside = {n: fused for n, fused in named.items() if of_parts.get(n, LANGUAGE) in parts}
        if not inside:
            why = f"{UNREACHED}; it" if LANGUAGE in parts else "it"
            raise RecipeError(
                f"{key}: {target} cannot have an adapter in this model: {why} is of the "
                f"{of_parts.get(min(named), LANGUAGE)}, which {setting} does not name"
            )
        chosen |= inside
    saved = [re.compile(rf"(^|.*\.){name}($|\..*)") for name in modules_to_save]  # as PEFT does
    chosen = {n: fused for n, fused in chosen.items() if not any(p.match(n) for p in saved)}
    if not chosen:
        raise RecipeError(f"{key}: nothing to adapt: no module in {', '.join(targets)} is left")
    for part in sorted({*parts} - {of_parts.get(name, LANGUAGE) for name in chosen}):
        leaves = _leaves(matrix for matrix in within if matrix.part == part)
        has = f"whose linear layers are {', '.join(leaves)}" if leaves else "without linear layers"
        hint = f" ({setting.removesuffix('parts')}modules_to_save trains it in full)"
        raise RecipeError(
            f"{key}: nothing to adapt in the {part}, {has}; name others, or leave {part} out of "
            f"{setting}{hint if part == PROJECTOR else ''}"
        )
    layers = {name.split(".")[-2] for name, fused in chosen.items() if not fused}
    converted = {layer for layer in layers if _is_converted(model, layer)}
    split = {n: fused or n.split(".")[-2] in converted for n, fused in chosen.items()}
    return Targets(
        [name.removesuffix(".weight") for name, apart in split.items() if not apart],
        [name for name, apart in split.items() if apart],
    )


def shorter_sides(model: nn.Module, targets: Targets) -> dict[str, int]:
    """The shorter side of each matrix of ``targets``, by the name of its module; of fused experts
    that of one expert."""
    sides = {}
    for name in targets.modules:
        module = model.get_submodule(name)
        if isinstance(module, nn.Linear):  # whose weight may be packed in few bits
            sides[name] = min(module.in_features, module.out_features)
        elif isinstance(module, nn.Embedding) or is_linear(module):
            sides[name] = min(module.get_parameter("weight").shape)
    for name in targets.parameters:
        sides[name.rpartition(".")[0]] = min(model.get_parameter(name).shape[-2:])
    return sides


def target_patterns(model: nn.Module, targets: Targets) -> tuple[list[str], list[str]]:
    """The shortest endings of names that match exactly ``targets``, for PEFT's configuration:
    ``q_proj`` instead of the full name in every layer."""
    modules = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters()]
    return endings(targets.modules, modules), endings(targets.parameters, parameters)


def _named(
    target: str,
    targets: Collection[str],
    model: PreTrainedModel,
    within: Sequence[Matrix],
    key: str,
) -> dict[str, bool]:
    """The parameters called ``target`` -> whether PEFT must take them as parameters."""
    chosen = {}
    called_so = [matrix for matrix in within if _matches(matrix.target, target)]
    reached = [matrix for matrix in called_so if matrix.left_out != UNREACHED]
    for matrix in reached or called_so:  # what reads sounds may have layers of the same names
        if not matrix.is_adaptable:
            is_router = matrix.left_out == ROUTER
            does = "it computes more than a product" if is_router else matrix.left_out
            raise RecipeError(f"{key}: {target} cannot have an adapter in this model: {does}")
        chosen[matrix.name] = matrix.is_fused
    for fused, leaves in names_of_parts(model, [m.name for m in within if m.is_fused]).items():
        if target in leaves:
            if missing := sorted(leaves - {*targets}):
                raise RecipeError(
                    f"{key}: the experts' {target} is one matrix with {', '.join(missing)} in "
                    f"memory; name {' and '.join(sorted(leaves))}, or {fused}"
                )
            chosen |= {m.name: True for m in within if _matches(m.name, fused)}
    return chosen


def _of_others(
    target: str, model: PreTrainedModel, within: Iterable[Matrix], key: str
) -> dict[str, bool]:
    """The same of layers that are not linear (embeddings, convolutions, routers with a matrix), or
    are not ``within`` the parts that are adapted."""
    same = {name: m for name, m in model.named_modules() if _matches(name, target)}
    weights = {name: getattr(module, "weight", None) for name, module in same.items()}
    chosen = {
        f"{name}.weight": not (is_linear(same[name]) or isinstance(same[name], _OTHERS))
        for name, weight in weights.items()
        if isinstance(weight, nn.Parameter) and weight.ndim > 1
    }
    if chosen:
        return chosen
    what = "is no linear layer" if same else "is not in the model"
    expected = ", ".join(_leaves(within))
    raise RecipeError(f"{key}: {target!r} {what}; expected all, or some of {expected}")


def _leaves(of: Iterable[Matrix]) -> list[str]:
    """The last parts of the names of those that have an adapter unless they are omitted."""
    return sorted({m.target.rpartition(".")[2] for m in of if m.is_adaptable and not m.left_out})


def _matches(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f".{ending}")


def _is_converted(model: PreTrainedModel, name: str) -> bool:
    """Whether PEFT takes modules called ``name`` for parts of fused experts."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # one of several parts
        return True
    return name not in (config.target_modules or ())
