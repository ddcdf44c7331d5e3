"""Train as ``surefoot train`` does, by a recipe that changes nothing that is about speed."""

from __future__ import annotations

from task import Meter, task

import surefoot
from surefoot.training.callback import Context, TrainerCallback
from surefoot.training.state import TrainerControl, TrainerState

todo = task()
meter = Meter(todo)


class Watch(TrainerCallback):
    """Tells the meter what happens."""

    def on_train_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """The model is there."""
        meter.watch(args.model)

    def on_step_begin(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """A step begins."""
        meter.begin()

    def on_step_end(self, args: Context, state: TrainerState, control: TrainerControl) -> None:
        """A step has ended."""
        meter.end()

    def on_log(
        self,
        args: Context,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float],
    ) -> None:
        """Note the loss."""
        meter.losses.append(logs["loss"])


surefoot.train(
    {
        "model": {"path": todo.inputs},
        "data": {
            "dataset_dir": todo.inputs,
            "datasets": ["rows"],
            "template": "chatml",
            "cutoff_len": todo.cutoff_len,
            "shuffle": False,
        },
        "method": {"lora": {"rank": 8, "alpha": 16}} if todo.method == "lora" else "full",
        "stage": "sft",
        "optim": {"adamw": {"learning_rate": 1e-4, "schedule": "constant"}},
        "train": {
            "output_dir": todo.output,
            "max_steps": todo.steps,
            "global_batch_size": todo.batch,
            "micro_batch_size": todo.batch,
            "log_steps": 1,
        },
        "checkpoint": {"save_steps": 1_000_000},
    },
    callbacks=[Watch()],
)
meter.write()
