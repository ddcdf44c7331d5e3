"""Train on rows with pictures as ``surefoot train`` does. Variants: ``packed``, ``padded``, and
``prompts``, packed and trained on all text."""

from __future__ import annotations

from row_meter import RowMeter
from task import Task, task

import surefoot
from surefoot.training.callback import Context, TrainerCallback, TrainerControl, TrainerState


class Watch(TrainerCallback):
    """Reports the run's events to the meter."""

    def __init__(self, meter: RowMeter) -> None:
        self.meter = meter

    def on_train_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """The model is ready."""
        self.meter.watch(args.model)

    def on_step_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """A step begins."""
        self.meter.begin()

    def on_step_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """A step has ended."""
        self.meter.end()

    def on_log(
        self, args: Context, state: TrainerState, control: TrainerControl, logs: dict[str, float]
    ) -> None:
        """Note the loss."""
        if "loss" in logs:
            self.meter.losses.append(logs["loss"])


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
            "max_steps": todo.steps,
            "global_batch_size": todo.batch,
            "micro_batch_size": todo.batch,
            "log_steps": 1,
        },
    }


if __name__ == "__main__":
    todo = task()
    meter = RowMeter(todo)
    surefoot.train(recipe(todo), callbacks=[Watch(meter)])
    meter.write()
