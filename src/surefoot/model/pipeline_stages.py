"""Split a model into pipeline stages: the layers of each, with the embedding before the first and
norm and head after the last.

A rank keeps the modules of its own stages; identity stubs replace the others (``keep``). So every
name is that of the full model, and the model's own code does the rest: masks, positions, inputs of
each kind of layer. To run a stage, only its own layers are made visible (``Stages.only``).

A model can be split if a layer gets nothing from earlier layers except hidden states. This is not
decided by the architecture's name but tested (``architecture_of``): every module is replaced by one
that records its inputs, and the model's own code runs once without computing anything.

``network`` plans the stages before weights are read (``plan_pipeline_stages``), and keeps those of
the rank afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from ..errors import RecipeError, first_line
from .packed_attention import DocumentBounds, one_document

_PLAIN = (bool, int, float, str, type(None))
_LENGTH = 4  # tokens to try with
_OF_THE_HEAD = ("logits_to_keep", "labels")  # arguments that the model without its head knows not


def keep(model: PreTrainedModel, numbers: Collection[int], num_stages: int) -> Stages:
    """Keep only the modules of the pipeline stages ``numbers`` of ``num_stages`` in ``model``.
    Raises ``RecipeError`` if the architecture cannot be split."""
    parts, last = architecture_of(model), num_stages - 1
    base = parts.base._modules
    layers = list(parts.base.get_submodule(parts.layers).children())
    layers_by_stage = split(len(layers), num_stages)
    stubs = [IdentityStub(layer) for layer in layers]
    no_norm = IdentityStub(parts.base.get_submodule(parts.norm))

    def only(stages: Collection[int]) -> list[nn.Module]:
        indices = {i for number in stages for i in layers_by_stage[number]}
        return [layer if i in indices else stubs[i] for i, layer in enumerate(layers)]

    base[parts.layers] = Layers(only(numbers))
    if 0 not in numbers:
        base[parts.embedding] = None
    if last not in numbers:
        base[parts.norm], model._modules[parts.head] = no_norm, None
    return Stages(parts, last, {number: only([number]) for number in numbers}, no_norm)


@dataclass(frozen=True)
class Stages:
    """The pipeline stages of this rank."""

    parts: Architecture
    last: int  # number of the last stage of all
    here: Mapping[int, list[nn.Module]]  # by number, the layers to show while it runs
    no_norm: nn.Module

    @contextmanager
    def only(self, number: int) -> Iterator[None]:
        """Make the model this stage: unless it is the last, it returns hidden states."""
        base, model = self.parts.base, self.parts.model
        layers = base.get_submodule(self.parts.layers)
        assert isinstance(layers, Layers)
        shown_before, layers.shown = layers.shown, self.here[number]
        norm, forward = base._modules[self.parts.norm], vars(model).get("forward")
        if number != self.last:
            base._modules[self.parts.norm] = self.no_norm
            model.forward = _without_head(base)
        try:
            yield
        finally:
            layers.shown, base._modules[self.parts.norm] = shown_before, norm
            if number != self.last:
                del model.forward
                if forward is not None:
                    model.forward = forward


def _without_head(base: nn.Module) -> Callable[..., object]:
    def forward(*args: object, **kwargs: object) -> object:
        return base(*args, **{k: v for k, v in kwargs.items() if k not in _OF_THE_HEAD})

    return forward


class Layers(nn.ModuleList):
    """The layers of this rank, of which the model's code sees one stage at a time.

    All of them stay registered, so that every module is found under its name.
    """

    def __init__(self, layers: Sequence[nn.Module]):
        super().__init__(layers)
        self.shown = list(layers)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.shown)

    def __getitem__(self, index: int | slice) -> nn.Module | list[nn.Module]:  # type: ignore[override]
        return self.shown[index]


class IdentityStub(nn.Module):
    """Takes the place of a module of another pipeline stage, and returns its input. It keeps the
    plain settings of that module, because the surrounding code may read them."""

    def __init__(self, module: nn.Module):
        super().__init__()
        settings = vars(module).items()
        vars(self).update({k: v for k, v in settings if k[0] != "_" and isinstance(v, _PLAIN)})

    def forward(self, hidden: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """``hidden``."""
        return hidden


def split(num_layers: int, num_stages: int) -> list[range]:
    """The layers of each pipeline stage, divided as evenly as possible.

    Stages in the middle get the remaining ones, because the last also has the head, and the first
    the embedding. Raises ``RecipeError`` if there are more stages than layers.
    """
    if num_stages > num_layers:
        raise RecipeError(
            f"parallel.pp: {num_stages} pipeline stages need as many layers, but the model has "
            f"{num_layers}; lower pp or pp_stages_per_rank"
        )
    fewest, remaining = divmod(num_layers, num_stages)
    longer = [*range(1, num_stages - 1), 0, num_stages - 1][:remaining]
    stages, start = [], 0
    for stage in range(num_stages):
        stop = start + fewest + (stage in longer)
        stages.append(range(start, stop))
        start = stop
    return stages


def plan_pipeline_stages(
    inner: PreTrainedModel, num_stages: int, *, is_converted: bool
) -> tuple[Sequence[bool], nn.Parameter | None]:
    """Plan the pipeline stages of ``inner``, which is complete: for each whether anything learns in
    it or before it, and a weight that the first and the last both have. Raises ``RecipeError``."""
    if is_converted:
        raise RecipeError(
            f"parallel.pp: {type(inner).__name__} fuses tensors of its files at loading, or has "
            "frozen adapters (model.frozen_adapters, method.lora.init), which a pipeline does not "
            "support; leave pp at 1 and use parallel.dp_shard"
        )
    stages = parameters_of(inner, num_stages)
    is_trained = [any(p.requires_grad for p in stage) for stage in stages]
    return [any(is_trained[: i + 1]) for i in range(num_stages)], _shared(stages)


def parameters_of(model: PreTrainedModel, num_stages: int) -> list[list[nn.Parameter]]:
    """The parameters of each pipeline stage of a full model; a tied one is in two. Raises
    ``RecipeError`` if the architecture cannot be split."""
    parts = architecture_of(model)
    layers = list(parts.base.get_submodule(parts.layers).children())
    by_stage = [
        [p for i in indices for p in layers[i].parameters()]
        for indices in split(len(layers), num_stages)
    ]
    by_stage[0] += parts.base.get_submodule(parts.embedding).parameters()
    by_stage[-1] += parts.base.get_submodule(parts.norm).parameters()
    by_stage[-1] += model.get_submodule(parts.head).parameters()
    return by_stage


def _shared(stages: Sequence[Sequence[nn.Parameter]]) -> nn.Parameter | None:
    """The parameter that the first and the last stage both have."""
    first = set(stages[0])
    both = first & set(stages[-1])
    between = [p for stage in stages[1:-1] for p in stage]
    if len(both) > 1 or len(set(between)) < len(between) or first & set(between):
        raise RecipeError(
            "parallel.pp: layers of this model share weights with others, which a pipeline "
            "does not support; leave pp at 1 and use parallel.dp_shard"
        )
    return both.pop() if both else None


@dataclass(frozen=True)
class Architecture:
    """The parts of a causal language model: embedding → layers → norm, which are children of
    ``base``, → head."""

    model: PreTrainedModel
    base: nn.Module
    embedding: str
    layers: str
    norm: str
    head: str


def architecture_of(model: PreTrainedModel) -> Architecture:
    """The parts of ``model``. Raises ``RecipeError`` if it cannot be split between layers, or if
    the test failed."""
    base = model.base_model
    if base is model:
        raise _refused(model, "it has no base model below its head")
    parts = Architecture(
        model,
        base,
        embedding=_child(model, base, model.get_input_embeddings(), "embedding"),
        layers=_layers(model, base),
        norm=_norm(model, base),
        head=_child(model, model, model.get_output_embeddings(), "head"),
    )
    part_names = {parts.embedding, parts.layers, parts.norm}
    for name, child in base.named_children():
        if name not in part_names and any(True for _ in child.parameters()):
            raise _refused(model, f"{name} is neither embedding, layer nor norm")
    _try_out(parts)
    return parts


def _refused(model: nn.Module, why: str) -> RecipeError:
    return RecipeError(
        f"parallel.pp: {type(model).__name__} cannot be split between its layers: {why}; leave "
        "pp at 1 and use parallel.dp_shard"
    )


def _child(model: PreTrainedModel, parent: nn.Module, module: nn.Module | None, what: str) -> str:
    for name, child in parent.named_children():
        if child is module:
            return name
    raise _refused(model, f"its {what} is not where it is expected")


def _layers(model: PreTrainedModel, base: nn.Module) -> str:
    lists = [name for name, child in base.named_children() if isinstance(child, nn.ModuleList)]
    if len(lists) != 1:
        raise _refused(model, f"it has {len(lists)} lists of layers")
    return lists[0]


def _norm(model: PreTrainedModel, base: nn.Module) -> str:
    """The child after the layers that has weights."""
    names = [name for name, child in base.named_children() if any(True for _ in child.parameters())]
    after = names[names.index(_layers(model, base)) + 1 :]
    if len(after) != 1:
        raise _refused(model, f"after its layers come {len(after)} modules, expected a norm")
    return after[0]


def _try_out(parts: Architecture) -> None:
    """Run the model's code with recorders in place of its parts, and look at what they got."""
    model = parts.model
    weight = next(parts.base.get_submodule(parts.layers).parameters())
    size = model.config.get_text_config().hidden_size
    arguments, mode = one_document(model, _LENGTH), FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        example = torch.empty(1, _LENGTH, size, device=weight.device)
        tokens = torch.zeros(1, _LENGTH, dtype=torch.int64, device=weight.device)
    with mode, _recording(parts, example) as recorders:
        for inputs in ({"input_ids": tokens}, {"inputs_embeds": example}):
            try:
                model(**inputs, use_cache=False, **arguments)
            except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
                raise _refused(model, f"the test run failed ({first_line(error)})") from None
            _check(parts, recorders, inputs.get("inputs_embeds", recorders[0].result))


def _check(
    parts: Architecture, recorders: Sequence[_Recorder], entering: torch.Tensor | None
) -> None:
    """Each module must get the output of the previous one, and nothing else from weights."""
    _, *layers, norm, head = recorders
    hidden, source = entering, "the input of the model"
    named = [*((f"layer {i}", layer) for i, layer in enumerate(layers)), (parts.norm, norm)]
    for name, recorder in named:
        if recorder.result is None or not recorder.got(hidden):
            raise _refused(parts.model, f"{name} does not get exactly {source}")
        for key, value in recorder.others():
            if not _is_harmless(value):
                why = f"{name} gets {key} as well, which depends on weights"
                raise _refused(parts.model, why)
        hidden, source = recorder.result, f"the output of {name}"
    if head.result is None:
        raise _refused(parts.model, "its head is not used")


@contextmanager
def _recording(parts: Architecture, example: torch.Tensor) -> Iterator[list[_Recorder]]:
    """Recorders in place of embedding, layers, norm and head, in this order."""
    base, model = parts.base._modules, parts.model._modules
    originals = base[parts.embedding], base[parts.layers], base[parts.norm], model[parts.head]
    layers = parts.base.get_submodule(parts.layers).children()
    modules = [parts.base.get_submodule(parts.embedding), *layers]
    modules += parts.base.get_submodule(parts.norm), parts.model.get_submodule(parts.head)
    recorders = [_Recorder(module, example) for module in modules]
    base[parts.embedding], base[parts.layers] = recorders[0], nn.ModuleList(recorders[1:-2])
    base[parts.norm], model[parts.head] = recorders[-2:]
    try:
        yield recorders
    finally:
        base[parts.embedding], base[parts.layers], base[parts.norm], model[parts.head] = originals


class _Recorder(IdentityStub):
    """Records its inputs, and returns a new tensor."""

    def __init__(self, module: nn.Module, example: torch.Tensor):
        super().__init__(module)
        self.example = example
        self.args: list[object] = []
        self.kwargs: dict[str, object] = {}
        self.result: torch.Tensor | None = None

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        self.args, self.kwargs = [*args, kwargs.pop("hidden_states", None)], kwargs
        self.result = torch.empty_like(self.example).requires_grad_()
        return self.result

    def got(self, tensor: object) -> bool:
        """Whether one of its positional inputs, or its hidden states, is exactly this tensor."""
        return any(argument is tensor for argument in self.args if argument is not None)

    def others(self) -> Iterator[tuple[str, object]]:
        """Its other inputs."""
        yield from ((f"argument {i}", argument) for i, argument in enumerate(self.args[1:-1], 1))
        yield from self.kwargs.items()


def _is_harmless(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.requires_grad
    if isinstance(value, tuple | list):
        return all(map(_is_harmless, value))
    return isinstance(value, (*_PLAIN, DocumentBounds))
