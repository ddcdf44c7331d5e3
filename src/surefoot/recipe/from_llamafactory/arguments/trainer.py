"""Arguments of Hugging Face's ``Seq2SeqTrainingArguments``, of transformers 4 and 5."""

from __future__ import annotations

from .argument import combined, no_effect, refused, same

_SPACE = "TRACKIO_SPACE_ID and Trackio's other environment variables set it"
_PUSH = "train.push_to_hub"
_HUB_TOKEN = "a recipe is stored with its run, where a token does not belong; set HF_TOKEN"
_FORMER = "transformers has removed it; write hub_model_id: owner/name"
_DDP = "how ranks exchange gradients is chosen for the mesh"
_LOGS = "the log is of rank 0, with one line for each event"
_LOADER = "a thread prefetches batches; it needs no workers"
_EVAL = "evaluations sum over tokens and keep no outputs"
_OLD = "transformers 5 has no such argument any more"
_METRICS = "the metrics of evaluations are fixed"
_XLA = "TPUs are not supported; remove it"
_STEPS = "as it is; below 1, a share of max_steps"
_OPTIM = "the optimizer that optim names"

TRAINING = {
    "output_dir": same("text", None, "train.output_dir"),
    "do_train": combined("bool", False, "train", "`surefoot train` trains; false is refused"),
    "do_eval": combined(
        "bool", False, "data", "of sft, eval_results.json after training; see compute_accuracy"
    ),
    "do_predict": combined(
        "bool", False, "generate", "of sft, generated_predictions.jsonl and predict_results.json"
    ),
    "per_device_train_batch_size": combined(
        "int",
        8,
        "train.micro_batch_size, train.global_batch_size",
        "a global batch is this x gradient_accumulation_steps x data-parallel ranks",
    ),
    "gradient_accumulation_steps": combined(
        "int", 1, "train.global_batch_size", "see per_device_train_batch_size"
    ),
    "num_train_epochs": same("float", 3.0, "train.num_epochs"),
    "max_steps": combined("int", -1, "train.max_steps", "-1 is unset"),
    "learning_rate": combined("float", 5e-5, "optim.adamw.learning_rate", _OPTIM),
    "lr_scheduler_type": combined(
        "text",
        "linear",
        "optim.adamw.schedule",
        "the same learning rates after warmup; constant has no warmup",
        *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant"),
        *("constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau", "cosine_with_min_lr"),
        *("cosine_warmup_with_min_lr", "warmup_stable_decay"),
    ),
    "lr_scheduler_kwargs": combined(
        "mapping", None, "optim.adamw.min_lr_ratio", "min_lr, min_lr_rate, lr_end"
    ),
    "warmup_steps": combined(
        "float", 0, "optim.adamw.warmup_steps, optim.adamw.warmup_ratio", "below 1, a share"
    ),
    "warmup_ratio": combined("float", None, "optim.adamw.warmup_ratio", "as it is"),
    "optim": combined(
        "text", "adamw_torch_fused", "optim", "the optimizer of the same update; others are refused"
    ),
    "optim_args": refused("text", None, "set the fields of the section optim; remove it"),
    "optim_target_modules": refused("any", None, "all matrices are projected; remove it"),
    "weight_decay": combined(
        "float", 0.0, "optim.adamw.weight_decay", "of matrices only, as there"
    ),
    "adam_beta1": combined("float", 0.9, "optim.adamw.beta1", _OPTIM),
    "adam_beta2": combined("float", 0.999, "optim.adamw.beta2", _OPTIM),
    "adam_epsilon": combined("float", 1e-8, "optim.adamw.epsilon", _OPTIM),
    "average_tokens_across_devices": no_effect(
        "bool", True, "a loss is always the mean over all trained tokens of all ranks"
    ),
    "max_grad_norm": same("float", 1.0, "train.max_grad_norm"),
    "label_smoothing_factor": combined(
        "float", 0.0, "stage.sft.label_smoothing_factor", "of sft and pt"
    ),
    "bf16": combined("bool", False, "train.precision", "bf16; neither bf16 nor fp16: fp32"),
    "fp16": combined("bool", False, "train.precision", "fp16"),
    "bf16_full_eval": no_effect("bool", False, "evaluations have the precision of training"),
    "fp16_full_eval": no_effect("bool", False, "evaluations have the precision of training"),
    "tf32": no_effect("bool", None, "float32 products are exact; bf16 is faster"),
    "gradient_checkpointing": combined(
        "bool", False, "model.gradient_checkpointing", "see disable_gradient_checkpointing"
    ),
    "activation_checkpointing": combined(  # its name in later versions
        "bool", False, "model.gradient_checkpointing", "see disable_gradient_checkpointing"
    ),
    "activation_checkpointing_kwargs": no_effect("mapping", None, "recomputed without reentrance"),
    "gradient_checkpointing_kwargs": no_effect("mapping", None, "recomputed without reentrance"),
    "torch_compile": same("bool", False, "model.compile"),
    "torch_compile_backend": no_effect("text", None, "inductor compiles"),
    "torch_compile_mode": no_effect("text", None, "the default mode compiles"),
    "use_liger_kernel": no_effect("bool", False, "the fused cross entropy is always used"),
    "liger_kernel_config": no_effect("mapping", None, "the fused cross entropy is always used"),
    "use_cache": no_effect("bool", False, "training has no cache of keys"),
    "neftune_noise_alpha": same("float", None, "model.neftune_noise_alpha"),
    "torch_empty_cache_steps": no_effect("int", None, "a step that does not fit is split"),
    "auto_find_batch_size": combined("bool", False, "train.micro_batch_size", "auto"),
    "logging_strategy": combined(
        "text", "steps", "train.log_steps, train.log_epoch", "as it is", "no", "steps", "epoch"
    ),
    "logging_steps": combined("float", 500, "train.log_steps", _STEPS),
    "logging_first_step": no_effect("bool", False, "the first step is always logged"),
    "log_on_each_node": no_effect("bool", True, _LOGS),
    "logging_nan_inf_filter": no_effect("bool", True, "train.on_nan says what NaN does"),
    "include_num_input_tokens_seen": no_effect("text", "no", "metrics.jsonl always has it"),
    "log_level": no_effect("text", "passive", _LOGS),
    "log_level_replica": no_effect("text", "warning", _LOGS),
    "disable_tqdm": no_effect("bool", None, _LOGS),
    "report_to": combined(
        "list", ["none"], "train.report_to", "tensorboard, trackio, wandb, mlflow and swanlab"
    ),
    "run_name": combined("text", None, "train.run_name", "unset, the name of the folder"),
    "project": combined("text", "huggingface", "train.project", "if it is set"),
    "trackio_space_id": no_effect("text", None, _SPACE),
    "trackio_bucket_id": no_effect("text", None, _SPACE),
    "trackio_static_space_id": no_effect("text", None, _SPACE),
    "logging_dir": no_effect("text", None, "TensorBoard's files are in the run's folder"),
    "eval_strategy": combined(
        "text", "no", "train.eval_steps, train.eval_epoch", "as it is", "no", "steps", "epoch"
    ),
    "eval_steps": combined("float", None, "train.eval_steps", f"{_STEPS}; unset, logging_steps"),
    "eval_delay": refused("float", 0, "evaluations start with the first interval; remove it"),
    "per_device_eval_batch_size": no_effect("int", 8, "evaluations have batches by length"),
    "prediction_loss_only": no_effect("bool", False, _EVAL),
    "eval_on_start": no_effect("bool", False, "`surefoot eval RECIPE --model base` does it"),
    "eval_do_concat_batches": no_effect("bool", True, _EVAL),
    "eval_use_gather_object": no_effect("bool", False, _EVAL),
    "eval_accumulation_steps": no_effect("int", None, _EVAL),
    "include_for_metrics": no_effect("list", [], _METRICS),
    "batch_eval_metrics": no_effect("bool", False, _EVAL),
    "save_only_model": no_effect("bool", False, "a checkpoint is always complete, to resume"),
    "save_strategy": combined(
        "text",
        "steps",
        "checkpoint.save_steps, checkpoint.save_epoch",
        "best saves evaluated steps; the best is kept, and the last",
        *("no", "steps", "epoch", "best"),
    ),
    "save_steps": combined("float", 500, "checkpoint.save_steps", _STEPS),
    "save_on_each_node": no_effect("bool", False, "ranks write one folder together"),
    "save_total_limit": combined("int", None, "checkpoint.keep", "unset, all"),
    "enable_jit_checkpoint": no_effect("bool", False, "SIGTERM always saves"),
    "push_to_hub": combined("bool", False, _PUSH, "the value of `hub_model_id`, if true"),
    "hub_token": refused("text", None, _HUB_TOKEN),
    "hub_private_repo": combined(
        "bool", None, "train.hub_private_repo", "if it is not set, the repository is private"
    ),
    "hub_model_id": combined("text", None, _PUSH, "with `push_to_hub: true`"),
    "hub_strategy": combined(
        "text",
        "every_save",
        "train.hub_strategy",
        "`checkpoint` means `all_checkpoints`",
        *("end", "every_save", "checkpoint", "all_checkpoints"),
    ),
    "hub_always_push": no_effect("bool", False, "the latest checkpoint is uploaded next"),
    "hub_revision": refused("text", None, "uploads go to the main branch; remove it"),
    "load_best_model_at_end": same("bool", False, "train.load_best_model_at_end"),
    "metric_for_best_model": combined(
        "text", None, "train.metric_for_best_model", "with eval_; accuracy is token_accuracy"
    ),
    "greater_is_better": same("bool", None, "train.greater_is_better"),
    "ignore_data_skip": refused(
        "bool", False, "a run always resumes with the next example; remove it"
    ),
    "restore_callback_states_from_checkpoint": no_effect("bool", False, "always restored"),
    "full_determinism": no_effect("bool", False, "train.deterministic is the default"),
    "seed": same("int", 42, "train.seed"),
    "data_seed": no_effect("int", None, "the order of data depends on train.seed"),
    "use_cpu": no_effect("bool", False, "a GPU is used if there is one; hide it from the process"),
    "accelerator_config": no_effect("any", None, "batches are divided by Surefoot"),
    "parallelism_config": refused("any", None, "set the section parallel; remove it"),
    "dataloader_drop_last": refused("bool", False, "no example is dropped; remove it"),
    "dataloader_num_workers": no_effect("int", 0, _LOADER),
    "dataloader_multiprocessing_context": no_effect("text", None, _LOADER),
    "dataloader_in_order": no_effect("bool", True, _LOADER),
    "dataloader_pin_memory": no_effect("bool", True, _LOADER),
    "dataloader_persistent_workers": no_effect("bool", False, _LOADER),
    "dataloader_prefetch_factor": no_effect("int", None, _LOADER),
    "remove_unused_columns": no_effect("bool", True, "the columns of a format alone are read"),
    "label_names": no_effect("list", None, "labels are made by the stage"),
    "train_sampling_strategy": combined(
        "text",
        "random",
        "data.shuffle",
        "false if sequential; batches are made by length anyway",
        *("random", "sequential", "group_by_length"),
    ),
    "length_column_name": no_effect("text", "length", "lengths are those of the tokens"),
    "ddp_find_unused_parameters": no_effect("bool", None, _DDP),
    "ddp_bucket_cap_mb": no_effect("int", None, _DDP),
    "ddp_broadcast_buffers": no_effect("bool", None, _DDP),
    "ddp_static_graph": no_effect("bool", None, _DDP),
    "ddp_backend": no_effect("text", None, _DDP),
    "ddp_timeout": no_effect(
        "int", 1800, "ranks wait for a slow first rank as long as it works; see timeout_minutes"
    ),
    "fsdp": combined("any", None, "parallel", "full_shard is dp_shard"),
    "fsdp_config": combined("any", None, "parallel", "see the keys of FSDP files"),
    "deepspeed": combined("any", None, "parallel", "see the keys of DeepSpeed files"),
    "debug": no_effect("any", "", "on_nan stops at the first NaN"),
    "skip_memory_metrics": no_effect("bool", True, "metrics.jsonl has memory"),
    "resume_from_checkpoint": combined(
        "text", None, "checkpoint.resume", "true is auto; a folder of LLaMA-Factory or of Surefoot"
    ),
    "local_rank": no_effect("int", -1, "the launcher sets it"),
    "sortish_sampler": no_effect("bool", False, "batches are made by length"),
    "predict_with_generate": combined(
        "bool", False, "generate", "BLEU-4 and ROUGE of do_predict and do_eval; and sacrebleu"
    ),
    "generation_max_length": no_effect("int", None, "generate.max_new_tokens sets it"),
    "generation_num_beams": refused("int", None, "there is no beam search; remove it", 1),
    "generation_config": no_effect("any", None, "the section generate sets it"),
    "overwrite_output_dir": no_effect(
        "bool", False, "a run in output_dir is resumed; checkpoint.resume=none starts from scratch"
    ),
}
# Arguments of transformers 4 that older files have, and transformers 5 refuses.
FORMER = {
    "evaluation_strategy": combined(
        "text", "no", "train.eval_steps, train.eval_epoch", "eval_strategy", "no", "steps", "epoch"
    ),
    "save_safetensors": no_effect("bool", True, "weights are always safetensors"),
    "group_by_length": no_effect("bool", False, "batches are made by length"),
    "include_tokens_per_second": no_effect("bool", False, "tokens per second are logged"),
    "include_inputs_for_metrics": no_effect("bool", False, _METRICS),
    "no_cuda": no_effect("bool", False, _OLD),
    "use_mps_device": no_effect("bool", False, _OLD),
    "half_precision_backend": no_effect("text", "auto", _OLD),
    "fp16_backend": no_effect("text", "auto", _OLD),
    "fp16_opt_level": no_effect("text", "O1", _OLD),
    "jit_mode_eval": no_effect("bool", False, _OLD),
    "use_ipex": no_effect("bool", False, _OLD),
    "ray_scope": no_effect("text", "last", "Ray is not used"),
    "past_index": no_effect("int", -1, _OLD),
    "torchdynamo": no_effect("text", None, _OLD),
    "dispatch_batches": no_effect("bool", None, _OLD),
    "split_batches": no_effect("bool", None, _OLD),
    "use_legacy_prediction_loop": no_effect("bool", False, _OLD),
    "mp_parameters": no_effect("text", "", _OLD),
    "fsdp_min_num_params": no_effect("int", 0, _DDP),
    "fsdp_transformer_layer_cls_to_wrap": no_effect("text", None, "decoder layers are sharded"),
    "push_to_hub_model_id": refused("text", None, _FORMER),
    "push_to_hub_organization": refused("text", None, _FORMER),
    "push_to_hub_token": refused("text", None, _HUB_TOKEN),
    "adafactor": refused("bool", False, "write optim: adafactor"),
    "tpu_num_cores": refused("int", None, _XLA),
    "tpu_metrics_debug": refused("bool", False, _XLA),
    "per_gpu_train_batch_size": refused("int", None, "write per_device_train_batch_size"),
    "per_gpu_eval_batch_size": no_effect("int", None, "evaluations have batches by length"),
}
