"""The process of one measurement: ``python -m surefoot.use.bench.trial RECIPE STEPS RESULT``.

It ends with a JSON file that contains the result, or the recipe's error.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from ...errors import SurefootError
from ...parallel.world import die_with_launcher
from ...recipe.recipe import load
from ...storage.memory import is_out_of_memory
from .measurement import measure

OUT_OF_MEMORY = "out of memory"


def main(recipe: Path, steps: int, result: Path) -> None:
    """Measure, and write the result to ``result``."""
    die_with_launcher()
    found: dict[str, object]
    try:
        found = {"figures": asdict(measure(load(recipe), steps, result.parent / "run"))}
    except SurefootError as error:
        found = {"failure": str(error), "error": type(error).__name__}
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        found = {"failure": OUT_OF_MEMORY}
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
