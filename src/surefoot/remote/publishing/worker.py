"""The process that uploads while a run trains: ``python -m surefoot.remote.publishing.worker``.

Its arguments are a folder, and the settings as JSON. Its last line is empty, or why it failed.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from ...errors import SurefootError
from .pushing import Destination, push


def main(folder: Path, settings: dict[str, object]) -> int:
    """Upload the run in ``folder``, at low priority."""
    os.nice(19)
    checkpoints = bool(settings.pop("checkpoints"))
    try:
        push(folder, Destination(**settings), checkpoints=checkpoints)  # type: ignore[arg-type]
    except (SurefootError, OSError) as error:
        sys.stdout.write(" ".join(str(error).split()) + "\n")
        return 1
    except Exception as error:
        traceback.print_exc(file=sys.stdout)
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
