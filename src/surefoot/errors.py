"""Every error a user can cause derives from one base, so that the CLI prints it without a
traceback.

    SurefootError
    ├── RecipeError         the YAML: unknown key, wrong type, values that contradict each other
    ├── DataError           a dataset, a file or a row of it
    │   └── TemplateError   a chat template that is unknown or cannot be masked
    ├── ModelError          a model, tokenizer or adapter: missing, damaged or of another kind
    ├── CheckpointError     a checkpoint: missing, damaged, or without what was asked of it
    └── RunError            a run that cannot go on: output_dir is taken, the loss is not a number
"""


class SurefootError(Exception):
    """Base of the errors this package raises on purpose. The message says where, what and what to
    do."""


class RecipeError(SurefootError):
    """The recipe is wrong: an unknown key, a wrong type, or values that contradict each other."""


class DataError(SurefootError):
    """A dataset, or a row of it, cannot be read as the recipe says."""


class TemplateError(DataError):
    """A chat template is unknown, or what it renders cannot be split into prompt and answer."""


class ModelError(SurefootError):
    """A model, tokenizer or adapter is missing, damaged, or of another kind."""


class CheckpointError(SurefootError):
    """A checkpoint is missing, damaged, or does not hold what was asked of it."""


class RunError(SurefootError):
    """A run cannot start or go on."""
