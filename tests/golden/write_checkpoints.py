"""Write the golden checkpoints of this version: ``python tests/golden/write_checkpoints.py``.

Run it once for a release. It writes ``checkpoints/VERSION``: a tiny model and its data, a
checkpoint in the middle of a run in each layout, and the losses of the uninterrupted runs. It never
changes the folder of a version that exists.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from folders import save_data, save_model, save_recipe  # noqa: E402
from surefoot import __version__  # noqa: E402

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
RUNS = {
    "full": {"method": "full"},
    "adapter": {"method": {"lora": {"rank": 2}}},
    "distributed": {
        "method": "full",
        "checkpoint": {"layout": "distributed"},
        "parallel": {"num_processes": 2, "dp_shard": 2},
    },
}
KEPT = 2  # the step whose checkpoint is kept, of four


def project(folder):
    """The model and the data of all runs."""
    save_model(folder / "model", **SIZES)
    save_data(folder / "data")


def losses(run):
    """Loss of each step and of each evaluation."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {f"{r['step']}": r["loss"] for r in records if "loss" in r}
    return found | {f"eval {r['step']}": r["eval_loss"] for r in records if "eval_loss" in r}


def recipe_of(folder, name):
    """The recipe of a run in ``folder``."""
    return save_recipe(folder, **{"train": {"log_steps": 1}, **RUNS[name]})


def main():
    target = HERE / "checkpoints" / __version__
    if target.exists():
        raise SystemExit(f"{target} exists, and is never changed")
    with tempfile.TemporaryDirectory() as place:
        folder, expected = Path(place), {}
        project(folder)
        for name in RUNS:
            recipe = recipe_of(folder, name)
            command = [sys.executable, "-m", "surefoot", "train", str(recipe)]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            run = folder / "run"
            shutil.copytree(run / f"checkpoint-{KEPT}", folder / "kept" / name)
            expected[name] = losses(run)
            shutil.rmtree(run)
        for name in ("model", "data"):
            shutil.copytree(folder / name, folder / "kept" / name)
        (folder / "kept" / "losses.json").write_text(json.dumps(expected, indent=2) + "\n")
        shutil.copytree(folder / "kept", target)


if __name__ == "__main__":
    main()
