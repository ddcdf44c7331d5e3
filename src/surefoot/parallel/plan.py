"""What becomes of each module of a model that is spread over the ``tp`` axis.

Transformers' plan of the architecture says it of the modules it cuts. The rest is deduced here:
what PEFT has put beside them, heads that are fewer than processes, and what is not cut at all. What
nobody has thought through is refused, for a gradient that is wrong would tell nobody.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torch import nn

from ..errors import RecipeError

if TYPE_CHECKING:  # half of all imports, and here only a name
    from transformers import PreTrainedModel

Style = Literal[
    "columns",
    "columns_gathered",
    "rows",
    "rows_of_whole",
    "some_rows",
    "groups",
    "vocabulary",
    "whole",
    "whole_inside",
    "dropout",
]
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
}
# Of PEFT's two matrices A comes first, so it has the base's input, and B the base's output.
_A: Mapping[Style, Style] = {"rows": "rows", "rows_of_whole": "rows_of_whole"}
_B: Mapping[Style, Style] = {name: name for name in ("columns", "columns_gathered", "some_rows")}
_PARTIAL = ("columns", "rows")  # beside these lies what only a part passes through
_WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")
_ADAPTER = re.compile(r"^(?P<base>.*)\.lora_(?P<part>\w+?)(\.[^.]+)?$")
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True)
class Role:
    """What one module is to do."""

    module: nn.Module
    style: Style
    length: int = 0  # dropout: of the whole input; groups: query heads here to each key-value head
    head: int = 0  # some_rows: size of a head

    def linear(self) -> nn.Linear:
        """The module, which is a plain linear map."""
        assert isinstance(self.module, nn.Linear)
        return self.module

    def embedding(self) -> nn.Embedding:
        """The module, which looks up tokens."""
        assert isinstance(self.module, nn.Embedding)
        return self.module


def roles(model: PreTrainedModel, size: int) -> list[Role]:
    """What every module of ``model`` that has parameters is to do in ``size`` processes.

    Raises ``RecipeError`` if the architecture has no plan, or this one does not fit it.
    """
    plan: dict[str, str] = model.tp_plan or {}
    if not any("*" in name for name in plan):
        raise _refused(model, "transformers has no tensor parallel plan for it")
    reader = _Reader(model, plan, size)
    return [role for name, module in model.named_modules() for role in reader.roles(name, module)]


def _refused(model: nn.Module, why: str) -> RecipeError:
    return RecipeError(
        f"parallel.tp: {type(model).__name__} cannot be spread by tensors: {why}; "
        "leave tp at 1 and use parallel.dp_shard"
    )


@dataclass(frozen=True)
class _Reader:
    """Reads the plan for one model."""

    model: PreTrainedModel
    plan: Mapping[str, str]
    size: int
    partial: set[str] = field(default_factory=set)  # modules in which some see a part only

    def __post_init__(self) -> None:
        for name, _ in self.model.named_modules():
            place = _WRAPPED.sub("", name)
            if _PLANNED.get(self._planned(place) or "") in _PARTIAL:
                self.partial.add(place.rpartition(".")[0])
        for name, _ in self.model.named_parameters():
            if self._planned(name) not in (None, "replicate"):
                raise _refused(
                    self.model, f"its plan cuts {name}, which is not the matrix of a linear map"
                )
        heads = self._config("num_attention_heads")
        if heads % self.size:
            raise RecipeError(
                f"parallel.tp: {self.size} processes cannot share the {heads} attention heads of "
                f"the model evenly; choose a divisor of {heads}"
            )

    def roles(self, name: str, module: nn.Module) -> Iterator[Role]:
        """What ``module`` is to do: nothing, if neither parameters nor numbers of it matter."""
        place = _WRAPPED.sub("", name)
        if adapter := _ADAPTER.match(place):
            yield from self._adapter(adapter["base"], adapter["part"], module)
            return
        if {"base_layer", "original_module"} & {child for child, _ in module.named_children()}:
            return  # PEFT's wrapper; what it wraps comes next
        planned = self._planned(place)
        if planned is None:
            if any(True for _ in module.parameters(recurse=False)):
                self._must_see_the_whole(place)
                if isinstance(module, nn.Conv1d):  # the layer around it reads its weight itself
                    raise _refused(self.model, f"its plan says nothing of the convolution {place}")
                yield Role(module, "whole")
            return
        role = self._role(place, module)
        if role.style == "some_rows" and place.endswith(".k_proj"):
            groups = self._config("num_attention_heads") // self.size
            yield Role(self.model.get_submodule(place.rpartition(".")[0]), "groups", groups)
        yield role

    def _planned(self, place: str) -> str | None:
        return self.plan.get(_NUMBER.sub(".*", place))

    def _role(self, place: str, module: nn.Module) -> Role:
        """The role of a module in the plan."""
        planned = str(self._planned(place))
        style = _PLANNED.get(planned)
        is_plain = type(module).forward is nn.Linear.forward
        is_whole = style in ("whole", "whole_inside")
        is_right = isinstance(module, nn.Embedding) if style == "vocabulary" else is_plain
        if style is None or not (is_whole or is_right):
            what = f"{planned!r} of {type(module).__name__} {place}"
            raise _refused(self.model, f"its plan asks for {what}, which is not there yet")
        if style == "columns" and place.endswith((".k_proj", ".v_proj")):
            return self._key_or_value(place, module)
        return Role(module, style)

    def _key_or_value(self, place: str, module: nn.Module) -> Role:
        """Heads go whole to one process, or one head to several processes."""
        assert isinstance(module, nn.Linear)
        attention = self.model.get_submodule(place.rpartition(".")[0])
        head = getattr(attention, "head_dim", None)
        head = head or module.out_features // self._config("num_key_value_heads")
        heads = module.out_features // head
        if heads % self.size == 0:
            return Role(module, "columns")
        if self.size % heads == 0:
            return Role(module, "some_rows", head=head)
        raise RecipeError(
            f"parallel.tp: {self.size} processes cannot share the {heads} key-value heads of the "
            f"model evenly; choose a divisor or a multiple of {heads}"
        )

    def _adapter(self, base: str, part: str, module: nn.Module) -> Iterator[Role]:
        """A module of PEFT's beside the linear map ``base``."""
        has_parameters = any(True for _ in module.parameters(recurse=False))
        if part not in ("A", "B", "dropout"):
            if has_parameters:
                raise _refused(self.model, f"lora_{part} beside {base} is not there yet (DoRA?)")
            return
        linear = self.model.get_submodule(base).get_submodule("base_layer")
        role = Role(linear, "whole") if self._planned(base) is None else self._role(base, linear)
        if part == "dropout":
            if role.style == "rows" and isinstance(module, nn.Dropout):
                yield Role(module, "dropout", role.linear().in_features)
        elif has_parameters:
            yield Role(module, (_A if part == "A" else _B).get(role.style, "whole"), head=role.head)

    def _must_see_the_whole(self, place: str) -> None:
        """Refuse a module whose gradients would be those of a part of the heads only."""
        around = place
        while around:
            if around in self.partial:
                why = f"its plan cuts matrices of {around}, but says nothing of {place}"
                raise _refused(self.model, why)
            around = around.rpartition(".")[0]

    def _config(self, name: str) -> int:
        config = self.model.config.get_text_config()
        found = getattr(config, name, None) or config.num_attention_heads
        return int(found)
