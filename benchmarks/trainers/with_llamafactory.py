"""Train with LLaMA-Factory. Variants: ``padded``, ``packing`` (examples see each other) and
``neat_packing``, all without recomputation, which would only be slower here."""

from __future__ import annotations

from hf_trainer import Watch, arguments
from llamafactory.train.tuner import run_exp
from task import Meter, task

todo = task()
meter = Meter(todo)

settings = {
    **arguments(todo),
    "model_name_or_path": todo.inputs,
    "dataset_dir": todo.inputs,
    "dataset": "rows",
    "template": "chatml",
    "cutoff_len": todo.cutoff_len,
    "stage": "sft",
    "do_train": True,
    "finetuning_type": todo.method,
    "gradient_accumulation_steps": 1,
    "disable_gradient_checkpointing": True,
    "disable_shuffling": True,
}
if todo.method == "lora":
    settings |= {"lora_rank": 8, "lora_alpha": 16, "lora_target": "all"}
if todo.variant == "padded":
    settings |= {"tokenized_path": f"{todo.inputs}/tokenized"}
    settings |= {"per_device_train_batch_size": todo.batch}
else:  # rows of cutoff_len: about two examples each
    settings |= {todo.variant: True, "per_device_train_batch_size": todo.batch // 2}
run_exp(settings, callbacks=[Watch(meter)])
meter.write()
