"""Start, training and saves of this checkout beside those of another commit: is it slower?

    git worktree add ../before COMMIT
    .venv/bin/python benchmarks/commits.py ../before [--repetitions 5] [--steps 60]

Both train ``examples/quickstart.yaml`` in this environment, on one thread, with rows in the cache.
A save is of 2.4 MB, so what is measured is what surrounds its bytes; ``checkpoint.py`` measures
large states.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import measure
from measure import say

HERE = Path(__file__).resolve().parents[1]
RECIPE = "examples/quickstart.yaml"
SAVES = 25
TIMES = {
    "help": "`--help`",
    "plan": "`plan`",
    "first": "`train` of one step",
    "train": "the steps of `train`",
    "waiting": "a save, waiting",
    "stall": "training stops for a save in the background",
}


def run(tree: Path, folder: Path, *arguments: str) -> float:
    """Run a command of a checkout; its CPU seconds."""
    found = folder.parent / "cache"
    env = {**os.environ, "PYTHONPATH": str(tree / "src"), "XDG_CACHE_HOME": str(found)}
    command = [sys.executable, "-m", "surefoot", *arguments]
    os.chdir(tree)
    return measure.timed(command, {**env, "OMP_NUM_THREADS": "1"}, folder / "log").cpu


def trained(
    tree: Path, folder: Path, steps: int, *overrides: str
) -> tuple[float, dict[str, float]]:
    """Train so many steps: CPU seconds of the whole command, and what it reports."""
    given = [f"train.output_dir={folder / 'run'}", f"train.max_steps={steps}", *overrides]
    given += ["train.eval_epoch=false", "data.eval_datasets=[]"]
    seconds = run(tree, folder, "train", RECIPE, *given)
    return seconds, json.loads((folder / "run" / "all_results.json").read_text())


def times(tree: Path, root: Path, steps: int) -> dict[str, float]:
    """One round of all that is measured, in seconds."""
    never, each = "checkpoint.save_steps=null", ["checkpoint.save_steps=1", "checkpoint.keep=1"]

    def folder() -> Path:
        return Path(tempfile.mkdtemp(dir=root))

    first, _ = trained(tree, folder(), 1, never)
    _, whole = trained(tree, folder(), steps, never)
    found = {
        "help": run(tree, folder(), "--help"),
        "plan": run(tree, folder(), "plan", RECIPE),
        "first": first,
        "train": whole["train_runtime"],
    }
    for name, background in (("waiting", "false"), ("stall", "true")):
        _, saved = trained(tree, folder(), SAVES, *each, f"checkpoint.async_save={background}")
        # the one figure of saves: its name is not the same in every commit
        stopped = next(value for key, value in saved.items() if "save" in key)
        found[name] = stopped / SAVES
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="a checkout of the other commit")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    asked = parser.parse_args()
    trees = {"before": asked.before.resolve(), "after": HERE}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as root:
        for tree in trees.values():  # fills the caches
            trained(tree, Path(tempfile.mkdtemp(dir=root)), 1)
        for name in measure.interleaved(list(trees), asked.repetitions):
            found[name].append(times(trees[name], Path(root), asked.steps))
            say(f"{name}: {found[name][-1]}")
    rows = []
    for key, title in TIMES.items():
        before, after = ([one[key] for one in found[name]] for name in trees)
        share = measure.spread([a / b for a, b in zip(after, before, strict=True)])
        rows.append([title, measure.spread(before, 3), measure.spread(after, 3), share])
    commits = [
        subprocess.check_output(["git", "-C", tree, "rev-parse", "--short", "HEAD"], text=True)
        for tree in trees.values()
    ]
    print(f"{measure.machine()}; {commits[0].strip()} beside {commits[1].strip()}\n")
    print(measure.table(["seconds", "before", "after", "after / before, in pairs"], rows))


if __name__ == "__main__":
    main()
