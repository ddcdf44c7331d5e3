"""Every error that a user can cause derives from one base, so that the CLI prints it without a
traceback.

    SurefootError
    ├── RecipeError         the YAML: unknown key, wrong type, values that contradict each other
    ├── DataError           a dataset, a file or a row of it
    │   └── TemplateError   a chat template that is unknown or cannot be masked
    ├── ModelError          a model, tokenizer or adapter: missing, damaged or of another kind
    ├── CheckpointError     a checkpoint: missing, damaged, or without what is needed
    │   └── DamagedFileError    a file of it is not the one that was saved
    └── RunError            a run that cannot continue: output_dir is in use, the loss is NaN
        ├── LostPeerError   another rank of it has died; that rank's error is the cause
        └── OutOfMemoryError    a rank ran out of memory; the next launch needs less
"""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU, Signals

SKIPPED_STEPS = 3  # exit code of a run that has ended, but has skipped steps (train.on_nan)
OUT_OF_MEMORY = 4  # exit code of a rank for which all ranks start again with less
HUNG = 40  # exit code of a rank that made no progress; above 32, as it is a signal, too
# What stops a run, which saves first. SIGHUP: the terminal was closed. SIGUSR1 and SIGUSR2: the
# warnings of SLURM and of Grid Engine before the time limit. SIGXCPU: the limit of CPU time.
STOP_SIGNALS = (SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU)


EXTRAS = {
    "bitsandbytes": "qlora",
    "compressed_tensors": "quantize",
    "gcsfs": "gs",
    "gguf": "gguf",
    "jieba": "metrics",
    "llguidance": "serve",
    "lm_eval": "lm-eval",
    "mlflow": "mlflow",
    "modelscope_hub": "modelscope",
    "optuna": "sweep",
    "ray": "ray",
    "s3fs": "s3",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard",
    "torchao": "float8",
    "trackio": "trackio",
    "wandb": "wandb",
}  # package -> the extra that installs it, and in the version that is needed


def installation(package: str, extra: str | None = None) -> str:
    """The command that installs a package that is missing, by ``extra`` if several have it.

    It is typed in the clone: the name surefoot on the package index does not belong to this
    project, so whatever is there is somebody else's code.
    """
    extra = extra or EXTRAS.get(package)
    if extra is None:
        return f"pip install {package}"
    return f"pip install -e '.[{extra}]' in the clone of Surefoot"


def counted(number: int, singular: str, plural: str | None = None) -> str:
    """A number and what it counts, in a message: ``1 tensor``, ``2 tensors``."""
    return f"{number:,} {singular if number == 1 else plural or f'{singular}s'}"


def similar(word: str, names: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """The ``names`` that ``word`` may be with a typing error, the most similar first; capitals do
    not count. Two letters that changed places come before all others: to difflib, ``chatlm`` is
    nearer to ``chatglm3`` than to ``chatml``."""
    by_lower = {name.lower(): name for name in names}
    word = word.lower()
    exchanged = [name for name in by_lower if sorted(name) == sorted(word)]
    close = difflib.get_close_matches(word, by_lower, n=count, cutoff=cutoff)
    return [by_lower[name] for name in dict.fromkeys([*exchanged, *close])][:count]


def did_you_mean(word: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """`` (did you mean x?)`` for the name most similar to ``word``, or nothing."""
    return "".join(f" (did you mean {name}?)" for name in similar(word, names, cutoff=cutoff))


def first_line(error: BaseException) -> str:
    """The first line of what an error of other code says, or its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def shortened(message: str) -> str:
    """``message`` without the middle of lines and values that would fill a terminal: what is wrong
    stands at the beginning of a line, and what to do at its end."""
    lines = (_LONG_VALUE.sub(_without_middle, line) for line in message.split("\n"))
    return "\n".join(_LONG_LINE.sub(_without_middle, line) for line in lines)


_LONG_VALUE = re.compile(r"\S{600,}")
_LONG_LINE = re.compile(r".{2400,}")


def _without_middle(match: re.Match[str]) -> str:
    text = match[0]
    part = 100 if len(text.split(maxsplit=1)) == 1 else 1000
    return f"{text[:part]} … ({len(text) - 2 * part:,} more characters) … {text[-part:]}"


class SurefootError(Exception):
    """Base of the errors that this package raises deliberately. The message says where, what was
    found and what to do.
    """

    is_everywhere = False  # whether all ranks of a run raise an error at this same place


class RecipeError(SurefootError):
    """The recipe is wrong: an unknown key, a wrong type, or values that contradict each other."""


class DataError(SurefootError):
    """A dataset, or a row of it, cannot be read in the way the recipe says."""


class TemplateError(DataError):
    """A chat template is unknown, or prompt and response cannot be separated in its output."""


class ModelError(SurefootError):
    """A model, tokenizer or adapter is missing, damaged, or of another kind."""


class CheckpointError(SurefootError):
    """A checkpoint is missing, damaged, or lacks what is needed."""


class DamagedFileError(CheckpointError):
    """A file of the checkpoint ``folder`` is not the one that was saved."""

    def __init__(self, folder: Path, message: str) -> None:
        super().__init__(message)
        self.folder = folder


class RunError(SurefootError):
    """A run cannot start or continue."""


class LostPeerError(RunError):
    """Another rank of the run has died. The cause is in that rank's error, not in this one.

    ``ended_by`` is the signal with which the launcher has ended this rank for the same reason.
    """

    def __init__(self, message: str, ended_by: Signals | None = None) -> None:
        super().__init__(message)
        self.ended_by = ended_by


class OutOfMemoryError(RunError):
    """A rank has run out of memory where others wait for it; smaller batches are written down, with
    which all ranks can start again."""


_REASONS = {
    errno.ENOSPC: "the disk is full; free some space or choose another folder",
    errno.EDQUOT: "your disk quota is used up; free some space or choose another folder",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EACCES: "no permission; check the owner and mode of the file and its folders",
    errno.EPERM: "not permitted; check the owner and mode of the file and its folders",
    errno.EIO: "the disk reports an input/output error; check its health before you continue",
    errno.ENOENT: "it does not exist",
    errno.EEXIST: "it exists already",
    errno.ENOTEMPTY: "it exists already and is not empty",
    errno.ENOTDIR: "a part of the path is not a folder",
    errno.EISDIR: "it is a folder",
    errno.ELOOP: "it is a symbolic link, which is not followed here",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ESTALE: "another machine has replaced or removed it meanwhile; try again",
    errno.EBUSY: "another process still has it open; end that process or try again later",
    errno.EFBIG: "the file system, or `ulimit -f`, does not allow files this large",
    errno.EMFILE: "too many open files; raise `ulimit -n`",
    errno.ENFILE: "too many files are open on this machine; end other programs",
}


_NO_INODES = (
    "the disk has no inodes left for more files; remove some files or choose another folder"
)


def explain(error: OSError) -> str:
    """One sentence for people: which file, what happened, what to do."""
    system_text = error.strerror or str(error)
    reason = _NO_INODES if _lacks_inodes(error) else _REASONS.get(error.errno or 0)
    if reason is None:
        reason = system_text
    elif system_text != os.strerror(error.errno or 0):
        reason = f"{reason} ({system_text})"
    where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
    return f"{where}{reason}"


def _lacks_inodes(error: OSError) -> bool:
    """Whether a file could not be made on a disk that has space, but no room for another file."""
    if error.errno != errno.ENOSPC or not isinstance(error.filename, str | bytes | os.PathLike):
        return False
    try:
        disk = os.statvfs(Path(os.fsdecode(error.filename)).absolute().parent)
    except OSError:
        return False
    return disk.f_files > 0 and not disk.f_favail and disk.f_bavail > 0
