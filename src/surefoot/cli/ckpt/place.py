"""Checkpoints and runs on the command line: folders here, or the URLs of folders in a store."""

from __future__ import annotations

from pathlib import Path

import click

from ...address import Address, is_address


class Place(click.Path):
    """A folder, or a URL: downloaded to the cache first, or handed on as an ``Address``."""

    def __init__(self, *, fetch: bool) -> None:
        super().__init__(exists=True, file_okay=False, path_type=Path)
        self._fetch = fetch

    def convert(  # type: ignore[override]
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path | Address:
        """The local folder; or the address, if it is not to be fetched."""
        if not is_address(value):
            found: Path = super().convert(value, param, ctx)  # type: ignore[assignment]
            return found
        try:
            address = Address(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if not self._fetch:
            return address
        from ...remote.resume import fetch

        return fetch(address)


CHECKPOINT = Place(fetch=True)
PLACE = Place(fetch=False)
