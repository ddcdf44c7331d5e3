"""Rollouts of the first prompts of every evaluation, kept in the run's folder for people to read.

rollouts-STEP.jsonl     one rollout per line
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from ..batch import Features, Outputs
from ..errors import RunError
from ..storage import files
from .rewards import Reward, Rewarded, total
from .rollout import Rollout
from .stage import POLICY, StageContext

NUM_PROMPTS = 4  # of each dataset
_MAX_BYTES = 1 << 30
_NAME = re.compile(r"rollouts-(\d+)\.jsonl")


@dataclass(frozen=True)
class Recorded:
    """The rollouts of a window, and what rewards said of them."""

    rollouts: Sequence[Rollout]
    rewards_by_name: Mapping[str, Reward]
    repetitions: Sequence[Rewarded]  # of each time that they were rewarded

    @property
    def by_reward(self) -> Sequence[Mapping[str, Sequence[float | None]]]:
        """The rewards by name, of each time."""
        names = self.rewards_by_name
        return [dict(zip(names, each.by_reward, strict=True)) for each in self.repetitions]

    @property
    def rewards(self) -> list[float | None]:
        """The sum for each rollout, as it is trained on."""
        weights = [reward.weight for reward in self.rewards_by_name.values()]
        return total(self.repetitions[0].by_reward, weights)


@dataclass(frozen=True)
class KeptToken:
    """A token after the prompt."""

    id: int
    text: str
    sampled: float | None  # log-probability as it was sampled; None: the environment's
    trained: float | None = None  # as the trained model computes it


@dataclass(frozen=True)
class KeptRollout:
    """A rollout, its rewards, and what it would have been trained with."""

    dataset: str
    origin: str  # of the row
    group: int
    prompt: str
    prompt_ids: Sequence[int]
    response: str
    stop_reason: str
    rewards: Mapping[str, float | None]
    reward: float | None
    advantage: float | None  # None: left out of training
    tokens: Sequence[KeptToken]
    extras: Mapping[str, object] = field(default_factory=dict)  # that a reward logged of it


@dataclass
class KeptRollouts:
    """Those of the evaluation that runs."""

    folder: Path | None = None  # of the run; None: nothing is kept
    _current: list[KeptRollout] = field(default_factory=list, init=False)
    _by_dataset: dict[str, list[KeptRollout]] = field(default_factory=dict, init=False)

    def begin(self) -> None:
        """A dataset is measured, perhaps once more."""
        self._current = []

    def add(
        self, context: StageContext, recorded: Sequence[Recorded], examples: Sequence[Features]
    ) -> None:
        """Those of a window's first prompts, and the ``examples`` that they became. A collective
        call."""
        prompts = {(rollout.origin, rollout.group) for rollout in self._current}
        num_missing = NUM_PROMPTS - len(prompts)
        for record in recorded if self.folder is not None else ():
            chosen = [i for i, rollout in enumerate(record.rollouts) if rollout.group < num_missing]
            self._current += _kept(context, record, chosen, advantages(record.rollouts, examples))

    def end(self, dataset: str) -> None:
        """It was the dataset of this name."""
        if self._current:
            self._by_dataset[dataset] = [replace(row, dataset=dataset) for row in self._current]

    def write(self, step: int) -> None:
        """Write those of all datasets. If an earlier start wrote others, its files of later steps
        are deleted. Raises ``RunError``."""
        by_dataset, self._by_dataset = self._by_dataset, {}
        if not by_dataset or self.folder is None:
            return
        rollouts = chain.from_iterable(by_dataset.values())
        lines = [json.dumps(asdict(rollout), ensure_ascii=False) for rollout in rollouts]
        data = ("\n".join(lines) + "\n").encode(errors="replace")
        path = self.folder / name_of(step)
        with files.raising(RunError, "cannot write the rollouts"):
            if files.size_of(path) == len(data) and _content(path) == data:
                return
            for later in (n for n in steps_of(self.folder) if n > step):
                files.remove_tree(self.folder / name_of(later))
            files.write_aside(path, data)


def name_of(step: int) -> str:
    """The file of an evaluation."""
    return f"rollouts-{step}.jsonl"


def steps_of(folder: Path) -> list[int]:
    """The steps whose rollouts are in the folder of a run."""
    matches = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return [int(match[1]) for match in matches if match]


def read(path: Path) -> list[KeptRollout]:
    """The rollouts in a file. Raises ``RunError`` if it is no such file."""
    try:
        lines = _content(path).split(b"\n")[:-1]  # text has line breaks that JSON does not escape
        rows: list[dict[str, Any]] = [files.parse_json(line) for line in lines]
        return [
            KeptRollout(**{**row, "tokens": [KeptToken(**token) for token in row["tokens"]]})
            for row in rows
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(f"{path}: no rollouts of a run: {error}") from None


def read_text(path: Path) -> str:
    """The lines of a file as they are. Raises ``RunError``."""
    with files.raising(RunError, "cannot read the rollouts"):
        return _content(path).decode(errors="replace")


def _content(path: Path) -> bytes:
    return files.read_inside(path.parent, path.name, _MAX_BYTES)


def advantages(rollouts: Sequence[Rollout], examples: Sequence[Features]) -> list[float | None]:
    """The advantage of the first token of each rollout: ``examples`` are some of them, in order."""
    remaining, by_rollout = list(reversed(examples)), list[float | None]()
    for rollout in rollouts:
        if remaining and list(remaining[-1]["input_ids"]) == list(rollout.ids):
            by_rollout.append(float(remaining.pop()["advantages"][0]))
        else:
            by_rollout.append(None)
    return by_rollout


def _kept(
    context: StageContext,
    recorded: Recorded,
    chosen: Sequence[int],
    by_rollout: Sequence[float | None],
) -> list[KeptRollout]:
    """The chosen ones, as the trained model computes them."""
    rollouts = [recorded.rollouts[i] for i in chosen]
    outputs = context.compute(POLICY, [rollout.features(0.0) for rollout in rollouts])
    decode, totals = context.codec.tokenizer.decode, recorded.rewards
    return [
        KeptRollout(
            dataset="",
            origin=rollout.row.origin,
            group=rollout.group,
            prompt=decode(list(rollout.prompt)),
            prompt_ids=rollout.prompt,
            response=context.codec.response_text(rollout.completion),
            stop_reason=rollout.stop_reason,
            rewards={name: values[i] for name, values in recorded.by_reward[0].items()},
            reward=totals[i],
            advantage=by_rollout[i],
            tokens=_tokens(rollout, computed, decode),
            extras={name: values[i] for name, values in recorded.repetitions[0].extras.items()},
        )
        for i, rollout, computed in zip(chosen, rollouts, outputs, strict=True)
    ]


def _tokens(
    rollout: Rollout, computed: Outputs, decode: Callable[[list[int]], str]
) -> list[KeptToken]:
    assert computed.logps is not None
    trained_logps = iter(computed.logps.tolist())  # of sampled tokens only
    tokens = []
    for n in range(rollout.num_prompt, len(rollout.ids)):
        token_id = rollout.ids[n]
        token = KeptToken(token_id, decode([token_id]), sampled=None)
        if rollout.is_sampled[n]:
            token = replace(token, sampled=rollout.logps[n], trained=next(trained_logps))
        tokens.append(token)
    return tokens
