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


KEYS = [
    {"key": "optim.adamw.learning_rate", "range": "1e-5..1e-3:log", "low": 1e-5, "high": 1e-3},
    {"key": "method.lora.rank", "range": "8,16,32", "choices": [8, 16, 32]},
]
KEYS[0] |= {"log": True, "integer": False, "step": None}


def write_sweep(folder, trials=6, *, requested=6, name="method.lora.rank"):
    """A sweep as its command leaves it: the last trial half-run, the one before pruned."""
    folder.mkdir(parents=True)
    keys = [KEYS[0], {**KEYS[1], "key": name}]
    objective = {"metric": "eval_loss", "direction": "minimize", "value": "last"}
    objective["sentence"] = "minimize eval_loss, at the last evaluation"
    spec = {"format": 1, "keys": keys, "objective": objective, "sampler": "tpe", "seed": 0}
    (folder / "sweep.json").write_text(json.dumps({**spec, "pruner": "median"}))
    states = ["complete"] * (trials - 2) + ["pruned", "half-run"]
    rows = []
    for number, state in enumerate(states):
        one = {"number": number, "folder": f"trial-{number:04d}", "state": state, "step": 20}
        values = {KEYS[0]["key"]: 1e-5 * 3**number, name: [8, 16, 32][number % 3]}
        one |= {"values": values, "value": 2.0 - 0.1 * number, "total_steps": 20}
        one |= {"reports": [[20, one["value"]]], "reason": None}
        rows.append(one)
        write_run(folder / one["folder"])
    rows[-1] |= {"value": None, "step": None, "reports": []}
    rows[-2] |= {"reason": "worse than the median at 20"}
    results = {"requested": requested, "metric": "eval_loss", "direction": "minimize"}
    results |= {"trials": rows, "best": trials - 3, "remarks": [], "exhausted": False}
    results["importance"] = {name: 0.25, KEYS[0]["key"]: 0.75}
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "best.yaml").write_text(RECIPE)
    return folder


COMPLETE = {"outcome": "complete", "step": 20}
