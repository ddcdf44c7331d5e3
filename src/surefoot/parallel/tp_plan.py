"""Tensor-parallel plan: how each module is sharded or replicated along ``tp``.

transformers' plan of the architecture covers the modules that it shards. The rest is derived here:
PEFT's modules, fewer heads than ranks, and modules that are not sharded. Cases that have not been
thought through are rejected, because a wrong gradient would go unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from torch import nn

from ..errors import RecipeError

if TYPE_CHECKING:  # half of all imports, and here only a name
    from transformers import PreTrainedModel

_MatrixStyle = Literal["columns", "columns_gathered", "rows", "rows_of_whole", "some_rows"]
_ModuleStyle = Literal["groups", "vocabulary", "experts", "whole", "whole_inside", "dropout"]
_BlockStyle = Literal["block", "block_of_experts", "dropout_of_parts"]
_LayerStyle = Literal["first_layer", "entered_layer", "last_layer"]
Style = _MatrixStyle | _ModuleStyle | _BlockStyle | _LayerStyle
_PLANNED: Mapping[str, Style] = {  # transformers' names
    "colwise": "columns",
    "colwise_gather_output": "columns_gathered",
    "colwise_rep": "columns_gathered",
    "rowwise": "rows",
    "rowwise_split_input": "rows_of_whole",
    "rowwise_rep": "rows_of_whole",
    "embedding_rowwise": "vocabulary",
    "replicated_with_grad_allreduce": "whole_inside",
    "replicate": "whole",
    "moe_tp_experts": "experts",
}
# Of PEFT's two matrices A comes first, so it has the base's input, and B the base's output.
_A: Mapping[Style, Style] = {"rows": "rows", "rows_of_whole": "rows_of_whole"}
_B: Mapping[Style, Style] = {name: name for name in ("columns", "columns_gathered", "some_rows")}
_PARTIAL = ("columns", "rows")  # beside these lies what only a part passes through
_ENDS = ("rows", "rows_of_whole")  # where a block of cut matrices ends
_BLOCK = (*_PARTIAL, *_ENDS, "columns_gathered", "experts")  # what makes one
_WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")
_ADAPTER = re.compile(r"^(?P<base>.*)\.lora_(?P<part>\w+?)(\.[^.]+)?$")
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True)
class ModulePlan:
    """The plan of one module."""

    module: nn.Module
    style: Style
    length: int = 0  # dropout: of all its input; experts: how many; groups: queries to a key
    head: int = 0  # some_rows: size of a head
    on_parts: bool = False  # gradients are of a part of the tokens, or of heads, and are summed

    def linear(self) -> nn.Linear:
        """The module, which is a plain linear layer."""
        assert isinstance(self.module, nn.Linear)
        return self.module

    def embedding(self) -> nn.Embedding:
        """The module, which is an embedding."""
        assert isinstance(self.module, nn.Embedding)
        return self.module


@dataclass(frozen=True)
class LayerRange:
    """Consecutive layers, with activations sharded along the sequence between the blocks."""

    layers: Sequence[nn.Module]
    is_first: bool = True  # whole hidden states enter it; otherwise parts, from another process
    is_last: bool = True  # and whole ones leave it


def module_plans(
    model: PreTrainedModel, size: int, stretches: Sequence[LayerRange] = ()
) -> list[ModulePlan]:
    """The plan of every module of ``model`` that has parameters, for ``size`` ranks. In
    ``stretches``, if given, activations are sharded along the sequence. Raises ``RecipeError`` if
    the architecture has no plan, or this one does not fit it."""
    plan: dict[str, str] = model.tp_plan or {}
    if not any("*" in name for name in plan):
        raise _refused(model, "transformers has no tensor parallel plan for it")
    reader = _Reader(model, plan, size, stretches, _head(model))
    return [role for name, module in model.named_modules() for role in reader.roles(name, module)]


def cuts_vocabulary(model: PreTrainedModel) -> bool:
    """Whether the plan of ``model`` shards its head, and so each row of logits."""
    planned = (model.tp_plan or {}).get(_head(model) or "")
    return _PLANNED.get(planned or "") in ("columns", "columns_gathered")


def _head(model: PreTrainedModel) -> str | None:
    """The name of the output head."""
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), None)


def _is_wrapper(module: nn.Module) -> bool:
    """Whether it is PEFT's wrapper of another module."""
    return bool({"base_layer", "original_module"} & {name for name, _ in module.named_children()})


def _refused(model: nn.Module, why: str) -> RecipeError:
    return RecipeError(
        f"parallel.tp: {type(model).__name__} does not support tensor parallelism: {why}; leave "
        "tp at 1 and use parallel.dp_shard"
    )


@dataclass(frozen=True)
class _Reader:
    """Derives the plan of one model."""

    model: PreTrainedModel
    plan: Mapping[str, str]
    size: int
    stretches: Sequence[LayerRange]
    head: str | None = None
    partial: set[str] = field(default_factory=set)  # modules in which some see a part only
    blocks: set[str] = field(default_factory=set)  # in stretches: modules that hold cut matrices
    routed: set[str] = field(default_factory=set)  # of these, those that hold experts
    places: list[str] = field(default_factory=list)  # of layers, with a dot at the end

    def __post_init__(self) -> None:
        chosen = {layer for stretch in self.stretches for layer in stretch.layers}
        self.places.extend(f"{n}." for n, module in self.model.named_modules() if module in chosen)
        for name, _ in self.model.named_modules():
            place = _WRAPPED.sub("", name)
            style = _PLANNED.get(self._planned(place) or "")
            if style in _PARTIAL:
                self.partial.add(place.rpartition(".")[0])
            if style in _BLOCK and self._in_layers(place):
                self.blocks.add(place.rpartition(".")[0])
                if style == "experts":
                    self.routed.add(place.rpartition(".")[0])
        inside = tuple(f"{block}." for block in self.routed)  # experts that are shared
        self.blocks.difference_update([b for b in self.blocks if b.startswith(inside)])
        self._check_blocks()
        for name, _ in self.model.named_parameters():
            is_expert = self._planned(name.rpartition(".")[0]) == "moe_tp_experts"
            if self._planned(name) not in (None, "replicate") and not is_expert:
                raise _refused(
                    self.model, f"its plan shards {name}, which is not the matrix of a linear layer"
                )
        heads = self._config("num_attention_heads")
        if heads % self.size:
            raise RecipeError(
                f"parallel.tp: {self.size} ranks cannot share the {heads} attention heads of "
                f"the model evenly; choose a divisor of {heads}"
            )

    def roles(self, name: str, module: nn.Module) -> Iterator[ModulePlan]:
        """The plan of ``module``: nothing, if neither its parameters nor its results need one."""
        place = _WRAPPED.sub("", name)
        yield from self._along_sequence(place, module)
        if adapter := _ADAPTER.match(place):
            yield from self._adapter(adapter["base"], adapter["part"], module)
            return
        if _is_wrapper(module):
            return  # what it wraps comes next
        planned = self._planned(place)
        if planned is None:
            if any(True for _ in module.parameters(recurse=False)):
                self._must_see_the_whole(place)
                if isinstance(module, nn.Conv1d):  # the layer around it reads its weight itself
                    raise _refused(self.model, f"its plan does not mention the convolution {place}")
                yield ModulePlan(module, "whole", on_parts=self._on_parts(place, "whole"))
            return
        role = self._role(place, module)
        if role.style == "some_rows" and place.endswith(".k_proj"):
            groups = self._config("num_attention_heads") // self.size
            yield ModulePlan(self.model.get_submodule(place.rpartition(".")[0]), "groups", groups)
        yield role

    def _planned(self, place: str) -> str | None:
        return self.plan.get(_NUMBER.sub(".*", place))

    def _role(self, place: str, module: nn.Module) -> ModulePlan:
        """The plan of a module in transformers' plan."""
        planned = str(self._planned(place))
        style = _PLANNED.get(planned)
        if style == "experts":
            return self._experts(place, module)
        is_plain = type(module).forward is nn.Linear.forward
        is_whole = style in ("whole", "whole_inside")
        is_right = isinstance(module, nn.Embedding) if style == "vocabulary" else is_plain
        if style is None or not (is_whole or is_right):
            what = f"{planned!r} of {type(module).__name__} {place}"
            raise _refused(self.model, f"its plan needs {what}, which is not supported yet")
        if style == "columns_gathered" and place == self.head:
            style = "columns"  # so that no process ever has all logits
        role = ModulePlan(module, style)
        if style == "columns" and place.endswith((".k_proj", ".v_proj")):
            role = self._key_or_value(place, module)
        return replace(role, on_parts=self._on_parts(place, style))

    def _experts(self, place: str, module: nn.Module) -> ModulePlan:
        """Every expert belongs to one rank: transformers' plan would shard each expert, but then
        the local part of a fused matrix of gate and up would not be a box."""
        count = getattr(module, "num_experts", 0)
        is_fused = all(len(parameter) == count for parameter in module.parameters())
        if not hasattr(module, "_is_expert_parallel") or not is_fused:
            why = f"{place} runs its experts in a way of its own, or has adapters beside them"
            raise _refused(self.model, why)
        if count % self.size:
            raise RecipeError(
                f"parallel.tp: {self.size} ranks cannot share the {count} experts of a layer "
                f"evenly; choose a divisor of {count}"
            )
        return ModulePlan(module, "experts", count)

    def _key_or_value(self, place: str, module: nn.Module) -> ModulePlan:
        """Several complete heads per rank, or one head on several ranks."""
        assert isinstance(module, nn.Linear)
        attention = self.model.get_submodule(place.rpartition(".")[0])
        head = getattr(attention, "head_dim", None)
        head = head or module.out_features // self._config("num_key_value_heads")
        heads = module.out_features // head
        if heads % self.size == 0:
            return ModulePlan(module, "columns")
        if self.size % heads == 0:
            return ModulePlan(module, "some_rows", head=head)
        raise RecipeError(
            f"parallel.tp: {self.size} ranks cannot share the {heads} key-value heads of the "
            f"model evenly; choose a divisor or a multiple of {heads}"
        )

    def _adapter(self, base: str, part: str, module: nn.Module) -> Iterator[ModulePlan]:
        """A module of PEFT's beside the linear layer ``base``."""
        has_parameters = any(True for _ in module.parameters(recurse=False))
        if part not in ("A", "B", "dropout"):
            if has_parameters:
                raise _refused(
                    self.model, f"lora_{part} beside {base} is not supported yet (DoRA?)"
                )
            return
        wrapper = self.model.get_submodule(base)
        linear = wrapper.get_submodule("base_layer")
        if hasattr(wrapper, "parameter_name") and not isinstance(linear, nn.Linear):  # experts
            why = f"the adapter of {base} covers all experts (method.lora.targets can leave it out)"
            raise _refused(self.model, why)
        role = ModulePlan(linear, "whole", on_parts=self._on_parts(base, "whole"))
        role = role if self._planned(base) is None else self._role(base, linear)
        if part == "dropout":
            if role.style == "rows" and isinstance(module, nn.Dropout):
                yield ModulePlan(module, "dropout", role.linear().in_features)
            elif role.style == "whole" and role.on_parts:
                yield from self._dropout(module)
        elif has_parameters:
            style = (_A if part == "A" else _B).get(role.style, "whole")
            yield replace(role, module=module, style=style)

    def _in_layers(self, place: str) -> bool:
        return f"{place}.".startswith(tuple(self.places))

    def _block(self, place: str) -> str | None:
        """The block that contains ``place``."""
        while place and place not in self.blocks:
            place = place.rpartition(".")[0]
        return place or None

    def _on_parts(self, place: str, style: Style) -> bool:
        """Whether a module there has only a part of the gradient: it sees a shard of the tokens, or
        all tokens but later computation sees a shard of the heads."""
        if not self._in_layers(place):
            return False
        block = self._block(place)
        if block in self.routed:
            return False
        return block is None or style in _ENDS or block in self.partial

    def _along_sequence(self, place: str, module: nn.Module) -> Iterator[ModulePlan]:
        """Where tokens are split and gathered."""
        if not self._in_layers(place):
            return
        if place in self.routed and not _is_wrapper(module):
            yield ModulePlan(module, "block_of_experts")
        elif place in self.blocks and not _is_wrapper(module):
            yield ModulePlan(module, "block", on_parts=place in self.partial)
        elif self._block(place) is None and not _ADAPTER.match(place):
            yield from self._dropout(module)
        for stretch in self.stretches:
            if module is stretch.layers[0]:
                yield ModulePlan(module, "first_layer" if stretch.is_first else "entered_layer")
            if module is stretch.layers[-1] and stretch.is_last:
                yield ModulePlan(module, "last_layer")

    def _dropout(self, module: nn.Module) -> Iterator[ModulePlan]:
        if isinstance(module, nn.Dropout) and module.p:
            yield ModulePlan(module, "dropout_of_parts")

    def _check_blocks(self) -> None:
        """Reject a module that cannot be sharded along the sequence."""
        why = None
        odd = [b for b in self.blocks if f"{b}." in self.places]
        odd += [b for b in self.blocks if self._block(b.rpartition(".")[0])]
        if odd:
            why = f"{min(odd)} is no block of its own"
        elif self.places and getattr(self.model.config, "residual_dropout", None):
            why = "its residual_dropout would drop the same positions of every shard"
        if why:
            raise RecipeError(
                f"parallel.sequence_parallel: {type(self.model).__name__} cannot be sharded "
                f"along the sequence: {why}; set it to false"
            )

    def _must_see_the_whole(self, place: str) -> None:
        """Reject a module whose gradients would be those of a shard of the heads only."""
        around = place
        while around:
            if around in self.partial:
                why = f"its plan shards matrices of {around}, but does not mention {place}"
                raise _refused(self.model, why)
            around = around.rpartition(".")[0]

    def _config(self, name: str) -> int:
        config = self.model.config.get_text_config()
        num_heads = getattr(config, name, None) or config.num_attention_heads
        return int(num_heads)
