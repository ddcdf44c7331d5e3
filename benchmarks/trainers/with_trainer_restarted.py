"""Train with the Hugging Face Trainer on several ranks of torchrun, saving often: started again, it
resumes from its last checkpoint."""

from __future__ import annotations

from pathlib import Path

from datasets import load_from_disk
from hf_trainer import arguments, load_model
from task import task
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint


def main() -> None:
    """Train until the last step, or until it is killed."""
    todo = task()
    settings = {**arguments(todo), "save_strategy": "steps", "save_steps": 25}
    trainer = Trainer(
        model=load_model(todo),
        args=TrainingArguments(
            **settings,
            save_total_limit=2,
            per_device_train_batch_size=todo.micro_batch_size,
            ddp_backend="gloo",
        ),
        train_dataset=load_from_disk(f"{todo.inputs}/tokenized"),
        data_collator=DataCollatorForSeq2Seq(PreTrainedTokenizerFast.from_pretrained(todo.inputs)),
    )
    folder = Path(todo.output)
    trainer.train(
        resume_from_checkpoint=get_last_checkpoint(todo.output) if folder.exists() else None
    )


if __name__ == "__main__":
    main()
