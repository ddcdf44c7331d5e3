"""Folders of runs as training leaves them, without training."""

import json
import math

RECIPE = """\
model: {path: base-model}
data: {datasets: [orders], dataset_dir: /data}
stage: sft
method: lora
train: {output_dir: runs/one, max_steps: 100}
optim: {adamw: {learning_rate: 1.0e-3}}
"""


def write_run(folder, steps=20, *, recipe=RECIPE, launches=(), end=None, offset=0.0, every=1):
    """A run with a falling loss; ``launches`` and ``end`` are events of its last launch."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(recipe)
    (folder / ".lock").touch()
    rows = []
    for step in range(every, steps + 1, every):
        loss = 2.0 / math.sqrt(step) + offset
        rows.append({"step": step, "epoch": step / 10, "loss": loss, "learning_rate": 1e-3})
        rows[-1] |= {"grad_norm": 1.0, "tokens_per_second": 1000.0}
    rows.append({"step": steps, "eval_loss": 0.5 + offset})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events = [{"event": "launch", "time": 1e9, "host": "other", "pid": 1, "ranks": 1}, *launches]
    if end:
        events.append({"event": "end", "time": 1e9 + 60, **end})
    (folder / "launches.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    return folder


COMPLETE = {"outcome": "complete", "step": 20}
