"""The model that a run trains, and how its packed rows are computed.

How it was made ready is recorded in its state: a resumed model takes another path to the same
values, without files or with other ranks. What decides how it computes beside the values must be
equal on the same kind of machine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
import xxhash
from torch import nn

from ..batch import StepRunner
from ..data.text.codec import Codec
from ..data.training_data import AnyData
from ..errors import ModelError, counted
from ..model import packed_attention, packed_kernels, products
from ..model.isolation import select_prompt_sharing
from ..model.loading import device, training_dtype
from ..model.numerics import LossScaler, choose
from ..model.section import ModelSection
from ..model.weight_matrices import is_added
from ..network.network import Network
from ..network.open import open_network
from ..optim.blocks import LONG
from ..parallel.progress import wait_for_ranks
from ..parallel.world import World
from ..training.callback import Kernels, TrainerState
from ..training.step import Learner, Step
from ..training.trainer import Trainer
from . import _data_loading as data_loading
from .parts import RunParts

logger = logging.getLogger(__name__)
Around = Callable[[StepRunner], StepRunner]
COMPUTED_IN = {"bf16": torch.bfloat16, "fp16": torch.float16}  # otherwise as weights are held


def used_here() -> dict[str, str]:
    """What a recipe with default settings uses on this machine; docs/devices.md says why."""
    weights = training_dtype(ModelSection(path=""))
    kernels = [
        *packed_kernels.candidates(device()),
        f"{packed_kernels.BY_DOCUMENT} (one call per document)",
    ]
    return {
        "precision": choose("auto"),
        "weights": "trained: float32; frozen: as stored" if weights == "auto" else str(weights)[6:],
        "packed attention": ", ".join(kernels),
        "products in float32": products.chosen(),
    }


def open_policy(parts: RunParts, world: World, *, needs_start: bool) -> Network:
    """The model that a run trains; on the meta device if a checkpoint has all of its weights, and
    none is needed as it was before the first step (``needs_start``)."""
    start, policy = parts.start, parts.models.policy
    is_new = start is None or needs_start or parts.models.needs_start
    is_saved = start is not None and start.has_base and parts.saves_base
    options = replace(policy.options, is_new=is_new, is_read=is_new or not is_saved)
    network = open_network(policy.folder, policy.section, parts.codec.tokenizer, world, options)
    percent = 100 * network.num_trainable / network.num_parameters
    logger.info("trainable parameters: %s (%.3g %% of all)", f"{network.num_trainable:,}", percent)
    if table := network.coverage_table():
        logger.info("%s", table)
    return network


def settle_packing(parts: RunParts, trainer: Trainer, policy: Network) -> None:
    """How packed rows are computed, as in a resumed run: the kernel, which is the preferred one
    that passes its self-check on rank 0, and whether prompts are shared.
    """
    if not parts.data.packing:
        return
    is_resumed = parts.start is not None
    kernels, inner, world = trainer.state.kernels, policy.inner, trainer.world
    if policy.awaits_values:
        policy.verify_packing()  # it has values only now
    # By an order that is written down, never by timing: kernels add up in different orders, so two
    # launches of one recipe differed with what else the machine did (docs/decisions/0041).
    is_free = parts.models.policy.section.attention == "auto" and world.pp == 1
    if is_free and inner.config._attn_implementation == f"{packed_attention.PREFIX}sdpa":
        kernel = kernels.packed_attention or (packed_kernels.BY_DOCUMENT if is_resumed else None)
        bounds = data_loading.packed_bounds(parts, trainer.windows.loader)
        if kernel is None and world.is_main:
            dtype = COMPUTED_IN.get(policy.options.precision, inner.dtype)
            row = packed_kernels.row_of(inner, bounds, device(), dtype)
            kernel = packed_kernels.choose(row)
        kernels.packed_attention = packed_kernels.use(inner, world.from_main(kernel))
    sharing = select_prompt_sharing(policy.sharing, inner, kernels.shared_prompts)
    # Examples are dealt among ranks by it: ranks that differ, as on other processors, would train
    # on some twice, and on others never.
    policy.sharing.is_proven = kernels.shared_prompts = all(world.gathered(sharing))


def end_with_responses(policy: Network, codec: Codec) -> None:
    """Let ``generate`` of the model, in a callback or after the run, end where responses do."""
    config = policy.inner.generation_config
    if policy.inner.can_generate() and config is not None:
        config.eos_token_id = list(dict.fromkeys([*policy.own_stops, *codec.stop_token_ids]))
        config.pad_token_id = codec.tokenizer.pad_token_id


def build_learner(
    parts: RunParts, policy: Network, state: TrainerState, around: Around | None
) -> Learner:
    """The policy with its optimizer."""
    world, trained = policy.world, policy.trained(parts.optim)
    every, seen = (frozenset[str]().union(*policy.blocks.turns(n)) for n in (LONG, state.max_steps))
    if never := every - seen:
        logger.warning(
            "%s of %d, such as %s, are in no block that the %s of the run train; lower "
            "switch_interval of the method, or train longer",
            *(counted(len(never), "tensor"), len(every), min(never)),
            counted(state.max_steps, "step"),
        )
    run_window: StepRunner = partial(policy.forward_backward, spec=parts.stage.spec)
    step = Step(
        trained.optimizer,
        parts.optim.schedule_over(state.max_steps, state.reductions),
        around(run_window) if around else run_window,
        parts.train.max_grad_norm,
        LossScaler(enabled=policy.options.precision == "fp16"),
        world.summed,
        world.totals,
        copies=policy.engine.replicas(),
        biases=policy.biases,
    )
    return Learner(policy, step, trained)


PICTURES = "what the processor of the model does with pictures"
STOPS = "what ends a response (eos_token_id in generation_config.json)"
TEXT = "how tokens become text (tokenizer.json, tokenizer_config.json)"


def read_besides(parts: RunParts, policy: Network, data: AnyData) -> dict[str, str]:
    """Hashes of what is read at training time beside the weights and rows of a run, by a name."""
    read, codec = dict[str, str](), parts.codec
    if codec.media is not None and data.has_pictures:
        read[PICTURES] = codec.media.processor.fingerprint
    if parts.stage.max_new_tokens:  # responses, which are decoded for rewards
        read[STOPS] = str(sorted(policy.own_stops))
        read[TEXT] = codec.decoding
    return read


def compare_read(state: TrainerState, now: dict[str, str]) -> None:
    """Record what is read beside the weights. Raises ``ModelError`` if the steps so far were
    trained with something else: as of a base, nobody reads a warning."""
    if changed := [name for name in now if state.read.get(name, now[name]) != now[name]]:
        raise ModelError(
            f"model.path: {'; '.join(changed)} has changed since step {state.global_step}, and "
            "this run was trained with the former; restore its files, or start a new run from its "
            "weights in another train.output_dir (model.path, or model.adapter for an adapter)"
        )
    state.read = now


MACHINE = "machine"  # of two kinds of machines, nothing is compared


def compare_prepared(kernels: Kernels, network: Network) -> None:
    """Record how ``network`` was made ready. Logs what differs from the record of a run that is
    resumed on the same kind of machine."""
    now, before = prepared(network), kernels.prepared or {}
    kernels.prepared = now
    if before.get(MACHINE) != now[MACHINE]:
        return
    different = [name for name in now if before.get(name, now[name]) != now[name]]
    if different:
        changes = "; ".join(f"{name}: {before[name]}, now {now[name]}" for name in different)
        logger.warning(
            "the model is not prepared as when this run was saved, so losses may differ: %s",
            changes,
        )


def prepared(network: Network) -> dict[str, str]:
    """What decides how a network computes, by a name for people."""
    world, module = network.world, network.module
    head = network.engine.runner.head
    shared = "" if world.row_group is None else f", cp {world.cp}"
    dtypes = sorted({f"{p.dtype}".removeprefix("torch.") for p in module.parameters()})
    return {
        MACHINE: f"{device().type}, tp {world.tp}, pp {world.pp}, ranks {world.size}{shared}",
        "attention kernel": str(network.inner.config._attn_implementation),
        "output head": "logits" if head is None else "log-probabilities in chunks",
        "precision": network.options.precision,
        "products in float32": products.chosen(),
        "dtypes of weights": ", ".join(dtypes),
        "hash of buffers": _hash(dict(_buffers(module))),
    }


def _buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that no checkpoint contains."""
    for prefix, part in module.named_modules():
        for name in sorted(part._non_persistent_buffers_set):
            if is_added(f"{prefix}.{name}"):  # PEFT's copy of the embeddings that it replaces
                continue
            if (values := part._buffers.get(name)) is not None:
                yield f"{prefix}.{name}", values


def _hash(buffers: Mapping[str, torch.Tensor]) -> str:
    digest = xxhash.xxh3_64()
    for name, values in sorted(buffers.items()):
        digest.update(f"{name} {tuple(values.shape)} {values.dtype}".encode())
        data = wait_for_ranks(values.detach().cpu).contiguous().flatten().view(torch.uint8)
        digest.update(data.numpy().tobytes())
    return digest.hexdigest()
