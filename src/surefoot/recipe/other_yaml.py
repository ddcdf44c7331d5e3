"""YAML files that are no recipes: whose they are, and the settings that their keys have here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..schema import Problem
from .document import Document

# At least one of these is in every file of MindSpore Transformers that runs anything.
MINDFORMERS = (
    *("run_mode", "runner_config", "runner_wrapper", "parallel_config", "train_dataset"),
    *("load_ckpt_format", "auto_trans_ckpt", "pretrained_model_dir", "use_parallel"),
)
LLAMAFACTORY = {  # the settings of its keys
    "model_name_or_path": "model.path",
    "adapter_name_or_path": "model.adapter; of several only the last is, the others are "
    "model.frozen_adapters",
    "trust_remote_code": "model.trust_remote_code",
    "quantization_bit": "model.quantization_bit",
    "flash_attn": "model.attention",
    "rope_scaling": "model.rope_scaling; it needs model.max_positions",
    "neftune_noise_alpha": "model.neftune_noise_alpha",
    "finetuning_type": "method",
    "lora_rank": "method.lora.rank",
    "lora_alpha": "method.lora.alpha",
    "lora_dropout": "method.lora.dropout",
    "lora_target": "method.lora.targets",
    "additional_target": "method.lora.modules_to_save",
    "use_rslora": "method.lora.rslora",
    "use_dora": "method.lora.dora",
    "pissa_init": "method.lora.init: pissa",
    "pissa_iter": "method.lora.init_iterations; -1 is 0 there",
    "loraplus_lr_ratio": "optim.adamw.learning_rates: {lora_B: the ratio}",
    "freeze_trainable_layers": "method.freeze.num_layers",
    "freeze_trainable_modules": "method.freeze.modules",
    "freeze_extra_modules": "method.freeze.extra_modules",
    "use_llama_pro": "method.llama_pro; it inserts num_new_layers into model.path itself",
    "shift_attn": "model.shifted_attention_group; the tokens of a group",
    "moe_aux_loss_coef": "model.router_aux_loss_coef",
    "add_special_tokens": "model.new_special_tokens",
    "dataset": "data.datasets",
    "dataset_dir": "data.dataset_dir",
    "eval_dataset": "data.eval_datasets",
    "template": "data.template",
    "cutoff_len": "data.cutoff_len",
    "max_samples": "data.max_samples",
    "val_size": "data.val_size",
    "packing": "data.packing",
    "streaming": "data.streaming",
    "mask_history": "data.mask_history",
    "train_on_prompt": "data.train_on_prompt",
    "output_dir": "train.output_dir",
    "num_train_epochs": "train.num_epochs",
    "max_steps": "train.max_steps",
    "per_device_train_batch_size": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size; micro-batch x accumulation x ranks",
    "max_grad_norm": "train.max_grad_norm",
    "logging_steps": "train.log_steps",
    "eval_steps": "train.eval_steps",
    "report_to": "train.report_to",
    "seed": "train.seed",
    "bf16": "train.precision: bf16",
    "fp16": "train.precision: fp16",
    "save_steps": "checkpoint.save_steps",
    "save_total_limit": "checkpoint.keep",
    "resume_from_checkpoint": "checkpoint.resume",
    "learning_rate": "optim.adamw.learning_rate",
    "lr_scheduler_type": "optim.adamw.schedule",
    "warmup_ratio": "optim.adamw.warmup_ratio",
    "warmup_steps": "optim.adamw.warmup_steps",
    "weight_decay": "optim.adamw.weight_decay",
    "deepspeed": "parallel.dp_shard; FSDP shards the model",
    "pref_beta": "stage.dpo.beta",
    "pref_loss": "stage.dpo.loss_type",
    "pref_ftx": "stage.dpo.sft_weight",
    "dpo_label_smoothing": "stage.dpo.label_smoothing",
    "simpo_gamma": "stage.dpo.gamma",
    "ref_model": "stage.dpo.reference",
    "ld_alpha": "stage.dpo.ld_alpha",
    "kto_chosen_weight": "stage.kto.desirable_weight",
    "kto_rejected_weight": "stage.kto.undesirable_weight",
    "stage": "stage",
}
# What a recipe has without a setting.
ALWAYS = {
    "do_train": "`surefoot train` does it",
    "do_predict": "`surefoot predict` does it",
    "plot_loss": "a run always writes loss.png",
    "overwrite_cache": "datasets that have changed are always encoded again",
    "overwrite_output_dir": "a run is resumed; checkpoint.resume=none starts from scratch",
}
# What is refused, and why.
REFUSED = {
    "mixture_of_depths": "in such a layer a router chooses the tokens of a row that it computes, "
    "so what a token gets depends on later tokens, which generation does not have; and no "
    "architecture of transformers opens the trained model",
}


def check_recipe(document: Document) -> None:
    """Raises ``RecipeError``: the file is not a recipe but another program's, with what to do."""
    found = document.data
    if not isinstance(found, dict) or {"model", "data", "train"} <= found.keys():
        return
    if problems := list(_problems(found)):
        raise document.error(problems)


def _problems(found: Mapping[str, Any]) -> Iterator[Problem]:
    if "model_name_or_path" in found:
        yield Problem((), "this is LLaMA-Factory's YAML; write a recipe with these settings")
        yield from of_llamafactory(found)
    elif "stage" not in found and any(key in found for key in MINDFORMERS):
        yield Problem(
            (),
            "this is MindSpore Transformers' YAML; `surefoot recipe convert` prints it as a recipe",
        )


def of_llamafactory(found: Mapping[str, Any]) -> Iterator[Problem]:
    """Where each of its keys belongs, and which keys have no setting."""
    for key in found:
        if key in LLAMAFACTORY:
            setting, *note = LLAMAFACTORY[key].split("; ")
            yield Problem((key,), "; ".join([f"is {setting} in a recipe", *note]))
        elif key in REFUSED:
            yield Problem((key,), f"is not supported: {REFUSED[key]}; remove it")
        elif key in ALWAYS:
            yield Problem((key,), f"has no setting: {ALWAYS[key]}")
        else:
            yield Problem((key,), "has no setting in a recipe")
