"""The parameters of a model by where they are: before, in or behind its decoder layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from transformers import PreTrainedModel

from ..errors import ModelError
from ..model.targets import decoder_layers
from .blocks import ParameterNames


def names_by_part(
    module: nn.Module,
    inner: PreTrainedModel,
    in_files: Mapping[str, str],
    heads: Iterable[nn.Module] = (),
) -> ParameterNames:
    """The trainable parameters of ``module``, which is not sharded yet and adds ``heads`` and
    perhaps an adapter to ``inner``; ``in_files`` has their names in files by those in it."""
    wanted = {p: in_files[name] for name, p in module.named_parameters() if p.requires_grad}
    layers = [set(layer.parameters()) for layer in _layers(inner)]
    inside = set[nn.Parameter]().union(*layers)
    added = {parameter for head in heads for parameter in head.parameters()}
    before, after, is_behind = list[str](), list[str](), False
    for parameter in module.parameters():
        is_behind |= parameter in inside
        if parameter in wanted and parameter not in inside | added:
            (after if is_behind else before).append(wanted[parameter])
    head, embeddings = inner.get_output_embeddings(), inner.get_input_embeddings()
    return ParameterNames(
        before=tuple(before),
        layers=tuple(tuple(wanted[p] for p in wanted if p in layer) for layer in layers),
        after=tuple(after),
        added=tuple(wanted[p] for p in wanted if p in added),
        is_tied=head is not None and head.weight is embeddings.weight,
    )


def _layers(model: nn.Module) -> list[nn.Module]:
    try:
        return decoder_layers(model)
    except ModelError:  # methods that need them report it
        return []
