"""Which weights of a model an adapter adapts: the targets of a recipe as names that PEFT takes.

PEFT converts the names of linear layers to those of fused experts where transformers has fused
experts of the same name, and drops every linear layer that is still there: dense layers, shared
experts. It leaves parameters alone. So linear layers with such names are adapted as parameters,
which is the same update under the same names in files.

``methods`` call ``choose_targets``, and give PEFT the ``target_patterns`` of what it returns.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ..errors import RecipeError
from .parts import LANGUAGE, PROJECTOR, modules_of, parts_of
from .weight_matrices import ROUTER, UNREACHED, Matrix, is_linear, matrices, names_in_parts

LORA = "method.lora.targets"  # the setting that names targets
# Layers other than linear ones that PEFT can adapt by the name of the module.
_OTHERS = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)


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
    candidates = [matrix for matrix in matrices(model) if matrix.part in parts]
    other_parts = names_in_parts(model)
    chosen: dict[str, bool] = {}  # by parameter: whether PEFT must take it as a parameter
    for target in targets:
        if target == "all":
            chosen |= {m.name: m.is_fused for m in candidates if not m.left_out}
            continue
        named = _named(target, targets, model, candidates, key)
        named = named or _of_others(target, model, candidates, key)
        in_parts = {n: fused for n, fused in named.items() if other_parts.get(n, LANGUAGE) in parts}
        if not in_parts:
            why = f"{UNREACHED}; it" if LANGUAGE in parts else "it"
            raise RecipeError(
                f"{key}: {target} cannot have an adapter in this model: {why} is of the "
                f"{other_parts.get(min(named), LANGUAGE)}, which {setting} does not name"
            )
        chosen |= in_parts
    saved = [re.compile(rf"(^|.*\.){name}($|\..*)") for name in modules_to_save]  # as PEFT does
    chosen = {n: fused for n, fused in chosen.items() if not any(p.match(n) for p in saved)}
    if not chosen:
        raise RecipeError(f"{key}: nothing to adapt: no module in {', '.join(targets)} is left")
    untouched = sorted({*parts} - {other_parts.get(name, LANGUAGE) for name in chosen})
    if untouched:
        raise _nothing_in(untouched[0], candidates, key, setting)
    # ``...up_proj.weight`` as a parameter, if PEFT would take every ``up_proj`` for fused experts
    layers = {name.split(".")[-2] for name, is_fused in chosen.items() if not is_fused}
    converted = {layer for layer in layers if _is_converted(model, layer)}
    as_parameter = {n for n, fused in chosen.items() if fused or n.split(".")[-2] in converted}
    return Targets(
        [name.removesuffix(".weight") for name in chosen if name not in as_parameter],
        [name for name in chosen if name in as_parameter],
    )


def _nothing_in(part: str, candidates: Iterable[Matrix], key: str, setting: str) -> RecipeError:
    leaves = _leaves(matrix for matrix in candidates if matrix.part == part)
    has = f"whose linear layers are {', '.join(leaves)}" if leaves else "without linear layers"
    hint = f" ({setting.removesuffix('parts')}modules_to_save trains it in full)"
    return RecipeError(
        f"{key}: nothing to adapt in the {part}, {has}; name others, or leave {part} out of "
        f"{setting}{hint if part == PROJECTOR else ''}"
    )


def _named(
    target: str,
    targets: Collection[str],
    model: PreTrainedModel,
    candidates: Sequence[Matrix],
    key: str,
) -> dict[str, bool]:
    """The parameters called ``target`` -> whether PEFT must take them as parameters."""
    chosen = {}
    called_so = [matrix for matrix in candidates if _matches(matrix.target, target)]
    reached = [matrix for matrix in called_so if matrix.left_out != UNREACHED]
    for matrix in reached or called_so:  # what reads sounds may have layers of the same names
        if not matrix.is_adaptable:
            is_router = matrix.left_out == ROUTER
            does = "it computes more than a product" if is_router else matrix.left_out
            raise RecipeError(f"{key}: {target} cannot have an adapter in this model: {does}")
        chosen[matrix.name] = matrix.is_fused
    for fused, leaves in _names_in_files(model, [m.name for m in candidates if m.is_fused]).items():
        if target in leaves:
            if missing := sorted(leaves - {*targets}):
                raise RecipeError(
                    f"{key}: the experts' {target} is one matrix with {', '.join(missing)} in "
                    f"memory; name {' and '.join(sorted(leaves))}, or {fused}"
                )
            chosen |= {m.name: True for m in candidates if _matches(m.name, fused)}
    return chosen


def _names_in_files(model: PreTrainedModel, fused: Collection[str]) -> dict[str, set[str]]:
    """The last part of each fused parameter's name -> the names that its matrices have in files:
    ``gate_up_proj`` -> ``gate_proj``, ``up_proj``. Empty if the files have it as it is."""
    kinds = {name.rpartition(".")[2]: name for name in reversed(list(fused))}  # the first of each
    names = {}
    for kind, name in kinds.items():
        fused_parameter = model.get_parameter(name).detach().to("meta")
        parts = revert_weight_conversion(model, {name: fused_parameter})
        leaves = {part.removesuffix(".weight").rpartition(".")[2] for part in parts}
        names[kind] = leaves - {kind}
    return names


def _of_others(
    target: str, model: PreTrainedModel, candidates: Iterable[Matrix], key: str
) -> dict[str, bool]:
    """The same of layers that are not linear (embeddings, convolutions, routers with a matrix), or
    are not in the parts that are adapted."""
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
    expected = ", ".join(_leaves(candidates))
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


def target_patterns(model: nn.Module, targets: Targets) -> tuple[list[str], list[str]]:
    """The shortest endings of names that match exactly ``targets``, for PEFT's configuration:
    ``q_proj`` instead of the full name in every layer."""
    modules = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters()]
    return endings(targets.modules, modules), endings(targets.parameters, parameters)


def endings(chosen: Iterable[str], names: Iterable[str]) -> list[str]:
    """The shortest endings, of whole parts, that only ``chosen`` have among all ``names``."""
    chosen = set(chosen)
    others = {ending for name in names if name not in chosen for ending in _endings(name)}
    return sorted({next((e for e in _endings(n) if e not in others), n) for n in chosen})


def _endings(name: str) -> list[str]:
    """``a.b.c`` -> ``c``, ``b.c``, ``a.b.c``."""
    words = name.split(".")
    return [".".join(words[start:]) for start in range(len(words) - 1, -1, -1)]


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


def in_full(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """``modules_to_save`` as PEFT has them: ``projector`` is the modules of that part, by their
    full names, since PEFT takes ``proj`` for ``q_proj``, too."""
    projector = frozenset(parts_of(model).get(PROJECTOR, ()))
    modules = {PROJECTOR: list(modules_of(model, projector))} if projector else {}
    return [module for name in names for module in modules.get(name, [name])]
