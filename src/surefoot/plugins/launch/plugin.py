"""Runs on Ray, SLURM, Kubernetes and SkyPilot, by name."""

from ...extensions import Plugin

PLUGIN = Plugin(
    name="launch",
    commands={
        "launch": (
            "Train a recipe on Ray, SLURM, Kubernetes or SkyPilot.",
            f"{__package__}.command:launch",
        )
    },
)
