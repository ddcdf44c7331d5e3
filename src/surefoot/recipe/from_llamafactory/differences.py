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
from .templates import same_template, thinks

Note = Callable[[GivenArguments], str | None]


def _template(given: GivenArguments) -> str | None:
    name = given["template"]
    if name is None or given["stage"] == "pt":
        return None
    if same_template(name)[0] == "auto":
        return f"template: {name} is the model's own chat template here, which it is served with"
    masked = "the line break after a response is not trained on"
    if same_template(name)[1] is None or given.sets("default_system"):
        return f"template: {name}: {masked}; docs/templates.md lists what else differs"
    return f"template: {name} has its default system message in data.default_system; {masked}"


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
    if given["packing"] or given["neat_packing"] or (given["stage"] == "pt"):
        return (
            "packing: a batch has as many examples here as it has packed rows there, so it has "
            "fewer tokens, and an epoch has more steps; raise train.global_batch_size if you like"
        )
    return None


def _long(given: GivenArguments) -> str | None:
    if given["stage"] == "pt":
        return "long texts: they are split into pieces of cutoff_len tokens, and none is lost"
    return (
        "long examples: later turns, then the end of a response are truncated, never the question"
    )


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
    _accuracy,
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
    if given["packing"] and not given["neat_packing"] and given["stage"] != "pt":
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
    if not given["predict_with_generate"] or same_template(given["template"] or "")[0] == "auto":
        return None
    return "BLEU-4 compares responses with labels that end in the template's line break, if any"


def _earlier_thoughts(given: GivenArguments) -> str | None:
    if not thinks(given["template"]) or given["stage"] == "pt" or given["mask_history"]:
        return None
    if given["preserve_thinking"]:
        return None
    return (
        "thoughts of earlier turns are trained on with preserve_thinking: false, too, but chat "
        "removes them; data.preserve_thinking: false trains on the prompts of chat"
    )


MISTAKES: tuple[Note, ...] = (
    _line_breaks,
    *(_badam_decay, _badam_resume, _badam_interval, _badam_ratio, _preference_loss, _constant),
    *(_long_responses, _shifted, _mixed_documents, _rounding, _muon, _tokenized, _thoughts),
    *(_repeated, _earlier_thoughts),
)


def said(notes: tuple[Note, ...], given: GivenArguments) -> Iterator[str]:
    """The lines that hold for these arguments."""
    for note in notes:
        if (line := note(given)) is not None:
            yield line
