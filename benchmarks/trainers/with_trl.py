"""Train with TRL's SFTTrainer. Variants: ``padded``, ``packing``, and ``packing_liger``: packing,
with Liger's kernels."""

from __future__ import annotations

from datasets import Dataset, load_from_disk
from hf_trainer import Watch, arguments, load_model, lora
from task import Meter, task
from torch.utils.data import SequentialSampler
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


class InOrder(SFTTrainer):
    """The examples in their own order, as for everybody else."""

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)


def completion(row: dict[str, list[int]]) -> dict[str, list[int]]:
    """What TRL calls labels."""
    return {"completion_mask": [int(label != -100) for label in row["labels"]]}


def main() -> None:
    """Train, and leave the report. Packed rows have ``cutoff_len`` tokens; there are as many in a
    micro-batch as have about the tokens of its examples."""
    todo = task()
    meter = Meter(todo)
    rows = load_from_disk(f"{todo.inputs}/tokenized").map(completion, remove_columns=["labels"])
    variant, _, kernels = todo.variant.partition("_")
    is_packed = variant == "packing"
    mean = sum(map(len, rows["input_ids"])) / len(rows)
    micro = todo.micro_batch_size
    packed = max(1, round(micro * mean / todo.cutoff_len))
    trainer = InOrder(
        model=load_model(todo),
        args=SFTConfig(
            **arguments(todo),
            per_device_train_batch_size=packed if is_packed else micro,
            gradient_accumulation_steps=todo.batch // micro,
            gradient_checkpointing=todo.recompute,
            packing=is_packed,
            max_length=todo.cutoff_len,
            completion_only_loss=True,
            use_liger_kernel=kernels == "liger",
        ),
        train_dataset=rows,
        processing_class=PreTrainedTokenizerFast.from_pretrained(todo.inputs),
        peft_config=lora(todo) if todo.method == "lora" else None,
        callbacks=[Watch(meter)],
    )
    trainer.train()
    meter.write()


if __name__ == "__main__":
    main()
