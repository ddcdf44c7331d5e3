"""Train on rows with pictures as ``surefoot train`` does. Variants: ``packed``, ``padded``, and
``prompts``, packed and trained on all text."""

from __future__ import annotations

from row_meter import RowMeter
from task import Task, task
from with_surefoot import measure


def recipe(todo: Task) -> dict[str, object]:
    """The recipe of a task: nothing that is about speed is changed."""
    return {
        "model": {"path": f"{todo.inputs}/base"},
        "data": {
            "dataset_dir": todo.inputs,
            "datasets": [f"{todo.inputs}/rows.jsonl"],
            "cutoff_len": todo.cutoff_len,
            "shuffle": False,
            "packing": todo.variant != "padded",
            "train_on_prompt": todo.variant == "prompts",
        },
        "method": "full",
        "stage": "sft",
        "optim": {"adamw": {"learning_rate": 1e-4, "schedule": "constant"}},
        "train": {
            "output_dir": todo.output,
            "max_steps": todo.steps + 2,  # as in `with_surefoot`
            "global_batch_size": todo.batch,
            "micro_batch_size": todo.batch,
            "log_steps": 1,
        },
    }


if __name__ == "__main__":
    todo = task()
    measure(recipe(todo), RowMeter(todo))
