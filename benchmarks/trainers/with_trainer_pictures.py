"""Train on rows with pictures with the Hugging Face Trainer, the processor in its collator."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from row_meter import RowMeter
from task import Task, task
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

Rows = Sequence[Mapping[str, Any]]


class Watch(TrainerCallback):
    """Reports the events of the Trainer to the meter."""

    def __init__(self, meter: RowMeter) -> None:
        self.meter = meter

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """A step begins."""
        self.meter.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """A step has ended."""
        self.meter.end()

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        """Note the loss."""
        if "loss" in logs:
            self.meter.losses.append(float(logs["loss"]))


def conversations(folder: Path) -> Rows:
    """The rows as processors take them: parts of text and pictures."""
    made = []
    for line in (folder / "rows.jsonl").read_text().splitlines():
        row, turns = json.loads(line), []
        for turn in row["messages"]:
            first, *others = turn["content"].split("<image>")
            parts: list[dict[str, str]] = [{"type": "text", "text": first}] if first else []
            for text in others:
                parts += [{"type": "image"}, {"type": "text", "text": text}]
            turns.append({"role": turn["role"], "content": parts})
        made.append({"messages": turns, "images": [str(folder / name) for name in row["images"]]})
    return made


def processed(processor: Any, rows: Rows, **options: Any) -> Any:
    """What a processor makes of some rows."""
    texts = [processor.apply_chat_template(row["messages"]) for row in rows]
    images = [[Image.open(path).convert("RGB") for path in row["images"]] for row in rows]
    given = images if any(images) else None
    return processor(text=texts, images=given, add_special_tokens=False, **options)


def main(todo: Task) -> None:
    """Train, and leave the report."""
    base, meter = Path(todo.inputs) / "base", RowMeter(todo)
    processor = AutoProcessor.from_pretrained(base)
    model = AutoModelForImageTextToText.from_pretrained(base, dtype="float32")
    meter.watch(model)

    def collate(rows: Rows) -> dict[str, torch.Tensor]:
        batch = processed(processor, rows, padding=True, return_tensors="pt")
        labels = batch["input_ids"].clone()
        labels[batch["attention_mask"] == 0] = -100
        labels[torch.isin(labels, torch.tensor(sorted(processor.image_token_ids)))] = -100
        return {**batch, "labels": labels}

    arguments = TrainingArguments(
        output_dir=todo.output,
        max_steps=todo.steps,
        per_device_train_batch_size=todo.batch,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(
        model=model,
        args=arguments,
        train_dataset=conversations(Path(todo.inputs)),  # type: ignore[arg-type]
        data_collator=collate,  # type: ignore[arg-type]
        callbacks=[Watch(meter)],
    ).train()
    meter.write()


if __name__ == "__main__":
    main(task())
