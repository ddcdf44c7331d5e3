"""What a run does differently from LLaMA-Factory, and what LLaMA-Factory silently gets wrong.

Each function is one line that is printed before a run, or None. Figures and versions are those of
0.9.5 with transformers 5.6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

from ...training.section import TrackerName
from .given import GivenArguments
from .rules.train import eval_strategy
from .templates import masks_line_break, next_roles, same_template, thinks

Note = Callable[[GivenArguments], str | None]


def _template(given: GivenArguments) -> str | None:
    name = given["template"]
    if name is None or given["stage"] == "pt":
        return None
    if same_template(name)[0] == "auto":
        return f"template: {name} is the model's own chat template here, which it is served with"
    parts = []
    if same_template(name)[1] is not None and not given.sets("default_system"):
        parts.append("its default system message is in data.default_system")
    if masks_line_break(name):
        parts.append("the line break after a response is not trained on")
    if ends := next_roles(name):
        parts.append(f"a turn ends in {' or '.join(ends)}, as the released model's; there in eos")
    parts.append("docs/templates.md lists others, if any")
    return f"template: {name}: {'; '.join(parts)}"


def _warmup(given: GivenArguments) -> str | None:
    if not (given["warmup_steps"] or given["warmup_ratio"]):
        return None
    if given["lr_scheduler_type"] == "constant":
        return None
    return "warmup: it is one step ahead, as the first step there has a learning rate of 0"


def _order(given: GivenArguments) -> str | None:
    held = "the rows that val_size holds out are drawn differently" if given["val_size"] else None
    if given["disable_shuffling"] or given["train_sampling_strategy"] == "sequential":
        return held
    said = "the order of examples is another permutation of the same seed"
    return f"{said}, and {held}" if held else said


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


def _packs(given: GivenArguments) -> bool:
    """Whether rows are packed there: of sft if it is set, of pt unless it is false."""
    if given["stage"] == "pt":
        return given["packing"] is None or bool(given["packing"])
    return given["stage"] == "sft" and bool(given["packing"] or given["neat_packing"])


_LONG = {
    "sft": "later turns, then the end of a response are truncated, never the question",
    "dpo": "the end of a response is truncated, never the prompt",
    "kto": "the end of a response is truncated, never the prompt",
    "rm": "a pair with a response that does not fit is dropped, as its reward is read at its end",
    "ppo": "a prompt of cutoff_len tokens or more is dropped, not truncated",
}


def _long(given: GivenArguments) -> str | None:
    if given["stage"] != "pt":
        return f"long examples: {_LONG[given['stage']]}"
    split = "long texts: they are split into pieces of cutoff_len tokens, and none is lost"
    if _packs(given):
        return split
    return f"{split}; there the rest of each is lost, so an epoch has fewer steps"


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


def _eval_loss(given: GivenArguments) -> str | None:
    evaluates = given["do_eval"] or eval_strategy(given) != "no"
    if not evaluates or given["stage"] not in ("pt", "sft"):
        return None
    return "eval_loss is a mean over tokens; there it is one over batches, whatever their tokens"


def _mismatched(given: GivenArguments) -> str | None:
    if given["stage"] != "kto":
        return None
    return (
        "kto: the baseline is a mean over the global batch, of prompts with the response of the "
        "example before; there over a micro-batch, with the response of the row before in the file"
    )


def _reward_head(given: GivenArguments) -> str | None:
    if given["stage"] != "rm":
        return None
    return "rm: a new head begins at 0, so the loss begins at 0.693; there at random numbers"


def _anchored(given: GivenArguments) -> str | None:
    if not given["use_asft_loss"] or given["use_dft_loss"] or given["use_eaft_loss"]:
        return None
    return "asft: its means are over the tokens of a step; there over those of a micro-batch"


def _first_block(given: GivenArguments) -> str | None:
    interval = given["badam_switch_interval"]
    is_layer = given["use_badam"] and given["badam_mode"] == "layer"
    if not is_layer or interval < 2 or given["badam_switch_mode"] == "fixed":
        return None
    return f"BAdam: the first block has {interval} steps, as the others; there {interval - 1}"


def _overwrite(given: GivenArguments) -> str | None:
    if not given["overwrite_output_dir"]:
        return None
    return "overwrite_output_dir: a run in output_dir is resumed; checkpoint.resume=none does not"


def _trackers(given: GivenArguments) -> str | None:
    if "all" in given["report_to"]:
        return "report_to: all is none of them here; name those that you want"
    others = [n for n in given["report_to"] if n not in ("none", *get_args(TrackerName))]
    return f"report_to: {', '.join(others)} is not written; metrics.jsonl is" if others else None


def _swanlab(given: GivenArguments) -> str | None:
    if given["use_swanlab"] and given["swanlab_api_key"]:
        return "swanlab_api_key: no recipe has a key; set SWANLAB_API_KEY, or use `swanlab login`"
    return None


def _new_adapter(given: GivenArguments) -> str | None:
    goes_on = given["adapter_name_or_path"] and not given["create_new_adapter"]
    if goes_on and given.sets("lora_rank", "lora_alpha", "lora_target"):
        return "lora_rank, lora_alpha, lora_target: those of the adapter count, as there"
    return None


def _half_badam(given: GivenArguments) -> str | None:
    if given["use_badam"] and given["fp16"]:
        return "fp16 with BAdam: weights are float32 in memory, and computed in float16"
    return None


def _sampling(given: GivenArguments) -> str | None:
    if given["stage"] != "ppo":
        return None
    return "ppo: responses are sampled at the temperature, without top_p and top_k, as they train"


def _at_the_end(given: GivenArguments) -> str | None:
    wants = [name for name in ("do_eval", "do_predict") if given[name]]
    is_logged = wants == ["do_eval"] and eval_strategy(given) != "no"
    if not given["do_train"] or not wants or is_logged or given["stage"] == "sft":
        return None
    return f"{', '.join(wants)}: run `surefoot eval RUN` after training"


def _accuracy(given: GivenArguments) -> str | None:
    if not given["compute_accuracy"] or not given["do_train"]:
        return None
    return (
        "compute_accuracy: eval_token_accuracy is the share of all tokens, and not a mean over rows"
    )


DIFFERENCES: tuple[Note, ...] = (
    *(_template, _warmup, _order, _packing, _long, _overwrite, _trackers, _swanlab),
    *(_new_adapter, _half_badam, _sampling, _at_the_end),
    *(_accuracy, _reference, _eval_loss, _mismatched, _reward_head, _first_block, _anchored),
)


def _badam_decay(given: GivenArguments) -> str | None:
    if given["use_badam"] and given["badam_mode"] == "layer" and given["weight_decay"] != 0.01:
        return (
            f"weight_decay {given['weight_decay']:g} is ignored with BAdam: 0.01 is applied, "
            "to norms and biases, too"
        )
    return None


def _badam_resume(given: GivenArguments) -> str | None:
    if not given["use_badam"]:
        return None
    return "a resumed BAdam run starts at block 0 with the moments of another block"


def _badam_interval(given: GivenArguments) -> str | None:
    if given["use_badam"] and given["badam_switch_interval"] == -1:
        return "badam_switch_interval: -1 switches at every step"
    return None


def _badam_ratio(given: GivenArguments) -> str | None:
    if (
        given["use_badam"]
        and given["badam_mode"] == "ratio"
        and given.sets("badam_switch_interval")
    ):
        return "badam_switch_interval is ignored in ratio mode, where it is 100"
    return None


def _preference_loss(given: GivenArguments) -> str | None:
    if given["stage"] == "dpo" and given["pref_loss"] in ("hinge", "ipo"):
        return f"pref_loss: {given['pref_loss']} computes sigmoid, with trl 0.24"
    return None


def _long_responses(given: GivenArguments) -> str | None:
    if given["stage"] == "dpo" and given["ld_alpha"] is not None:
        return (
            "ld_alpha weighs the tokens of the policy and not those of the reference, so the "
            "rewards of an untrained model are not 0"
        )
    return None


def _constant(given: GivenArguments) -> str | None:
    warms = given["warmup_steps"] or given["warmup_ratio"]
    if given["lr_scheduler_type"] == "constant" and warms:
        return "lr_scheduler_type: constant has no warmup; constant_with_warmup has (so it is here)"
    return None


def _shifted(given: GivenArguments) -> str | None:
    return "shift_attn is ignored with transformers 4.48 and later" if given["shift_attn"] else None


def _mixed_documents(given: GivenArguments) -> str | None:
    if given["stage"] == "sft" and given["packing"] and not given["neat_packing"]:
        return "packing lets examples of one row attend to each other"
    return None


def _rounding(given: GivenArguments) -> str | None:
    if not given["pure_bf16"] or given["use_badam"]:
        return None
    return "pure_bf16 rounds to the nearest weight, so updates below 0.2 % of a weight are lost"


def _muon(given: GivenArguments) -> str | None:
    if given["use_muon"] and given["finetuning_type"] == "lora":
        return "Muon orthogonalizes the two factors of LoRA, too"
    return None


def _tokenized(given: GivenArguments) -> str | None:
    if given["tokenized_path"]:
        return "tokenized_path, once written, hides changes of dataset, template and cutoff_len"
    return None


def _repeated(given: GivenArguments) -> str | None:
    repeats = given["mix_strategy"] == "interleave_over" and len(given["dataset"] or ()) > 1
    if not repeats or not given["val_size"]:
        return None
    return (
        "val_size with interleave_over evaluates on rows that are trained on, as rows are repeated "
        "before some are held out"
    )


def _thoughts(given: GivenArguments) -> str | None:
    if thinks(given["template"]) and given["enable_thinking"] and given["stage"] != "pt":
        return (
            "responses without thoughts are trained to begin with empty ones; enable_thinking: "
            "false puts them into the prompt"
        )
    return None


def _line_breaks(given: GivenArguments) -> str | None:
    if not given["predict_with_generate"] or not masks_line_break(given["template"] or ""):
        return None
    return "BLEU-4 compares responses with labels that end in the template's line break"


def _earlier_thoughts(given: GivenArguments) -> str | None:
    if not thinks(given["template"]) or given["stage"] == "pt" or given["mask_history"]:
        return None
    if given["preserve_thinking"]:
        return None
    return (
        "thoughts of earlier turns are trained on with preserve_thinking: false, too, but chat "
        "removes them; data.preserve_thinking: false trains on the prompts of chat"
    )


def _first_tokens(given: GivenArguments) -> str | None:
    if given["stage"] != "pt" and not (given["stage"] == "sft" and given["train_on_prompt"]):
        return None
    return (
        "the loss and its gradient are divided by a token a row too many: the first one, which "
        "nothing predicts"
    )


def _smoothed(given: GivenArguments) -> str | None:
    steps = given["gradient_accumulation_steps"]
    if not given["label_smoothing_factor"] or steps < 2:
        return None
    return f"label_smoothing_factor: the loss and its gradient are {steps} times too large"


MISTAKES: tuple[Note, ...] = (
    _line_breaks,
    *(_badam_decay, _badam_resume, _badam_interval, _badam_ratio, _preference_loss, _constant),
    *(_long_responses, _shifted, _mixed_documents, _rounding, _muon, _tokenized, _thoughts),
    *(_repeated, _earlier_thoughts, _first_tokens, _smoothed),
)


def said(notes: tuple[Note, ...], given: GivenArguments) -> Iterator[str]:
    """The lines that hold for these arguments."""
    for note in notes:
        if (line := note(given)) is not None:
            yield line
