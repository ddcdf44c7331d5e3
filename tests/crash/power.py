"""A disk that forgets what was not flushed: a model of what a power cut may leave.

It records the calls through the seam, and can say after any of them what is on the platter: the
bytes of a file up to its last flush, the names of a folder up to its last flush, and, since file
systems write on their own when they like, some part of what was not flushed.
"""

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

from .system import System

BLOCK = 64  # bytes that get to the platter together; less than real ones, as the files are small


@dataclass
class FileNode:
    now: bytearray = field(default_factory=bytearray)
    flushed: bytes = b""


@dataclass
class FolderNode:
    now: dict = field(default_factory=dict)
    flushed: dict = field(default_factory=dict)


class Disk(System):
    """Does every call for real, and keeps the model of ``root`` beside it."""

    def __init__(self, root, samples):
        super().__init__()
        self.rng, self.samples = random.Random(0), samples
        self.root = Path(root)
        self.top = self._read(self.root)
        self.open_nodes = {}
        self.moments = []  # what may be on the platter after each call that changes something

    def __getattr__(self, name):
        call = super().__getattr__(name)
        follow = getattr(type(self), f"_{name}", None)
        if follow is None:
            return call

        def traced(*args, **kwargs):
            result = call(*args, **kwargs)
            follow(self, result, *args, **kwargs)
            self.moments.append(list(self._possible()))
            return result

        return traced

    def _read(self, path):
        """What lies there at the beginning is on the platter."""
        if path.is_file():
            return FileNode(bytearray(path.read_bytes()), path.read_bytes())
        children = {p.name: self._read(p) for p in path.iterdir()}
        return FolderNode(dict(children), dict(children))

    def _find(self, path):
        node = self.top
        for part in Path(path).relative_to(self.root).parts:
            node = node.now[part]
        return node

    def _open(self, descriptor, path, flags, *_, dir_fd=None):
        if dir_fd is not None or not Path(path).is_relative_to(self.root):
            return
        if flags & os.O_CREAT:
            self._find(Path(path).parent).now.setdefault(Path(path).name, FileNode())
        self.open_nodes[descriptor] = self._find(path)

    def _close(self, _, descriptor):
        self.open_nodes.pop(descriptor, None)

    def _posix_fallocate(self, _, descriptor, offset, length):
        node = self.open_nodes[descriptor]
        node.now.extend(bytes(max(0, offset + length - len(node.now))))

    def _pwrite(self, count, descriptor, data, offset):
        node = self.open_nodes[descriptor]
        node.now.extend(bytes(max(0, offset + count - len(node.now))))
        node.now[offset : offset + count] = bytes(data[:count])

    def _write(self, count, descriptor, data):
        self.open_nodes[descriptor].now.extend(bytes(data[:count]))

    def _fsync(self, _, descriptor):
        node = self.open_nodes[descriptor]
        node.flushed = dict(node.now) if isinstance(node, FolderNode) else bytes(node.now)

    def _mkdir(self, _, path):
        self._find(Path(path).parent).now[Path(path).name] = FolderNode()

    def _link(self, _, old, new, **options):
        self._find(Path(new).parent).now[Path(new).name] = self._find(old)

    def _rename(self, _, old, new):
        node = self._find(Path(old).parent).now.pop(Path(old).name)
        self._find(Path(new).parent).now[Path(new).name] = node

    def _unlink(self, _, path):
        del self._find(Path(path).parent).now[Path(path).name]

    _rmdir = _unlink

    def _possible(self):
        """Nothing that was not flushed; names, not bytes; bytes, not names; some; everything."""
        for names in (flushed_names, some_names, written_names):
            for bytes_of in (flushed_bytes, zeroed_bytes, some_bytes, written_bytes):
                is_chance = names is some_names or bytes_of is some_bytes
                for _ in range(self.samples if is_chance else 1):
                    yield tree(self.top, names, bytes_of, self.rng)


def flushed_names(node, rng):
    return node.flushed


def written_names(node, rng):
    return node.now


def some_names(node, rng):
    """Every change since the last flush got to the platter, or did not."""
    chosen = {}
    for name in node.flushed.keys() | node.now.keys():
        child = rng.choice((node.flushed, node.now)).get(name)
        if child is not None:
            chosen[name] = child
    return chosen


def flushed_bytes(node, rng):
    return node.flushed


def zeroed_bytes(node, rng):
    """The length got to the platter, the bytes since the last flush did not."""
    return bytes(node.flushed) + bytes(max(0, len(node.now) - len(node.flushed)))


def some_bytes(node, rng):
    """Every block since the last flush got to the platter, or did not."""
    content = bytearray(zeroed_bytes(node, rng))
    for at in range(0, len(content), BLOCK):
        if rng.random() < 0.5:
            content[at : at + BLOCK] = node.now[at : at + BLOCK]
    return bytes(content)


def written_bytes(node, rng):
    return bytes(node.now)


def tree(node, names, bytes_of, rng):
    """The model as nested dicts of bytes."""
    if isinstance(node, FileNode):
        return bytes_of(node, rng)
    children = sorted(names(node, rng).items())
    return {name: tree(child, names, bytes_of, rng) for name, child in children}


def write_tree(path, content):
    """Put nested dicts of bytes on a real disk."""
    if isinstance(content, bytes):
        path.write_bytes(content)
        return
    path.mkdir()
    for name, child in content.items():
        write_tree(path / name, child)
