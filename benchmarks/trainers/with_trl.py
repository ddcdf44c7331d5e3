"""Train with TRL's SFTTrainer in float32. Variants: ``padded``, ``packing``."""

from __future__ import annotations

import torch
from datasets import Dataset, load_from_disk
from hf_trainer import Watch, arguments
from peft import LoraConfig
from task import Meter, task
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

todo = task()
meter = Meter(todo)


class InOrder(SFTTrainer):
    """The examples in their own order, as for everybody else."""

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)


def completion(row: dict[str, list[int]]) -> dict[str, list[int]]:
    """What TRL calls labels."""
    return {"completion_mask": [int(label != -100) for label in row["labels"]]}


rows = load_from_disk(f"{todo.inputs}/tokenized").map(completion, remove_columns=["labels"])
is_packed = todo.variant == "packing"
model = AutoModelForCausalLM.from_pretrained(todo.inputs, dtype=torch.float32)
lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
trainer = InOrder(
    model=model,
    args=SFTConfig(
        **arguments(todo),
        per_device_train_batch_size=todo.batch // 2 if is_packed else todo.batch,
        gradient_checkpointing=False,
        packing=is_packed,
        max_length=todo.cutoff_len,
        completion_only_loss=True,
    ),
    train_dataset=rows,
    processing_class=PreTrainedTokenizerFast.from_pretrained(todo.inputs),
    peft_config=lora if todo.method == "lora" else None,
    callbacks=[Watch(meter)],
)
trainer.train()
meter.write()
