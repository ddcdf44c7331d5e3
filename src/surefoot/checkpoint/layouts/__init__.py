"""Layouts: the kinds of folders that Surefoot reads weights from. One file and one line each.

Looking into a folder needs no torch. ``opening`` opens its weights as tensor sources, and
``converting/targets`` writes such folders.
"""

from ...extensions import Extended
from .dcp import DCP
from .huggingface import PEFT, HuggingFace
from .layout import Layout
from .native import Native

LAYOUTS: Extended[Layout] = Extended(
    "layouts", {layout.name: layout for layout in (Native(), PEFT(), HuggingFace(), DCP())}
)
