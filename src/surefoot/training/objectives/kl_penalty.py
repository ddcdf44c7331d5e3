"""How far a policy is from its reference, and the coefficient of that penalty: pure functions.

Shapes: T tokens of a response, sampled by the policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.float64]"
KLEstimator: TypeAlias = Literal["k1", "k3"]
MAX_CHANGE = 0.2  # of the relative error of a window, in the update of the coefficient


def kl_estimates(logps_T: Floats, reference_T: Floats, kind: KLEstimator) -> Floats:
    """[T] an estimate of the KL divergence at each token (Schulman, "Approximating KL divergence",
    2020): ``k1`` is the log-ratio, ``k3`` is ``e^-k1 - 1 + k1``, which is never negative."""
    import numpy as np

    k1_T = logps_T - reference_T
    return k1_T if kind == "k1" else np.expm1(-k1_T) + k1_T


def adapted_coefficient(
    coefficient: float, kl: float, *, target: float, count: int, horizon: int
) -> float:
    """The coefficient after a window of ``count`` responses whose mean KL divergence was ``kl``
    (arXiv:1909.08593, section 2.2)."""
    error = min(max(kl / target - 1, -MAX_CHANGE), MAX_CHANGE)
    return coefficient * (1 + error * count / horizon)
