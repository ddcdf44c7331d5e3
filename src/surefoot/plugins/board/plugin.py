"""The board, and what the terminal shows of runs and does with them, by name."""

from ...extensions import Plugin

_HERE = f"{__package__}.command"

PLUGIN = Plugin(
    name="board",
    commands={
        "watch": (
            "Show how runs train in the terminal: curves, figures, time left, state.",
            f"{_HERE}:watch",
        ),
        "runs": ("List runs with their states and figures; also as JSON.", f"{_HERE}:runs"),
        "stop": (
            "Let a run finish its step, save and end, from any machine that sees its folder.",
            f"{_HERE}:stop",
        ),
        "board": (
            "Show all runs in a browser: curves, checkpoints, new runs, data and chat.",
            f"{_HERE}:board",
        ),
    },
)
