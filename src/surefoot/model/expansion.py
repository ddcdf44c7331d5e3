"""What a method may add to a model: decoder layers that return their input until they are trained
(LLaMA Pro, arXiv:2401.02415), and rows for new tokens beside a frozen vocabulary.

A new layer is a copy of the layer before it, in which the last projection of each branch
(attention, MLP, experts) is zero, so that the branches add nothing to the hidden states. Whether an
architecture can be expanded so depends on its code, and a wrong guess trains something else without
a word. So three things are proven, whatever the architecture is called:

- the configuration, as it is saved, builds the same layers again (``insert_layers``);
- on real weights and the mesh of the run, each new layer returns its input to the bit, and
- no output changes if the old layers get their former numbers back (``verify_new_layers``).
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ..batch import Batch
from ..errors import RecipeError, counted, first_line
from ..parallel.world import local
from .weight_matrices import layer_list

logger = logging.getLogger(__name__)
Run = Callable[[Batch], torch.Tensor]
_KEY = "method.llama_pro"
# In a configuration: the numbers of the new layers. A run that goes on from the deeper model trains
# these, and inserts no others.
_RECORD = "llama_pro_layers"
# Linear layers and fused experts whose result is added to the hidden states.
_LAST = frozenset(
    {
        *("o_proj", "out_proj", "output_proj", "dense", "wo", "linear_out"),
        *("down_proj", "c_proj", "fc2", "fc_out", "dense_4h_to_h", "w2", "linear_fc2"),
        *("output_linear", "linear_2"),
    }
)
_NUMBERS = ("layer_idx", "layer_id", "layer_number", "layer_index")  # of a layer in its modules
_IS_NEW, _NUMBERED = "_surefoot_is_new", "_surefoot_numbers"  # attributes of layers
_LENGTH = 24  # tokens, which most numbers of ranks divide that share a sequence


def insert_layers(model: PreTrainedModel, count: int) -> list[nn.Module]:
    """Insert ``count`` layers into ``model``, evenly spaced, the last one at the end. Returns them,
    or the ones that an earlier run has inserted. Raises ``RecipeError`` if the model has fewer
    layers or other new ones, or its architecture does not allow it."""
    layers, config = layer_list(model), model.config.get_text_config(decoder=True)
    number = len(layers)
    if (recorded := getattr(config, _RECORD, None)) is not None:
        return _recorded(layers, recorded, count)
    if count > number:
        raise RecipeError(
            f"{_KEY}.num_new_layers: expected at most {number}, the layers of the model, "
            f"got {count}"
        )
    if getattr(config, "num_hidden_layers", None) != number:
        raise _refusal(model, f"its configuration does not count its {number} layers")
    sources = [(index + 1) * number // count - 1 for index in range(count)]
    order = sorted([*range(number), *sources])  # of each layer, the layer that it is or copies
    for source in reversed(sources):
        layers.insert(source + 1, _identity(model, layers[source]))
    changed = _count_layers(config, number, order)
    _tell_modules(model, changed)
    for place, (layer, before) in enumerate(zip(layers, order, strict=True)):
        vars(layer)[_NUMBERED] = before, place
        set_number(layer, place)
    _check_config(model)
    places = [place for place, layer in enumerate(layers) if is_new(layer)]
    vars(config)[_RECORD] = places
    return [layers[place] for place in places]


def _recorded(layers: nn.ModuleList, recorded: object, count: int) -> list[nn.Module]:
    """The layers that the configuration of the model says are new."""
    listed = recorded if isinstance(recorded, list) else [recorded]
    numbers = [place for place in listed if type(place) is int and 0 <= place < len(layers)]
    if len(numbers) < len(listed):
        raise RecipeError(
            f"{_KEY}: {_RECORD} in the config.json of the model is {recorded}, which are no "
            "layers of it; remove the key to insert new ones"
        )
    if len(numbers) != count:
        raise RecipeError(
            f"{_KEY}.num_new_layers: got {count}, but the model has "
            f"{counted(len(numbers), 'layer')} of an earlier run ({_RECORD} in its config.json); "
            f"set it to {len(numbers)} to train these"
        )
    return [layers[place] for place in numbers]


@torch.no_grad()
def _identity(model: PreTrainedModel, source: nn.Module) -> nn.Module:
    """A copy of the layer ``source`` that returns its input."""
    # The model's configuration and its lists are one object for all layers, also for the new ones.
    shared = (model.config, *vars(model.config).values())
    layer = copy.deepcopy(source, {id(part): part for part in shared})
    for tensor, original in zip(
        layer.state_dict().values(), source.state_dict().values(), strict=True
    ):
        # Without values, the copy is noted (``CapturedInit``): each rank will read its box of the
        # new layer from the layer that it copies.
        if tensor.is_meta:
            tensor.copy_(original)
    last = [p for name, p in layer.named_parameters() if _is_last(name)]
    if not last:
        kinds = sorted({name.split(".")[-2] for name, _ in layer.named_parameters() if "." in name})
        raise _refusal(model, f"no output projection is known among {', '.join(kinds)}")
    for parameter in last:
        parameter.zero_()
    vars(layer)[_IS_NEW] = True
    return layer


def _is_last(name: str) -> bool:
    """Whether a parameter belongs to the last projection of a branch: of a linear layer, or of
    experts that are fused in a parameter of that name."""
    parts = name.split(".")
    leaf = parts[-2] if parts[-1] in ("weight", "bias") and len(parts) > 1 else parts[-1]
    return leaf.removesuffix("_bias") in _LAST


def _count_layers(
    config: PretrainedConfig, number: int, order: Sequence[int]
) -> Mapping[str, tuple[object, object]]:
    """Change the number of layers, and the lists that have a value for each layer; these before and
    after, by name."""
    changed: dict[str, tuple[object, object]] = {}
    for name, value in list(vars(config).items()):
        is_by_layer = "layer" in name or "block" in name
        if is_by_layer and isinstance(value, list | tuple) and len(value) == number:
            vars(config)[name] = type(value)(value[source] for source in order)
            changed[name] = value, vars(config)[name]
    config.num_hidden_layers = len(order)
    return changed


def _tell_modules(model: nn.Module, changed: Mapping[str, tuple[object, object]]) -> None:
    """Change the copies of these lists that modules keep, as GPT-Neo's do."""
    for module in model.modules():
        for name, (before, after) in changed.items():
            if vars(module).get(name) == before:
                setattr(module, name, after)


def _check_config(model: PreTrainedModel) -> None:
    """Raise ``RecipeError`` unless the configuration, as it is saved, builds the same layers."""
    kind: Any = type(model)
    try:
        with tempfile.TemporaryDirectory() as folder:
            model.config.save_pretrained(folder)
            saved = type(model.config).from_pretrained(folder)
        with torch.device("meta"):
            again: PreTrainedModel = kind(saved)
        expected = [_facts(layer) for layer in layer_list(again)]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        reason = f"its configuration allows no more layers: {first_line(error)}"
        raise _refusal(model, reason) from None
    for number, (layer, expected_facts) in enumerate(zip(layer_list(model), expected, strict=True)):
        facts = _facts(layer)
        for name in sorted(facts.keys() | expected_facts.keys()):
            if facts.get(name) != expected_facts.get(name):
                raise _refusal(
                    model,
                    f"its configuration cannot describe them: {name} of layer {number} is "
                    f"{facts.get(name)}, but would be {expected_facts.get(name)} when it is loaded",
                )


def _facts(layer: nn.Module) -> Mapping[str, object]:
    """What a configuration decides about a layer: shapes, classes and plain settings."""
    facts: dict[str, object] = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    plain = (int, float, str, bool, list, tuple, type(None))
    for name, module in layer.named_modules():
        facts[name or "the class"] = type(module).__name__
        for setting, value in vars(module).items():
            if not setting.startswith("_") and setting != "training" and isinstance(value, plain):
                listed = [*value] if isinstance(value, list | tuple) else value  # as in a file
                facts[f"{name}.{setting}".removeprefix(".")] = listed
    return facts


def _refusal(model: PreTrainedModel, reason: str) -> RecipeError:
    return RecipeError(
        f"{_KEY}: {type(model).__name__} gets no new layers: {reason}; use another method, "
        "such as freeze"
    )


def is_new(layer: nn.Module) -> bool:
    """Whether ``insert_layers`` has added ``layer``."""
    return bool(vars(layer).get(_IS_NEW))


def numbers(layer: nn.Module) -> tuple[int, int] | None:
    """The number that ``layer`` (or the one that it copies) had before layers were inserted, and
    its own now; None if none were inserted."""
    return vars(layer).get(_NUMBERED)


def set_number(layer: nn.Module, number: int) -> None:
    """Tell the modules of ``layer`` its place, which is that of its keys and values in a cache."""
    for module in layer.modules():
        for name in _NUMBERS:
            if type(vars(module).get(name)) is int:
                setattr(module, name, number)


@torch.no_grad()
def verify_new_layers(
    model: PreTrainedModel,
    run: Run,
    *,
    is_packed: bool,
    agreed: Callable[[str | None], str | None] = lambda problem: problem,
) -> None:
    """Raise ``RecipeError`` on every rank unless the new layers of ``model`` return their input, no
    norm follows a branch that is zero, and the other layers do not depend on their number."""
    numbered = [(layer, pair) for layer in model.modules() if (pair := numbers(layer))]
    if not numbered:
        return
    problems: list[str] = []

    def compare(
        layer: nn.Module,
        args: tuple[torch.Tensor, ...],
        kwargs: dict[str, Any],
        output: torch.Tensor | tuple[torch.Tensor, ...],
    ) -> None:
        entering = args[0] if args else kwargs["hidden_states"]
        leaving = output[0] if isinstance(output, tuple | list) else output
        if not torch.equal(local(entering), local(leaving)):
            problems.append(f"a new {type(layer).__name__} does not return its input")

    def look(norm: nn.Module, args: tuple[object, ...]) -> None:
        # As in Gemma 2 and OLMo 2: a norm behind a branch makes of the first small update a large
        # one.
        if args and isinstance(args[0], torch.Tensor) and not bool(local(args[0]).any()):
            problems.append(
                f"its layers normalize what a branch adds ({type(norm).__name__}), so the first "
                "step would not change a new layer a little but at once in full"
            )

    def refuse(problem: str | None) -> None:
        if (shared := agreed(problem)) is not None:
            raise _refusal(model, shared)

    ids = torch.arange(_LENGTH) % model.config.get_text_config().vocab_size
    mask = None if is_packed else torch.ones(1, _LENGTH, dtype=torch.int64)
    bounds = torch.tensor([0, _LENGTH], dtype=torch.int32) if is_packed else None
    batch = Batch(ids[None], ids[None], torch.arange(_LENGTH)[None], mask, cu_seqlens=bounds)
    with ExitStack() as hooks:
        for layer in filter(is_new, model.modules()):
            hooks.enter_context(layer.register_forward_hook(compare, with_kwargs=True))
            for module in layer.modules():
                if "norm" in type(module).__name__.lower():
                    hooks.enter_context(module.register_forward_pre_hook(look))
        now = run(batch)
    refuse(problems[0] if problems else None)
    try:  # with the numbers that layers had before others were inserted
        for layer, (before, _) in numbered:
            set_number(layer, before)
        is_same = torch.equal(now, run(batch))
    finally:
        for layer, (_, place) in numbered:
            set_number(layer, place)
    refuse(None if is_same else "its layers compute differently under another number")
    places = getattr(model.config.get_text_config(decoder=True), _RECORD, ())
    layers, listed = counted(len(places), "new layer"), ", ".join(map(str, places))
    logger.info("%s: %s; they change nothing yet", layers, listed)


_TOKENS = "method.lora.new_tokens"
# An attribute of such models. It is set when embeddings are resized: a method sees the model alone.
_NEW = "new_token_ids"
_UNKNOWN = (0,)  # stands for the tokens of a tokenizer that is not there: names are what matters


def note_new_tokens(model: PreTrainedModel, ids: Sequence[int]) -> None:
    """Note which tokens ``model`` has embeddings for since its tokenizer has got them."""
    vars(model)[_NEW] = sorted(set(ids))


def embeddings_to_train(model: PreTrainedModel) -> dict[str, list[int]]:
    """The new tokens, by the name of each matrix that has a row for them: the input embeddings, and
    the output head unless it is the same matrix. Raises ``RecipeError`` if there are no new tokens,
    or PEFT would compute them differently."""
    ids = list(vars(model).get(_NEW, _UNKNOWN))
    if not ids:
        raise RecipeError(
            f"{_TOKENS}: there are no new tokens; name them in model.new_special_tokens, or leave "
            "it out"
        )
    names = {module: name for name, module in model.named_modules()}
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    has_own_forward = type(embeddings).forward is not nn.Embedding.forward
    # PEFT also multiplies by ``embed_scale``
    is_more = has_own_forward and not hasattr(embeddings, "embed_scale")
    if not isinstance(embeddings, nn.Embedding) or is_more:
        raise _unsupported(model, "its input embeddings are more than rows of a matrix")
    if head is None:
        return {names[embeddings]: ids}
    is_tied = head.weight is embeddings.weight
    if is_tied != bool(model.config.tie_word_embeddings):
        raise _unsupported(
            model, "its config.json and its files differ in whether head and embeddings are tied"
        )
    if type(head).forward is not nn.Linear.forward or head.bias is not None:
        raise _unsupported(model, "its output head is more than a product with a matrix")
    return {names[embeddings]: ids} if is_tied else {names[embeddings]: ids, names[head]: ids}


def untrained_matrices(model: PreTrainedModel, *, has_grown: bool) -> list[str]:
    """The matrices of ``model`` in which a method that was applied to it does not train the rows of
    new tokens, if any were added (``has_grown``) or rows are trained one by one."""
    ids, untrained = set(vars(model).get(_NEW, _UNKNOWN)), []
    names = {module: name for name, module in model.named_modules()}
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if module is None:
            continue
        rows = dict(module.named_children()).get("token_adapter")
        if rows is not None:
            is_left = bool(ids - {*rows.token_indices["default"]})
        else:
            is_left = has_grown and not any(p.requires_grad for p in module.parameters())
        untrained += [names[module].rpartition(".")[2]] if is_left else []
    return untrained


def refuse_divided(model: nn.Module, *, tp: int, pp: int) -> None:
    """Raise ``RecipeError`` if an adapter in ``model`` trains the embeddings of some tokens, and
    ranks of ``tp`` or ``pp`` would have parts of the vocabulary or of the layers alone."""
    has_rows = any(name.endswith(".token_adapter") for name, _ in model.named_modules())
    if has_rows and max(tp, pp) > 1:
        raise RecipeError(
            f"{_TOKENS}: PEFT needs the input embeddings and the output head on one rank; leave "
            "parallel.tp and parallel.pp at 1, and use parallel.dp_shard"
        )


def _unsupported(model: PreTrainedModel, reason: str) -> RecipeError:
    return RecipeError(
        f"{_TOKENS}: {type(model).__name__} is not supported: {reason}; name both in "
        "method.lora.modules_to_save instead"
    )
