"""The server of OpenAI's API, by name."""

from ...extensions import Plugin

PLUGIN = Plugin(
    name="serve",
    commands={
        "serve": (
            "Serve a model, a run or adapters through OpenAI's API.",
            f"{__package__}.command:serve",
        )
    },
)
