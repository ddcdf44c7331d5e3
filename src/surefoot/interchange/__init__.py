"""Resume runs of other trainers, and convert runs for them: weights, moments, progress, in both
directions.

Hugging Face's Trainer stores its training state in pickles. Only ``pickles`` opens them, as tensors
and plain values, and only with the user's consent. MindSpore Transformers uses safetensors. The
names are imported when they are first used: an ordinary run needs none of the conversions.
"""

from typing import TYPE_CHECKING

from ..lazy_exports import lazy_getattr

if TYPE_CHECKING:
    from .arguments import training_arguments
    from .foreign_resume import ForeignTrainer, detect_trainer
    from .from_mindspore import load_mindspore_checkpoint
    from .from_trainer import check_trainer_checkpoint, load_trainer_checkpoint
    from .to_trainer import save_trainer_checkpoint
    from .trainer_folder import is_trainer_checkpoint, refuse_output_dir

__all__ = [
    "ForeignTrainer",
    "check_trainer_checkpoint",
    "detect_trainer",
    "is_trainer_checkpoint",
    "load_mindspore_checkpoint",
    "load_trainer_checkpoint",
    "refuse_output_dir",
    "save_trainer_checkpoint",
    "training_arguments",
]

_HOMES = {
    ".arguments": ("training_arguments",),
    ".from_mindspore": ("load_mindspore_checkpoint",),
    ".from_trainer": ("check_trainer_checkpoint", "load_trainer_checkpoint"),
    ".foreign_resume": ("ForeignTrainer", "detect_trainer"),
    ".to_trainer": ("save_trainer_checkpoint",),
    ".trainer_folder": ("is_trainer_checkpoint", "refuse_output_dir"),
}
__getattr__ = lazy_getattr(__name__, _HOMES)
