"""The names that parameters have in files, how many there are, and which are trained when.

Queries, keys and values that are one matrix: which of its outputs are which.

What each trainable parameter is in its model, for optimizers that treat matrices otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..errors import ModelError
from ..model.config import num_elements, size_of
from ..model.parts import parts_of
from ..model.weight_matrices import HEAD, ROUTER, decoder_layers, is_added, matrices, plain_name
from ..model.weights import AdapterWeights, FullWeights, names_in_files
from ..optim.blocks import ParameterNames
from ..optim.state_tensor import OTHER, ParameterKind, ParameterKinds
from ..optim.trained import unsupported_by_pipelines
from ._coverage import coverage
from .draft import Draft, Tensors
from .method import Method

_FUSED = re.compile(r"qkv|query_key_value|c_attn|w_pack|in_proj_ba", re.IGNORECASE)
# By the package of transformers that defines the attention: all queries come first, or those of
# each head, or those of each head of keys and values.
_IN_ORDER = {"dbrx", "decision_transformer", "gpt2", "imagegpt", "mpt", "openai", "phi3"}
_IN_ORDER |= {"modernbert", "phi4_multimodal"}
_BY_HEAD = {"bloom", "gpt_neox", "gpt_neox_japanese", "minimax", "persimmon"}
_BY_KEY_HEAD = {"falcon", "gpt_bigcode"}
_IN_FOUR = {"codegen"}


@dataclass(frozen=True)
class FusedProjection:
    """The outputs of each of the fused matrices, in order, and in how many groups of outputs each
    has its share. Without outputs, they are not known."""

    parts: tuple[int, ...] = ()
    num_groups: int = 1


def fused_projection(
    name: str, shape: Sequence[int], attention: nn.Module, config: PretrainedConfig
) -> FusedProjection | None:
    """What is fused in the linear layer ``name`` of an attention module, whose weight has this
    ``shape``, outputs first; None if it is one matrix by its name."""
    if not _FUSED.search(name):
        return None
    projection = _linear(name, attention) or _of_heads(name, shape, attention, config)
    # What does not add up is unknown: a wrong split trains, and nothing shows it (decisions/0046).
    is_right = projection is not None and sum(projection.parts) == shape[0]
    return projection if is_right else FusedProjection()


def _of_heads(
    name: str, shape: Sequence[int], attention: nn.Module, config: PretrainedConfig
) -> FusedProjection | None:
    if name == "qkv" and shape[0] == 3 * shape[1]:  # of a vision tower
        return FusedProjection((shape[1],) * 3)
    size = getattr(attention, "head_dim", None) or head_size(config)
    heads, package = num_heads(config), type(attention).__module__.split(".")[-2:][0]
    queries, others = heads * size, shape[0] - heads * size
    if name == "c_attn" and others == queries:  # cross attention: keys and values
        return FusedProjection((queries, queries)) if package in _IN_ORDER else None
    groups = {
        **dict.fromkeys(_IN_ORDER, 1),
        **dict.fromkeys(_BY_HEAD, heads),
        **dict.fromkeys(_BY_KEY_HEAD, others // 2 // max(1, size)),
        **dict.fromkeys(_IN_FOUR, 4),
    }
    if package not in groups or not size or others <= 0 or others % (2 * size):
        return None
    return FusedProjection((queries, others // 2, others // 2), groups[package])


def _linear(name: str, attention: nn.Module) -> FusedProjection | None:
    """Of gated linear attention, as Qwen3-Next and Qwen3.5 have it."""
    if not hasattr(attention, "key_dim") or not hasattr(attention, "num_v_heads"):
        return None
    sizes = (attention.key_dim, attention.value_dim, attention.num_v_heads, attention.num_k_heads)
    keys, values, heads, groups = map(int, sizes)  # type: ignore[arg-type]
    projections = {
        "in_proj_qkv": FusedProjection((keys, keys, values)),
        "in_proj_qkvz": FusedProjection((keys, keys, values, values), groups),
        "in_proj_ba": FusedProjection((heads, heads), groups),
    }
    return projections.get(name)


def num_heads(config: PretrainedConfig) -> int:
    """The heads of attention; 0 if the layers differ, or have none."""
    count = getattr(config, "num_attention_heads", 0)
    return count if isinstance(count, int) else 0


def head_size(config: PretrainedConfig) -> int:
    """The outputs of one head of attention; 0 if they are not known."""
    head_dim, heads = size_of(config, "head_dim"), num_heads(config)
    if isinstance(head_dim, int) and head_dim:
        return head_dim
    return int(config.hidden_size) // heads if heads else 0


_IN_LAYER = re.compile(r"\.\d+\.")
_HALVES = ("gate_up_proj", "gate_and_up_proj")
_HEADS = ("q_proj", "k_proj", "query", "key", "q_lin", "k_lin")


def kinds_of(inner: PreTrainedModel, named: Mapping[str, nn.Parameter]) -> ParameterKinds:
    """The layout of each of the parameters ``named`` of ``inner``, which PEFT may have wrapped."""
    matrix_names = {m.name for m in matrices(inner) if m.left_out not in (HEAD, ROUTER)}
    modules = {plain_name(name): module for name, module in inner.named_modules()}
    kinds: dict[int, ParameterKind] = {}
    for name, parameter in inner.named_parameters():
        plain = plain_name(name)
        if plain in matrix_names and not is_added(name) and _IN_LAYER.search(plain):
            kinds[id(parameter)] = _layout(plain, parameter, inner, modules)
    parts = {id(p): part for part, inside in parts_of(inner).items() for p in inside}
    return {
        name: replace(kinds.get(id(p), OTHER), part=parts.get(id(p), ""))
        for name, p in named.items()
    }


def _layout(
    name: str, parameter: nn.Parameter, inner: PreTrainedModel, modules: Mapping[str, nn.Module]
) -> ParameterKind:
    path = name.rpartition(".")[0]
    module, leaf = modules[path], name.removesuffix(".weight").rpartition(".")[2]
    is_transposed = isinstance(module, Conv1D) or getattr(module, "is_transposed", False) is True
    shape = [*parameter.shape[-2:]][:: -1 if is_transposed else 1]
    usual = ParameterKind(is_matrix=True, is_transposed=is_transposed)
    if leaf in _HALVES and shape[0] % 2 == 0:
        # transformers' word for fused experts: in GPT-OSS, gates and ups take turns.
        half, is_whole = shape[0] // 2, getattr(module, "is_concatenated", True)
        return replace(usual, parts=(half, half), num_groups=1 if is_whole else half)
    config = inner.config.get_text_config()
    attention = modules[path.rpartition(".")[0]]
    if fused := fused_projection(leaf, shape, attention, config):
        groups = fused.num_groups
        return replace(usual, parts=fused.parts, num_groups=groups, is_unknown=not fused.parts)
    size = head_size(config)
    is_of_heads = leaf in _HEADS and size and shape[0] % size == 0
    return replace(usual, head_size=size) if is_of_heads else usual


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
    draft.num_parameters = sum(num_elements(p) for p in draft.module.parameters())
    draft.num_trainable = sum(p.numel() for p in draft.module.parameters() if p.requires_grad)
    parameters = draft.module.named_parameters()
    trainable = {draft.names[name]: p for name, p in parameters if p.requires_grad}
    draft.trainable = list(trainable)
    draft.layouts = kinds_of(draft.inner, trainable)
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
    names = {p: in_files[name] for name, p in module.named_parameters() if p.requires_grad}
    layers = [set(layer.parameters()) for layer in _layers(inner)]
    inside = set[nn.Parameter]().union(*layers)
    added = {parameter for head in heads for parameter in head.parameters()}
    before, after, is_behind = list[str](), list[str](), False
    for parameter in module.parameters():
        # The order of parameters in the module is that of its layers: what comes after the first of
        # them and is in none is behind them.
        is_behind |= parameter in inside
        if parameter in names and parameter not in inside | added:
            (after if is_behind else before).append(names[parameter])
    head, embeddings = inner.get_output_embeddings(), inner.get_input_embeddings()
    return ParameterNames(
        before=tuple(before),
        layers=tuple(tuple(names[p] for p in names if p in layer) for layer in layers),
        after=tuple(after),
        added=tuple(names[p] for p in names if p in added),
        is_tied=head is not None and head.weight is embeddings.weight,
    )


def _layers(model: nn.Module) -> list[nn.Module]:
    try:
        return decoder_layers(model)
    except ModelError:  # methods that need them report it
        return []
