"""What ``ckpt convert --to NAME`` writes. To add one: write its file, add its line.

Targets that need more than checkpoints are added where they are at home, for one the Hugging Face
Trainer's in ``interchange/``.
"""

from collections.abc import Mapping

from ..origin import Target
from .dcp import DCPFolder
from .huggingface import HuggingFaceModel
from .mindspore import MindSporeFolder
from .peft import PEFTAdapter
from .surefoot import SurefootCheckpoint

TARGETS: Mapping[str, type[Target]] = {
    "surefoot": SurefootCheckpoint,
    "huggingface": HuggingFaceModel,
    "peft": PEFTAdapter,
    "dcp": DCPFolder,
    "mindspore": MindSporeFolder,
}
