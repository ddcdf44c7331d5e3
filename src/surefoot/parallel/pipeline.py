"""Pipeline parallelism: every rank runs some pipeline stages, and micro-batches pass from stage to
stage, forward and backward.

The loss is computed after the last stage, and broadcast. Tied weights that the first and the last
stage both have (embedding and head) are updated with the sum of both gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain, pairwise, zip_longest
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..batch import Batch, Loss, LossFunction, Outputs, Window
from .progress import wait_for_ranks
from .section import ScheduleName
from .world import World, local

T = TypeVar("T")
Advance = Callable[[int, Batch, torch.Tensor | None], torch.Tensor]
Finish = Callable[[Batch, torch.Tensor | None], Outputs]


@dataclass(frozen=True)
class Pipeline:
    """The pipeline stages of this rank, and how they are run."""

    links: Links
    schedule: ScheduleName
    advance: (
        Advance  # a stage but the last one: what enters it (the first: nothing), what leaves it
    )
    shape: Callable[[Batch], Sequence[int]]  # of what passes between stages
    learns: Sequence[bool]  # for each stage, whether anything learns in it or before it
    settle: Callable[[bool], None]  # called before each backward pass: whether it is the last one
    let_go: Callable[[], None]  # called after a window without any backward pass here
    tied: TiedWeight | None = None

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return self.links.num_stages - 1

    def stage(self, op: Op) -> int:
        """The number of the pipeline stage that ``op`` runs."""
        return op.part * self.links.size + self.links.place

    def order(self, count: int) -> list[Op]:
        """The operations of this rank for ``count`` micro-batches."""
        links = self.links
        parts = links.num_stages // links.size
        return order(self.schedule, links.place, links.size, parts, count)


@dataclass(frozen=True)
class TiedWeight:
    """A weight that the first and the last stage both have; ``parameter`` is this rank's copy."""

    parameter: nn.Parameter | None
    group: dist.ProcessGroup | None

    def add_up(self) -> None:
        """Give both copies the sum of their gradients."""
        if self.parameter is None or self.group is None or not self.parameter.requires_grad:
            return
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        wait_for_ranks(dist.all_reduce, local(self.parameter.grad), group=self.group)


def tie(world: World, parameter: nn.Parameter | None) -> TiedWeight:
    """Connect the first and the last stage of each pipeline. A collective call."""
    group_of_ends = None
    for ranks in pipelines(world):
        ends = [ranks[0], ranks[-1]]
        group = wait_for_ranks(dist.new_group, ends, timeout=world.timeout)
        if world.rank in ends:
            group_of_ends = group
    return TiedWeight(parameter, group_of_ends)


def run_window(
    pipeline: Pipeline,
    finish: Finish,
    window: Window,
    loss_function: LossFunction,
    *,
    before: Callable[[int], None],
    after: Callable[[int], None],
) -> list[Loss]:
    """Run a window through the stages, with several micro-batches in flight."""
    ops = pipeline.order(len(window))
    running = _Running(pipeline, finish, window, loss_function, ops)
    for op, coming in zip_longest(ops, ops[1:]):
        running.expect(op)
        if coming is not None and running.is_free_to_expect(coming):
            running.expect(coming)  # it may arrive while this one is computed
        if op.is_forward:
            before(op.index + op.part * len(window))  # other layers draw other numbers
            running.forward(op)
        else:
            running.backward(op)
            if op.part == 0:
                after(op.index)
    pipeline.links.flush()
    if running.final is None:
        pipeline.let_go()
    if pipeline.tied is not None:
        pipeline.tied.add_up()
    return _broadcast_losses(pipeline.links, running.losses)


def run_forward(pipeline: Pipeline, finish: Finish, batch: Batch) -> Outputs:
    """A batch forward through the stages; its outputs are broadcast to all ranks."""
    links, outputs = pipeline.links, None
    for stage in range(links.place, links.num_stages, links.size):
        hidden = links.entering(pipeline.shape(batch), stage).take() if stage else None
        if stage == pipeline.last:
            outputs = finish(batch, hidden)
        else:
            links.enter(pipeline.advance(stage, batch, hidden), stage + 1)
    links.flush()
    return _shared(links, outputs)


@dataclass
class _Running:
    """One window in flight."""

    pipeline: Pipeline
    finish: Finish
    window: Window
    loss_function: LossFunction
    ops: Sequence[Op]
    losses: list[Loss] = field(default_factory=list)  # in the last process, of each micro-batch
    inputs: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    outputs: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    arrivals: dict[Op, Arrival] = field(default_factory=dict)

    @cached_property
    def final(self) -> Op | None:
        """The last backward pass of this rank, if anything here or before it is trainable."""
        pipe = self.pipeline
        back = (op for op in reversed(self.ops) if not op.is_forward)
        return next((op for op in back if pipe.learns[pipe.stage(op)]), None)

    def expect(self, op: Op) -> None:
        """Start to receive the input of ``op``."""
        if op in self.arrivals:
            return
        pipe, stage = self.pipeline, self.pipeline.stage(op)
        if op.is_forward and stage > 0:
            shape = pipe.shape(self.window[op.index])
            self.arrivals[op] = pipe.links.entering(shape, stage)
        elif not op.is_forward and stage < pipe.last and pipe.learns[stage]:
            output = self.outputs[stage, op.index]
            self.arrivals[op] = pipe.links.given_back(output, stage + 1)

    def is_free_to_expect(self, op: Op) -> bool:
        """Whether the input of ``op`` is known, so that nothing has to be waited for."""
        stage = self.pipeline.stage(op)
        if op.is_forward:
            return stage in self.pipeline.links.dtypes
        return (stage, op.index) in self.outputs

    def forward(self, op: Op) -> None:
        """Run a stage, and send its output to the next."""
        pipe, stage = self.pipeline, self.pipeline.stage(op)
        batch = self.window[op.index].to(pipe.links.device)
        hidden = self.arrivals.pop(op).take() if stage > 0 else None
        with torch.set_grad_enabled(pipe.learns[stage]):
            if hidden is not None and pipe.learns[stage - 1]:
                self.inputs[stage, op.index] = hidden.requires_grad_()
            if stage == pipe.last:
                loss = self.loss_function(self.finish(batch, hidden), batch)
                self.losses.append(loss.detach())
                self.outputs[stage, op.index] = loss.total
                return
            output = pipe.advance(stage, batch, hidden)
        pipe.links.enter(output, stage + 1)
        self.outputs[stage, op.index] = output

    def backward(self, op: Op) -> None:
        """Run a stage backward, and send the gradient of its input to the previous one."""
        pipe, stage = self.pipeline, self.pipeline.stage(op)
        output = self.outputs.pop((stage, op.index))
        if not pipe.learns[stage]:
            return
        gradient = None if stage == pipe.last else self.arrivals.pop(op).take()
        pipe.settle(op == self.final)
        torch.autograd.backward(output, gradient)
        entered = self.inputs.pop((stage, op.index), None)
        if entered is not None:
            assert entered.grad is not None
            pipe.links.give_back(entered.grad, stage)


def _broadcast_losses(links: Links, losses: Sequence[Loss]) -> list[Loss]:
    """The losses of the last rank, as numbers, on all ranks."""
    rows = wait_for_ranks(_numbers, losses)
    of_examples = [loss.rows for loss in losses]  # which only the last rank has

    def number(value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float64, device=links.device)

    return [
        Loss(number(total), number(weight), {k: number(v) for k, v in metrics.items()}, rows_E)
        for (total, weight, metrics), rows_E in zip_longest(_from_last(links, rows), of_examples)
    ]


def _numbers(losses: Sequence[Loss]) -> list[tuple[float, float, dict[str, float]]]:
    return [
        (float(loss.total), float(loss.weight), {k: float(v) for k, v in loss.metrics.items()})
        for loss in losses
    ]


def _shared(links: Links, outputs: Outputs | None) -> Outputs:
    """The outputs of the last rank, on all ranks."""
    on_cpu = {}
    if outputs is not None:
        tensors = {field.name: getattr(outputs, field.name) for field in fields(outputs)}
        on_cpu = {n: wait_for_ranks(t.cpu) for n, t in tensors.items() if t is not None}
    return Outputs(**{name: t.to(links.device) for name, t in _from_last(links, on_cpu).items()})


def _from_last(links: Links, value: T) -> T:
    box = [value]
    group = links.groups["forward", False]
    wait_for_ranks(dist.broadcast_object_list, box, src=links.ranks[-1], group=group)
    return box[0]


@dataclass(frozen=True, slots=True)
class Op:
    """One micro-batch through one of this rank's stages."""

    is_forward: bool
    part: int  # which of the process's stages, from the model's beginning
    index: int  # of the micro-batch


def order(name: ScheduleName, rank: int, size: int, parts: int, count: int) -> list[Op]:
    """The operations of rank ``rank`` of ``size``, with ``parts`` virtual stages, for ``count``
    micro-batches.

    ``1f1b`` (arXiv:1806.03377) runs forward until the last rank has its first micro-batch, and then
    alternates backward and forward, so that a rank stores the activations of at most ``size``
    micro-batches. ``interleaved`` (arXiv:2104.04473) does the same with several virtual stages per
    rank, which idles less. ``gpipe`` (arXiv:1811.06965) runs all forward passes first.

    Pure arithmetic: every rank knows the order of every other one. So the next tensor that one
    sends is the next that another expects, and tensors need no labels.
    """
    groups = _groups(size, count)
    forward = [(part, index) for group in groups for part in range(parts) for index in group]
    backward = [(parts - 1 - part, index) for part, index in forward]
    ahead = {
        "1f1b": size - 1 - rank,
        "interleaved": 2 * (size - 1 - rank) + (parts - 1) * len(groups[0]),
        "gpipe": len(forward),
    }[name]
    first = [Op(True, *visit) for visit in forward]
    second = [Op(False, *visit) for visit in backward]
    ahead = min(ahead, len(first))
    steady = chain.from_iterable(zip(first[ahead:], second, strict=False))
    return [*first[:ahead], *steady, *second[len(first) - ahead :]]


def _groups(size: int, count: int) -> list[range]:
    """Number of micro-batches that run through one virtual stage before any runs through the
    next: at least ``size``, if there are so many. With fewer, ranks would wait for each other
    forever."""
    # With a smaller last group 148 combinations waited, of 2 to 8 ranks, 1 to 4 stages each and 1
    # to 29 micro-batches; with these none does (docs/decisions/0025).
    num_groups = max(1, count // size)
    least, remainder = divmod(count, num_groups)
    bounds = [least * i + min(i, remainder) for i in range(num_groups + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


Direction = Literal["forward", "backward"]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_Route = tuple[Direction, bool]  # the second: between the last process and the first


@dataclass(frozen=True)
class Arrival:
    """A tensor that this rank is receiving."""

    tensor: torch.Tensor
    work: dist.Work

    def take(self) -> torch.Tensor:
        """The tensor, once it has arrived."""
        wait_for_ranks(self.work.wait)
        return self.tensor


@dataclass
class Links:
    """The other ranks of this rank's pipeline. Stage s is on rank s mod ``size``: in order, and
    again from the first rank for the next virtual stage of each rank (a *part*).

    Every rank knows each micro-batch of the window, and so the shape of each tensor; only the dtype
    is sent, once, before the first tensor. So rows may have any lengths. The tensors of each
    direction have a process group of their own: NCCL delivers in order within one group, and two
    ranks that both send first would wait for each other.
    """

    ranks: Sequence[int]  # of the pipeline's processes, in the order of their stages
    place: int  # of this process among them
    num_stages: int
    device: torch.device
    groups: dict[_Route, dist.ProcessGroup]
    dtypes: dict[int, torch.dtype] = field(default_factory=dict)  # of what enters each stage
    _sent: deque[tuple[dist.Work, torch.Tensor]] = field(default_factory=deque)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def enter(self, hidden: torch.Tensor, stage: int) -> None:
        """Send the input of ``stage`` to its rank."""
        if stage not in self.dtypes:
            self.dtypes[stage] = hidden.dtype
            dtype_index = torch.tensor([_DTYPES.index(hidden.dtype)], device=self.device)
            self._send(dtype_index, stage, "forward")
        self._send(hidden.detach(), stage, "forward")

    def entering(self, shape: Sequence[int], stage: int) -> Arrival:
        """The input of ``stage``, which is on this rank."""
        if stage not in self.dtypes:
            dtype_index = torch.empty(1, dtype=torch.int64, device=self.device)
            self._receive(dtype_index, stage, "forward").take()
            self.dtypes[stage] = _DTYPES[wait_for_ranks(int, dtype_index)]
        hidden = torch.empty(tuple(shape), dtype=self.dtypes[stage], device=self.device)
        return self._receive(hidden, stage, "forward")

    def give_back(self, gradient: torch.Tensor, stage: int) -> None:
        """Send the gradient of the input of ``stage`` to the rank that sent the input."""
        self._send(gradient, stage, "backward")

    def given_back(self, output: torch.Tensor, stage: int) -> Arrival:
        """The gradient of ``output``, which was the input of ``stage``."""
        gradient = torch.empty_like(output, memory_format=torch.contiguous_format)
        return self._receive(gradient, stage, "backward")

    def flush(self) -> None:
        """Wait until everything that was sent has arrived."""
        self._wait_for_all_but(0)

    def _send(self, tensor: torch.Tensor, stage: int, direction: Direction) -> None:
        # The tensor is kept until it has arrived; older ones have by now (tests/parallel/
        # test_schedule.py), so that nobody waits here.
        self._wait_for_all_but(2 * self.num_stages)
        tensor, group = tensor.contiguous(), self.groups[direction, stage % self.size == 0]
        peer = self.ranks[(stage if direction == "forward" else stage - 1) % self.size]
        work = dist.isend(tensor, peer, group=group)
        assert work is not None
        self._sent.append((work, tensor))

    def _receive(self, into: torch.Tensor, stage: int, direction: Direction) -> Arrival:
        peer = self.ranks[(stage - 1 if direction == "forward" else stage) % self.size]
        work = dist.irecv(into, peer, group=self.groups[direction, stage % self.size == 0])
        assert work is not None
        return Arrival(into, work)

    def _wait_for_all_but(self, count: int) -> None:
        while len(self._sent) > count:
            wait_for_ranks(self._sent.popleft()[0].wait)


def pipelines(world: World) -> list[list[int]]:
    """The ranks of each pipeline."""
    return world.rows_along("pp")


def connect(world: World, *, num_parts: int, device: torch.device) -> Links:
    """The links of this rank. A collective call."""
    routes: list[_Route] = [("forward", False), ("backward", False)]
    if num_parts > 1:
        routes += [("forward", True), ("backward", True)]
    for ranks in pipelines(world):
        route_groups = {
            route: wait_for_ranks(dist.new_group, ranks, timeout=world.timeout) for route in routes
        }
        if world.rank in ranks:
            ranks_of_pipeline, groups = ranks, route_groups
    return Links(ranks_of_pipeline, world.pp_rank, num_parts * world.pp, device, groups)
