"""Surefoot: fine-tune large language models from one YAML file, where no step is ever lost."""

import os
from typing import TYPE_CHECKING

from .extensions import lazy_getattr

if TYPE_CHECKING:
    from .run.from_python import StageParts
    from .run.training_run import Outcome, train
    from .use.trainer import Trainer

__all__ = ["Outcome", "StageParts", "Trainer", "__version__", "train"]
__version__ = "0.1.0"

# libgomp's threads spin 300,000 times at every barrier before they sleep. Beside other programs,
# they take the cores from those that they wait for. On a quiet machine, the next operation comes
# within 20,000 times (benchmarks/threads.py). torch reads this when it is imported.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "20000"

# torch takes seconds to import
_HOMES = {
    ".run.training_run": ("Outcome", "train"),
    ".run.from_python": ("StageParts",),
    ".use.trainer": ("Trainer",),
}
__getattr__ = lazy_getattr(__name__, _HOMES)
