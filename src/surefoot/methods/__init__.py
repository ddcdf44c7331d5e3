"""The ways of tuning weights. To add one: write its file, add its line."""

from .badam import BAdam
from .freeze import Freeze
from .full import Full
from .lisa import LISA
from .lora import LoRA
from .oft import OFT

METHODS = {"full": Full, "freeze": Freeze, "lora": LoRA, "oft": OFT, "badam": BAdam, "lisa": LISA}
