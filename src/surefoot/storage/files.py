"""The one seam for durable bytes: everything that must survive a crash is written and read here.

Every call to the operating system goes through this module's ``os``, never through pathlib. So a
test can make any one of them fail, fall short or be the last call of the process. Functions raise
plain ``OSError`` with the file's name; ``raising(SomeError)`` turns it into a message for people.
"""

# ruff: noqa: PTH102, PTH104, PTH106, PTH108, PTH116, PTH208
from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import xxhash

from ..errors import SurefootError, explain, first_line

BLOCK = 512 << 10  # bytes per read or write: still in the core's own cache when they are hashed
PAGE = 4096  # bytes; what lies at a page, in memory and in the file, can go to the disk uncopied
_FETCH = 8 << 20  # bytes that are fetched ahead of sequential reads
MAX_JSON = 64 << 20  # bytes of a configuration or an index: the largest are a few megabytes
MAX_FILE = 1 << 30  # bytes of any other file that is read at once
_DIRECT_BLOCK = 4 << 20  # bytes per write that goes to the disk uncopied

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe of that name must not hang the reader
_FOLDER = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
_APPEND = os.O_WRONLY | os.O_CLOEXEC | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
_DIRECT: int = getattr(os, "O_DIRECT", 0)
_CREATE = os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL
_CLONE = 0x40049409  # FICLONE of linux/fs.h

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EINVAL)  # nor flushes


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the file's name to an ``OSError`` of a call on a descriptor."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@cache
def _reads_ahead(device: int) -> bool:
    """Whether nothing need be fetched: the system cannot, or reads as far ahead by itself."""
    if not hasattr(os, "posix_fadvise"):
        return True
    number = f"{os.major(device)}:{os.minor(device)}"
    # Of a disk, of the disk of a partition, and of a network disk.
    for folder in (f"dev/block/{number}", f"dev/block/{number}/..", f"class/bdi/{number}"):
        queue = Path("/sys", folder, "queue" if folder.startswith("dev") else "")
        with contextlib.suppress(OSError, ValueError):
            # In pages of its cache that are larger than those of a fetch, which takes twice the
            # processor's time, now and in later reads from the cache (Linux 6.18, ext4).
            return int((queue / "read_ahead_kb").read_text()) << 10 >= _FETCH
    return False


class File:
    """An open file, read and written at positions, so that threads can share it."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.path = path
        self._descriptor = descriptor
        self._is_direct = False
        self._sequence = -1, 0  # where the last read ended, and how far was fetched
        # Not at exit: the system closes files after the last exit hook, and until then a lock
        # holds.
        self._close = weakref.finalize(self, os.close, descriptor)  # whoever forgets to
        self._close.atexit = False

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor. Closing twice is harmless."""
        self._descriptor = -1  # its number may soon be another file's
        with _naming(self.path):
            self._close()

    @property
    def size(self) -> int:
        """Length in bytes."""
        with _naming(self.path):
            return os.fstat(self._descriptor).st_size

    @property
    def stamp(self) -> tuple[int, int, int]:
        """Another value whenever the file was replaced or written to."""
        with _naming(self.path):
            status = os.fstat(self._descriptor)
        return status.st_ino, status.st_size, status.st_mtime_ns

    def read_into(self, offset: int, view: memoryview, digest: Hash | None = None) -> None:
        """Fill ``view`` with the bytes from ``offset`` on; ``OSError`` if the file ends earlier.

        ``digest`` is fed with what was read, block by block: each is still in the core's cache.
        """
        done, end = 0, offset + len(view)
        last_end, fetched = self._sequence
        is_next = offset == last_end
        # Beyond the view only in a sequence of reads: others may need nothing of it.
        limit = end + _FETCH if is_next else end
        fetched = max(fetched if is_next else 0, offset + BLOCK)
        if self._reads_ahead:
            fetched = limit
        with _naming(self.path):
            while done < len(view):
                if fetched < min(limit, offset + done + _FETCH // 2):
                    fetched += self._fetch(fetched, min(_FETCH, limit - fetched))
                block = view[done : done + BLOCK]
                count = os.preadv(self._descriptor, [block], offset + done)
                if not count:
                    short = f"the file ends {len(view) - done} bytes too early"
                    raise OSError(errno.ENODATA, short)
                if digest is not None:
                    digest.update(block[:count])
                done += count
        self._sequence = end, fetched

    @cached_property
    def _reads_ahead(self) -> bool:
        with _naming(self.path):
            return _reads_ahead(os.fstat(self._descriptor).st_dev)

    def _fetch(self, offset: int, length: int) -> int:
        """Let the system read these bytes while others are hashed; returns their number."""
        # Every few megabytes, not for every block: the system looks at each page, also of its
        # cache, which took a sixth of the time of a load.
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_WILLNEED)
        return length

    def read(self, offset: int, length: int) -> bytes:
        """The ``length`` bytes from ``offset`` on. The caller bounds ``length``."""
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_up_to(self, offset: int, length: int) -> bytes:
        """The same of a file that another process changes: fewer bytes where it ends earlier."""
        return self.read(offset, max(0, min(length, self.size - offset)))

    def reserve(self, length: int) -> None:
        """Reserve space for ``length`` bytes: a full disk is detected before any is written."""
        if not length:
            return
        with _naming(self.path):
            system = os.fstatvfs(self._descriptor)
            free = system.f_bavail * system.f_frsize
            # st_blocks counts 512 bytes on every file system; what the file has already is not
            # needed again.
            needed = length - os.fstat(self._descriptor).st_blocks * 512
            # The system would take all that is left before it refuses: other programs would fail.
            if needed > free and system.f_blocks:  # some network file systems report no sizes
                raise OSError(errno.ENOSPC, f"{length:,} bytes are needed, {free:,} are free")
            try:
                os.posix_fallocate(self._descriptor, 0, length)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                # Nothing can be reserved on this disk: the comparison above alone finds that it is
                # full.
                os.ftruncate(self._descriptor, length)

    def extend(self, length: int) -> None:
        """Make it at least that long. What was not written takes no space, and is read as zeros."""
        with _naming(self.path):
            if os.fstat(self._descriptor).st_size < length:
                os.ftruncate(self._descriptor, length)

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        """Write all of ``data`` at ``offset``."""
        view, done = memoryview(data), 0
        with _naming(self.path):
            while done < len(view):
                # A write may take less than it was given, without an error.
                count = self._write(view[done:], offset + done)
                if not count:
                    raise OSError(errno.EIO, "nothing was written")
                done += count

    def bypass_cache(self) -> None:
        """Bypass the page cache for later writes, if possible: it would cost another copy."""
        with contextlib.suppress(OSError):
            self._set_direct(True)

    def _set_direct(self, on: bool) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~_DIRECT
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | (_DIRECT if on else 0))
        self._is_direct = on

    def write_ranges(self, ranges: Iterable[tuple[int, int]], data: memoryview) -> None:
        """Write ``data`` into ranges of the file, (offset, length) each, through the page cache."""
        was_direct, done = self._is_direct, 0
        if was_direct:
            self._set_direct(False)  # they are too short for that
        for offset, length in ranges:
            self.write_at(offset, data[done : done + length])
            done += length
        if was_direct:
            self._set_direct(True)

    def _write(self, view: memoryview, offset: int) -> int:
        """One write: past the page cache for complete pages, through it for the rest."""
        if not self._is_direct:
            return os.pwrite(self._descriptor, view[:BLOCK], offset)
        edge = -offset % PAGE  # bytes before the next page; others may write the rest of this one
        num_direct = min((len(view) - edge) // PAGE * PAGE, _DIRECT_BLOCK)
        if edge or not num_direct:
            self._set_direct(False)
            count = os.pwrite(self._descriptor, view[: edge or len(view)], offset)
            self._set_direct(True)
            return count
        try:
            return os.pwrite(self._descriptor, view[:num_direct], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:  # not from this memory, or not on this disk
                raise
        self._set_direct(False)
        return os.pwrite(self._descriptor, view[:BLOCK], offset)

    def sync(self) -> None:
        """Return when the bytes are on the disk."""
        with _naming(self.path):
            os.fsync(self._descriptor)

    def lock(self, *, shared: bool = False) -> bool:
        """Lock the file while it is open, alone or ``shared`` with others; False without locks,
        ``BlockingIOError`` if taken."""
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        with _naming(self.path):
            try:
                # Never lockf: on Linux neither sees the other, and a run and a program would save
                # to one folder.
                fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                return False
        return True

    def is_at(self, path: Path) -> bool:
        """Whether ``path`` is the file that is open here."""
        status = _status(os.stat, path)
        return status is not None and os.path.samestat(os.fstat(self._descriptor), status)


def create(path: Path) -> File:
    """Create an empty file; ``OSError`` if it exists."""
    # The umask decides who may read it. The safetensors library writes 0600 (decisions/0012).
    return File(os.open(path, _CREATE, 0o666), path)


def open_file(path: Path, *, follow: bool = True, write: bool = False) -> File:
    """Open an existing regular file; ``follow=False`` rejects a symbolic link as its last part."""
    # O_RDONLY is 0, so O_RDWR may be added to it.
    flags = _READ | (os.O_RDWR if write else 0) | (0 if follow else os.O_NOFOLLOW)
    return _regular(File(os.open(path, flags), path))


def open_or_create(path: Path) -> File:
    """Open a regular file, not a link, for reading and writing; an empty one if there is none."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return _regular(File(os.open(path, flags, 0o666), path))


def open_to_write(path: Path) -> File:
    """Open an existing regular file, not a link, that other ranks write too, for writing only.
    Reading would make network file systems fetch pages of others, and write them back."""
    return _regular(File(os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW), path))


def open_folder(path: Path) -> File:
    """Open a folder, not through a link, to lock it or to identify it later."""
    return File(os.open(path, _FOLDER | os.O_NOFOLLOW), path)


def open_inside(folder: Path, name: str) -> File:
    """Open the regular file ``name`` (``sub/b.txt``) inside ``folder``, following no link in it.

    The door for the files of a run and of any folder that a stranger may have made: a link in it
    would show another file of this machine, a pipe would hang, ``/dev/zero`` would never end.
    """
    parts = PurePosixPath(name).parts
    # POSIX leaves the meaning of two leading slashes open, so pathlib keeps them apart from one.
    if not parts or {"..", "/", "//"} & set(parts):
        raise OSError(errno.EINVAL, "not a name of a file inside this folder", str(folder / name))
    *folders, last = parts
    try:
        with contextlib.ExitStack() as stack:
            # Each part is opened relative to the one before, so no link takes its place in between
            # (decisions/0013).
            parent = os.open(folder, _FOLDER)
            stack.callback(os.close, parent)
            for part in folders:
                parent = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
                stack.callback(os.close, parent)
            descriptor = os.open(last, _READ | os.O_NOFOLLOW, dir_fd=parent)
            return _regular(File(descriptor, folder / name))
    except OSError as error:
        error.filename = str(folder / name)  # not just the part of it that was to be opened
        raise


def _regular(file: File) -> File:
    # Asked of what is open, not of its name, which may be another file by now.
    if not stat.S_ISREG(os.fstat(file._descriptor).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(file.path))
    return file


def read_all(file: File, limit: int) -> bytes:
    """The content of the file, if it has at most ``limit`` bytes."""
    if (size := file.size) <= limit:
        return file.read(0, size)
    why = f"{size} bytes are more than the {limit} allowed"
    raise OSError(errno.EINVAL, why, str(file.path))


def read_inside(folder: Path, name: str, limit: int) -> bytes:
    """The content of the file that ``open_inside`` opens, of at most ``limit`` bytes."""
    with open_inside(folder, name) as file:
        return read_all(file, limit)


def read_file(path: Path, limit: int = MAX_FILE) -> bytes:
    """The content of a regular file, links followed. A pipe of its name would hang ``read_bytes``,
    and a device would fill the memory."""
    with open_file(path) as file:
        return read_all(file, limit)


def open_stream(path: Path) -> BinaryIO:
    """A regular file, links followed, to be read from its beginning on."""
    with open_file(path) as file:
        return os.fdopen(os.dup(file._descriptor), "rb")


def read_json(path: Path, limit: int = MAX_JSON) -> Any:
    """The value in a small file of a model or a dataset. Links are followed: caches of hubs consist
    of them. Raises ``OSError``, and ``ValueError`` for whatever is no JSON."""
    return parse_json(read_file(path, limit))


def parse_json(data: bytes | str) -> Any:
    """The value of a JSON text; ``ValueError`` also for one whose nesting Python cannot read."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_new(path: Path, data: bytes) -> None:
    """Write and flush a new file. It becomes durable when its folder is flushed too."""
    with create(path) as file:
        file.reserve(len(data))
        file.write_at(0, data)
        file.sync()


def write_aside(path: Path, data: bytes) -> None:
    """Replace the content of ``path`` atomically, through a temporary file that is flushed and
    renamed: after a crash it has the old or the new content."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        write_new(aside, data)
        rename(aside, path)
        sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(aside)  # of that name nothing is left after the rename


def try_writes(folder: Path) -> bool:
    """Overwrite the middle of a file in ``folder``, append to it and rename it, as a run does.
    Returns whether files can share what they contain (``share``). Raises ``OSError``, also if what
    was written is not there."""
    path = folder / f".try.{secrets.token_hex(4)}"
    renamed = path.with_suffix(".part")
    try:
        with create(path) as file:
            file.write_at(0, b"abc")
            file.write_at(1, b"B")
        append_line(path, "d")
        rename(path, renamed)
        with open_file(renamed, follow=False) as file:
            if (content := read_all(file, 64)) != b"aBcd\n":
                why = f"{content!r} is read in place of what was written"
                raise OSError(errno.ESPIPE, why, str(path))
        return share(renamed, path)
    finally:
        for left in (path, renamed):
            with contextlib.suppress(OSError):
                os.unlink(left)


def open_log(path: Path, *, is_empty: bool = False) -> BinaryIO:
    """Open a file, not a link, to append what a process says, after what it has, or with
    ``is_empty`` in its place."""
    return os.fdopen(os.open(path, _APPEND | (os.O_TRUNC if is_empty else 0), 0o666), "ab")


def append_line(path: Path, text: str, *, is_durable: bool = False) -> None:
    """Append one complete line to ``path``; readers see it at once. With ``is_durable``, it
    survives a power cut."""
    line = (text + "\n").encode()
    descriptor = os.open(path, _APPEND, 0o666)
    with _naming(path), File(descriptor, path) as file:
        before = file.size
        # One call, at the end of the file (O_APPEND): lines of several processes do not mix.
        if (written := os.write(descriptor, line)) < len(line):
            # The half line goes: the next one would be appended to it, and both be lost.
            os.ftruncate(descriptor, before)
            raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes were written")
        if is_durable:
            file.sync()
    if not before:  # its name; the bytes are flushed where somebody can wait for it
        sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Create ``path`` and its missing parents, durably."""
    if is_folder(path):
        return
    try:
        os.mkdir(path)
    except FileNotFoundError:
        make_folder(path.parent)
        make_folder(path)
    except FileExistsError:
        if not is_folder(path):  # another process may have been faster
            raise NotADirectoryError(errno.ENOTDIR, "it is a file", str(path)) from None
    else:
        sync_folder(path.parent)


def new_folder(path: Path) -> None:
    """Create ``path``, which must not exist. It becomes durable when its folder is flushed."""
    os.mkdir(path)


def sync_folder(path: Path) -> None:
    """Return when the names in ``path`` (not the files' bytes) are on the disk, if it can do it."""
    with File(os.open(path, _FOLDER), path) as folder:
        try:
            folder.sync()
        except OSError as error:
            if error.errno not in NO_LOCKS:  # it flushes no folders
                raise


def rename(old: Path, new: Path) -> None:
    """Rename atomically. Replaces a file; ``OSError`` if ``new`` is a folder that is not empty."""
    os.rename(old, new)


def share(old: Path, new: Path) -> bool:
    """Give ``new`` the content of ``old`` without a copy; False if this file system cannot. It is a
    clone (a file of its own that shares unchanged blocks) where supported, else a hard link."""
    with contextlib.suppress(OSError):
        with open_file(old, follow=False) as source, create(new) as target:
            fcntl.ioctl(target._descriptor, _CLONE, source._descriptor)
            target.sync()
        return True
    with contextlib.suppress(FileNotFoundError):
        # The empty file in which the clone was to be.
        os.unlink(new)
    with contextlib.suppress(OSError):
        os.link(old, new, follow_symlinks=False)
        return True
    with contextlib.suppress(OSError):  # a network disk may link them, and lose its answer
        return os.path.samestat(os.lstat(old), os.lstat(new))
    return False


def list_folder(path: Path) -> list[str]:
    """The names in ``path``, sorted."""
    return sorted(os.listdir(path))


def names_in(path: Path) -> list[str]:
    """The same; none if ``path`` is no folder."""
    return list_folder(path) if is_folder(path) else []


def remove_tree(path: Path) -> None:
    """Delete a file, a link (not its target) or a folder with all its contents. Files that other
    processes add or delete meanwhile are no error."""
    # A list, not recursion: folders may be nested deeper than Python's stack.
    left, patience = [path], 100
    while left:
        try:
            if not stat.S_ISDIR(os.lstat(left[-1]).st_mode):
                os.unlink(left[-1])
            elif inside := os.listdir(left[-1]):
                left += [left[-1] / name for name in inside]
                continue
            else:
                os.rmdir(left[-1])
        except OSError as error:
            # Another process has added a file since; look again.
            if error.errno == errno.ENOTEMPTY and (patience := patience - 1):
                continue
            # ESTALE is the word of a network disk for what another machine has deleted.
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
        left.pop()


def remove_empty_folder(path: Path) -> bool:
    """Delete the folder ``path`` if it is empty; returns whether it was."""
    with contextlib.suppress(OSError):
        os.rmdir(path)
        return True
    return False


def exists(path: Path) -> bool:
    """Whether the name exists, even as a broken link."""
    return _status(os.lstat, path) is not None


def size_of(path: Path) -> int | None:
    """The length of a regular file, links followed; None if there is none."""
    with contextlib.suppress(OSError, ValueError):
        status = os.stat(path)
        return status.st_size if stat.S_ISREG(status.st_mode) else None
    return None


def is_one_place(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file or folder, or would if it existed."""
    status = [_status(os.stat, path) for path in (one, other)]
    if status == [None, None] and one.name == other.name != "":
        return is_one_place(one.parent, other.parent)
    return None not in status and os.path.samestat(*status)  # type: ignore[arg-type]


def is_folder(path: Path) -> bool:
    """Whether ``path`` is a folder, links followed."""
    status = _status(os.stat, path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def _status(look: Callable[[Path], os.stat_result], path: Path) -> os.stat_result | None:
    try:
        return look(path)
    except (OSError, ValueError) as error:  # of values: a null byte, which no name contains
        # ENAMETOOLONG: what a user typed may be no path at all, but the text of a recipe.
        missing = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
        if isinstance(error, ValueError) or error.errno in missing:
            return None
        raise


# Of all stored bytes. Against damage, not attackers: nothing in a checkpoint can execute
# (decisions/0010). A GiB takes 0.3 s of one core (0043).
Hash = xxhash.xxh3_128


def digest(data: bytes | memoryview) -> str:
    """xxh3-128 of ``data`` as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


@contextlib.contextmanager
def reading(
    kind: type[SurefootError], where: str | Callable[[], str], cure: str = "is it complete?"
) -> Iterator[None]:
    """Turn whatever a reader raises in the block into ``kind``, which says ``where`` it was: what a
    made-up file makes it raise is anybody's choice. Errors of Surefoot stay as they are."""
    try:
        yield
    except SurefootError:
        raise
    except BaseException as error:
        place = where if isinstance(where, str) else where()
        if isinstance(error, OSError):
            raise kind(f"cannot read {place}: {error.strerror or error}") from error
        # A panic of a reader in Rust is no Exception, and its class has no place to import it from.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        what = f"{type(error).__name__}: {first_line(error)}"
        raise kind(f"{place}: cannot be read ({what}); {cure}") from error


@contextlib.contextmanager
def raising(kind: type[SurefootError], doing: str = "") -> Iterator[None]:
    """Turn an ``OSError`` of the block into ``kind``, with a message for people."""
    try:
        yield
    except OSError as error:
        raise kind(f"{doing}: {explain(error)}" if doing else explain(error)) from error


def num_names(path: Path) -> int:
    """How many names (hard links) a file has."""
    return path.lstat().st_nlink
