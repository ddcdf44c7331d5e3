"""What a run does differently from LLaMA-Factory, and what LLaMA-Factory silently gets wrong.

Most notes are rows of ``notes.yaml``; each function here is one that depends on more than values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

from ruamel.yaml import YAML

from ...training.section import TrackerName
from .given import GivenArguments
from .rules.train import eval_strategy
from .templates import masks_line_break, next_roles, same_template, thinks

Note = Callable[[GivenArguments], str | None]
_NOTES = Path(__file__).with_name("notes.yaml")


def _template(given: GivenArguments) -> str | None:
    name = given["template"]
    if name is None or given["stage"] == "pt":
        return None
    template, system = same_template(name)
    if template == "auto":
        return f"template: {name} is the model's own chat template here, which it is served with"
    parts = []
    if system is not None and not given.sets("default_system"):
        parts.append("its default system message is in data.default_system")
    if masks_line_break(name):
        parts.append("the line break after a response is not trained on")
    if ends := next_roles(name):
        parts.append(f"a turn ends in {' or '.join(ends)}, as the released model's; there in eos")
    parts.append("docs/templates.md lists others, if any")
    return f"template: {name}: {'; '.join(parts)}"


def _order(given: GivenArguments) -> str | None:
    held = "the rows that val_size holds out are drawn differently" if given["val_size"] else None
    if given["disable_shuffling"] or given["train_sampling_strategy"] == "sequential":
        return held
    order = "the order of examples is another permutation of the same seed"
    return f"{order}, and {held}" if held else order


def _packs(given: GivenArguments) -> bool:
    """Whether rows are packed there: of sft if it is set, of pt unless it is false."""
    if given["stage"] == "pt":
        return given["packing"] is None or bool(given["packing"])
    return given["stage"] == "sft" and bool(given["packing"] or given["neat_packing"])


def _packing(given: GivenArguments) -> str | None:
    if not _packs(given):
        return None
    here, there = "examples", "packed rows"
    if given["stage"] == "pt":
        here, there = "pieces of texts", "blocks of joined texts"
    return (
        f"packing: a batch has as many {here} here as it has {there} there, so it has fewer "
        "tokens, and an epoch has more steps; raise train.global_batch_size if you like"
    )


_LONG = {
    "sft": "later turns, then the end of a response are truncated, never the question",
    "dpo": "the end of a response is truncated, never the prompt",
    "kto": "the end of a response is truncated, never the prompt",
    "rm": "a pair with a response that does not fit is dropped, as its reward is read at its end",
    "ppo": "a prompt of cutoff_len tokens or more is dropped, not truncated",
}


def _long(given: GivenArguments) -> str | None:
    if not given.program.truncates:
        return None
    if given["stage"] != "pt":
        return f"long examples: {_LONG[given['stage']]}"
    split = "long texts: they are split into pieces of cutoff_len tokens, and none is lost"
    lost = "; there the rest of each is lost, so an epoch has fewer steps"
    return split if _packs(given) else split + lost


def _trackers(given: GivenArguments) -> str | None:
    if "all" in given["report_to"]:
        return "report_to: all is none of them here; name those that you want"
    others = [n for n in given["report_to"] if n not in ("none", *get_args(TrackerName))]
    return f"report_to: {', '.join(others)} is not written; metrics.jsonl is" if others else None


def _at_the_end(given: GivenArguments) -> str | None:
    names = [name for name in ("do_eval", "do_predict") if given[name]]
    is_logged = names == ["do_eval"] and eval_strategy(given) != "no"
    if not given["do_train"] or not names or is_logged or given["stage"] == "sft":
        return None
    return f"{', '.join(names)}: run `surefoot eval RUN` after training"


def _reference(given: GivenArguments) -> str | None:
    """LLaMA-Factory switches the adapter off, even if it was trained before."""
    is_free = given["stage"] == "dpo" and given["pref_loss"] in ("orpo", "simpo")
    if given["stage"] not in ("dpo", "kto", "ppo") or is_free or given["ref_model"]:
        return None
    if not given["adapter_name_or_path"] or given["create_new_adapter"]:
        return None
    return (
        f"{given['stage']}: the reference is the model with {given['adapter_name_or_path'][-1]}, "
        "as it is before the first step; there it is the model without that adapter"
    )


def _first_block(given: GivenArguments) -> str | None:
    interval = given["badam_switch_interval"]
    is_layer = given["use_badam"] and given["badam_mode"] == "layer"
    if not is_layer or interval < 2 or given["badam_switch_mode"] == "fixed":
        return None
    return f"BAdam: the first block has {interval} steps, as the others; there {interval - 1}"


def _line_breaks(given: GivenArguments) -> str | None:
    if not given["predict_with_generate"] or not masks_line_break(given["template"] or ""):
        return None
    return "BLEU-4 compares responses with labels that end in the template's line break"


def _repeated(given: GivenArguments) -> str | None:
    repeats = given["mix_strategy"] == "interleave_over" and len(given["dataset"] or ()) > 1
    if not repeats or not given["val_size"]:
        return None
    return (
        "val_size with interleave_over evaluates on rows that are trained on, as rows are repeated "
        "before some are held out"
    )


def _thoughts(given: GivenArguments) -> str | None:
    if not thinks(given["template"]) or given["stage"] == "pt" or not given["enable_thinking"]:
        return None
    return (
        "responses without thoughts are trained to begin with empty ones; enable_thinking: false "
        "puts them into the prompt"
    )


def _earlier_thoughts(given: GivenArguments) -> str | None:
    if not thinks(given["template"]) or given["stage"] == "pt":
        return None
    if given["mask_history"] or given["preserve_thinking"]:
        return None
    return (
        "thoughts of earlier turns are trained on with preserve_thinking: false, too, but chat "
        "removes them; data.preserve_thinking: false trains on the prompts of chat"
    )


_FUNCTIONS: dict[str, tuple[Note, ...]] = {
    "differs": (
        *(_template, _order, _packing, _long, _trackers, _at_the_end, _reference, _first_block),
    ),
    "mistakes": (_line_breaks, _repeated, _thoughts, _earlier_thoughts),
}


@cache
def _rows() -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = YAML(typ="safe").load(_NOTES)
    return rows


def notes(kind: str, given: GivenArguments) -> Iterator[str]:
    """The lines that hold for these arguments, of what ``differs``, or of the ``mistakes``."""
    for note in _FUNCTIONS[kind]:
        if (line := note(given)) is not None:
            yield line
    for text, condition in _rows()[kind].items():
        if _holds(given, condition):
            yield text.format_map(given)


def _holds(given: GivenArguments, condition: Any) -> bool:
    if isinstance(condition, list):
        return any(_holds(given, one) for one in condition)
    return all(_fits(given, name, wanted) for name, wanted in condition.items())


def _fits(given: GivenArguments, name: str, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return given.sets(name) if "set" in wanted else not _fits(given, name, wanted["not"])
    if isinstance(wanted, bool):
        return bool(given[name]) == wanted
    return given[name] in (wanted if isinstance(wanted, list) else [wanted])
