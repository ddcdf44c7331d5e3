"""The longest row that fits in a memory under each policy of recomputation, and what a token of it
takes: ``surefoot plan --longest-row``.

Each candidate is a dry run of one example of that many tokens, whose number of operations does not
depend on its length. The memory of a long row is nearly a line, so a few runs find where it meets
the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ...batch import Batch, Features
from ...errors import RecipeError
from ...model.isolation import PromptSharing
from ...model.section import Recomputation
from ...run.parts import collation_of
from ...training.context import blank_examples
from ._batches import shares_prompts
from ._memory_model import Pass
from ._rank_memory import Machine, PlanBase, memory_of, rehearsed_row
from .plan import NotKnownError, Trial, imported, usable_bytes

STEP = 1024  # tokens; lengths are multiples of it
_MOST = 1 << 22  # tokens: no longer row is looked for
_FIRST = (8, 64)  # steps, of the first dry runs
_MOST_RUNS = 12  # of one policy; a line takes three or four
_CLOSE = 0.01  # of the limit: a row that leaves no more of it is the longest one


@dataclass(frozen=True)
class RowLimit:
    """The longest row under one policy."""

    policy: Recomputation
    tokens: int  # 0: not even ``STEP`` fit
    num_bytes: int  # that a rank takes with it
    per_token: int  # bytes that a further token takes
    main_memory: int = 0  # bytes that the row moves there
    is_least: bool = False  # the search ended before a longer row did not fit


def longest_rows(trials: Iterable[Trial], machine: Machine) -> list[RowLimit]:
    """The longest row under the policy of each of ``trials`` (``plan.trials_of``), in ``capacity``
    less a tenth. Raises as ``plan.make_plan``, and ``RecipeError`` if there is no capacity, or
    activations are not known."""
    if machine.capacity is None:
        raise RecipeError(
            "--longest-row depends on the memory of a rank, which is not that of this machine; "
            "name it with --memory"
        )
    taken = 0 if machine.on_gpu else imported()
    limit = usable_bytes(machine, machine.capacity, taken)
    found, kept = list[RowLimit](), dict[Recomputation, Callable[[int], float]]()
    for trial in trials:
        rows, policy = _Rows(trial), trial.policy
        row = rows.longest(limit)
        kept[policy] = rows.kept_of
        if policy == "offload" and row.tokens:
            moved = kept["full"](row.tokens) - rows.kept_of(row.tokens)
            row = replace(row, main_memory=max(0, int(moved)))
        found.append(replace(row, num_bytes=row.num_bytes + taken))
    return found


class _Rows:
    """Dry runs of one row under a policy."""

    def __init__(self, trial: Trial) -> None:
        self.trial, self.ground = trial, trial.ground.with_size(1)
        self.passes = dict[int, Pass]()  # by steps of tokens

    @cached_property
    def example(self) -> Features:
        """The training example with the most tokens, which is stretched."""
        dataset = self.ground.dataset
        return dataset[int(self.ground.lengths.argmax())]

    def peak(self, steps: int) -> int:
        """The bytes of a rank with a row of so many ``STEP`` tokens."""
        if steps not in self.passes:
            batch = _row(self.ground, self.example, steps * STEP)
            rehearsal = rehearsed_row(self.ground, self.trial.rank_model, batch)
            if rehearsal.not_known is not None:
                raise NotKnownError(rehearsal.not_known)
            self.passes[steps] = rehearsal.memory
        passed = self.passes[steps]
        return memory_of(self.ground, self.trial.rank_model, passed).peak + self.trial.snapshot

    def kept_of(self, tokens: int) -> float:
        """Bytes that a row of ``tokens`` keeps for the backward pass, by those that were run."""
        lengths = sorted(self.passes)[-2:]
        kept = [self.passes[each].kept.activations for each in lengths]
        slope = (kept[-1] - kept[0]) / max(1, lengths[-1] - lengths[0]) / STEP
        return kept[-1] + slope * (tokens - lengths[-1] * STEP)

    def longest(self, limit: int) -> RowLimit:
        """The longest row that takes at most ``limit``, to a hundredth of that; its policy is that
        of the trial."""
        low, high = 0, _MOST // STEP + 1  # the longest one that fits, and one that does not
        for first in _FIRST:
            if low < first < high:
                low, high = (first, high) if self.peak(first) <= limit else (low, first)
        while high - low > 1 and (not low or self.peak(low) < (1 - _CLOSE) * limit):
            if len(self.passes) >= _MOST_RUNS:
                break
            middle = self._meets(limit, low, high)
            low, high = (middle, high) if self.peak(middle) <= limit else (low, middle)
        lengths = sorted(self.passes)[-2:]
        grown = self.peak(lengths[-1]) - self.peak(lengths[0])
        per_token = grown // (max(1, lengths[-1] - lengths[0]) * STEP)
        num_bytes, is_least = self.peak(low or 1), low * STEP >= _MOST
        return RowLimit(self.trial.policy, low * STEP, num_bytes, per_token, is_least=is_least)

    def _meets(self, limit: int, low: int, high: int) -> int:
        """Where the line through the two longest rows that were run meets ``limit``, between
        these; half way, if it does not."""
        first, last = sorted(self.passes)[-2:] if len(self.passes) > 1 else (0, 0)
        slope = (self.peak(last) - self.peak(first)) / (last - first) if last > first else 0.0
        if slope <= 0 or not low:
            return max(low + 1, min(high - 1, (low + high) // 2))
        guess = last + int((limit - self.peak(last)) / slope)
        return max(low + 1, min(high - 1, guess))


def _row(ground: PlanBase, example: Features, tokens: int) -> Batch:
    """One example of ``tokens``, responses that are sampled included; as a micro-batch."""
    parts, stage = ground.parts, ground.parts.stage
    collation = collation_of(stage, packing=parts.data.packing)
    stretched = _stretched(example, max(STEP // 2, tokens - stage.max_new_tokens))
    examples: Sequence[Features] = blank_examples(stage, parts.codec, [stretched], collation)
    sharing = PromptSharing(shares_prompts(parts))
    return collation.for_model(sharing).batch(examples[:: stage.group_size][:1])


def _stretched(example: Features, tokens: int) -> Features:
    """``example`` with so many tokens: as large a share of them is trained, and belongs to each
    part of a pair."""
    length = len(example["input_ids"])
    places = np.arange(tokens) * length // tokens
    stretched: dict[str, Sequence[int]] = {
        name: np.asarray(values)[places].tolist() if len(values) == length else values
        for name, values in example.items()
    }
    if "lengths" in example:
        ends = np.cumsum(example["lengths"]) * tokens // length
        stretched["lengths"] = np.diff(ends, prepend=0).tolist()
    return stretched
