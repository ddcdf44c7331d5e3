"""What is done with a model, trained or not; each name below is for programs, too.

``_model_location.locate`` finds weights by any path, ``model_loading.open_model`` opens them as
they were trained: with the adapter, the vocabulary and the template. On such a ``LoadedModel`` work
``conversation`` (chat), ``prediction`` (answers and rewards for files), ``run_evaluation`` (what
training measures, on held-out data), ``harness`` (tasks of lm-eval); ``prediction.ResultJournal``
keeps their results as they come. ``exporting`` writes a model elsewhere from file to file, and
verifies it.
Before a run, ``data_check`` reads its rows, ``reward_check`` tries its rewards, ``estimate`` says
what it needs by a step on fake tensors, and ``bench`` how fast it is by a few real ones.
"""

from ..checkpoint.converting.targets import HuggingFaceModel
from ._model_location import ModelLocation, locate
from .conversation import Answer, Conversation
from .exporting.conversion import export
from .model_loading import LoadedModel, open_model
from .prediction import predict
from .run_evaluation import Generation

__all__ = [
    "Answer",
    "Conversation",
    "Generation",
    "HuggingFaceModel",
    "LoadedModel",
    "ModelLocation",
    "export",
    "locate",
    "open_model",
    "predict",
]
