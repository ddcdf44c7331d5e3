"""Resume runs of other trainers, and convert runs for them: weights, moments, progress, in both
directions.

Hugging Face's Trainer stores its training state in pickles. Only ``pickles`` opens them, as tensors
and plain values, and only with the user's consent. MindSpore Transformers uses safetensors. The
names are imported when they are first used: an ordinary run needs none of the conversions.
"""

from typing import TYPE_CHECKING

from ..lazy_exports import lazy_getattr

if TYPE_CHECKING:
    from .foreign_resume import ForeignTrainer, detect_trainer
    from .trainer_folder import latest_complete, pickles_in, refuse_output_dir

__all__ = ["ForeignTrainer", "detect_trainer", "latest_complete", "pickles_in", "refuse_output_dir"]

_HOMES = {
    ".foreign_resume": ("ForeignTrainer", "detect_trainer"),
    ".trainer_folder": ("latest_complete", "pickles_in", "refuse_output_dir"),
}
__getattr__ = lazy_getattr(__name__, _HOMES)
