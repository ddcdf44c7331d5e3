"""What several stages require of their settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..data.section import DataSection
from ..generate.section import LEAST_TEMPERATURE
from ..generate.servers.server import Sampler
from ..schema import Problem


def without_effect(data: DataSection, names: Sequence[str], reason: str) -> Iterator[Problem]:
    """The problems of settings of ``data`` that are set, but have no effect for this ``reason``."""
    for name in names:
        if getattr(data, name):
            yield Problem(("data", name), f"has no effect with {reason}")


USUAL_BATCH = 32  # of ``sampling_batch_size``


def check_temperature(name: str, temperature: float) -> None:
    """Raise ``ValueError`` if nothing can be sampled at the temperature with this name."""
    if temperature < LEAST_TEMPERATURE:
        raise ValueError(f"{name} must be at least {LEAST_TEMPERATURE:g}, got {temperature}")


def check_sampler(sampler: Sampler, sampling_batch_size: int) -> None:
    """Raise ``ValueError`` for a setting of the engine's beside a server."""
    if sampler.server is not None and sampling_batch_size != USUAL_BATCH:
        raise ValueError(
            "sampling_batch_size has no effect with a server as sampler, which has a concurrency"
        )
