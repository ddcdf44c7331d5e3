"""Train with the Hugging Face Trainer. Variants: ``padded``, and ``one`` example at a time."""

from __future__ import annotations

from datasets import load_from_disk
from task import Meter, task
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from watch import Watch

todo = task()
meter = Meter(todo)

tokenizer = PreTrainedTokenizerFast.from_pretrained(todo.inputs)
model = AutoModelForCausalLM.from_pretrained(todo.inputs)
if todo.method == "lora":
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
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
    callbacks=[Watch(meter)],
)
trainer.train()
meter.write()
