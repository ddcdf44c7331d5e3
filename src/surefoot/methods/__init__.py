"""The ways of tuning weights. To add one: write its file, add its line."""

from .badam import BAdam
from .badam_ratio import BAdamRatio
from .freeze import Freeze
from .full import Full
from .lisa import LISA
from .lora import LoRA

METHODS = {
    "full": Full,
    "freeze": Freeze,
    "lora": LoRA,
    "badam": BAdam,
    "badam_ratio": BAdamRatio,
    "lisa": LISA,
}
