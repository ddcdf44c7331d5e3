"""Train with TRL's DPOTrainer, reference log-probabilities computed before. Variants: ``padded``,
and ``liger``: with Liger's kernels for the layers. The head is TRL's fused one in both."""

from __future__ import annotations

import json
from pathlib import Path

from datasets import Dataset
from hf_trainer import Watch, arguments, load_model, lora
from task import Meter, Task, task
from torch.utils.data import SequentialSampler
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer


class InOrder(DPOTrainer):
    """The examples in their own order, as for everybody else."""

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)


def pairs(todo: Task) -> Dataset:
    """The rows as conversations, which TRL renders with the tokenizer's template."""
    rows = json.loads((Path(todo.inputs) / "rows.json").read_text())[: todo.batch * todo.steps]
    rows *= -(-todo.batch * todo.steps // len(rows))
    chosen = [[{"role": "assistant", "content": row["chosen"]}] for row in rows]
    rejected = [[{"role": "assistant", "content": row["rejected"]}] for row in rows]
    prompts = [[{"role": "user", "content": row["instruction"]}] for row in rows]
    return Dataset.from_dict({"prompt": prompts, "chosen": chosen, "rejected": rejected})


def main() -> None:
    """Train, and leave the report."""
    todo = task()
    meter = Meter(todo)
    is_liger = todo.variant == "liger"
    trainer = InOrder(
        model=load_model(todo),
        args=DPOConfig(
            **arguments(todo),
            per_device_train_batch_size=todo.micro_batch_size,
            gradient_accumulation_steps=todo.batch // todo.micro_batch_size,
            gradient_checkpointing=todo.recompute,
            max_length=todo.cutoff_len,
            precompute_ref_log_probs=True,
            use_liger_kernel=is_liger,
        ),
        train_dataset=pairs(todo),
        processing_class=PreTrainedTokenizerFast.from_pretrained(todo.inputs),
        peft_config=lora(todo) if todo.method == "lora" else None,
        callbacks=[Watch(meter)],
    )
    trainer.train()
    meter.write()


if __name__ == "__main__":
    main()
