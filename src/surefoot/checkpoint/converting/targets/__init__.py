"""What ``export`` and ``ckpt convert --to NAME`` write. To add one: write its file, add its line.

Targets that need more than checkpoints, such as GGUF files, come from plugins.
"""

from collections.abc import Mapping

from ....extensions import Extended
from ..origin import Target
from .dcp import DCPFolder
from .huggingface import HuggingFaceModel
from .peft import PEFTAdapter
from .surefoot import SurefootCheckpoint

TARGETS: Extended[type[Target]] = Extended(
    "targets",
    {
        "surefoot": SurefootCheckpoint,
        "huggingface": HuggingFaceModel,
        "peft": PEFTAdapter,
        "dcp": DCPFolder,
    },
)

READING: Mapping[str, type] = Extended("reading", {})
"""Options for reading a folder, by its layout: a dataclass each."""
