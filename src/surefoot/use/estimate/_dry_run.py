"""Dry run of one micro-batch on fake tensors, to measure the memory of a step.

Fake tensors are dispatched like tensors of a CPU, so the activations saved for the backward pass
are those of torch's own kernels. A GPU's kernels save the same, except for attention with a mask.
"""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ...batch import Batch, with_router_loss
from ...data.media.batch_media import BatchMedia
from ...data.media.files import Noise, Seen
from ...errors import ModelError, first_line
from ...model.isolation import refuse_parts
from ...model.numerics import autocast
from ...model.packed_attention import set_attention
from ...network.early import check_optimizer_shards
from ...network.network import Network
from ...network.open import open_network
from ...optim.blocks import LONG
from ...optim.state import shapes_of_state
from ...parallel.sharded_model import layers
from ...parallel.tensor_parallel import widened
from ...parallel.world import ALONE
from ...run.models import separate_roles, with_auxiliary
from ...run.parts import RunParts
from ...training.stage import POLICY
from ._fake_tensors import FakeTensors, HoldingOptions
from ._memory_model import Pass, Snapshot, Weight

UNMASKED = "surefoot_unmasked_sdpa"  # transformers' own; no mask is built for a name it knows not
AttentionInterface.register(UNMASKED, sdpa_attention_forward)
_MANY = 100_000  # more layers than a model has
_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")  # tells what is raised as well


class NotRehearsedError(ModelError):
    """The model cannot run on fake tensors."""


@dataclass(frozen=True)
class DryRunModel:
    """The model of a run on fake tensors, ready to be trained, as one rank has it."""

    network: Network
    tensors: FakeTensors
    parts: RunParts
    steps: int = LONG  # of the run, if they are known
    others: Sequence[Network] = ()  # that stay beside it, on weights of their own
    keeps_first: bool = False  # a copy of the first values of what is trained, in main memory

    @property
    def setting(self) -> HoldingOptions:
        """Its options."""
        return self.tensors.setting

    @cached_property
    def turns(self) -> list[frozenset[str]]:
        """Each set of parameters that the run trains at once, by their names in files."""
        return self.network.blocks.turns(self.steps)

    @property
    def largest_turn(self) -> frozenset[str]:
        """The one with most parameters, so with most gradients and optimizer state."""
        return max(self.turns, key=self._size)

    @property
    def deepest_turns(self) -> list[frozenset[str]]:
        """Those for which most activations may be saved: no other one with as many tensors has a
        backward pass through more of the model."""
        places = {name: place for place, name in enumerate(self.network.named)}
        deepest: list[frozenset[str]] = []

        def first(turn: frozenset[str]) -> int:
            return min((places[name] for name in turn & places.keys()), default=0)

        for turn in sorted(self.turns, key=first):
            if not deepest or len(turn) > len(deepest[-1]):
                deepest.append(turn)
        return deepest

    @property
    def num_at_once(self) -> int:
        """The number of parameters that are trained at once, at most."""
        return self._size(self.largest_turn)

    def train(self, turn: frozenset[str]) -> None:
        """Make these parameters trainable, and freeze the others."""
        for name, parameter in self.network.named.items():
            parameter.requires_grad_(name in turn)

    def shape_at_once(self, name: str) -> tuple[int, ...]:
        """The shape of what an update changes of the parameter ``name``."""
        parameter = self.network.named[name]
        return self.network.blocks.shape_at_once(name, tuple(parameter.shape))

    def kept_gradient(self, name: str) -> int:
        """The bytes that are kept of the gradient of the parameter ``name``."""
        return math.prod(self.shape_at_once(name)) * self.network.named[name].element_size()

    def copied(self, name: str) -> int:
        """The bytes of the entries of a parameter that the optimizer has instead of it."""
        parameter = self.network.named.get(name)
        is_partial = parameter is not None and self.shape_at_once(name) != tuple(parameter.shape)
        return self.kept_gradient(name) if is_partial else 0

    def _size(self, turn: frozenset[str]) -> int:
        return sum(math.prod(self.shape_at_once(n)) for n in self.network.named.keys() & turn)

    @cached_property
    def weights(self) -> list[Weight]:
        """Every parameter and buffer, with its optimizer state when that is largest."""
        return describe(self)


def build(parts: RunParts, setting: HoldingOptions, steps: int = LONG) -> DryRunModel:
    """The model of ``parts`` as a run of ``steps`` has it, from its ``config.json`` alone. Raises
    ``ModelError`` if that is none of a causal language model, ``RecipeError`` if the method or the
    mesh does not fit."""
    tensors, models, tokenizer = FakeTensors(setting), parts.models, parts.codec.tokenizer
    policy = models.policy
    section = replace(policy.section, gradient_checkpointing=setting.recomputes)
    options = replace(policy.options, precision=setting.precision)
    network = open_network(policy.folder, section, tokenizer, ALONE, options, tensors)
    check_optimizer_shards(network, parts.optim, options.parallel)
    if options.parallel.cp > 1:
        refuse_parts(network.inner)
    network.module.train()

    separate: dict[str, Network] = {}
    for role in separate_roles(models, network):
        other = models.auxiliary(role)
        frozen = replace(other.options, precision=setting.precision)
        fake = FakeTensors(setting, tensors.mode)
        separate[role] = open_network(other.folder, other.section, tokenizer, ALONE, frozen, fake)
    networks = with_auxiliary(models, network, separate)
    others = [other for other in networks.values() if other.module is not network.module]
    keeps_first = any(other.around is not network.around for other in networks.values())
    return DryRunModel(networks[POLICY], tensors, parts, steps, others, keeps_first)


def optimizer_state(dry_run: DryRunModel) -> dict[str, dict[str, torch.Tensor]]:
    """The state of the run's optimizer after a step, by parameter, when it is largest, as the
    optimizer declares it; fake tensors."""
    optim, layouts, state = dry_run.parts.optim, dry_run.network.layouts, {}
    turn = dry_run.largest_turn
    for name, parameter in dry_run.network.named.items():
        if name not in turn:
            continue
        shapes = shapes_of_state(optim, parameter, layouts[name], dry_run.shape_at_once(name))
        with dry_run.tensors.mode:
            state[name] = {
                key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in shapes.items()
            }
    return state


def describe(dry_run: DryRunModel) -> list[Weight]:
    """Every parameter and buffer of the model, with its optimizer state."""
    state = optimizer_state(dry_run)
    dry_run.train(dry_run.largest_turn)
    names = {id(p): name for name, p in dry_run.network.named.items()}
    blocks = {
        id(tensor): index
        for index, layer in enumerate(layers(dry_run.network.module))
        for tensor in layer.parameters()
    }
    inner = dry_run.network.inner
    head, last = inner.get_output_embeddings(), inner.get_input_embeddings()
    is_tied = head is not None and last is not None and head.weight is last.weight
    weights = []
    for parameter in dry_run.network.module.parameters():
        name = names.get(id(parameter), "")
        state_tensors = state.get(name, {}).values()
        weights.append(
            Weight(
                tuple(parameter.shape),
                parameter.element_size(),
                parameter.requires_grad,
                blocks.get(id(parameter)),
                state=sum(t.nbytes for t in state_tensors if t.ndim) + dry_run.copied(name),
                scalars=sum(tensor.nbytes for tensor in state_tensors if not tensor.ndim),
                is_last=last is not None and parameter is last.weight and not is_tied,
                kept=dry_run.kept_gradient(name) if parameter.requires_grad else 0,
            )
        )
    weights += [
        Weight(tuple(p.shape), p.element_size(), False, layer)
        for number, other in enumerate(dry_run.others, 1)
        for p, layer in _layered(other.module, number)
    ]
    modules = [dry_run.network.module, *(other.module for other in dry_run.others)]
    buffers = {id(buffer): buffer for module in modules for buffer in module.buffers()}.values()
    weights += [Weight((*b.shape,), b.element_size(), False, None, is_cut=False) for b in buffers]
    return weights


def _layered(module: nn.Module, number: int) -> Iterator[tuple[nn.Parameter, int | None]]:
    """The parameters of another model with the index of the layer of each, which no other model
    has."""
    blocks = {
        id(parameter): number * _MANY + index
        for index, layer in enumerate(layers(module))
        for parameter in layer.parameters()
    }
    return ((parameter, blocks.get(id(parameter))) for parameter in module.parameters())


def dry_run_batch(dry_run: DryRunModel, batch: Batch, *, has_pictures: bool = False) -> Pass:
    """Run ``batch``, which may be real, forward and backward; it is only the text of a batch that
    ``has_pictures``. Raises ``NotRehearsedError`` if the model reads values, which do not exist, or
    uses a kernel for which torch has no shapes."""
    was_disabled, _LOGGER.disabled = _LOGGER.disabled, True
    try:
        passes = []
        for turn in dry_run.deepest_turns:
            dry_run.train(turn)
            passes.append(_measure_pass(dry_run, batch, has_pictures=has_pictures))
        return max(passes, key=lambda measured: measured.at_peak.total)
    except (RuntimeError, NotImplementedError) as error:
        name = type(dry_run.network.inner).__name__
        raise NotRehearsedError(f"{name} cannot run on fake tensors: {first_line(error)}") from None
    finally:
        _LOGGER.disabled = was_disabled


def _measure_pass(dry_run: DryRunModel, batch: Batch, *, has_pictures: bool) -> Pass:
    """Run ``batch`` forward and backward on fake tensors, and count the bytes that are alive: those
    saved between the two, and the most at any moment."""
    stage, network = dry_run.parts.stage, dry_run.network
    inner, mode = network.inner, dry_run.tensors.mode
    batch = widened(batch, dry_run.setting.tp if dry_run.setting.sequence_parallel else 1)
    fake_batch = batch.located().mapped(mode.from_tensor)
    modules = [network.module, *(other.module for other in dry_run.others)]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    vocabulary = dry_run.tensors.vocabulary
    width = inner.config.get_text_config().vocab_size if vocabulary is None else vocabulary.width

    # A run keeps gradients until the update, and ``_memory_model.memory`` adds them. Here each goes
    # as soon as it is complete, and leaves its bytes: else it would count as an activation, too.
    gradients = _Gradients({p: dry_run.kept_gradient(n) for n, p in network.named.items()})
    hooks = [
        parameter.register_post_accumulate_grad_hook(gradients.drop)  # type: ignore[no-untyped-call]
        for parameter in network.module.parameters()
        if parameter.requires_grad
    ]
    if has_pictures and any(
        parameter.requires_grad
        for module in _picture_modules(inner)
        for parameter in module.parameters(recurse=False)
    ):
        # The gradient of the layers for pictures passes through the whole language model, also
        # where adapters leave its embeddings frozen.
        embeddings = inner.get_input_embeddings()
        hooks.append(embeddings.register_forward_hook(lambda *call: call[-1].requires_grad_()))
    kernel = inner.config._attn_implementation
    if _needs_no_mask(inner, batch):
        inner.set_attn_implementation(UNMASKED)
    live = LiveBytes(tensors, width, lambda: gradients.num_bytes)
    try:
        with mode, live:
            outputs = network.engine.runner.run(fake_batch, stage.spec)
            loss = with_router_loss(stage.loss(POLICY, outputs, fake_batch), outputs).total
            del outputs  # as the loop does, whose backward pass has only the loss
            saved = live.now
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
    finally:
        set_attention(inner, kernel)
        for hook in hooks:
            hook.remove()
    return Pass(
        kept=saved, at_peak=live.peak, most_activations=live.most_activations, growing=live.growing
    )


def of_pictures(dry_run: DryRunModel, media: BatchMedia, pictures: Sequence[Seen]) -> Snapshot:
    """What the layers for pictures keep of these for the backward pass. They read the sizes of
    pictures as values, which fake tensors do not have, so the largest picture really runs through
    them, on the CPU and on weights of zeros; the others take as much for each of their tokens.
    Raises ``NotRehearsedError``: these layers cannot be run alone."""
    inner = dry_run.network.inner
    largest = max(pictures, key=lambda each: each.tokens)
    noise = Noise.of(0, largest.width, largest.height)
    tensors = media.processor.tensors([[media.files.decode(largest._replace(path=noise))]])
    try:
        features = inner.get_image_features  # of transformers' models that read pictures
        given = {name: tensors[name] for name in signature(features).parameters if name in tensors}
        with _zeros_in(_picture_modules(inner)) as weights:
            live = LiveBytes(weights, 0)
            with autocast(dry_run.setting.precision, torch.device("cpu")), live:
                made = features(**given)
                made = getattr(made, "pooler_output", made)
                # what stays is in the graph; the outputs are copied among embeddings, and gone
                made = [output.grad_fn for output in _tensors(made)]
                now = live.now
    except (AttributeError, RuntimeError, TypeError, ValueError, IndexError) as error:
        name = type(inner).__name__
        raise NotRehearsedError(
            f"the layers of {name} for pictures cannot be run alone: {first_line(error)}"
        ) from None
    share = sum(each.tokens for each in pictures) / max(1, largest.tokens)
    return Snapshot(math.ceil(now.activations * share), 0, now.copies)


def _picture_modules(inner: PreTrainedModel) -> list[nn.Module]:
    """The modules of a model that are not of its language model."""
    of_text = {inner.get_output_embeddings(), *inner.get_decoder().modules()}
    return [module for module in inner.modules() if module not in of_text]


@contextlib.contextmanager
def _zeros_in(modules: Sequence[nn.Module]) -> Iterator[list[torch.Tensor]]:
    """While it lasts, the tensors of ``modules`` are zeros on the CPU, trained as they were."""
    before = [(module, dict(module._parameters), dict(module._buffers)) for module in modules]
    made: list[torch.Tensor] = []

    def zeros(tensor: torch.Tensor) -> torch.Tensor:
        made.append(torch.zeros(tuple(tensor.shape), dtype=tensor.dtype, device="cpu"))
        return made[-1]

    try:
        for module, parameters, buffers in before:
            for name, parameter in parameters.items():
                if parameter is not None:
                    learns = parameter.requires_grad
                    module._parameters[name] = nn.Parameter(zeros(parameter), learns)
            for name, buffer in buffers.items():
                module._buffers[name] = None if buffer is None else zeros(buffer)
        yield [tensor for module in modules for tensor in (*module.parameters(), *made)]
    finally:
        for module, parameters, buffers in before:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


@dataclass
class _Gradients:
    """Counts the gradients of a backward pass, and keeps none."""

    kept_bytes: Mapping[torch.Tensor, int]  # of what a run keeps of some
    num_bytes: int = 0

    def drop(self, parameter: torch.Tensor) -> None:
        """The gradient of ``parameter`` is complete."""
        assert parameter.grad is not None
        self.num_bytes += self.kept_bytes.get(parameter, parameter.grad.nbytes)
        parameter.grad = None


def _needs_no_mask(model: PreTrainedModel, batch: Batch) -> bool:
    """Whether transformers would read the mask of ``batch`` and omit it: it hides nothing."""
    if batch.attention_mask is None or model.config._attn_implementation != "sdpa":
        return False
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    is_local = window is not None and batch.input_ids.shape[1] >= window
    return not is_local and bool(batch.attention_mask.all())


KINDS = ("activations", "logits", "copies")


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that counts the storages created in it, by kind: conversions of ``weights`` are
    copies, and logits are as wide as the ``vocabulary``. ``now`` is the current amount, ``peak``
    the moment when it was largest, ``most_activations`` the largest amount of these at any moment,
    ``growing`` the peak with the bytes of gradients ``beside``."""

    def __init__(
        self,
        weights: Iterable[torch.Tensor],
        vocabulary: int,
        beside: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = {_place(tensor) for tensor in weights}
        self._known: set[int] = set(self._weights)
        self._vocabulary = vocabulary
        self._alive = dict.fromkeys(KINDS, 0)
        self._beside = beside
        self.peak = self.now
        self.growing = self.most_activations = 0

    @property
    def now(self) -> Snapshot:
        """The live bytes at this moment."""
        return Snapshot(**self._alive)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Run the operation, and record the storages it has created."""
        out = _run(func, args, kwargs)
        created = [tensor for tensor in _tensors(out) if _place(tensor) not in self._known]
        if created:  # not so for views, and for what an operation has changed in place
            input_places = {_place(tensor) for tensor in _tensors((args, kwargs))}
            created = [tensor for tensor in created if _place(tensor) not in input_places]
        if created:
            is_conversion = func is torch.ops.aten._to_copy.default
            is_copy = is_conversion and _place(args[0]) in self._weights
            for tensor in created:
                self._note(tensor, "copies" if is_copy else self._kind(tensor))
            self.look()
        return out

    def _kind(self, tensor: torch.Tensor) -> str:
        is_wide = tensor.ndim >= 2 and tensor.shape[-1] == self._vocabulary
        return "logits" if is_wide and tensor.is_floating_point() else "activations"

    def _note(self, tensor: torch.Tensor, kind: str) -> None:
        place, storage = _place(tensor), tensor.untyped_storage()
        if place in self._known:  # of two results that are one
            return
        self._known.add(place)
        self._alive[kind] += storage.nbytes()
        weakref.finalize(storage, self._forget, place, kind, storage.nbytes())

    def _forget(self, place: int, kind: str, num_bytes: int) -> None:
        self._known.discard(place)
        self._alive[kind] -= num_bytes

    def look(self) -> None:
        """Record a peak, if this is one."""
        now = self.now
        self.most_activations = max(self.most_activations, now.activations)
        self.growing = max(self.growing, now.total + self._beside())
        if now.total > self.peak.total:
            self.peak = now


def _place(tensor: torch.Tensor) -> int:
    """A key that two tensors share only if they share memory."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(out: object) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(out):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            yield leaf


def _run(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> object:
    """The result of ``func``; of a kernel that fails on fake tensors, one of the right shape."""
    if func is torch.ops.aten._grouped_mm.default and isinstance(args[0], FakeTensor):
        return _grouped_mm(*args, **(kwargs or {}))
    return func(*args, **(kwargs or {}))


def _grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    _bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A matrix product for each expert, of E. Fake tensors know bfloat16 and widths of 16 bytes;
    a CPU computes all. The dimension that ``offs`` divides among the experts is T.

    [T, K] x [E, K, N] = [T, N]; [M, T] x [T, N] = [E, M, N]; [E, M, K] x [K, T] = [M, T].
    """
    shape = [left.shape[-2], right.shape[-1]]
    if left.ndim == right.ndim:
        assert offs is not None or left.ndim == 3
        shape.insert(0, left.shape[0] if offs is None else offs.shape[0])
    return left.new_empty(shape, dtype=out_dtype)
