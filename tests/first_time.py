"""On import, does once what the first command of a process has to do: what is forked afterwards has
the table of templates, the documentation of settings and the fonts of pictures in memory. They take
a second of a core.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from surefoot.cli import train  # noqa: F401 - the command, and what it imports
from surefoot.data.text.families import families
from surefoot.recipe.recipe import load
from surefoot.training.callback import TrainerState
from surefoot.training.callbacks.metric_files import Plot

EXAMPLE = Path(__file__).parent.parent / "examples" / "quickstart.yaml"

with TemporaryDirectory() as folder:
    rows = [{"step": step, "loss": 1 / step, "eval_loss": 0.5} for step in range(1, 30)]
    Plot(Path(folder) / "loss.png")._draw(TrainerState(log_history=rows))
families()
load(EXAMPLE)
