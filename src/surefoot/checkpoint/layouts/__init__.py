"""Layouts: the kinds of folders that Surefoot reads weights from, one class and one line each.

Looking into a folder needs no torch. ``opening`` opens its weights as tensor sources, and
``converting/targets`` writes such folders.
"""

from ...extensions import Extended
from .layout import DCP, PEFT, HuggingFace, Layout, Native

# A folder may have files of several: a checkpoint of ours has transformers', too. The first counts.
LAYOUTS: Extended[Layout] = Extended(
    "layouts", {layout.name: layout for layout in (Native(), HuggingFace(), PEFT(), DCP())}
)
