"""The modules and parameters that LoRA adapts, and their names in PEFT's configuration.

PEFT converts the names of linear layers to those of fused experts where transformers has fused
experts of the same name, and drops every linear layer that is still there: dense layers, shared
experts. It leaves parameters alone. So linear layers with such names are adapted as parameters,
which is the same update under the same names in files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from peft import LoraConfig
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from transformers import PreTrainedModel

from ..errors import RecipeError
from .adaptable import ROUTER, UNREACHED, Matrix, is_linear, matrices, names_of_parts
from .targets import endings, linear_names

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

    def inside(self, model: nn.Module, parents: Collection[nn.Module]) -> Targets:
        """Those in modules ``parents`` of ``model``. Raises ``RecipeError`` if there is none."""
        starts = tuple(f"{name}." for name, module in model.named_modules() if module in parents)
        kept = [[n for n in names if n.startswith(starts)] for names in vars(self).values()]
        if not any(kept):
            raise RecipeError(f"{LORA}: none of them is in method.lora.layers")
        return Targets(*kept)


def choose_targets(
    model: PreTrainedModel,
    targets: Collection[str],
    modules_to_save: Collection[str] = (),
    key: str = LORA,
) -> Targets:
    """The targets of ``model`` that ``key`` of the recipe names, except in modules that are trained
    in full.
    Raises ``RecipeError``: a name that is not in the model, or of what cannot be adapted."""
    known = matrices(model)
    chosen: dict[str, bool] = {}  # by parameter: whether PEFT must take it as a parameter
    for target in targets:
        if target == "all":
            chosen |= {m.name: m.is_fused for m in known if not m.left_out}
        else:
            chosen |= _named(target, targets, model, known, key)
    saved = [re.compile(rf"(^|.*\.){name}($|\..*)") for name in modules_to_save]  # as PEFT does
    chosen = {n: fused for n, fused in chosen.items() if not any(p.match(n) for p in saved)}
    if not chosen:
        raise RecipeError(f"{key}: nothing to adapt: no module in {', '.join(targets)} is left")
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
    found = {}
    for name in targets.modules:
        module = model.get_submodule(name)
        if isinstance(module, nn.Linear):  # whose weight may be packed in few bits
            found[name] = min(module.in_features, module.out_features)
        elif isinstance(module, nn.Embedding) or is_linear(module):
            found[name] = min(module.get_parameter("weight").shape)
    for name in targets.parameters:
        found[name.rpartition(".")[0]] = min(model.get_parameter(name).shape[-2:])
    return found


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
    known: Sequence[Matrix],
    key: str,
) -> dict[str, bool]:
    """The parameters called ``target`` -> whether PEFT must take them as parameters."""
    found = {}
    called_so = [matrix for matrix in known if _matches(matrix.target, target)]
    reached = [matrix for matrix in called_so if matrix.left_out != UNREACHED]
    for matrix in reached or called_so:  # a tower for pictures may have layers of the same names
        _check_adaptable(matrix, target, key)
        found[matrix.name] = matrix.is_fused
    for fused, parts in names_of_parts(model, [m.name for m in known if m.is_fused]).items():
        if target in parts:
            _check_complete(target, fused, parts, targets, key)
            found |= {m.name: True for m in known if _matches(m.name, fused)}
    return found or _of_others(target, model, key)


def _of_others(target: str, model: PreTrainedModel, key: str) -> dict[str, bool]:
    """The same of layers that are not linear: embeddings, convolutions, routers with a matrix."""
    same = {name: m for name, m in model.named_modules() if _matches(name, target)}
    weights = {name: getattr(module, "weight", None) for name, module in same.items()}
    found = {
        f"{name}.weight": not isinstance(same[name], _OTHERS)
        for name, weight in weights.items()
        if isinstance(weight, nn.Parameter) and weight.ndim > 1
    }
    if found:
        return found
    what = "is no linear layer" if same else "is not in the model"
    expected = ", ".join(linear_names(model))
    raise RecipeError(f"{key}: {target!r} {what}; expected all, or some of {expected}")


def _matches(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f".{ending}")


def _check_adaptable(matrix: Matrix, target: str, key: str) -> None:
    if not matrix.is_adaptable:
        does = "it computes more than a product" if matrix.left_out == ROUTER else matrix.left_out
        raise RecipeError(f"{key}: {target} cannot have an adapter in this model: {does}")


def _check_complete(
    target: str, fused: str, parts: set[str], targets: Collection[str], key: str
) -> None:
    if missing := sorted(parts - {*targets}):
        raise RecipeError(
            f"{key}: the experts' {target} is one matrix with {', '.join(missing)} in memory; "
            f"name {' and '.join(sorted(parts))}, or {fused}"
        )


def _is_converted(model: PreTrainedModel, name: str) -> bool:
    """Whether PEFT takes modules called ``name`` for parts of fused experts."""
    config = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # one of several parts
        return True
    return name not in (config.target_modules or ())
