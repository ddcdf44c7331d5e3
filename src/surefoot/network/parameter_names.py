"""The names that parameters have in files, how many there are, and which are trained when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from transformers import PreTrainedModel

from ..errors import ModelError
from ..model.pretrained.quantized import num_elements
from ..model.pretrained.weights import AdapterWeights, FullWeights, names_in_files
from ..model.targets import decoder_layers
from ..model.trained_weights import coverage
from ..optim.blocks import ParameterNames
from ..optim.trained import unsupported_by_pipelines
from .draft import Draft
from .method import Method
from .parameter_kinds import kinds_of
from .tensors import Tensors


def name_parameters(draft: Draft, _: Tensors) -> None:
    """Note each parameter's name in files."""
    inner = (name for name, _ in draft.inner.named_parameters())
    of_heads = {name for name in inner if draft.heads.name_in_file(name) is not None}
    method, is_adapter = draft.options.method, draft.module is not draft.inner
    if method is not None:
        weights = method.weights(draft.module, draft.inner)
    else:
        weights = AdapterWeights(draft.module) if is_adapter else FullWeights(draft.inner)
    draft.weights = weights.without(of_heads)
    names = names_in_files(draft.module, draft.weights.state_dict())
    draft.names = {here: draft.heads.name_in_file(here) or name for here, name in names.items()}
    named = draft.module.named_parameters()
    draft.trainable = [draft.names[name] for name, p in named if p.requires_grad]
    draft.num_parameters = sum(num_elements(p) for p in draft.module.parameters())
    draft.num_trainable = sum(p.numel() for p in draft.module.parameters() if p.requires_grad)
    own = {draft.names[name]: p for name, p in draft.module.named_parameters() if p.requires_grad}
    draft.layouts = kinds_of(draft.inner, own)
    if method is not None and draft.options.is_trainable:
        settle_blocks(draft, method)


def settle_blocks(draft: Draft, method: Method) -> None:
    """Note which parameters ``method`` trains at which step. Raises ``RecipeError`` if it switches
    in a pipeline."""
    parts = names_by_part(draft.module, draft.inner, draft.names, draft.heads.modules.values())
    draft.blocks = method.trainable(parts, draft.options.seed)
    if draft.blocks.changes and draft.options.parallel.pp > 1:
        raise unsupported_by_pipelines()
    in_turn = {here for here, name in draft.names.items() if name in draft.blocks.in_turn}
    draft.coverage = coverage(draft.module, draft.inner, in_turn)


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
