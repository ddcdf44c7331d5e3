"""The ways of tuning weights. To add one: write its file, add its line."""

from .freeze import Freeze
from .full import Full
from .lora import LoRA

METHODS = {"full": Full, "freeze": Freeze, "lora": LoRA}
