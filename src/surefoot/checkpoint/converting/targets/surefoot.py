"""A Surefoot checkpoint: resharded, or converted from foreign weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ....parallel.sharding import Mesh
from ...disk.commit import named
from ...disk.manifest import Kind
from ...layouts.detection import detect_layout, model_near
from ...sources.copying import Progress, cast
from ...sources.source import TensorSource
from ..model_files import adapter_files, companions, named_as, refuse_adapter
from ..origin import Done, ModelTarget, OptionError, Origin
from ..resharding import reshard, write_weights


@dataclass(frozen=True)
class SurefootCheckpoint(ModelTarget):
    """A Surefoot checkpoint: another layout or mesh, or the weights of other tools."""

    layout: Literal["full", "distributed"] | None = None
    """Layout of the Surefoot checkpoint: full (unsharded tensors), or distributed (one folder of
    shards per rank), which is the default with a mesh.
    """

    mesh: Mesh | None = None
    """The processes whose boxes are written: dp_shard=4, dp_shard=4,tp=2, dp_replicate=2 …"""

    def __post_init__(self) -> None:
        if self.mesh and self.layout == "full":
            raise OptionError("--mesh needs --layout distributed; layout full is not sharded")

    @property
    def written(self) -> Literal["full", "distributed"]:
        """The layout that is written."""
        return self.layout or ("distributed" if self.mesh else "full")

    def write(self, origin: Origin, target: Path, progress: Progress) -> Done:
        """All of a Surefoot checkpoint; of other folders the weights."""
        mesh = self.mesh or Mesh()
        notes = {"layout": self.written, "mesh": mesh.axes}
        layout = detect_layout(origin.folder)
        if not (named(origin.folder) or (layout is not None and layout.has_manifest)):
            setting = self._write_weights(origin, target, mesh, progress)
            return Done(notes, f"weights only: start a run from them with model.{setting}={target}")
        self._refuse_hints(origin)
        reshard(
            origin.folder,
            target,
            layout=self.written,
            mesh=mesh,
            dtype=self.dtype,
            progress=progress,
        )
        return Done(notes, f"resume from it with checkpoint.resume={target}")

    def _refuse_hints(self, origin: Origin) -> None:
        given = {"base": self.base, **origin.reading, "trust_pickle": self.trust_pickle}
        for name, value in given.items():
            if value:
                raise OptionError(
                    f"--{name.replace('_', '-')} cannot be used with a Surefoot checkpoint, "
                    "which contains all that is needed"
                )

    def _write_weights(
        self, origin: Origin, target: Path, mesh: Mesh, progress: Progress
    ) -> Literal["adapter", "path"]:
        kind, source, small = self._opened(origin)
        write_weights(
            source,
            target,
            kind=kind,
            layout=self.written,
            mesh=mesh,
            dtype=self.dtype,
            small=small,
            progress=progress,
        )
        return "adapter" if kind == "adapter" else "path"

    def _opened(self, origin: Origin) -> tuple[Kind, TensorSource, Mapping[str, bytes]]:
        source, layout = origin.weights(), detect_layout(origin.folder)
        if layout is not None and layout.is_adapter:
            return "adapter", source, adapter_files(origin.folder)
        refuse_adapter(origin.folder, source)
        place = origin.base or model_near(origin.folder)
        if origin.base is not None:
            source = named_as(source, origin.base)
        return "full", source, {} if place is None else companions(place, cast(source, self.dtype))
