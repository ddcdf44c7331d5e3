"""The settings of axolotl that have a counterpart here; all others are refused by name."""

from __future__ import annotations

from collections.abc import Mapping

from ...from_llamafactory.arguments.argument import Argument, combined, no_effect, refused, same

_KERNEL = "kernels are chosen by Surefoot"
_TRACKER = "the metrics are sent, and nothing else; set W&B's own environment variables"
_PACK = "examples are packed without padding"
_LOADER = "a thread prefetches batches"
_ATTENTION = "packed rows never attend to each other; model.attention chooses the kernel"

AXOLOTL: Mapping[str, Argument] = {
    "base_model": same("text", None, "model_name_or_path"),
    "revision_of_model": same("text", None, "model_revision"),
    "trust_remote_code": same("bool", False, "trust_remote_code"),
    "model_type": no_effect("text", None, "config.json says which architecture it is"),
    "tokenizer_type": no_effect("text", None, "the tokenizer is that of the model"),
    "is_llama_derived_model": no_effect("bool", None, "config.json says which architecture it is"),
    "strict": no_effect("bool", False, "unknown keys are always refused"),
    "load_in_8bit": combined("bool", False, "model.quantization_bit", "8"),
    "load_in_4bit": combined("bool", False, "model.quantization_bit", "4"),
    "adapter": combined("text", None, "method", "lora or qlora; unset, full", "lora", "qlora"),
    "lora_model_dir": same("list", None, "adapter_name_or_path"),
    "lora_r": same("int", None, "lora_rank"),
    "lora_alpha": same("int", None, "lora_alpha"),
    "lora_dropout": same("float", 0.0, "lora_dropout"),
    "lora_target_linear": combined("bool", None, "method.lora.targets", "all"),
    "lora_target_modules": combined("list", None, "method.lora.targets", "as it is"),
    "lora_modules_to_save": same("list", None, "additional_target"),
    "peft_use_dora": same("bool", False, "use_dora"),
    "peft_use_rslora": same("bool", False, "use_rslora"),
    "datasets": combined("any", None, "data.datasets", "path, split, name, data_files"),
    "test_datasets": combined("any", None, "data.eval_datasets", "likewise"),
    "dataset_prepared_path": no_effect("text", None, "data.cache_dir has what is encoded"),
    "dataset_processes": no_effect("int", None, "encoding uses the cores that there are"),
    "shuffle_merged_datasets": combined("bool", True, "data.shuffle", "as it is"),
    "val_set_size": combined("float", 0.0, "data.val_size", "as it is"),
    "sequence_len": same("int", 512, "data.cutoff_len"),
    "sample_packing": combined("bool", None, "data.packing", "see the notes of the conversion"),
    "eval_sample_packing": no_effect("bool", None, _PACK),
    "pad_to_sequence_len": no_effect("bool", None, _PACK),
    "group_by_length": no_effect("bool", None, "batches are made by length"),
    "train_on_inputs": same("bool", False, "train_on_prompt"),
    "chat_template": combined(
        "text", None, "data.template", "chatml, or tokenizer_default, the model's own"
    ),
    "default_system_message": same("text", None, "data.default_system"),
    "output_dir": same("text", "./model-out", "output_dir"),
    "micro_batch_size": same("int", 1, "per_device_train_batch_size"),
    "gradient_accumulation_steps": same("int", 1, "gradient_accumulation_steps"),
    "eval_batch_size": no_effect("int", None, "evaluations have batches by length"),
    "num_epochs": same("float", 1.0, "num_train_epochs"),
    "max_steps": same("int", None, "max_steps"),
    "learning_rate": combined("float", None, "optim.adamw.learning_rate", "must be set"),
    "lr_scheduler": same("text", "cosine", "lr_scheduler_type"),
    "lr_scheduler_kwargs": same("mapping", None, "lr_scheduler_kwargs"),
    "optimizer": same("text", "adamw_torch_fused", "optim"),
    "weight_decay": same("float", 0.0, "weight_decay"),
    "adam_beta1": same("float", None, "adam_beta1"),
    "adam_beta2": same("float", None, "adam_beta2"),
    "adam_epsilon": same("float", None, "adam_epsilon"),
    "max_grad_norm": same("float", None, "max_grad_norm"),
    "warmup_steps": combined(
        "int", None, "optim.adamw.warmup_steps", "this or warmup_ratio must be set"
    ),
    "warmup_ratio": combined("float", None, "optim.adamw.warmup_ratio", "likewise"),
    "bf16": combined("any", "auto", "train.precision", "auto is bf16"),
    "fp16": combined("bool", None, "train.precision", "unless bf16"),
    "tf32": no_effect("bool", None, "float32 products are exact; bf16 is faster"),
    "gradient_checkpointing": combined(
        "any", False, "model.gradient_checkpointing", "true is full; offload"
    ),
    "gradient_checkpointing_kwargs": no_effect("mapping", None, "recomputed without reentrance"),
    "flash_attention": no_effect("bool", None, _ATTENTION),
    "sdp_attention": no_effect("bool", None, _ATTENTION),
    "xformers_attention": no_effect("bool", None, _ATTENTION),
    "flex_attention": no_effect("bool", None, _ATTENTION),
    "eager_attention": no_effect("bool", None, _ATTENTION),
    "lora_mlp_kernel": no_effect("bool", None, _KERNEL),
    "lora_qkv_kernel": no_effect("bool", None, _KERNEL),
    "lora_o_kernel": no_effect("bool", None, _KERNEL),
    "torch_compile": same("bool", None, "torch_compile"),
    "logging_steps": combined("int", None, "train.log_steps", "unset, 10"),
    "eval_steps": same("float", None, "eval_steps"),
    "evals_per_epoch": refused("int", None, "write eval_steps, or eval_strategy: epoch"),
    "eval_strategy": same("text", None, "eval_strategy"),
    "save_steps": same("float", None, "save_steps"),
    "saves_per_epoch": combined("int", None, "checkpoint.save_epoch", "1 alone"),
    "save_strategy": same("text", None, "save_strategy"),
    "save_total_limit": same("int", 4, "save_total_limit"),
    "save_only_model": no_effect("bool", False, "a checkpoint is always complete"),
    "load_best_model_at_end": same("bool", False, "load_best_model_at_end"),
    "metric_for_best_model": same("text", None, "metric_for_best_model"),
    "greater_is_better": same("bool", None, "greater_is_better"),
    "early_stopping_patience": same("int", None, "early_stopping_steps"),
    "resume_from_checkpoint": same("text", None, "resume_from_checkpoint"),
    "auto_resume_from_checkpoints": no_effect("bool", None, "a run is always resumed"),
    "seed": same("int", 42, "seed"),
    "deepspeed": same("any", None, "deepspeed"),
    "ddp_timeout": no_effect("int", None, "ranks wait for a slow first rank as long as it works"),
    "local_rank": no_effect("int", None, "the launcher sets it"),
    "neftune_noise_alpha": same("float", None, "neftune_noise_alpha"),
    "use_tensorboard": combined("bool", None, "train.report_to", "tensorboard"),
    "use_wandb": combined("bool", None, "train.report_to", "wandb, also if wandb_project is set"),
    "wandb_project": combined("text", None, "train.project", "as it is"),
    "wandb_name": combined("text", None, "train.run_name", "as it is"),
    "wandb_mode": combined("text", None, "train.report_offline", "offline; disabled is none"),
    "use_mlflow": combined("bool", None, "train.report_to", "mlflow"),
    "mlflow_experiment_name": combined(
        "text", None, "train.project", "unless wandb_project is set"
    ),
    "dataloader_num_workers": no_effect("int", None, _LOADER),
    "dataloader_pin_memory": no_effect("bool", None, _LOADER),
    "dataloader_prefetch_factor": no_effect("int", None, _LOADER),
    "special_tokens": combined("any", None, "model", "pad_token alone has no effect"),
    **{
        name: no_effect("any", None, _TRACKER)
        for name in (*("wandb_entity", "wandb_watch", "wandb_log_model", "wandb_run_id"),)
    },
    "rl": refused(
        "text", None, "preferences: write a recipe with stage dpo or kto, or convert TRL's file"
    ),
    "hub_model_id": refused("text", None, "write train.push_to_hub in the recipe; remove it"),
    "plugins": refused("list", None, "remove it; the fused cross entropy is always used", []),
    "fsdp": refused("any", None, "set parallel.dp_shard in the recipe; remove it", []),
    "fsdp_config": refused("any", None, "set parallel.dp_shard in the recipe; remove it", {}),
}
