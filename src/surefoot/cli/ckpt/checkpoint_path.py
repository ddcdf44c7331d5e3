"""Checkpoints and runs on the command line: local folders, or URLs in an object store."""

from __future__ import annotations

from pathlib import Path

import click

from ...checkpoint.layouts.detection import names_save
from ...storage.address import Address, is_address


class CheckpointPath(click.Path):
    """An existing folder, or a URL; a file may select one save of its folder."""

    def __init__(self) -> None:
        super().__init__(exists=True, file_okay=False, path_type=Path)

    def convert(  # type: ignore[override]
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path | Address:
        """The folder, or the address."""
        if Path(value).is_file() and names_save(Path(value)):
            return Path(value)
        if not is_address(value):
            found: Path = super().convert(value, param, ctx)  # type: ignore[assignment]
            return found
        try:
            return Address(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


PLACE = CheckpointPath()


def local(checkpoint: Path | Address) -> Path:
    """The checkpoint's folder; for a URL, that of its copy in the cache."""
    if isinstance(checkpoint, Path):
        return checkpoint
    from ...checkpoint.remote import stores

    return stores().fetch(checkpoint)
