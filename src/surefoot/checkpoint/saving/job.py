"""A save job: everything of a future checkpoint except the bytes of its tensors. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ...parallel.box import Box
from ...storage import files
from ..disk.manifest import Kind, Layout
from ..disk.tensorfile import FilePlan

MOST_ATTEMPTS = 2  # to write a job of which a process was killed, or one that several write


@dataclass(frozen=True)
class WriteShare:
    """The part of a file that one of several ranks writes."""

    boxes: Mapping[str, Box]  # of the whole tensors in it, by key
    has_head: bool  # whether it writes what precedes the tensors


@dataclass(frozen=True)
class Shard:
    """One file of tensors to write."""

    role: str  # model, optimizer or state
    plan: FilePlan
    share: WriteShare | None = None  # if several processes write it


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to write where, and what to delete once it is committed."""

    root: Path
    step: int
    kind: Kind
    created: str  # UTC, ISO 8601
    versions: Mapping[str, str]
    shards: Sequence[Shard]
    small: Mapping[str, bytes]  # the other files, by name
    parent: str | None = None  # the checkpoint this run went on from
    forget: Sequence[str] = ()  # checkpoints under ``root`` that this one takes the place of
    layout: Layout = "full"
    rank: int = 0  # which process this is of those that write the checkpoint together
    world_size: int = 1
    mesh: Mapping[str, int] = field(default_factory=dict)
    nonce: str | None = None  # of the folder aside, on which they have agreed
    attempt: int = 0  # how often it has failed; a folder aside for each
    share: bool = True  # files equal to the parent's are linked instead of written again
    beside: Sequence[str] = ()  # files and folders under ``root`` to flush before the commit
    makes_root: bool = True  # False if ``root`` must exist: a run is never divided
    most_sharing: int = 8  # checkpoints that may have one file in common
    name: str | None = None  # of the folder, if it is not checkpoint-{step}

    @property
    def is_joint(self) -> bool:
        """Whether several ranks write the same files, at least an adapter's."""
        return self.nonce is not None and (self.layout == "full" or self.kind == "adapter")

    @property
    def joint_shards(self) -> list[Shard]:
        """The files of which several ranks write parts."""
        return [shard for shard in self.shards if shard.share is not None]

    @property
    def may_share(self) -> bool:
        """Whether files may be shared with the parent, on which all ranks agree."""
        return self.share and self.parent is not None

    @property
    def target(self) -> Path:
        """The folder of the future checkpoint."""
        return self.root / (self.name or f"checkpoint-{self.step}")

    def nonce_of(self, attempt: int) -> str | None:
        """The part of the temporary folder's name on which ranks agree, of one attempt."""
        return None if self.nonce is None else f"{self.nonce}{attempt:x}"


class Content(Protocol):
    """The bytes of a job's tensors."""

    def write(self, shard: Shard, file: files.File) -> Mapping[str, str]:
        """Write and flush the file; returns the hash of each tensor's bytes by name."""

    def hash(self, shard: Shard, name: str) -> str:
        """The hash of one tensor's bytes."""


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint."""

    path: Path
    num_bytes: int  # of all its files
    num_shared: int = 0  # of these, bytes that lie in files it shares with its parent
    seconds: float = 0.0  # from the first byte to the commit
    problem: str | None = None  # why an older checkpoint could not be removed
    is_committed: bool = True  # as far as a process knows that is not the first
