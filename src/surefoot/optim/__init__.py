"""Optimizers and learning-rate schedules. To add an optimizer: write its file, add its line."""

from .adafactor import Adafactor
from .adam_mini import AdamMini
from .adamw import AdamW
from .ademamix import AdEMAMix
from .apollo import Apollo
from .galore import GaLore
from .lion import Lion
from .muon import Muon

OPTIMIZERS = {
    "adamw": AdamW,
    "muon": Muon,
    "lion": Lion,
    "ademamix": AdEMAMix,
    "adafactor": Adafactor,
    "adam_mini": AdamMini,
    "apollo": Apollo,
    "galore": GaLore,
}
