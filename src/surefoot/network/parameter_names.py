"""The names that parameters have in files, how many there are, and which are trained."""

from __future__ import annotations

from ..model.pretrained.quantized import num_elements
from ..model.pretrained.weights import AdapterWeights, FullWeights, names_in_files
from ..model.trained_weights import coverage
from .draft import Draft
from .tensors import Tensors


def name_parameters(draft: Draft, _: Tensors) -> None:
    """Note each parameter's name in files."""
    inner = (name for name, _ in draft.inner.named_parameters())
    own = {name for name in inner if draft.heads.name_in_file(name) is not None}
    method, is_adapter = draft.options.method, draft.module is not draft.inner
    if method is not None:
        weights = method.weights(draft.module, draft.inner)
    else:
        weights = AdapterWeights(draft.module) if is_adapter else FullWeights(draft.inner)
    draft.weights = weights.without(own)
    names = names_in_files(draft.module, draft.weights.state_dict())
    draft.names = {here: draft.heads.name_in_file(here) or name for here, name in names.items()}
    named = draft.module.named_parameters()
    draft.trainable = [draft.names[name] for name, p in named if p.requires_grad]
    draft.num_parameters = sum(num_elements(p) for p in draft.module.parameters())
    draft.num_trainable = sum(p.numel() for p in draft.module.parameters() if p.requires_grad)
    if method is not None and draft.options.is_trainable:
        draft.coverage = coverage(draft.module, draft.inner)
