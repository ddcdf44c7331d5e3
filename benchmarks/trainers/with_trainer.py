"""Train with the Hugging Face Trainer. Variants: ``padded``, and ``one`` example at a time."""

from __future__ import annotations

import sys
from typing import Any

from datasets import load_from_disk
from task import Meter, task
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

todo = task()
meter = Meter(todo)


class Watch(TrainerCallback):
    """Tells the meter what happens."""

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """A step begins."""
        meter.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """A step has ended."""
        meter.end()

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        """Note the loss."""
        if "loss" in logs:
            meter.losses.append(float(logs["loss"]))


tokenizer = PreTrainedTokenizerFast.from_pretrained(todo.inputs)
model = AutoModelForCausalLM.from_pretrained(todo.inputs)
if todo.method == "lora":
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
meter.watch(model)
micro = 1 if todo.variant == "one" else todo.batch
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=todo.output,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=todo.batch // micro,
        max_steps=todo.steps,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        train_sampling_strategy="sequential",
        disable_tqdm=True,
    ),
    train_dataset=load_from_disk(f"{todo.inputs}/tokenized"),
    data_collator=DataCollatorForSeq2Seq(tokenizer),
    callbacks=[Watch()],
)
trainer.train()
meter.write()
sys.stdout.flush()
