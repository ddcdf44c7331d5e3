"""Use trained models: find one by any path, open it as it was trained, evaluate it, export it."""

from .auxiliary_outputs import auxiliary_columns
from .conversation import Answer, Conversation
from .evaluation import adopt, measure, num_batches
from .exported import export
from .held_out_set import HeldOut, held_out
from .model_loading import LoadedModel, open_model, open_start
from .model_location import ModelLocation, locate
from .prediction import predict
from .responses import Generation, generations

Opened, Located = LoadedModel, ModelLocation  # names of version 0.1, until 1.0

__all__ = [
    "Answer",
    "Conversation",
    "Generation",
    "HeldOut",
    "LoadedModel",
    "Located",
    "ModelLocation",
    "Opened",
    "adopt",
    "auxiliary_columns",
    "export",
    "generations",
    "held_out",
    "locate",
    "measure",
    "num_batches",
    "open_model",
    "open_start",
    "predict",
]
