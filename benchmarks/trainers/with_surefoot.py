"""Train as ``surefoot train`` does, by a recipe that changes nothing that is about speed."""

from __future__ import annotations

from task import Meter, Task, task

import surefoot
from surefoot.training.callback import Context, TrainerCallback, TrainerControl, TrainerState


class _MeasuredError(Exception):
    """All steps are measured: raised to leave the run without its last save."""


class Watch(TrainerCallback):
    """Reports the run's events to the meter."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_train_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """The model is ready."""
        self.meter.watch(args.model)

    def on_step_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """A step begins."""
        self.meter.begin()

    def on_step_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """A step has ended."""
        if self.meter.num_steps < self.meter.todo.steps:
            self.meter.end()

    def on_log(
        self,
        args: Context,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float],
    ) -> None:
        """Note the loss; the last one ends the run."""
        self.meter.losses.append(logs["loss"])
        if len(self.meter.losses) == self.meter.todo.steps:
            raise _MeasuredError


MODELS = {  # by variant, what the recipe's model section also has
    "bf16": {"dtype": "bfloat16"},
    "compile": {"compile": True},
    "compile_float8": {"compile": True, "float8": "rowwise"},
    "float8": {"float8": "rowwise"},
}


def recipe(todo: Task) -> dict[str, object]:
    """The recipe of a task."""
    model: dict[str, object] = {"path": todo.model_path, **MODELS.get(todo.variant, {})}
    if todo.recompute:
        model["gradient_checkpointing"] = True
    if todo.bits:
        model["quantization_bit"] = todo.bits
    lora = {"lora": {"rank": todo.rank, "alpha": 2 * todo.rank}}
    return {
        "model": model,
        "data": {
            "dataset_dir": todo.inputs,
            "datasets": ["rows"],
            "template": "chatml",
            "cutoff_len": todo.cutoff_len,
            "shuffle": False,
        },
        "method": lora if todo.method == "lora" else "full",
        "stage": todo.stage,
        "optim": {"adamw": {"learning_rate": 1e-4, "schedule": "constant"}},
        "train": {
            "output_dir": todo.output,
            "max_steps": todo.steps + 2,  # the losses of a step are logged during the next one
            "global_batch_size": todo.batch,
            "micro_batch_size": todo.micro_batch_size,
            "deterministic": todo.deterministic,
            "log_steps": 1,
        },
        "checkpoint": {"save_steps": 1_000_000},
    }


def measure(recipe: dict[str, object], meter: Meter) -> None:
    """Train, and leave the report."""
    try:
        surefoot.train(recipe, callbacks=[Watch(meter)])
    except _MeasuredError:
        meter.write()


if __name__ == "__main__":
    todo = task()
    measure(recipe(todo), Meter(todo))
