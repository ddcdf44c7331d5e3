"""What each architecture can do, found by doing it: one row of the table in docs/architectures.md.

The references are independent: a plain torch loop, the padded run, transformers' and PEFT's own
loading. Every cell is ``yes``, ``refused`` (by an error that says what to do, before training),
``fails``, or what is done instead.
"""

import json
import re
import shutil

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import project
import ranks
import surefoot
from surefoot.batch import IGNORE_INDEX
from surefoot.errors import SurefootError
from surefoot.model.outputs import why_full_logits
from surefoot.recipe.recipe import read
from surefoot.run.assembly import build
from surefoot.use import export
from zoo import architectures

COLUMNS = ["full", "packed", "lora", "tp", "resume", "export", "head", "kept tensors"]
RATE = 1e-3
LORA = {"method": {"lora": {"rank": 4}}}
ROWS = [
    {"instruction": f"What is {n} plus {n}?" + " And more?" * (3 * n), "output": f"It is {2 * n}."}
    for n in range(4)
]  # one global batch; two of them longer than the windows


def prepare(name, folder):
    """The model ``name`` with a tokenizer, a dataset and a recipe for them."""
    tokens = project.tokenizer()
    known = {"vocab_size": len(tokens), "vocab_size_per_layer_input": len(tokens)}
    model = architectures.build(name, **known, eos_token_id=0, bos_token_id=0)
    model.save_pretrained(folder / "model")
    if names := passengers(type(model)):
        path = folder / "model" / "model.safetensors"
        extra = {name: torch.full((3,), 0.5) for name in names}
        save_file({**load_file(path), **extra}, path, {"format": "pt"})
    tokens.save_pretrained(folder / "model")
    # For some types transformers takes a class of their own, whatever the files say (qwen2).
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.jsonl"}}))
    return recipe_of(folder, datasets=["rows"], cutoff_len=128)


def passengers(kind):
    """Names of weights that files of this class have, and its code does not: heads that predict
    several tokens."""
    patterns = getattr(kind, "_keys_to_ignore_on_load_unexpected", None) or ()
    stems = (re.sub(r"[\\^$*]|\.\*", "", p).strip(".") for p in sorted(patterns))
    return [f"{stem}.norm.weight" for stem in stems if re.search(r"mtp|layers\.\d\d", stem)]


def recipe_of(folder, **data):
    """Three steps of the model in ``folder``."""
    return {
        "model": {"path": str(folder / "model")},
        "data": {
            "dataset_dir": str(folder),
            "packing": False,
            "cache_dir": str(folder / "cache"),
            **data,
        },
        "stage": "sft",
        "train": {
            "max_steps": 3,
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "log_steps": 1,
            "max_grad_norm": 0.0,
            "output_dir": str(folder / "run"),
        },
        "optim": {"adamw": {"learning_rate": RATE, "schedule": "constant"}},
    }


def trained(recipe, folder, **changes):
    """The losses of a run; one that is complete is not begun again."""
    known, steps = folder.with_suffix(".json"), changes.get("train.max_steps", 3)
    if known.exists() and len(losses := json.loads(known.read_text())) >= steps:
        return losses
    losses = losses_of(surefoot.train(recipe, **{"train.output_dir": str(folder), **changes}))
    known.write_text(json.dumps(losses))
    return losses


def losses_of(state):
    return [entry["loss"] for entry in state.log_history if "loss" in entry]


def by_plain_loop(recipe):
    """The losses of AdamW on rows one at a time, by transformers and torch alone."""
    loader = build(read(recipe, {})).windows.loader
    model = AutoModelForCausalLM.from_pretrained(recipe["model"]["path"]).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    losses = []
    for _ in range(3):
        total, count = 0.0, 0
        for batch in loader.window_at(0, 0):
            for ids, labels, mask in zip(
                batch.input_ids, batch.labels, batch.attention_mask, strict=True
            ):
                ids, labels = ids[mask.bool()], labels[mask.bool()]
                logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
                total = total + F.cross_entropy(logits, labels[1:], reduction="sum")
                count += int((labels != IGNORE_INDEX).sum())
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach() / count))
    return losses


def must_be_close(found, expected):
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-5)


def full(recipe, folder):
    """Full fine-tuning has the losses of a plain loop."""
    must_be_close(trained(recipe, folder / "full"), by_plain_loop(recipe))


def packed(recipe, folder):
    """Packed rows have the losses of padded ones."""
    found = trained(recipe, folder / "packed", **{"data.packing": True})
    must_be_close(found, trained(recipe, folder / "full"))


def lora(recipe, folder):
    """LoRA of the default targets trains."""
    losses = trained(recipe, folder / "lora", **LORA)
    assert losses[-1] < losses[0]


def tp(recipe, folder):
    """Two ranks that share every matrix have the losses of one."""

    (folder / "tp").mkdir()

    def work(world):
        changes = {"train.output_dir": str(folder / "tp"), "parallel.tp": 2}
        trainer = build(read(recipe, {**changes, "parallel.num_processes": 2}), world=world)
        trainer.fit()
        return losses_of(trainer.state)

    expected = trained(recipe, folder / "full")
    for found in ranks.run(2, _told(work), tp=2):
        if isinstance(found, str):
            raise SurefootError(found)
        must_be_close(found, expected)


def _told(work):
    """Refusals as values: what a rank raises would be an error of the test."""

    def run(world):
        try:
            return work(world)
        except SurefootError as error:
            return str(error)

    return run


def resume(recipe, folder):
    """A stopped run ends in the bits of one that was not; also with LoRA, where that trains."""
    for kind, changes in {"full": {}, "lora": LORA}.items():
        if kind == "lora" and outcome(lora, recipe, folder)[0] != "yes":
            continue
        trained(recipe, folder / kind, **changes)
        trained(recipe, folder / f"{kind}-again", **changes, **{"train.max_steps": 2})
        trained(recipe, folder / f"{kind}-again", **changes)
        whole, again = (weights(folder / name) for name in (kind, f"{kind}-again"))
        assert whole.keys() == again.keys()
        for name, tensor in whole.items():
            assert torch.equal(tensor, again[name]), f"{kind}: {name}"


def weights(run):
    files = (run / "checkpoint-3").glob("*model*.safetensors")
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def exported(recipe, folder):
    """An adapter merges into a model with the logits of base and adapter, by PEFT's reckoning."""
    from peft import PeftModel

    trained(recipe, folder / "lora", **LORA)
    export(folder / "lora", folder / "merged")
    ids = torch.arange(3, 20)[None]
    base = AutoModelForCausalLM.from_pretrained(recipe["model"]["path"]).eval()
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(folder / "merged").eval()
        found = merged(input_ids=ids, use_cache=False).logits
        adapted = PeftModel.from_pretrained(base, folder / "lora" / "checkpoint-3").eval()
        expected = adapted(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def head(recipe, folder):
    """Log-probabilities are computed in chunks of tokens, also with LoRA of the default targets."""
    for changes in ({}, LORA):
        trainer = build(read(recipe | changes, {"train.output_dir": str(folder / "head")}))
        if trainer.policy.network.engine.runner.head is None:
            raise OtherError("full logits", why_full_logits(trainer.policy.network.inner))


def kept(recipe, folder):
    """A full export has every tensor of the base's files."""
    kind = AutoModelForCausalLM._model_mapping[
        type(AutoConfig.from_pretrained(recipe["model"]["path"]))
    ]
    if not (names := passengers(kind)):
        return
    trained(recipe, folder / "full")
    export(folder / "full", folder / "exported")
    files = (folder / "exported").glob("*.safetensors")
    there = {name for path in files for name in load_file(path)}
    if lost := sorted(set(names) - there):
        raise OtherError("no", f"{lost[0]} of the base is not in the export")


class OtherError(Exception):
    """What is done in place of ``yes``, and why."""


CHECKS = dict(zip(COLUMNS, (full, packed, lora, tp, resume, exported, head, kept), strict=True))


def outcome(check, recipe, folder):
    """A cell, and why it is not ``yes``."""
    try:
        check(recipe, folder)
    except OtherError as error:
        return error.args
    except SurefootError as error:
        return "refused", str(error)
    except Exception as error:
        return "fails", f"{type(error).__name__}: {error}"
    return "yes", ""


def row(name, folder, columns=COLUMNS):
    """The cells of an architecture, by column, each with its reason."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        recipe = prepare(name, folder)
        return {column: outcome(CHECKS[column], recipe, folder) for column in columns}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
