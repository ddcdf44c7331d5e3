"""Messages for people that explain an ``OSError``."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import SurefootError

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


@contextlib.contextmanager
def raising(kind: type[SurefootError], doing: str = "") -> Iterator[None]:
    """Turn an ``OSError`` of the block into ``kind``, with a message for people."""
    try:
        yield
    except OSError as error:
        raise kind(f"{doing}: {explain(error)}" if doing else explain(error)) from error
