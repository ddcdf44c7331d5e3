"""The surrogates of policy gradients by name. To add one: write its function, add its line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from . import policy_gradient

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Positions:
    """The N trained positions of A responses, as a surrogate reads them, and its settings."""

    logps: torch.Tensor  # [N]
    old: torch.Tensor  # [N] of the policy that sampled
    advantages: torch.Tensor  # [N]
    owner: torch.Tensor  # [N] each position's response
    lengths: torch.Tensor  # [A] positions of each response
    clip: float
    clip_high: float
    dual_clip: float
    temperatures: tuple[float, float]  # of positive and of other advantages

    @property
    def three(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What every surrogate reads."""
        return self.logps, self.old, self.advantages


@dataclass(frozen=True)
class Surrogate:
    """A surrogate, what it reads, and its usual bounds."""

    compute: Callable[[Positions], tuple[torch.Tensor, torch.Tensor]]
    clip: float = 0.2
    clip_high: float | None = None  # None: that of clip
    settings: Collection[str] = ("clip", "clip_high")
    own: Mapping[str, str] = field(default_factory=dict)  # settings that it decides


SURROGATES: Mapping[str, Surrogate] = {
    "clip": Surrogate(lambda p: policy_gradient.clipped(*p.three, p.clip, p.clip_high)),
    "dual_clip": Surrogate(
        lambda p: policy_gradient.dual_clipped(*p.three, p.clip, p.clip_high, p.dual_clip),
        settings=("clip", "clip_high", "dual_clip"),
    ),
    "cispo": Surrogate(
        lambda p: policy_gradient.cispo(*p.three, p.clip_high),
        clip_high=4.0,
        settings=("clip_high",),
    ),
    "gspo": Surrogate(
        lambda p: policy_gradient.gspo(*p.three, p.owner, p.lengths, p.clip, p.clip_high),
        clip=3e-4,
        clip_high=4e-4,
    ),
    "sapo": Surrogate(
        lambda p: policy_gradient.sapo(*p.three, *p.temperatures),
        settings=("sapo_temperature", "sapo_temperature_negative"),
    ),
    "rloo": Surrogate(
        lambda p: policy_gradient.rloo(*p.three, p.owner, p.lengths, p.clip, p.clip_high),
        own={"advantage": "rloo", "average_over": "responses", "kl_estimator": "k1"},
    ),
}
KL = {"k1": policy_gradient.k1, "k3": policy_gradient.k3}
