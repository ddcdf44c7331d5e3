"""The search for better settings, by name."""

from ...extensions import Plugin

PLUGIN = Plugin(
    name="sweep",
    commands={
        "sweep": (
            "Train a recipe with other settings, several times, and find the best ones.",
            f"{__package__}.command:sweep",
        )
    },
)
