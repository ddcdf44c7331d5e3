"""``make demo``: ``surefoot demo``, with the files and the run in this clone."""

from __future__ import annotations

import os
from pathlib import Path

from surefoot.cli.demo import run_demo
from surefoot.errors import SurefootError

if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent.parent)
    try:
        run_demo(Path(), "examples/quickstart.yaml")
    except SurefootError as error:
        raise SystemExit(f"error: {error}") from None
