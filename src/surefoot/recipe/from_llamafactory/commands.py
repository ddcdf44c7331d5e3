"""Arguments of other commands of LLaMA-Factory: the commands that do the same here."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from ...schema import Problem
from .arguments import ARGUMENTS
from .arguments.argument import OtherCommand
from .given import GivenArguments

_TEXT = ("default", "fewshot", "empty")  # templates without turns


def other_commands(given: GivenArguments) -> Iterator[Problem]:
    """What to type instead of `export`, `chat` and `eval`, if the arguments are of these."""
    found = [name for name in given.values if isinstance(ARGUMENTS[name].outcome, OtherCommand)]
    if found and not given["do_train"]:
        command = _export(given) if given["export_dir"] else _evaluation(given)
        yield Problem((found[0],), command)
    elif not found and not given["do_train"]:
        yield from _without_training(given)


def _export(given: GivenArguments) -> str:
    if given["export_quantization_bit"]:
        return (
            "GPTQ models are not written: export the model with `surefoot export`, and quantize "
            "the folder with a quantizer such as llm-compressor"
        )
    source, base = _model(given), ""
    if given["adapter_name_or_path"]:
        base = f" --base {shlex.quote(given['model_name_or_path'])}"
    adapters = given["adapter_name_or_path"] or []
    size = f" --max-shard-size {given['export_size']}GB" if given.sets("export_size") else ""
    words = f"surefoot export {source} {shlex.quote(given['export_dir'])}{base}{size}"
    if given["export_hub_model_id"]:
        folder, name = shlex.quote(given["export_dir"]), shlex.quote(given["export_hub_model_id"])
        words += f", then: surefoot push {folder} {name}"
    if len(adapters) > 1:
        return f"adapters are merged one by one; begin with: {words}"
    return f"these are arguments of `llamafactory-cli export`; type: {words}"


def _model(given: GivenArguments) -> str:
    """The adapter to merge, or the model."""
    adapters = given["adapter_name_or_path"]
    return shlex.quote(adapters[0] if adapters else given["model_name_or_path"] or "MODEL")


def _evaluation(given: GivenArguments) -> str:
    name, _, split = str(given["task"] or "mmlu_test").rpartition("_")
    words = [f"surefoot eval {_model(given)}"]
    if given["adapter_name_or_path"]:
        words.append(f"--base {shlex.quote(given['model_name_or_path'])}")
    words.append(f"--questions {shlex.quote(str(Path(given['task_dir']) / name))}")
    options = {"--split": (split, "test"), "--shots": (given["n_shot"], 5)}
    options["--lang"] = (given["lang"], "en")
    words += [f"{option} {value}" for option, (value, usual) in options.items() if value != usual]
    if given["template"] in _TEXT:
        words.append("--prompts text")
    if given["save_dir"]:
        words.append(f"--output {shlex.quote(given['save_dir'] + '.jsonl')}")
    return f"`llamafactory-cli eval` ends with an error in 0.9.5; type: {' '.join(words)}"


def _without_training(given: GivenArguments) -> Iterator[Problem]:
    if given["do_predict"] or given["do_eval"]:
        return  # a recipe for `surefoot eval`
    if given.sets("output_dir") or given["dataset"]:
        message = "is not set, so LLaMA-Factory would train nothing; set do_train: true"
        yield Problem(("do_train",), message)
        return
    model, adapters = given["model_name_or_path"], given["adapter_name_or_path"]
    adapter = f" --adapter {shlex.quote(adapters[0])}" if adapters else ""
    yield Problem(
        (),
        "these are arguments of `llamafactory-cli chat` and `api`; type: surefoot chat "
        f"{shlex.quote(str(model))}{adapter}",
    )
