"""The operating system as the seam in ``files.py`` sees it, with a fault at the call one names."""

import errno
import os

# Every function of ``os`` through which files.py reaches the disk.
CALLS = (
    "open", "close", "write", "preadv", "pwrite", "posix_fallocate", "ftruncate", "fsync",
    "fstat", "fstatvfs", "stat", "lstat", "listdir", "mkdir", "rename", "link", "unlink", "rmdir",
)  # fmt: skip
WRITES = ("write", "pwrite", "preadv")  # calls that may do less than they were asked to
DEAD = 9  # exit code of a process that a fault ended


class System:
    """``os``, but call number ``at`` (from 0) does what ``fault`` says. Notes the calls."""

    def __init__(self, fault=None, at=None, calls=CALLS):
        self.fault, self.at, self.calls = fault, at, calls
        self.seen = []

    def __getattr__(self, name):
        real = getattr(os, name)
        if name not in self.calls:
            return real

        def call(*args, **kwargs):
            number = len(self.seen)
            self.seen.append(name)
            if self.fault is not None and number == self.at:
                return self.fault(name, real, args, kwargs)
            return real(*args, **kwargs)

        return call


class But:
    """``os``, but for the calls that are given."""

    def __init__(self, **calls):
        vars(self).update(calls)

    def __getattr__(self, name):
        return getattr(os, name)


def refusing(code):
    """For ``But``: a call that is refused."""

    def call(path, *_, **__):
        where = str(path) if isinstance(path, os.PathLike) else None
        raise OSError(code, os.strerror(code), where)

    return call


def fails(code):
    """The call fails and does nothing."""

    def fault(name, real, args, kwargs):
        if name == "close":
            real(*args, **kwargs)  # Linux closes the descriptor even when it reports an error
        raise OSError(code, os.strerror(code))

    fault.__name__ = errno.errorcode[code]
    return fault


def short(name, real, args, kwargs):
    """The call does only the first byte of its work."""
    if name == "preadv":
        return real(args[0], [args[1][0][:1]], *args[2:])
    if name in WRITES:
        return real(args[0], args[1][:1], *args[2:])
    return real(*args, **kwargs)


def dies_before(name, real, args, kwargs):
    """The process is killed before the call."""
    os._exit(DEAD)


def dies_within(name, real, args, kwargs):
    """The process is killed when half of the call is done."""
    if name in ("write", "pwrite"):
        real(args[0], args[1][: max(1, len(args[1]) // 2)], *args[2:])
    os._exit(DEAD)


def dies_after(name, real, args, kwargs):
    """The process is killed after the call."""
    try:
        real(*args, **kwargs)
    finally:
        os._exit(DEAD)
