"""What a run does differently from LLaMA-Factory, and what LLaMA-Factory silently gets wrong.

A note is one line that is printed before a run, and when it is. Names in braces are arguments.
Figures and versions are those of 0.9.5 with transformers 5.6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

from ...training.section import TrackerName
from .given import GivenArguments
from .rules.train import eval_strategy
from .templates import masks_line_break, next_roles, same_template, thinks

# A note: the text, or what makes it; and when it holds.
Note = tuple[str | Callable[[GivenArguments], str | None], Callable[[GivenArguments], object]]
_TRACKERS = ("none", *get_args(TrackerName))


def _template(given: GivenArguments) -> str:
    name = given["template"]
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


def _packing(given: GivenArguments) -> str:
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


def _long(given: GivenArguments) -> str:
    if given["stage"] != "pt":
        return f"long examples: {_LONG[given['stage']]}"
    split = "long texts: they are split into pieces of cutoff_len tokens, and none is lost"
    lost = "; there the rest of each is lost, so an epoch has fewer steps"
    return split if _packs(given) else split + lost


def _has_other_reference(given: GivenArguments) -> bool:
    """LLaMA-Factory switches the adapter off, even if it was trained before."""
    is_free = given["stage"] == "dpo" and given["pref_loss"] in ("orpo", "simpo")
    is_compared = given["stage"] in ("dpo", "kto", "ppo") and not is_free and not given["ref_model"]
    return is_compared and _trains_adapter_further(given)


def _trains_adapter_further(given: GivenArguments) -> bool:
    return bool(given["adapter_name_or_path"]) and not given["create_new_adapter"]


def _reference(given: GivenArguments) -> str:
    return (
        f"{given['stage']}: the reference is the model with {given['adapter_name_or_path'][-1]}, "
        "as it is before the first step; there it is the model without that adapter"
    )


def _trackers(given: GivenArguments) -> str | None:
    if "all" in given["report_to"]:
        return "report_to: all is none of them here; name those that you want"
    others = [name for name in given["report_to"] if name not in _TRACKERS]
    return f"report_to: {', '.join(others)} is not written; metrics.jsonl is" if others else None


def _at_the_end(given: GivenArguments) -> str | None:
    names = [name for name in ("do_eval", "do_predict") if given[name]]
    is_logged = names == ["do_eval"] and eval_strategy(given) != "no"
    if not names or is_logged:
        return None
    return f"{', '.join(names)}: run `surefoot eval RUN` after training"


def _first_block(given: GivenArguments) -> str:
    interval = given["badam_switch_interval"]
    return f"BAdam: the first block has {interval} steps, as the others; there {interval - 1}"


def _warms(given: GivenArguments) -> bool:
    return bool(given["warmup_steps"] or given["warmup_ratio"])


def _has_layer_badam(given: GivenArguments) -> bool:
    return bool(given["use_badam"]) and given["badam_mode"] == "layer"


def _always(_given: GivenArguments) -> bool:
    return True


def _answers(given: GivenArguments) -> bool:
    return bool(given["stage"] != "pt")


DIFFERENCES: tuple[Note, ...] = (
    (_template, lambda a: a["template"] is not None and _answers(a)),
    (
        "warmup: it is one step ahead, as the first step there has a learning rate of 0",
        lambda a: _warms(a) and a["lr_scheduler_type"] != "constant",
    ),
    (_order, _always),
    (_packing, _packs),
    (_long, lambda a: a.program.truncates),
    (
        "overwrite_output_dir: a run in output_dir is resumed; checkpoint.resume=none does not",
        lambda a: a["overwrite_output_dir"],
    ),
    (_trackers, _always),
    (
        "swanlab_api_key: no recipe has a key; set SWANLAB_API_KEY, or use `swanlab login`",
        lambda a: a["use_swanlab"] and a["swanlab_api_key"],
    ),
    (
        "lora_rank, lora_alpha, lora_target: those of the adapter count, as there",
        lambda a: _trains_adapter_further(a) and a.sets("lora_rank", "lora_alpha", "lora_target"),
    ),
    (
        "fp16 with BAdam: weights are float32 in memory, and computed in float16",
        lambda a: a["use_badam"] and a["fp16"],
    ),
    (
        "ppo: responses are sampled at the temperature, without top_p and top_k, as they train",
        lambda a: a["stage"] == "ppo",
    ),
    (_at_the_end, lambda a: a["do_train"] and a["stage"] != "sft"),
    (
        "compute_accuracy: eval_token_accuracy is the share of all tokens, and not a mean over "
        "rows",
        lambda a: a["compute_accuracy"] and a["do_train"],
    ),
    (_reference, _has_other_reference),
    (
        "eval_loss is a mean over tokens; there it is one over batches, whatever their tokens",
        lambda a: (a["do_eval"] or eval_strategy(a) != "no") and a["stage"] in ("pt", "sft"),
    ),
    (
        "kto: the baseline is a mean over the global batch, of prompts with the response of the "
        "example before; there over a micro-batch, with the response of the row before in the file",
        lambda a: a["stage"] == "kto",
    ),
    (
        "rm: a new head begins at 0, so the loss begins at 0.693; there at random numbers",
        lambda a: a["stage"] == "rm",
    ),
    (
        _first_block,
        lambda a: (
            _has_layer_badam(a)
            and a["badam_switch_interval"] >= 2
            and a["badam_switch_mode"] != "fixed"
        ),
    ),
    (
        "asft: its means are over the tokens of a step; there over those of a micro-batch",
        lambda a: a["use_asft_loss"] and not a["use_dft_loss"] and not a["use_eaft_loss"],
    ),
)
MISTAKES: tuple[Note, ...] = (
    (
        "BLEU-4 compares responses with labels that end in the template's line break",
        lambda a: a["predict_with_generate"] and masks_line_break(a["template"] or ""),
    ),
    (
        "weight_decay {weight_decay:g} is ignored with BAdam: 0.01 is applied, to norms and "
        "biases, too",
        lambda a: _has_layer_badam(a) and a["weight_decay"] != 0.01,
    ),
    (
        "a resumed BAdam run starts at block 0 with the moments of another block",
        lambda a: a["use_badam"],
    ),
    (
        "badam_switch_interval: -1 switches at every step",
        lambda a: a["use_badam"] and a["badam_switch_interval"] == -1,
    ),
    (
        "badam_switch_interval is ignored in ratio mode, where it is 100",
        lambda a: a["use_badam"] and not _has_layer_badam(a) and a.sets("badam_switch_interval"),
    ),
    (
        "pref_loss: {pref_loss} computes sigmoid, with trl 0.24",
        lambda a: a["stage"] == "dpo" and a["pref_loss"] in ("hinge", "ipo"),
    ),
    (
        "lr_scheduler_type: constant has no warmup; constant_with_warmup has (so it is here)",
        lambda a: a["lr_scheduler_type"] == "constant" and _warms(a),
    ),
    (
        "ld_alpha weighs the tokens of the policy and not those of the reference, so the rewards "
        "of an untrained model are not 0",
        lambda a: a["stage"] == "dpo" and a["ld_alpha"] is not None,
    ),
    ("shift_attn is ignored with transformers 4.48 and later", lambda a: a["shift_attn"]),
    (
        "packing lets examples of one row attend to each other",
        lambda a: a["stage"] == "sft" and a["packing"] and not a["neat_packing"],
    ),
    (
        "pure_bf16 rounds to the nearest weight, so updates below 0.2 % of a weight are lost",
        lambda a: a["pure_bf16"] and not a["use_badam"],
    ),
    (
        "Muon orthogonalizes the two factors of LoRA, too",
        lambda a: a["use_muon"] and a["finetuning_type"] == "lora",
    ),
    (
        "tokenized_path, once written, hides changes of dataset, template and cutoff_len",
        lambda a: a["tokenized_path"],
    ),
    (
        "responses without thoughts are trained to begin with empty ones; enable_thinking: false "
        "puts them into the prompt",
        lambda a: thinks(a["template"]) and a["enable_thinking"] and _answers(a),
    ),
    (
        "val_size with interleave_over evaluates on rows that are trained on, as rows are repeated "
        "before some are held out",
        lambda a: (
            a["mix_strategy"] == "interleave_over" and len(a["dataset"] or ()) > 1 and a["val_size"]
        ),
    ),
    (
        "thoughts of earlier turns are trained on with preserve_thinking: false, too, but chat "
        "removes them; data.preserve_thinking: false trains on the prompts of chat",
        lambda a: (
            thinks(a["template"])
            and _answers(a)
            and not a["mask_history"]
            and not a["preserve_thinking"]
        ),
    ),
    (
        "the loss and its gradient are divided by a token a row too many: the first one, which "
        "nothing predicts",
        lambda a: a["stage"] == "pt" or (a["stage"] == "sft" and a["train_on_prompt"]),
    ),
    (
        "label_smoothing_factor: the loss and its gradient are {gradient_accumulation_steps} times "
        "too large",
        lambda a: a["label_smoothing_factor"] and a["gradient_accumulation_steps"] > 1,
    ),
)


def said(notes: tuple[Note, ...], given: GivenArguments) -> Iterator[str]:
    """The lines that hold for these arguments."""
    for text, holds in notes:
        if holds(given):
            line = text(given) if callable(text) else text.format_map(given)
            yield from () if line is None else (line,)
