"""The values of the next trial: a function of the sweep's seed, the trial's number, and the trials
before it. So a sweep that was killed continues as it would have."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence

from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial

from .ranges import as_text
from .space import Space, Values
from .study import Study, from_params

SAMPLERS = ("tpe", "random", "grid")
_ATTEMPTS = 20  # draws before a combination that is new is taken in order
_MAX_SIZE = 100_000  # combinations that are looked through for one that is new
_MADE: dict[str, Callable[[int], BaseSampler]] = {
    "tpe": lambda seed: TPESampler(seed=seed),
    "random": lambda seed: RandomSampler(seed=seed),
}


def next_values(
    space: Space, study: Study, trials: Sequence[FrozenTrial], *, sampler: str, seed: int
) -> Values | None:
    """The values of the trial after ``trials``; None if all combinations have been tried."""
    number, known = len(trials), {_identity(study.values(trial)) for trial in trials}
    if sampler == "grid":
        return next(itertools.islice(space.combinations(), number, None), None)
    for attempt in range(_ATTEMPTS):
        drawn = _drawn(space, study, trials, _MADE[sampler](_seed(seed, number, attempt)))
        if _identity(drawn) not in known:
            return drawn
    if space.size is None or space.size > _MAX_SIZE:
        return drawn
    return next((one for one in space.combinations() if _identity(one) not in known), None)


def _drawn(
    space: Space, study: Study, trials: Sequence[FrozenTrial], sampler: BaseSampler
) -> Values:
    mirror = study.mirror(trials, sampler)
    return from_params(space.keys, mirror.ask(study.distributions).params)


def _seed(seed: int, number: int, attempt: int) -> int:
    """Another seed for each trial: a sampler that began with the same one again after a restart
    would draw the first trials again."""
    text = f"{seed}/{number}/{attempt}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big")


def _identity(values: Values) -> str:
    return as_text(dict(values))
