"""The ranks of a run with regard to memory: the form of the model on each, the peak micro-batch,
and its memory. The first rank stands for all; the stages of a pipeline are not estimated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from ...batch import Batch
from ...data.data_order import Index
from ...data.media.files import Seen, seen_in
from ...data.store.dataset import EncodedDataset
from ...errors import RecipeError
from ...model.isolation import PromptSharing
from ...model.numerics import PrecisionName
from ...model.packed_kernels import row_of
from ...model.section import Recomputation
from ...optim.bf16_weights import offloaded_size, update_size
from ...parallel.context_parallel import part_of
from ...parallel.launcher import num_processes
from ...parallel.section import ParallelSection
from ...parallel.world import RowGroup
from ...run.parts import RunParts, collation_of
from ...training.context import blank_examples
from ._batches import (
    ExampleLengths,
    RunLength,
    course_of,
    examples_of,
    heaviest,
    loader_of,
    shares_prompts,
    token_counts,
    trained_counts,
)
from ._dry_run import DryRunModel, NotRehearsedError, build, dry_run_batch, of_pictures
from ._fake_tensors import HoldingOptions, held_dtype
from ._memory_model import Memory, MeshShape, Pass, Snapshot, Weight, memory

_STAGES = "the run is a pipeline (parallel.pp), whose stages are not estimated; weights, gradients "
_STAGES += "and optimizer are those of all layers"
NOTHING = Pass(Snapshot(0, 0, 0), Snapshot(0, 0, 0), 0, 0)


@dataclass(frozen=True)
class Machine:
    """The machine of the run."""

    num_processes: int
    on_gpu: bool
    capacity: int | None = None  # bytes that a process can have; None: not known


@dataclass(frozen=True)
class PlanBase:
    """What is the same whatever the size of a micro-batch and the policy of recomputation."""

    parts: RunParts
    machine: Machine
    mesh: MeshShape
    examples: ExampleLengths
    lengths: Index  # with the responses that the stage adds; in a run they may be shorter
    trained: Index
    course: RunLength

    @property
    def dataset(self) -> EncodedDataset:
        """The training examples."""
        return self.examples.dataset

    @property
    def precision(self) -> PrecisionName:
        """What the machine computes in."""
        chosen = self.parts.train.precision
        if chosen == "auto":
            return "bf16" if self.machine.on_gpu else "fp32"
        return "fp32" if chosen == "fp16" and not self.machine.on_gpu else chosen

    @property
    def gathers_bf16(self) -> bool:
        """Whether ranks gather weights in bfloat16."""
        return self.machine.num_processes > 1 and self.precision == "bf16"

    @property
    def setting(self) -> HoldingOptions:
        """The form of the weights on the first rank."""
        policy, on_gpu = self.parts.models.policy, self.machine.on_gpu
        section, parallel = policy.section, policy.options.parallel
        return HoldingOptions(
            self.precision,
            held_dtype(section.dtype, on_gpu=on_gpu),
            recomputes=recomputes_on(self.machine, section.recomputes),
            tp=parallel.tp,
            sequence_parallel=parallel.sequence_parallel,
            cp=parallel.cp,
            num_stages=parallel.pp * parallel.num_parts if parallel.pp > 1 else 1,
            quantized=torch.bfloat16 if on_gpu else torch.float32,
            emulates_float8=not on_gpu,
        )

    def with_size(self, size: int) -> PlanBase:
        """The same with micro-batches of ``size``."""
        train = replace(self.parts.train, micro_batch_size=size)
        return replace(self, parts=replace(self.parts, train=train))

    def build(self, setting: HoldingOptions) -> DryRunModel:
        """The model as ``setting`` says. Raises ``RecipeError`` if it cannot be sharded."""
        stage = self.parts.stage
        return build(self.parts, setting, self.course.windows * stage.passes * stage.mini_batches)


def plan_base(parts: RunParts, machine: Machine) -> PlanBase:
    """The data and the length of a run. Raises as ``plan.make_plan``."""
    mesh = mesh_of(parts.models.policy.options.parallel, machine)
    examples, added = examples_of(parts), parts.stage.max_new_tokens
    lengths = token_counts(parts, examples.dataset) + added
    trained = trained_counts(examples.dataset) + added
    loader = loader_of(parts, examples.dataset, mesh.num_data_ranks)
    course = course_of(parts, loader, lengths, trained)
    return PlanBase(parts, machine, mesh, examples, lengths, trained, course)


def whole(ground: PlanBase) -> DryRunModel:
    """The model as a single rank would have it."""
    return ground.build(replace(ground.setting, tp=1, sequence_parallel=False, num_stages=1))


def mesh_of(section: ParallelSection, machine: Machine) -> MeshShape:
    """The mesh of a run; a ``RecipeError`` if the ranks do not form it."""
    try:
        axes = section.axes(machine.num_processes)
    except ValueError as error:
        raise RecipeError(
            f"parallel: {error}; change them, or plan for that number with --num-processes"
        ) from None
    known = {field.name for field in fields(MeshShape)}
    if odd := [axis for axis, size in axes.items() if size > 1 and axis not in known]:
        raise RecipeError(
            f"parallel.{odd[0]}: what a rank needs where it is above 1 is not estimated; leave it "
            "at 1 to estimate, or measure a run with `surefoot bench`"
        )
    sizes = {axis: size for axis, size in axes.items() if axis in known}
    reshards = section.reshard_after_forward
    return MeshShape(**sizes, reshard_after_forward=reshards, cp=section.cp)


def recomputes_on(machine: Machine, policy: Recomputation) -> Recomputation:
    """What ``policy`` is there: main memory is no other memory for a CPU."""
    return "full" if policy == "offload" and not machine.on_gpu else policy


@dataclass(frozen=True)
class PeakPictures:
    """The pictures of the peak micro-batch."""

    count: int
    num_bytes: int  # that their layers keep for the backward pass
    largest: tuple[int, int]  # width and height


@dataclass(frozen=True)
class Rehearsed:
    """The peak micro-batch, and its memory on the first rank."""

    batch: Batch
    memory: Pass
    not_known: str | None = None  # why it is not
    pictures: PeakPictures | None = None  # which are in it

    @property
    def logit_weight(self) -> float:
        """The bytes of a trained position relative to those of a token."""
        at_peak = self.memory.at_peak
        by_token = max(1, at_peak.activations) / self.batch.input_ids.numel()
        return at_peak.logits / max(1, self.batch.num_trained) / by_token


def rehearsed_row(ground: PlanBase, rank_model: DryRunModel, batch: Batch) -> Rehearsed:
    """The memory of ``batch``, which is text alone, as ``rehearsed`` has that of the peak one."""
    if ground.mesh.pp > 1:
        return Rehearsed(batch, NOTHING, _STAGES)
    try:
        if ground.gathers_bf16:
            rank_model = ground.build(replace(ground.setting, gathered=torch.bfloat16))
        return _rehearsed_batch(ground, rank_model, batch, ())
    except NotRehearsedError as error:
        return Rehearsed(batch, NOTHING, str(error))


def rehearsed(ground: PlanBase, rank_model: DryRunModel) -> Rehearsed:
    """The memory of the peak micro-batch on a rank with ``rank_model``, or why it is not known.
    Which micro-batch that is depends on the cost of a trained position relative to a token; the one
    with the most tokens is used to find it."""
    batch, seen = _batch(ground, 0.0)
    if ground.mesh.pp > 1:
        return Rehearsed(batch, NOTHING, _STAGES)
    try:
        if ground.gathers_bf16:
            rank_model = ground.build(replace(ground.setting, gathered=torch.bfloat16))
        rehearsal = _rehearsed_batch(ground, rank_model, batch, seen)
        other, seen = _batch(ground, rehearsal.logit_weight)
        if not torch.equal(other.input_ids, batch.input_ids):
            both = (rehearsal, _rehearsed_batch(ground, rank_model, other, seen))
            rehearsal = max(both, key=lambda candidate: candidate.memory.at_peak.total)
    except NotRehearsedError as error:
        return Rehearsed(batch, NOTHING, str(error))
    return rehearsal


def _rehearsed_batch(
    ground: PlanBase, rank_model: DryRunModel, batch: Batch, seen: Sequence[Seen]
) -> Rehearsed:
    """Its memory. The text of pictures is in the batch, the layers for them run beside it."""
    media = ground.parts.codec.media
    of_text = dry_run_batch(rank_model, batch, has_pictures=bool(media and seen))
    if media is None or not seen:
        return Rehearsed(batch, of_text)
    kept = of_pictures(rank_model, media, seen)
    largest = max(seen, key=lambda each: each.tokens)
    pictures = PeakPictures(len(seen), kept.total, (largest.width, largest.height))
    return Rehearsed(batch, of_text.with_kept(kept), pictures=pictures)


@dataclass(frozen=True)
class SharedRows:
    """How ranks share the peak micro-batch (``parallel.cp``)."""

    tokens: int  # of the largest part
    fetched: int  # bytes of keys and values, by a rank in a layer without a window, at most
    longest: int  # tokens of the longest example

    @classmethod
    def of(cls, ground: PlanBase, rank_model: DryRunModel, batch: Batch) -> SharedRows | None:
        """None if no ranks share rows."""
        size, tp = ground.mesh.cp, ground.mesh.tp
        if size == 1:
            return None
        part = part_of(batch, RowGroup(0, size))
        dtype = torch.bfloat16 if ground.precision == "bf16" else torch.float32
        row = row_of(rank_model.network.inner, (), torch.device("cpu"), dtype)
        of_token = 2 * -(-row.num_key_value_heads // tp) * row.head_dim * dtype.itemsize
        tokens = int(np.bincount(part.owner).max())
        return cls(tokens, max(part.num_fetched(None)) * of_token, int(ground.lengths.max()))


def _batch(ground: PlanBase, logit_weight: float) -> tuple[Batch, list[Seen]]:
    """The peak micro-batch as text, and its pictures."""
    parts, stage = ground.parts, ground.parts.stage
    loader = loader_of(parts, ground.dataset, ground.mesh.num_data_ranks)
    collation = collation_of(stage, packing=parts.data.packing)
    items = heaviest(
        loader,
        ground.course.windows,
        ground.lengths,
        ground.trained,
        logit_weight=logit_weight,
        group_size=stage.group_size,
        added=stage.max_new_tokens,
    )
    features = [ground.dataset[int(item)] for item in items]
    examples = blank_examples(stage, parts.codec, features, collation)
    one_of_each = examples[:: stage.group_size][: len(features)]
    batch = collation.for_model(PromptSharing(shares_prompts(parts))).batch(one_of_each)
    copies = 1 if batch.branches is not None else 2  # of the pictures of a pair
    counts = [copies if "lengths" in item else 1 for item in features]
    pairs = zip(features, counts, strict=True)
    return batch, [seen for item, count in pairs for seen in seen_in(item) * count]


def memory_of(ground: PlanBase, rank_model: DryRunModel, peak_pass: Pass) -> Memory:
    """The memory of a rank with ``rank_model``, when it runs ``peak_pass``."""
    parts, mesh, on_gpu = ground.parts, ground.mesh, ground.machine.on_gpu
    per_pass = parts.train.fixed_micro_batch_size * mesh.num_data_ranks
    offloads = on_gpu and parts.optim.offload_state
    estimate = memory(
        [replace(each, state=0) for each in rank_model.weights] if offloads else rank_model.weights,
        peak_pass,
        mesh,
        compute_size=2 if ground.gathers_bf16 else 0,
        accumulates=parts.train.global_batch_size > per_pass,
        update=_update_size(rank_model, mesh, offloads=offloads),
    )
    count = 1 if mesh.num_processes == 1 else mesh.dp_shard
    more = 0 if on_gpu else initial_values_size(rank_model, count)
    return replace(estimate, weights=estimate.weights + more, peak=estimate.peak + more)


def _update_size(dry_run: DryRunModel, mesh: MeshShape, *, offloads: bool) -> int:
    """Bytes that an update takes for a moment: bfloat16 weights in float32, and a state that rests
    in main memory."""
    trained = [weight for weight in dry_run.weights if weight.is_trained]
    gradients_of_bf16 = [
        weight.gradient(mesh.dp_shard) // 2 for weight in trained if weight.item_size == 2
    ]
    size = update_size(gradients_of_bf16, dry_run.parts.optim.bf16_weights)
    if offloads:
        size += offloaded_size([(weight.size, weight.state) for weight in trained])
    return size


def machine_for(section: ParallelSection, device: str | None) -> Machine:
    """The ranks that would be started on this machine, and the memory of each."""
    import psutil

    has_gpu = torch.cuda.is_available()
    on_gpu = has_gpu if device is None else device == "gpu"
    count = section.num_processes or num_processes(section)
    if on_gpu:
        capacity = torch.cuda.get_device_properties(0).total_memory if has_gpu else None
        return Machine(count, True, capacity)
    return Machine(count, False, None if has_gpu else psutil.virtual_memory().total // count)


def initial_values_size(policy: DryRunModel, count: int) -> int:
    """Bytes on the largest of ``count`` ranks that share all weights: the initial values of what is
    trained, which are kept in main memory if windows are prepared with them."""
    if not policy.keeps_first:
        return 0
    parameters = policy.network.named.values()
    weights = [Weight(tuple(p.shape), p.element_size(), False, None) for p in parameters]
    return sum(weight.share(count) * weight.item_size for weight in weights)
