"""Find a model's embedding, decoder layers, final norm and head, as needed to split it into
pipeline stages.

A model can be split if a layer gets nothing from earlier layers except hidden states. This is not
decided by the architecture's name but tested: every module is replaced by one that records its
inputs, and the model's own code runs once without computing anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from ..errors import RecipeError
from .attention.bounds import Bounds
from .attention.packed import PREFIX, packed_arguments

_LENGTH = 4  # tokens to try with
_PLAIN = (bool, int, float, str, type(None))
_HARMLESS = (*_PLAIN, Bounds)


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

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.base.get_submodule(self.layers)._modules)


class IdentityStub(nn.Module):
    """Identity stub: replaces a module of another pipeline stage and returns its input.

    It keeps the settings of that module, because the surrounding code may read them.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        settings = vars(module).items()
        vars(self).update({k: v for k, v in settings if k[0] != "_" and isinstance(v, _PLAIN)})

    def forward(self, hidden: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """``hidden``."""
        return hidden


class _Noted(IdentityStub):
    """Records its inputs, and returns a new tensor."""

    def __init__(self, module: nn.Module, example: torch.Tensor):
        super().__init__(module)
        self.example = example
        self.given: list[object] = []
        self.named: dict[str, object] = {}
        self.result: torch.Tensor | None = None

    def forward(self, *given: object, **named: object) -> torch.Tensor:
        self.given, self.named = [*given, named.pop("hidden_states", None)], named
        self.result = torch.empty_like(self.example).requires_grad_()
        return self.result

    def got(self, tensor: object) -> bool:
        """Whether its first input is exactly this tensor."""
        return any(one is tensor for one in self.given if one is not None)

    def others(self) -> Iterator[tuple[str, object]]:
        """Its other inputs."""
        yield from ((f"argument {i}", one) for i, one in enumerate(self.given[1:-1], 1))
        yield from self.named.items()


def anatomy(model: PreTrainedModel) -> Architecture:
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
    known = {parts.embedding, parts.layers, parts.norm}
    for name, child in base.named_children():
        if name not in known and any(True for _ in child.parameters()):
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


@dataclass
class _Trial:
    """All modules, replaced by recorders."""

    embedding: _Noted
    layers: list[_Noted]
    norm: _Noted
    head: _Noted


def _try_out(parts: Architecture) -> None:
    model = parts.model
    weight = next(parts.base.get_submodule(parts.layers).parameters())
    size = model.config.get_text_config().hidden_size
    arguments, mode = _arguments(model), FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        example = torch.empty(1, _LENGTH, size, device=weight.device)
        tokens = torch.zeros(1, _LENGTH, dtype=torch.int64, device=weight.device)
    with mode, _replaced(parts, example) as trial:
        for given in ({"input_ids": tokens}, {"inputs_embeds": example}):
            try:
                model(**given, **arguments)
            except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
                reason = str(error).strip().splitlines()
                why = f"the test run failed ({reason[0] if reason else type(error).__name__})"
                raise _refused(model, why) from None
            _check(parts, trial, given.get("inputs_embeds", trial.embedding.result))


def _arguments(model: PreTrainedModel) -> dict[str, object]:
    found: dict[str, object] = {"use_cache": False}
    if model.config._attn_implementation.startswith(PREFIX):
        found |= packed_arguments(model, torch.tensor([0, _LENGTH], dtype=torch.int32))
    return found


def _check(parts: Architecture, trial: _Trial, entering: torch.Tensor | None) -> None:
    """Each module must get the output of the previous one, and nothing else from weights."""
    model, now, what = parts.model, entering, "the input of the model"
    layers = [(f"layer {number}", noted) for number, noted in enumerate(trial.layers)]
    for where, noted in [*layers, (parts.norm, trial.norm)]:
        if noted.result is None or not noted.got(now):
            raise _refused(model, f"{where} does not get exactly {what}")
        for key, value in noted.others():
            if not _is_harmless(value):
                raise _refused(model, f"{where} gets {key} as well, which depends on weights")
        now, what = noted.result, f"the output of {where}"
    if trial.head.result is None:
        raise _refused(model, "its head is not used")


def _is_harmless(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.requires_grad
    if isinstance(value, tuple | list):
        return all(map(_is_harmless, value))
    return isinstance(value, _HARMLESS)


@contextmanager
def _replaced(parts: Architecture, example: torch.Tensor) -> Iterator[_Trial]:
    base, model = parts.base._modules, parts.model._modules
    layers = parts.base.get_submodule(parts.layers)
    embedding = parts.base.get_submodule(parts.embedding)
    norm = parts.base.get_submodule(parts.norm)
    head = parts.model.get_submodule(parts.head)
    trial = _Trial(
        _Noted(embedding, example),
        [_Noted(layer, example) for layer in layers.children()],
        _Noted(norm, example),
        _Noted(head, example),
    )
    base[parts.layers] = nn.ModuleList(trial.layers)
    base[parts.embedding], base[parts.norm] = trial.embedding, trial.norm
    model[parts.head] = trial.head
    try:
        yield trial
    finally:
        base[parts.layers], base[parts.embedding], base[parts.norm] = layers, embedding, norm
        model[parts.head] = head
