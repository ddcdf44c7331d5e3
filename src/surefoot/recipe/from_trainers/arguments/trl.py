"""The settings of TRL 1.16: those of its trainers, of its model and of its scripts.

``Same("name")`` without a dot is an argument of LLaMA-Factory with the same meaning, otherwise a
setting of a recipe.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...from_llamafactory.arguments.argument import (
    Argument,
    Kind,
    NoEffect,
    combined,
    no_effect,
    refused,
    same,
)

_PADDING = "examples are packed without padding"
_LOAD = "set the section model; remove it"
_TEMPLATE = "the model's own template is used; set data.template in the recipe, and remove it"
_ONCE = "reference log-probabilities are always computed once, before the first step"
_SYNC = "the reference stays as it is; remove it"
_ENTROPY = "there is no entropy bonus; remove it"
_VLLM = "responses are sampled by Surefoot itself, in the process of training; remove it"
_SHOWN = "`surefoot rollouts` shows all responses of a run"

# Defaults of TRL's configurations that differ from transformers'.
_BASE: Mapping[str, object] = {"logging_steps": 10, "gradient_checkpointing": True}


def defaults_of(own: Mapping[str, Argument]) -> dict[str, object]:
    """The defaults of transformers' arguments under a configuration of TRL."""
    rate = {
        name: own[name].default
        for name in ("learning_rate", "train_sampling_strategy")
        if name in own
    }
    return {**_BASE, **rate}


def _rate(default: float) -> Argument:
    return same("float", default, "learning_rate")


_MODEL_OPTIONS: Mapping[str, Argument] = {
    "model_init_kwargs": refused("any", None, _LOAD, {}),
    "trust_remote_code": same("bool", False, "trust_remote_code"),
    "router_aux_loss_coef": same("float", None, "model.router_aux_loss_coef"),
    "bf16": combined("bool", None, "train.precision", "unset, true unless fp16"),
    "gradient_checkpointing": combined("bool", True, "model.gradient_checkpointing", "full"),
    "logging_steps": same("float", 10, "logging_steps"),
    "lr_scheduler_kwargs": same("mapping", None, "lr_scheduler_kwargs"),
    "use_liger_kernel": no_effect("bool", False, "the fused cross entropy is always used"),
    "torch_empty_cache_steps": no_effect("int", None, "a step that does not fit is split"),
}
_OFFLOAD = {"activation_offloading": same("bool", False, "use_unsloth_gc")}
_LENGTH = {
    "max_length": combined("int", 1024, "data.cutoff_len", "null, the positions of the model"),
    "dataset_num_proc": no_effect("int", None, "encoding uses the cores that there are"),
    "pad_to_multiple_of": no_effect("any", "auto", _PADDING),
}
_TRUNCATION = {
    "truncation_mode": refused("text", "keep_start", "the end is truncated; write keep_start"),
}
_PAD = {"pad_token": no_effect("text", None, _PADDING)}
_REFERENCE = {
    "precompute_ref_log_probs": no_effect("bool", False, _ONCE),
    "precompute_ref_batch_size": no_effect("int", None, _ONCE),
    "sync_ref_model": refused("bool", False, _SYNC),
    "ref_model_mixup_alpha": no_effect("float", 0.6, "of sync_ref_model"),
    "ref_model_sync_steps": no_effect("int", 512, "of sync_ref_model"),
}
_DROPOUT = combined("bool", True, "method.lora.dropout", "0: LoRA's is disabled, too")

SFT: Mapping[str, Argument] = {
    "learning_rate": _rate(2e-5),
    **_MODEL_OPTIONS,
    **_LENGTH,
    **_TRUNCATION,
    **_OFFLOAD,
    **_PAD,
    "chat_template_path": refused("text", None, _TEMPLATE),
    "dataset_text_field": refused(
        "text", "text", "for plain texts, write `stage: pt` in the recipe; remove it"
    ),
    "dataset_kwargs": refused("any", None, "set the section data; remove it", {}),
    "eos_token": refused("text", None, "a response ends as the template ends it; remove it"),
    "shuffle_dataset": no_effect("bool", False, "examples are shuffled in every epoch anyway"),
    "packing": combined("bool", False, "data.packing", "see the notes of the conversion"),
    "packing_strategy": refused(
        "text", "bfd", "examples never mix or continue in the next row; write bfd", "bfd"
    ),
    "padding_free": no_effect("bool", False, _PADDING),
    "eval_packing": no_effect("bool", None, _PADDING),
    "completion_only_loss": combined(
        "bool", None, "data.train_on_prompt, data.mask_history", "must be set: see its error"
    ),
    "assistant_only_loss": combined("bool", False, "data.train_on_prompt", "the opposite"),
    "loss_type": refused("text", "nll", "the loss is cross entropy; write nll", "chunked_nll"),
}
_DPO_LOSSES = (
    *("sigmoid", "sigmoid_norm", "robust", "exo_pair", "hinge", "ipo", "apo_zero", "apo_down"),
    *("nca_pair", "sppo_hard", "bco_pair"),
)
DPO: Mapping[str, Argument] = {
    "learning_rate": _rate(1e-6),
    **_MODEL_OPTIONS,
    **_LENGTH,
    **_TRUNCATION,
    **_OFFLOAD,
    **_PAD,
    **_REFERENCE,
    "disable_dropout": _DROPOUT,
    "padding_free": no_effect("bool", False, _PADDING),
    "loss_type": combined(
        "list", ["sigmoid"], "stage.dpo.loss_type, stage.dpo.losses", ", ".join(_DPO_LOSSES)
    ),
    "loss_weights": combined("any", None, "stage.dpo.losses", "of several losses"),
    "ld_alpha": combined("float", None, "stage.dpo.ld_alpha", "unset, 1"),
    "f_divergence_type": refused("text", "reverse_kl", "write reverse_kl"),
    "f_alpha_divergence_coef": no_effect("float", 0.5, "of alpha_divergence"),
    "label_smoothing": combined(
        "float", 0.0, "stage.dpo.label_smoothing", "of robust and exo_pair, as there"
    ),
    "beta": same("float", 0.1, "stage.dpo.beta"),
    "use_weighting": refused("bool", False, "pairs have equal weights; remove it"),
    "discopop_tau": no_effect("float", 0.05, "of discopop, which is refused"),
}
KTO: Mapping[str, Argument] = {
    "learning_rate": _rate(1e-6),
    "train_sampling_strategy": combined(
        "text", "sequential", "data.shuffle", "false if sequential", "random", "sequential"
    ),
    **_MODEL_OPTIONS,
    **_LENGTH,
    **_OFFLOAD,
    **_REFERENCE,
    "disable_dropout": _DROPOUT,
    "loss_type": same("text", "kto", "stage.kto.loss_type"),
    "beta": same("float", 0.1, "stage.kto.beta"),
    "desirable_weight": same("float", 1.0, "stage.kto.desirable_weight"),
    "undesirable_weight": same("float", 1.0, "stage.kto.undesirable_weight"),
}
REWARD: Mapping[str, Argument] = {
    "learning_rate": _rate(1e-4),
    **{name: one for name, one in _MODEL_OPTIONS.items() if name != "router_aux_loss_coef"},
    **_LENGTH,
    **_OFFLOAD,
    **_PAD,
    "disable_dropout": _DROPOUT,
    "chat_template_path": refused("text", None, _TEMPLATE),
    "eos_token": refused("text", None, "a response ends as the template ends it; remove it"),
    "center_rewards_coefficient": combined(
        "float", None, "stage.rm.center_rewards_coefficient", "unset, 0"
    ),
}


def _ignored(kind: Kind, reason: str, **defaults: object) -> dict[str, Argument]:
    """Settings without effect, with their defaults."""
    return {name: Argument(kind, default, NoEffect(reason)) for name, default in defaults.items()}


GRPO: Mapping[str, Argument] = {
    "learning_rate": _rate(1e-6),
    **_MODEL_OPTIONS,
    "disable_dropout": combined("bool", False, "method.lora.dropout", "0 if true"),
    "cast_lm_head_to_fp32": refused("bool", False, "remove it"),
    "remove_unused_columns": no_effect("bool", False, "rewards get all columns of a row"),
    "num_generations": same("int", 8, "stage.grpo.group_size"),
    "num_generations_eval": no_effect("int", None, "evaluations have groups of the same size"),
    "max_completion_length": same("int", 512, "stage.grpo.max_new_tokens"),
    "ds3_gather_for_generation": no_effect("bool", True, "weights are gathered to sample"),
    "shuffle_dataset": combined("bool", True, "data.shuffle", "as it is"),
    "pad_to_multiple_of": no_effect("any", "auto", _PADDING),
    "generation_batch_size": combined("int", None, "train.global_batch_size", "in prompts"),
    "steps_per_generation": combined(
        "int", None, "train.global_batch_size, stage.grpo.mini_batches", "in windows"
    ),
    "temperature": same("float", 1.0, "stage.grpo.temperature"),
    "top_p": refused("float", 1.0, "responses are sampled from all tokens; write 1"),
    "top_k": refused("int", 0, "responses are sampled from all tokens; write 0"),
    "min_p": refused("float", None, "responses are sampled from all tokens; remove it"),
    "generation_kwargs": refused("any", None, "remove it", {}),
    "chat_template_kwargs": refused("any", None, "remove it", {}),
    "repetition_penalty": refused("float", 1.0, "write 1"),
    "cache_implementation": no_effect("text", None, "keys and values have slots"),
    **{
        name: refused("any", default, _VLLM)
        for name, default in (
            *(("use_vllm", False), ("use_transformers_continuous_batching", False)),
            *(("use_transformers_paged", False), ("vllm_structured_outputs_regex", None)),
        )
    },
    **_ignored(
        "any",
        "of use_vllm",
        vllm_mode="colocate",
        vllm_model_impl="vllm",
        vllm_enable_sleep_mode=False,
        vllm_server_base_url=None,
        vllm_server_host="0.0.0.0",
        vllm_server_port=8000,
        vllm_server_timeout=240.0,
        vllm_group_port=51216,
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=None,
        vllm_tensor_parallel_size=1,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode="sequence_mask",
        vllm_importance_sampling_clip_max=3.0,
        vllm_importance_sampling_clip_min=None,
        vllm_importance_sampling_cap=None,
        transformers_continuous_batching_config=None,
    ),
    "beta": same("float", 0.0, "stage.grpo.beta"),
    "num_iterations": same("int", 1, "stage.grpo.passes"),
    "epsilon": combined("float", 0.2, "stage.grpo.clip", "as it is"),
    "epsilon_high": combined("float", None, "stage.grpo.clip_high", "unset, epsilon"),
    "delta": refused("float", None, "ratios are not capped before the clip; remove it"),
    "importance_sampling_level": combined(
        "text", "token", "stage.grpo.surrogate", "sequence is gspo", "token", "sequence"
    ),
    "loss_type": combined(
        "text",
        "dapo",
        "stage.grpo.surrogate, stage.grpo.average_over",
        "grpo, dr_grpo, dapo, cispo and sapo",
    ),
    **_ignored("float", "of vespo", vespo_k_pos=2.0, vespo_lambda_pos=3.0),
    **_ignored("float", "of vespo", vespo_k_neg=3.0, vespo_lambda_neg=2.0),
    "sapo_temperature_neg": combined(
        "float", 1.05, "stage.grpo.sapo_temperature_negative", "of sapo"
    ),
    "sapo_temperature_pos": combined("float", 1.0, "stage.grpo.sapo_temperature", "of sapo"),
    "reward_weights": refused("any", None, "write a weight for each reward in stage.grpo.reward"),
    "multi_objective_aggregation": refused(
        "text", "sum_then_normalize", "rewards are added first; write sum_then_normalize"
    ),
    "scale_rewards": combined("any", "group", "stage.grpo.advantage", "none is dr_grpo"),
    "mask_truncated_completions": same("bool", False, "stage.grpo.mask_truncated_completions"),
    "sync_ref_model": refused("bool", False, _SYNC),
    "ref_model_mixup_alpha": no_effect("float", 0.6, "of sync_ref_model"),
    "ref_model_sync_steps": no_effect("int", 512, "of sync_ref_model"),
    "top_entropy_quantile": refused("float", 1.0, "all tokens are trained on; write 1"),
    "entropy_coef": refused("float", 0.0, _ENTROPY),
    "use_adaptive_entropy": refused("bool", False, _ENTROPY),
    **_ignored("float", "of use_adaptive_entropy", entropy_coef_min=0.0, entropy_coef_max=1.0),
    **_ignored("float", "of use_adaptive_entropy", entropy_coef_delta=0.005, entropy_target=0.2),
    "max_tool_calling_iterations": refused(
        "int", None, "write an environment with stage.grpo.max_turns"
    ),
    "off_policy_mask_threshold": refused("float", None, "remove it"),
    "use_bias_correction_kl": refused(
        "bool", True, "the divergence is multiplied by the ratio; write true"
    ),
    **_ignored("any", _SHOWN, log_completions=False, log_multimodal=True),
    **_ignored("any", _SHOWN, num_completions_to_print=None, log_unique_prompts=False),
    "log_completions_hub_repo": refused("text", None, "nothing is uploaded; remove it"),
}
GRPO_SCRIPT: Mapping[str, Argument] = {
    "reward_model_name_or_path": combined("text", None, "stage.grpo.reward", "a reward model"),
    "reward_funcs": refused(
        "any", None, "write stage.grpo.reward, such as rewards.py:f, behind the file; remove it", []
    ),
}
MODEL: Mapping[str, Argument] = {
    "model_name_or_path": same("text", None, "model_name_or_path"),
    "model_revision": same("text", "main", "model_revision"),
    "dtype": combined("text", "float32", "model.dtype", "bfloat16 of a full fine-tuning"),
    "attn_implementation": combined("text", None, "model.attention", "as it is"),
    "use_peft": combined("bool", False, "method.lora", "otherwise method: full"),
    "lora_r": same("int", 16, "lora_rank"),
    "lora_alpha": same("int", 32, "lora_alpha"),
    "lora_dropout": combined("float", 0.05, "method.lora.dropout", "unless disable_dropout"),
    "lora_target_modules": combined(
        "list", None, "method.lora.targets", "all-linear is all; unset is refused"
    ),
    "lora_target_parameters": refused("any", None, "experts are adapted with targets; remove it"),
    "lora_modules_to_save": same("list", None, "additional_target"),
    "lora_task_type": no_effect("text", "CAUSAL_LM", "it follows from the stage"),
    "use_rslora": same("bool", False, "use_rslora"),
    "use_dora": same("bool", False, "use_dora"),
    "load_in_8bit": combined("bool", False, "model.quantization_bit", "8"),
    "load_in_4bit": combined("bool", False, "model.quantization_bit", "4"),
    "bnb_4bit_quant_type": same("text", "nf4", "model.quantization_type"),
    "use_bnb_nested_quant": combined("bool", False, "model.double_quantization", "as it is"),
    "bnb_4bit_quant_storage": no_effect("text", None, "it is of FSDP's flat parameters"),
}
SCRIPT: Mapping[str, Argument] = {
    "dataset_name": combined("text", None, "data.datasets", "a hub id, a file or a folder"),
    "dataset_config": combined("text", None, "data.datasets", "subset"),
    "dataset_train_split": combined("text", "train", "data.datasets", "split"),
    "dataset_test_split": combined("text", "test", "data.eval_datasets", "with eval_strategy"),
    "dataset_streaming": combined("bool", False, "data.streaming", "as it is"),
    "ignore_bias_buffers": no_effect("bool", False, "buffers are not synchronized"),
}
MIXTURE: Mapping[str, Argument] = {
    "datasets": refused(
        "any", [], "write one dataset_name, and the others in data.datasets of the recipe", []
    ),
    "streaming": refused("bool", False, "of datasets; write dataset_streaming"),
    "test_split_size": refused("float", None, "of datasets; set data.val_size in the recipe"),
}
