"""A user's project in a folder: a tiny model, its tokenizer, a dataset, a recipe; and the CLI."""

import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import folders
import tiny
import warm

TEXTS = [f"What is {a} plus {b}? It is {a + b}, said the hen." for a in range(9) for b in range(9)]
CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}
{% else %}{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def tokenizer(template=CHATML):
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(TEXTS, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    made.chat_template = template
    return made


@folders.made_once
def model_folder(folder, kind="llama", **changes):
    made = tokenizer()
    model = tiny.model(
        kind, vocab_size=len(made), **{"eos_token_id": 0, "bos_token_id": 0, **changes}
    )
    model.save_pretrained(folder)
    folders.save_tokenizer(made, folder)


def rows(count=24):
    return [
        {"instruction": f"What is {i % 9} plus {i // 9}?", "output": f"It is {i % 9 + i // 9}."}
        for i in range(count)
    ]


def pairs(count=24):
    wrong = [f"It is {i % 9 + i // 9 + 1 + i % 3}, said the hen." for i in range(count)]
    return [
        {"instruction": row["instruction"], "chosen": row["output"], "rejected": answer}
        for row, answer in zip(rows(count), wrong, strict=True)
    ]


def marked(count=24):
    return [{**row, "is_good": i % 3 > 0} for i, row in enumerate(rows(count))]


def labeled(count=24):
    return [{**row, "label": ["small", "large"][i > 11]} for i, row in enumerate(rows(count))]


class Project:
    """``recipe.yaml`` in ``folder``, with everything it names beside it."""

    def __init__(self, folder, kind="llama", **sections):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        model_folder(folder / "model", kind)
        (folder / "data").mkdir()
        made_by_name = {"sums": rows(), "pairs": pairs(), "marked": marked(), "labeled": labeled()}
        for name, made in made_by_name.items():
            text = "".join(json.dumps(row) + "\n" for row in made)
            (folder / "data" / f"{name}.jsonl").write_text(text)
        info = {name: {"file_name": f"{name}.jsonl"} for name in made_by_name}
        info["pairs"]["ranking"] = True
        info["marked"]["columns"] = {"kto_tag": "is_good"}
        (folder / "data" / "dataset_info.json").write_text(json.dumps(info))
        self.sections = {
            "model": {"path": "model"},
            "data": {"datasets": ["sums"], "cutoff_len": 64},
            "stage": "sft",
            "train": {
                "output_dir": str(folder / "run"),
                "max_steps": 12,
                "global_batch_size": 4,
                "micro_batch_size": 2,
                "log_steps": 1,
            },
            "optim": {"adamw": {"learning_rate": 0.003}},
            "checkpoint": {"save_steps": 3},
        }
        for name, fields in sections.items():
            self.sections[name] = (
                fields
                if isinstance(fields, str) or name == "stage"
                else {**self.sections.get(name, {}), **fields}
            )
        self.write()

    def write(self):
        self.recipe.write_text(json.dumps(self.sections))  # YAML is a superset of JSON

    @property
    def recipe(self):
        return self.folder / "recipe.yaml"

    @property
    def run(self):
        return Path(self.sections["train"]["output_dir"])


@contextmanager
def put_back(project, folder):
    """The project, to be changed inside the block; after it, all of its files are as they were."""
    before, sections = shutil.copytree(project.folder, folder), deepcopy(project.sections)
    yield project
    shutil.rmtree(project.folder)
    shutil.move(before, project.folder)
    project.sections = sections


def start(*arguments, popen=warm.Popen, **options):
    """The CLI; with ``subprocess.Popen`` exactly as a user starts it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return popen(
        [sys.executable, "-m", "surefoot", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


def surefoot(*arguments, stdin=None, popen=warm.Popen):
    """Run a command to its end: exit code, standard output, standard error."""
    process = start(*arguments, stdin=subprocess.PIPE, popen=popen)
    out, err = process.communicate(stdin, timeout=300)
    return process.returncode, out, err


def in_child(work, *, kill_when=None):
    """Run ``work()`` in a forked process, killed as soon as ``kill_when()``; its exit code."""
    faulthandler.cancel_dump_traceback_later()  # no fork has its thread, which would be waited for
    pid = os.fork()
    if pid == 0:
        try:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    while True:
        done, status = os.waitpid(pid, os.WNOHANG if kill_when else 0)
        if done:
            return os.waitstatus_to_exitcode(status)
        if kill_when():
            os.kill(pid, signal.SIGKILL)
            kill_when = None
        else:
            time.sleep(0.001)


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run):
    """Step to loss; a step that comes twice fails."""
    found = [(r["step"], r["loss"]) for r in metrics(run) if "loss" in r]
    assert len(dict(found)) == len(found), "a step is logged twice"
    return dict(found)


def checkpoints(run):
    found = {p.name.removeprefix("checkpoint-"): p for p in run.glob("checkpoint-*")}
    return [found[step] for step in sorted(filter(str.isdigit, found), key=int)]


def final_weights(run):
    folder = checkpoints(run)[-1]
    stored = [*folder.glob("model*.safetensors"), *folder.glob("adapter_model.safetensors")]
    return {name: tensor for file in stored for name, tensor in load_file(file).items()}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
