"""A sampled answer as training needs it: with the token that ended it, and its probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Sample:
    """One sampled answer."""

    ids: Sequence[int]  # with the token that ended it
    logps: NDArray[np.float32]  # of each token, under the distribution it was sampled from
    stop: Literal["stop", "length", "context"]  # what ended it: a token, a setting, the window
