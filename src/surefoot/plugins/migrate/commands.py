"""LLaMA-Factory's command lines: arguments in words, and its other commands as those that do the
same here."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...errors import RecipeError
from ...recipe.overrides import Overrides
from ...recipe.yaml import Document, parse_argument, parse_text
from ...schema import Keys, Problem
from .arguments import ARGUMENTS, RefusedError
from .rules import GivenArguments
from .templates import same_template

_KEY = re.compile(r"--[A-Za-z][\w-]*(=.*)?", re.DOTALL)
_LINE = "command line"

_TEXT = ("default", "fewshot", "empty")  # templates without turns
_TASKS = {  # of lm-eval, by LLaMA-Factory's names; it has these splits only
    "mmlu_test": "mmlu",
    "ceval_validation": "ceval-valid",
    "cmmlu_test": "cmmlu",
}
_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty")


@dataclass(frozen=True)
class Command:
    """A command line of ``surefoot``, and what it does differently."""

    words: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """To be typed, without the key of a server."""
        hidden = [
            "..." if self.words[i - 1] == "--api-key" else w for i, w in enumerate(self.words)
        ]
        return shlex.join(["surefoot", *hidden])


def command_of(name: str, given: GivenArguments) -> Command | None:
    """What `llamafactory-cli NAME` is here: None if the arguments are of a run, which `surefoot
    chat`, `export` and `eval` open by its file. Raises ``RefusedError``."""
    if given["do_train"] or (name == "eval" and given["task"] is None):
        return None
    return {"chat": _chat, "api": _api, "export": _export, "eval": _evaluation}[name](given)


def other_commands(given: GivenArguments) -> Iterator[Problem]:
    """What to type instead of `surefoot train`, if the arguments are of another command."""
    found = [name for name in given.values if ARGUMENTS[name].outcome == "command"]
    if given["do_train"] or (not found and (given["do_predict"] or given["do_eval"])):
        return  # or a recipe for `surefoot eval`
    if not found and (given.sets("output_dir") or given["dataset"]):
        message = "is not set, so LLaMA-Factory would train nothing; set do_train: true"
        yield Problem(("do_train",), message)
        return
    name = "chat" if not found else "export" if given["export_dir"] else "eval"
    if name == "eval":
        given = replace(given, values={"task": "mmlu_test", **given.values})
    try:
        yield Problem(
            (found[0],) if found else (),
            f"these are arguments of `llamafactory-cli {name}`; type: {command_of(name, given)}",
        )
    except RefusedError as error:
        yield Problem((error.argument,), str(error))


def _chat(given: GivenArguments) -> Command:
    words = ["chat", str(given["model_name_or_path"])]
    if adapter := _adapter(given):
        words += ["--adapter", adapter]
    system = given["default_system"] or same_template(given["template"] or "")[1]
    words += ["--system", system] if system else []
    if given.sets("enable_thinking") and given["enable_thinking"] is not None:
        words.append("--thinking" if given["enable_thinking"] else "--no-thinking")
    words += ["--max-new-tokens", str(given["max_new_tokens"])]
    if not given["do_sample"] or not given["temperature"]:
        words.append("--greedy")
    else:
        for name in _SAMPLING:
            words += [f"--{name.replace('_', '-')}", f"{given[name]:g}"]
    return Command((*words, *_weights(given)), tuple(_differences(given)))


def _api(given: GivenArguments) -> Command:
    """With the variables of the environment that LLaMA-Factory reads."""
    found = given.environment
    words = ["serve", *_opened(given), "--port", found.get("API_PORT", "8000")]
    words += ["--name", found.get("API_MODEL_NAME", "gpt-3.5-turbo")]
    words += ["--host", found["API_HOST"]] if "API_HOST" in found else []
    words += ["--api-key", found["API_KEY"]] if "API_KEY" in found else []
    notes = list(_differences(given))
    notes.append("a request without a temperature is answered greedily")
    if "API_HOST" not in found:
        notes.append("this machine alone reaches the server; API_HOST=0.0.0.0 opens it to others")
    return Command((*words, *_weights(given)), tuple(notes))


def _export(given: GivenArguments) -> Command:
    if given["export_quantization_bit"]:
        raise RefusedError(
            "export_quantization_bit",
            "GPTQ models are not written: export the model with `surefoot export`, and quantize "
            "the folder with a quantizer such as llm-compressor",
        )
    if not given["export_dir"]:
        raise RefusedError("export_dir", "is missing; name a new folder")
    out = str(given["export_dir"])
    model, *base = _opened(given)
    words = ["export", model, out, *base, "--max-shard-size", f"{given['export_size']}GB"]
    notes = []
    if name := given["export_hub_model_id"]:
        notes.append(f"to upload it afterwards: surefoot push {shlex.join([out, name])}")
    return Command((*words, *_weights(given)), tuple(notes))


def _evaluation(given: GivenArguments) -> Command:
    task, folder = str(given["task"]), given["task_dir"]
    if folder != ARGUMENTS["task_dir"].default:
        message = (
            f"{folder!r}: a local folder of questions is not read; remove it: lm-eval has them"
        )
        raise RefusedError("task_dir", message)
    if task not in _TASKS:
        known = ", ".join(_TASKS)
        message = f"expected one of {known}, got {task!r}; `surefoot eval MODEL --tasks NAME` runs "
        raise RefusedError("task", f"{message}any other task of lm-eval")
    model, *base = _opened(given)
    words = ["eval", model, *base, f"generate.batch_size={given['batch_size']}"]
    words += ["--tasks", _TASKS[task], "--shots", str(given["n_shot"])]
    words += [] if given["template"] in (None, *_TEXT) else ["--prompts", "chat"]
    words += ["--output", f"{given['save_dir']}.jsonl"] if given["save_dir"] else []
    if given["trust_remote_code"]:
        words.append("model.trust_remote_code=true")
    note = f"the questions and prompts are those of lm-eval's {_TASKS[task]}"
    return Command(tuple(words), (note,))


def _opened(given: GivenArguments) -> list[str]:
    """The model, or the adapter and its base."""
    base, adapter = str(given["model_name_or_path"]), _adapter(given)
    return [base] if adapter is None else [adapter, "--base", base]


def _adapter(given: GivenArguments) -> str | None:
    """The adapter, if any. Raises ``RefusedError``: there are several, or no model."""
    if not given["model_name_or_path"]:
        raise RefusedError("model_name_or_path", "is missing; name a model")
    adapters = given["adapter_name_or_path"] or []
    if len(adapters) > 1:
        words = shlex.join([adapters[0], "MERGED", "--base", given["model_name_or_path"]])
        message = f"adapters are merged one by one; begin with: surefoot export {words}"
        raise RefusedError("adapter_name_or_path", message)
    return str(adapters[0]) if adapters else None


def _weights(given: GivenArguments) -> list[str]:
    dtype = [] if given["infer_dtype"] == "auto" else ["--dtype", str(given["infer_dtype"])]
    return [*dtype, *(["--trust-remote-code"] if given["trust_remote_code"] else [])]


def _differences(given: GivenArguments) -> Iterator[str]:
    if given["template"]:
        yield f"template: the one saved with the model is used, not {given['template']} by its name"
    if given["quantization_bit"]:
        yield "quantization_bit: weights are opened as they are stored"


# Arguments in words


def read_command_line(words: Sequence[str]) -> tuple[Document, list[str]]:
    """The values by argument, and Surefoot's own overrides among them, which have a dot before
    ``=``. Raises ``RecipeError``: a value belongs to no argument, or an argument occurs twice."""
    values: dict[str, list[str]] = {}
    overrides: list[str] = []
    key = ""
    for word in words:
        if _KEY.fullmatch(word):
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_")
            if key in values:
                raise RecipeError(f"{_LINE}: --{key} occurs twice; keep one")
            values[key] = [value] if equals else []
        elif _is_override(word):
            overrides.append(word)
        elif not key or (values[key] and not _takes_several(key)):
            raise RecipeError(f"{_LINE}: {word!r} belongs to no argument; write --name value")
        else:
            values[key].append(word)
    data = {key: _value(key, words) for key, words in values.items()}
    origins: dict[Keys, str] = {(key,): f"{_LINE}: --{key}" for key in data}
    return Document(data, _LINE, overrides=origins), overrides


def _is_override(word: str) -> bool:
    """Whether a word sets a field of a recipe: ``optim.adamw.learning_rate=1e-5``."""
    path, equals, _ = word.partition("=")
    return bool(equals) and "." in path and "/" not in path


def _takes_several(key: str) -> bool:
    return key not in ARGUMENTS or ARGUMENTS[key].kind in ("list", "any")


def _value(key: str, words: Sequence[str]) -> object:
    """``--bf16`` alone is true; ``--no_NAME`` is false only as a key of its own."""
    if len(words) != 1:
        return list(words) or True
    word = words[0]
    if word.lstrip().startswith("{"):
        try:
            return json.loads(word)
        except ValueError:
            raise RecipeError(f"{_LINE}: --{key}: not valid JSON: {word}") from None
    return None if word.lower() in ("none", "null") and key != "report_to" else word


def with_arguments(document: Document, overrides: Overrides) -> tuple[Document, Overrides]:
    """``document`` with the overrides of its arguments (``learning_rate=1e-5``), and the others,
    of a recipe's fields."""
    if isinstance(overrides, Mapping):
        theirs = {key: value for key, value in overrides.items() if key in ARGUMENTS}
        others: Overrides = {k: value for k, value in overrides.items() if k not in ARGUMENTS}
    else:
        others = [word for word in overrides if not _sets_argument(word)]
        theirs = dict(_argument_of(word) for word in overrides if _sets_argument(word))
    if not theirs or not isinstance(document.data, Mapping):
        return document, others
    origins: dict[Keys, str] = {(name,): f"{_LINE}: {name}" for name in theirs}
    return (
        replace(
            document,
            data={**document.data, **theirs},
            overrides={**document.overrides, **origins},
        ),
        others,
    )


def _sets_argument(word: str) -> bool:
    key, equals, _ = word.partition("=")
    return bool(equals) and key in ARGUMENTS


def _argument_of(word: str) -> tuple[str, object]:
    key, _, text = word.partition("=")
    if ARGUMENTS[key].kind == "text":
        return key, parse_text(text)
    return key, parse_argument(text, f"{_LINE}: {word}")[0]
