"""Train with the Hugging Face Trainer. Variants: ``padded``, ``one`` example at a time, and
``liger``: padded, with Liger's kernels."""

from __future__ import annotations

from datasets import load_from_disk
from hf_trainer import Watch, arguments, load_model, with_adapter
from task import Meter, task
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)


def main() -> None:
    """Train, and leave the report."""
    todo = task()
    meter = Meter(todo)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(todo.inputs)
    micro = 1 if todo.variant == "one" else todo.micro_batch_size
    trainer = Trainer(
        model=with_adapter(load_model(todo), todo),
        args=TrainingArguments(
            **arguments(todo),
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=todo.batch // micro,
            gradient_checkpointing=todo.recompute,
            train_sampling_strategy="sequential",
            use_liger_kernel=todo.variant == "liger",
        ),
        train_dataset=load_from_disk(f"{todo.inputs}/tokenized"),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        callbacks=[Watch(meter)],
    )
    trainer.train()
    meter.write()


if __name__ == "__main__":
    main()
