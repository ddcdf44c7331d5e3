"""LLaMA-Factory's command lines: arguments in words, and what to type for its other commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ...errors import RecipeError
from ...recipe.overrides import Overrides, read_arguments
from ...recipe.yaml import Document, parse_argument, parse_text
from ...schema import Keys, Problem
from .arguments import ARGUMENTS, RefusedError
from .rules import GivenArguments
from .templates import same_template

_LINE = "command line"

_TEXT = ("default", "fewshot", "empty")  # templates without turns
_TASKS = {  # of lm-eval, by LLaMA-Factory's names; it has these splits only
    "mmlu_test": "mmlu",
    "ceval_validation": "ceval-valid",
    "cmmlu_test": "cmmlu",
}
_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty")


def other_commands(arguments: GivenArguments) -> Iterator[Problem]:
    """What to type instead of `surefoot train`, if the arguments are of another command."""
    names = [name for name in arguments.values if ARGUMENTS[name].outcome == "command"]
    if arguments["do_train"] or (not names and (arguments["do_predict"] or arguments["do_eval"])):
        return  # or a recipe for `surefoot eval`
    if not names and (arguments.sets("output_dir") or arguments["dataset"]):
        message = "is not set, so LLaMA-Factory would train nothing; set do_train: true"
        yield Problem(("do_train",), message)
        return
    command = "chat" if not names else "export" if arguments["export_dir"] else "eval"
    try:
        line = shlex.join(["surefoot", *_COMMANDS[command](arguments)])
    except RefusedError as error:
        yield Problem((error.argument,), str(error))
        return
    message = f"these are arguments of `llamafactory-cli {command}`; type: {line}"
    yield Problem(tuple(names[:1]), message)


def _chat(arguments: GivenArguments) -> list[str]:
    words = ["chat", str(arguments["model_name_or_path"])]
    if adapter := _adapter(arguments):
        words += ["--adapter", adapter]
    system = arguments["default_system"] or same_template(arguments["template"] or "")[1]
    words += ["--system", system] if system else []
    if arguments.sets("enable_thinking") and arguments["enable_thinking"] is not None:
        words.append("--thinking" if arguments["enable_thinking"] else "--no-thinking")
    words += ["--max-new-tokens", str(arguments["max_new_tokens"])]
    if not arguments["do_sample"] or not arguments["temperature"]:
        words.append("--greedy")
    else:
        for name in _SAMPLING:
            words += [f"--{name.replace('_', '-')}", f"{arguments[name]:g}"]
    return [*words, *_weights(arguments)]


def _export(arguments: GivenArguments) -> list[str]:
    if arguments["export_quantization_bit"]:
        raise RefusedError(
            "export_quantization_bit",
            "GPTQ models are not written: export the model with `surefoot export`, and quantize "
            "the folder with a quantizer such as llm-compressor",
        )
    if not arguments["export_dir"]:
        raise RefusedError("export_dir", "is missing; name a new folder")
    model, *base = _model_and_base(arguments)
    size = f"{arguments['export_size']}GB"
    words = ["export", model, str(arguments["export_dir"]), *base, "--max-shard-size", size]
    return [*words, *_weights(arguments)]


def _evaluation(arguments: GivenArguments) -> list[str]:
    """Their questions are lm-eval's, and so are the prompts."""
    task, folder = arguments["task"] or "mmlu_test", arguments["task_dir"]
    if folder != ARGUMENTS["task_dir"].default:
        message = (
            f"{folder!r}: a local folder of questions is not read; remove it: lm-eval has them"
        )
        raise RefusedError("task_dir", message)
    if task not in _TASKS:
        message = f"expected one of {', '.join(_TASKS)}, got {task!r}; `surefoot eval MODEL"
        raise RefusedError("task", f"{message} --tasks NAME` runs any other task of lm-eval")
    model, *base = _model_and_base(arguments)
    words = ["eval", model, *base, f"generate.batch_size={arguments['batch_size']}"]
    words += ["--tasks", _TASKS[task], "--shots", str(arguments["n_shot"])]
    words += [] if arguments["template"] in (None, *_TEXT) else ["--prompts", "chat"]
    words += ["--output", f"{arguments['save_dir']}.jsonl"] if arguments["save_dir"] else []
    return [*words, *(["model.trust_remote_code=true"] if arguments["trust_remote_code"] else [])]


_COMMANDS = {"chat": _chat, "export": _export, "eval": _evaluation}


def _model_and_base(arguments: GivenArguments) -> list[str]:
    """The model; or the adapter, and the base under it as an option."""
    base, adapter = str(arguments["model_name_or_path"]), _adapter(arguments)
    return [base] if adapter is None else [adapter, "--base", base]


def _adapter(arguments: GivenArguments) -> str | None:
    """The adapter, if any. Raises ``RefusedError``: there are several, or no model."""
    if not arguments["model_name_or_path"]:
        raise RefusedError("model_name_or_path", "is missing; name a model")
    adapters = arguments["adapter_name_or_path"] or []
    if len(adapters) > 1:
        words = shlex.join([adapters[0], "MERGED", "--base", arguments["model_name_or_path"]])
        message = f"adapters are merged one by one; begin with: surefoot export {words}"
        raise RefusedError("adapter_name_or_path", message)
    return str(adapters[0]) if adapters else None


def _weights(arguments: GivenArguments) -> list[str]:
    dtype = [] if arguments["infer_dtype"] == "auto" else ["--dtype", str(arguments["infer_dtype"])]
    return [*dtype, *(["--trust-remote-code"] if arguments["trust_remote_code"] else [])]


# Arguments in words


def read_command_line(words: Sequence[str]) -> tuple[Document, list[str]]:
    """The values by argument, and Surefoot's own overrides among them, which have a dot before
    ``=``. Raises ``RecipeError``: a value belongs to no argument, or an argument occurs twice."""
    values, overrides = read_arguments(words, _takes_several)
    data = {key: _value(key, words) for key, words in values.items()}
    origins: dict[Keys, str] = {(key,): f"{_LINE}: --{key}" for key in data}
    return Document(data, _LINE, overrides=origins), overrides


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
    # `none` is a value of report_to.
    return None if word.lower() in ("none", "null") and key != "report_to" else word


def with_arguments(document: Document, overrides: Overrides) -> tuple[Document, Overrides]:
    """``document`` with the overrides of its arguments (``learning_rate=1e-5``), and the others,
    of a recipe's fields."""
    arguments: dict[str, object] = {}
    others: Overrides
    if isinstance(overrides, Mapping):
        arguments = {key: value for key, value in overrides.items() if key in ARGUMENTS}
        others = {key: value for key, value in overrides.items() if key not in ARGUMENTS}
    else:
        others = words = []
        for word in overrides:
            key, equals, text = word.partition("=")
            if not equals or key not in ARGUMENTS:
                words.append(word)
            elif ARGUMENTS[key].kind == "text":
                arguments[key] = parse_text(text)
            else:
                arguments[key] = parse_argument(text, f"{_LINE}: {word}")
    if not arguments or not isinstance(document.data, Mapping):
        return document, others
    data = {**document.data, **arguments}
    origins: dict[Keys, str] = {(name,): f"{_LINE}: {name}" for name in arguments}
    return replace(document, data=data, overrides={**document.overrides, **origins}), others
