"""Use trained models: find one by any path, open it as it was trained, evaluate it, export it."""

from ..checkpoint.converting.targets import HuggingFaceModel
from .conversation import Answer, Conversation
from .exporting.conversion import export
from .model_loading import LoadedModel, open_model
from .model_location import ModelLocation, locate
from .prediction import predict
from .responses import Generation

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
