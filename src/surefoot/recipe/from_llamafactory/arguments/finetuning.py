"""Arguments of LLaMA-Factory's ``FinetuningArguments`` and its parents."""

from __future__ import annotations

from .argument import Argument, combined, no_effect, refused, same

_MEDIA = "only text models are trained"
_LORA = "method.lora."
_MEGATRON = "Megatron is not supported; parallel.tp, pp and dp_shard shard a model; remove it"
_LAYERWISE = (
    "an update of each layer inside the backward pass, to free its gradient; here the gradients "
    "of a step are kept, so that they can be clipped and accumulated"
)
_SWANLAB_KEY = "no recipe has a key; set SWANLAB_API_KEY, or use `swanlab login`"
_LARK = "train.webhook sends messages, to Lark, too"
_ALL_MATRICES = "all matrices inside layers are projected; write all"

FREEZE = {
    "freeze_trainable_layers": combined("int", 2, "method.freeze.num_layers", "as it is"),
    "freeze_trainable_modules": combined("list", ["all"], "method.freeze.modules", "as it is"),
    "freeze_extra_modules": combined("list", None, "method.freeze.extra_modules", "as it is"),
}
LORA = {
    "additional_target": combined(
        "list", None, "method.lora.modules_to_save, method.oft.modules_to_save", "as it is"
    ),
    "lora_alpha": combined("int", None, f"{_LORA}alpha", "unset, twice the rank"),
    "lora_dropout": combined("float", 0.0, f"{_LORA}dropout", "as it is"),
    "lora_rank": combined("int", 8, f"{_LORA}rank", "as it is"),
    "lora_target": combined("list", ["all"], f"{_LORA}targets", "as it is"),
    "loraplus_lr_ratio": combined(
        "float", None, "optim.adamw.learning_rates", "{lora_B: the ratio}"
    ),
    "loraplus_lr_embedding": no_effect(
        "float", 1e-6, "embeddings are not adapted by LoRA, but trained in full"
    ),
    "use_rslora": combined("bool", False, f"{_LORA}rslora", "as it is"),
    "use_dora": combined("bool", False, f"{_LORA}dora", "as it is"),
    "pissa_init": combined("bool", False, f"{_LORA}init", "pissa"),
    "pissa_iter": combined("int", 16, f"{_LORA}init_iterations", "-1 is 0"),
    "pissa_convert": no_effect("bool", False, "checkpoints are adapters of the unchanged base"),
    "create_new_adapter": combined(
        "bool", False, "model.frozen_adapters", "all of adapter_name_or_path are frozen"
    ),
}
OFT = {
    "module_dropout": combined("float", 0.0, "method.oft.dropout", "as it is"),
    "oft_rank": refused("int", 0, "the size of blocks is set by oft_block_size; write oft_rank: 0"),
    "oft_block_size": combined("int", 32, "method.oft.block_size", "as it is"),
    "oft_target": combined("list", ["all"], "method.oft.targets", "as it is"),
}
RLHF = {
    "pref_beta": combined("float", 0.1, "stage.dpo.beta, stage.kto.beta", "as it is"),
    "pref_ftx": combined("float", 0.0, "stage.dpo.sft_weight", "as it is"),
    "pref_bco_weight": refused(
        "float",
        0.0,
        "its baseline is a running mean over batches; stage.dpo.losses: {sigmoid: 1, bco_pair: w} "
        "is the loss of that name without it",
    ),
    "pref_loss": combined(
        "text",
        "sigmoid",
        "stage.dpo.loss_type",
        "kto_pair is stage: kto",
        *("sigmoid", "hinge", "ipo", "kto_pair", "orpo", "simpo"),
    ),
    "dpo_label_smoothing": combined("float", 0.0, "stage.dpo.label_smoothing", "as it is"),
    "kto_chosen_weight": combined("float", 1.0, "stage.kto.desirable_weight", "as it is"),
    "kto_rejected_weight": combined("float", 1.0, "stage.kto.undesirable_weight", "as it is"),
    "simpo_gamma": combined("float", 0.5, "stage.dpo.gamma", "as it is"),
    "ppo_buffer_size": combined(
        "int", 1, "stage", "of ppo: mini_batches, and a factor of the global batch"
    ),
    "ppo_epochs": combined("int", 4, "stage", "of ppo: passes"),
    "ppo_score_norm": combined("bool", False, "stage", "of ppo: normalize_scores"),
    "ppo_target": combined("float", 6.0, "stage", "of ppo: kl_target"),
    "ppo_whiten_rewards": combined("bool", False, "stage", "of ppo: whiten_rewards"),
    "ref_model": combined("text", None, "stage.dpo.reference, stage.kto.reference", "as it is"),
    "ref_model_adapters": refused(
        "text",
        None,
        "merge them into the model first: `surefoot export`, then name it in ref_model",
    ),
    "ref_model_quantization_bit": refused(
        "int", None, "the reference is as precise as the model that it is compared with; remove it"
    ),
    "reward_model": combined("text", None, "stage", "of ppo: reward"),
    "reward_model_adapters": refused(
        "text", None, "merge them first: `surefoot export`, then name the folder in reward_model"
    ),
    "reward_model_quantization_bit": refused(
        "int", None, "a reward model has the precision of its files; remove it"
    ),
    "reward_model_type": combined(
        "text", "lora", "stage", "of ppo: lora and full alike", "lora", "full", "api"
    ),
    "ld_alpha": combined("float", None, "stage.dpo.ld_alpha", "as it is"),
}
GALORE = {
    "use_galore": combined("bool", False, "optim.galore", "as it is"),
    "galore_target": refused("list", ["all"], _ALL_MATRICES),
    "galore_rank": combined("int", 16, "optim.galore.rank", "as it is"),
    "galore_update_interval": combined("int", 200, "optim.galore.update_gap", "as it is"),
    "galore_scale": combined("float", 2.0, "optim.galore.scale", "as it is"),
    "galore_proj_type": refused("text", "std", "the shorter side is projected; write std"),
    "galore_layerwise": no_effect("bool", False, _LAYERWISE),
}
APOLLO = {
    "use_apollo": combined("bool", False, "optim.apollo", "as it is"),
    "apollo_target": refused("list", ["all"], _ALL_MATRICES),
    "apollo_rank": combined("int", 16, "optim.apollo.rank", "as it is"),
    "apollo_update_interval": combined("int", 200, "optim.apollo.update_gap", "as it is"),
    "apollo_scale": combined("float", 32.0, "optim.apollo.scale", "as it is"),
    "apollo_proj": refused("text", "random", "projections are random; write random"),
    "apollo_proj_type": refused("text", "std", "the shorter side is projected; write std"),
    "apollo_scale_type": combined(
        "text", "channel", "optim.apollo.scaling", "as it is", "channel", "tensor"
    ),
    "apollo_layerwise": no_effect("bool", False, _LAYERWISE),
    "apollo_scale_front": refused("bool", False, "the norm is limited before the scale; remove it"),
}
BADAM = {
    "use_badam": combined("bool", False, "method.badam, method.badam_ratio", "by badam_mode"),
    "badam_mode": combined(
        "text", "layer", "method.badam, method.badam_ratio", "as it is", "layer", "ratio"
    ),
    "badam_start_block": combined("int", None, "method.badam.start_block", "as it is"),
    "badam_switch_mode": combined(
        "text",
        "ascending",
        "method.badam.order",
        "as it is",
        *("ascending", "descending", "random", "fixed"),
    ),
    "badam_switch_interval": combined(
        "int", 50, "method.badam.switch_interval", "-1 (never) is order: fixed"
    ),
    "badam_update_ratio": combined("float", 0.05, "method.badam_ratio.update_ratio", "as it is"),
    "badam_mask_mode": combined(
        "text", "adjacent", "method.badam_ratio.mask", "as it is", "adjacent", "scatter"
    ),
    "badam_verbose": no_effect("int", 0, "the log names each block"),
}
SWANLAB = {
    "use_swanlab": combined("bool", False, "train.report_to", "swanlab"),
    "swanlab_project": combined("text", "llamafactory", "train.project", "if project is not set"),
    "swanlab_workspace": no_effect("text", None, "set SWANLAB_WORKSPACE"),
    "swanlab_run_name": combined("text", None, "train.run_name", "if run_name is not set"),
    "swanlab_mode": combined(
        "text", "cloud", "train.report_offline", "local and offline; disabled is none"
    ),
    "swanlab_api_key": no_effect("text", None, _SWANLAB_KEY),
    "swanlab_logdir": no_effect("text", None, "its files are in the run's folder"),
    "swanlab_lark_webhook_url": no_effect("text", None, _LARK),
    "swanlab_lark_secret": no_effect("text", None, _LARK),
}
FINETUNING = {
    "pure_bf16": combined("bool", False, "model.dtype, train.precision", "bfloat16 and bf16"),
    "stage": combined("text", "sft", "stage", "as it is", "pt", "sft", "rm", "ppo", "dpo", "kto"),
    "finetuning_type": combined(
        "text", "lora", "method", "as it is", "lora", "oft", "freeze", "full"
    ),
    "use_llama_pro": refused(
        "bool",
        False,
        "scripts/llama_pro.py is not needed: name the model before it in model_name_or_path, and "
        "add use_llama_pro=false method.llama_pro.num_new_layers=N to the command, where N is "
        "freeze_trainable_layers",
    ),
    "use_adam_mini": combined("bool", False, "optim.adam_mini", "as it is"),
    "use_mca": refused("bool", False, _MEGATRON),
    "use_megatron_bridge": refused("bool", False, _MEGATRON),
    "use_hyper_parallel": refused("bool", False, _MEGATRON.replace("Megatron", "HyperParallel")),
    "hyper_parallel_args": refused("text", None, _MEGATRON.replace("Megatron", "HyperParallel")),
    "hyper_parallel_cp_size": refused("int", 1, "a sequence is not sharded; use parallel.tp"),
    "use_muon": combined("bool", False, "optim.muon", "as it is"),
    "use_dft_loss": combined("bool", False, "stage.sft.loss_type", "dft"),
    "use_asft_loss": combined("bool", False, "stage.sft.loss_type", "asft"),
    "asft_alpha": combined("float", 0.1, "stage.sft.asft_alpha", "as it is"),
    "use_eaft_loss": combined("bool", False, "stage.sft.loss_type", "eaft"),
    "eaft_alpha": combined("float", 1.0, "stage.sft.eaft_alpha", "as it is"),
    "freeze_vision_tower": no_effect("bool", True, _MEDIA),
    "freeze_multi_modal_projector": no_effect("bool", True, _MEDIA),
    "freeze_language_model": refused("bool", False, f"{_MEDIA}; remove it"),
    "compute_accuracy": combined(
        "bool",
        False,
        "data",
        "eval_token_accuracy is always logged; accuracy, the mean over rows, is of do_eval",
    ),
    "disable_shuffling": Argument(
        "bool", False, combined("bool", False, "data.shuffle", "the opposite").outcome
    ),
    "early_stopping_steps": same("int", None, "train.early_stopping_patience"),
    "plot_loss": no_effect("bool", False, "a run always writes loss.png"),
    "include_effective_tokens_per_second": no_effect("bool", False, "tokens per second are logged"),
}
