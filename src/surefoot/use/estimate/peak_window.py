"""The memory of a pipeline rank while a window runs through its stages: the current micro-batch,
what is saved of those in flight, and what waits between ranks. Pure arithmetic.

Every micro-batch counts as the peak one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import zip_longest

from ...parallel.pipeline.schedule import Op
from .memory_model import Pass, Snapshot

_NONE = Snapshot(0, 0, 0)
_Visit = tuple[int, int]  # part and micro-batch


@dataclass(frozen=True)
class Route:
    """The operations of a rank, which has each ``size``-th stage from ``place`` on."""

    place: int
    size: int
    learns: Sequence[bool]  # of all stages, whether anything learns in one or before it
    num_bytes: int  # of what passes between two stages
    num_layers: Sequence[int]  # of each stage here

    def stage(self, op: Op) -> int:
        """The number of the pipeline stage that ``op`` runs."""
        return op.part * self.size + self.place

    def works(self, op: Op) -> bool:
        """Whether ``op`` computes anything."""
        return op.is_forward or self.learns[self.stage(op)]

    def receives(self, op: Op) -> bool:
        """Whether ``op`` receives a tensor."""
        if op.is_forward:
            return self.stage(op) > 0
        return self.works(op) and self.stage(op) < len(self.learns) - 1

    def sends(self, op: Op) -> bool:
        """Whether ``op`` sends a tensor."""
        if op.is_forward:
            return self.stage(op) < len(self.learns) - 1
        return self.stage(op) > 0 and self.learns[self.stage(op) - 1]


def window(passes: Sequence[Pass], ops: Sequence[Op], route: Route) -> Pass:
    """The memory of ``ops``, each of which runs one of ``passes``, the stages of this rank.
    ``growing`` is the peak until the first backward pass is over; the peak itself, and
    ``most_activations``, are those after it, when the gradients of weights exist."""
    moments = _moments(passes, ops, route)
    first = next((i for i, op in enumerate(ops) if not op.is_forward and route.works(op)), len(ops))
    later = moments[first + 1 :] or moments
    gone = passes[ops[-1].part].kept.activations
    worst = max(later, key=lambda moment: moment.at_peak.total)
    return replace(
        worst,
        most_activations=max(moment.most_activations for moment in later),
        growing=max(moment.growing for moment in moments[: first + 1]),
        last=moments[-1].most_activations - gone // max(1, route.num_layers[ops[-1].part]),
    )


def _moments(passes: Sequence[Pass], ops: Sequence[Op], route: Route) -> list[Pass]:
    """The live bytes during each of ``ops``."""
    under_way: set[_Visit] = set()
    sent: deque[_Visit | None] = deque(
        maxlen=2 * len(route.learns) + 1
    )  # see parallel/pipeline/stage_links.py
    found = []
    for op, coming in zip_longest(ops, ops[1:]):
        visit = (op.part, op.index)
        here = under_way | {visit}  # what leaves a stage is kept with what else is of its visit
        waiting = sum(1 for one in sent if one is None or one not in here)
        waiting += coming is not None and route.receives(coming)
        beside = reduce(_plus, (passes[part].kept for part, _ in under_way - {visit}), _NONE)
        found.append(_with_in_flight(passes[op.part], beside, waiting * route.num_bytes))
        under_way = here if op.is_forward else under_way - {visit}
        if route.sends(op):
            sent.append(visit if op.is_forward else None)
    return found


def _plus(a: Snapshot, b: Snapshot, more: int = 0) -> Snapshot:
    return Snapshot(a.activations + b.activations + more, a.logits + b.logits, a.copies + b.copies)


def _with_in_flight(one: Pass, others: Snapshot, waiting: int) -> Pass:
    """``one`` while others are in flight."""
    return Pass(
        kept=_plus(one.kept, others),
        at_peak=_plus(one.at_peak, others, waiting),
        most_activations=one.most_activations + others.total + waiting,
        growing=one.growing + others.total + waiting,
    )
