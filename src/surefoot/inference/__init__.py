"""Using what was trained: find it by any path, open it as it was trained, write it out whole."""

from .conversation import Answer, Conversation
from .export import export
from .located import Located, locate
from .opened import Opened, open_model, open_start

__all__ = [
    "Answer",
    "Conversation",
    "Located",
    "Opened",
    "export",
    "locate",
    "open_model",
    "open_start",
]
