"""ROOT of runs on the command line: a folder, or the address of one in an object store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...errors import RunError
from ...storage.address import Address, is_address

if TYPE_CHECKING:
    from ...board.board import Board


class RootType(click.ParamType[Path | Address]):
    """A folder that exists, as an absolute path, or an address."""

    name = "root"
    _folder = click.Path(path_type=Path, exists=True, file_okay=False, resolve_path=True)

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path | Address:
        """The folder or the address. Raises ``BadParameter``."""
        if isinstance(value, str) and is_address(value):
            try:
                return Address(value)
            except ValueError as error:
                self.fail(str(error), param, ctx)
        found = self._folder.convert(value, param, ctx)  # type: ignore[arg-type]
        return Path(str(found))


ROOT = RootType()


def opened(root: Path | Address) -> Board:
    """The runs below ROOT, as they are now. Raises ``SurefootError``."""
    from ...board.board import open_board

    board = open_board(root)
    if board.store is not None:
        board.store.refresh()
        if board.store.problem is not None and not board.store.sizes:
            raise RunError(board.store.problem)
    return board


def opened_run(run: Path | Address) -> Board:
    """The same for a run itself. Raises ``RunError`` if it is none."""
    from ...board.run_folders import is_run

    board = opened(run)
    if not is_run(board.root):
        raise RunError(f"{run}: is not a run; surefoot runs ls {run} lists those below it")
    return board
