"""Train with the Hugging Face Trainer. Variants: ``padded``, ``one`` example at a time, and
``liger``: padded, with Liger's kernels."""

from __future__ import annotations

from datasets import load_from_disk
from hf_trainer import Watch, arguments
from task import Meter, task
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

todo = task()
meter = Meter(todo)

tokenizer = PreTrainedTokenizerFast.from_pretrained(todo.inputs)
model = AutoModelForCausalLM.from_pretrained(todo.inputs, dtype="float32")
if todo.method == "lora":
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
micro = 1 if todo.variant == "one" else todo.batch
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        **arguments(todo),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=todo.batch // micro,
        train_sampling_strategy="sequential",
        use_liger_kernel=todo.variant == "liger",
    ),
    train_dataset=load_from_disk(f"{todo.inputs}/tokenized"),
    data_collator=DataCollatorForSeq2Seq(tokenizer),
    callbacks=[Watch(meter)],
)
trainer.train()
meter.write()
