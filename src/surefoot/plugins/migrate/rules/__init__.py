"""Settings that are made of several arguments, section by section."""

from __future__ import annotations

from ..given import Rule
from .data import DATA
from .method import METHOD
from .model import MODEL
from .optim import OPTIM
from .parallel import PARALLEL
from .stage import STAGE
from .train import TRAIN

# Where the error of a setting is shown: the argument that it is of; and the rule.
RULES: tuple[tuple[str, Rule], ...] = (*MODEL, *DATA, *METHOD, *STAGE, *TRAIN, *OPTIM, *PARALLEL)
