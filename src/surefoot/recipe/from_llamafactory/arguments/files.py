"""Keys of DeepSpeed's JSON, of accelerate's FSDP YAML and of ``fsdp_config``."""

from __future__ import annotations

from .argument import Argument, combined, no_effect, refused

_SIZES = "batch sizes are those of the arguments"
_COMMUNICATION = "how shards are gathered is chosen for the mesh"
_LAUNCH = "`surefoot train` starts the ranks of a machine; torchrun or SLURM those of several"
_OPTIM = "optimizer and schedule are those of the arguments"
_SCALER = "the loss scale of fp16 starts at 65,536 and corrects itself"
_OFFLOAD = "optim.adamw.offload_state"
_TENSORS = "checkpoints always contain full tensors, unless checkpoint.layout is distributed"
_LAYERS = "decoder layers are sharded one by one"
_ZERO = "zero_optimization."

DEEPSPEED: dict[str, Argument] = {
    "train_batch_size": no_effect("any", "auto", _SIZES),
    "train_micro_batch_size_per_gpu": no_effect("any", "auto", _SIZES),
    "gradient_accumulation_steps": no_effect("any", "auto", _SIZES),
    "gradient_clipping": no_effect("any", "auto", "max_grad_norm clips"),
    "steps_per_print": no_effect("any", None, "logging_steps is the interval"),
    "wall_clock_breakdown": no_effect("any", None, "`surefoot bench` measures"),
    "zero_allow_untested_optimizer": no_effect("any", None, "every optimizer is tested sharded"),
    "optimizer": no_effect("any", None, _OPTIM),
    "scheduler": no_effect("any", None, _OPTIM),
    "bf16": no_effect("any", None, "bf16 of the arguments is the precision"),
    "fp16": no_effect("any", None, f"fp16 of the arguments is the precision; {_SCALER}"),
    "amp": refused("any", None, "write bf16 or fp16 in the arguments"),
    "fp8": no_effect("any", None, "fp8 of the arguments chooses products in 8 bits"),
    "comms_logger": no_effect("any", None, _COMMUNICATION),
    "comms_config": no_effect("any", None, _COMMUNICATION),
    "monitor_config": no_effect("any", None, "metrics.jsonl has all figures"),
    "zero_force_ds_cpu_optimizer": no_effect("any", None, _OPTIM),
    "activation_checkpointing": no_effect("any", None, "model.gradient_checkpointing is set"),
    "tensor_parallel": combined("mapping", None, "parallel.tp", "autotp_size"),
    "zero_optimization": combined(
        "mapping", None, "parallel", "the keys below, each after `zero_optimization.`"
    ),
    f"{_ZERO}stage": combined(
        "int",
        0,
        "parallel.dp_replicate, parallel.dp_shard, parallel.reshard_after_forward",
        "0 and 1 are replicas; 2 is dp_shard without resharding after the forward pass; 3 with it",
    ),
    f"{_ZERO}offload_optimizer": combined("any", None, _OFFLOAD, "on one rank"),
    f"{_ZERO}offload_param": refused(
        "any", None, "weights stay on the GPU; use quantization_bit, badam or more ranks"
    ),
    **{
        f"{_ZERO}{name}": no_effect("any", None, _COMMUNICATION)
        for name in (
            *("allgather_partitions", "allgather_bucket_size", "overlap_comm", "reduce_scatter"),
            *("reduce_bucket_size", "contiguous_gradients", "round_robin_gradients"),
            *("sub_group_size", "stage3_prefetch_bucket_size", "load_from_fp32_weights"),
            *("stage3_param_persistence_threshold", "stage3_max_live_parameters"),
            *("stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save"),
            *("ignore_unused_parameters", "zero_hpz_partition_size", "elastic_checkpoint"),
            *("zero_quantized_weights", "memory_efficient_linear"),
        )
    },
}
FSDP: dict[str, Argument] = {
    "distributed_type": combined("text", "FSDP", "parallel", "FSDP", "FSDP", "MULTI_GPU", "NO"),
    "num_processes": combined("int", None, "parallel.num_processes", "of one machine"),
    "fsdp_config": combined("mapping", None, "parallel", "the keys that begin with fsdp_"),
    "mixed_precision": no_effect("text", None, "bf16 or fp16 of the arguments is the precision"),
    "fsdp_sharding_strategy": combined(
        "text",
        "FULL_SHARD",
        "parallel.dp_shard, parallel.dp_replicate, parallel.reshard_after_forward",
        "SHARD_GRAD_OP does not reshard; NO_SHARD is replicas",
        *("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "1", "2", "3"),
    ),
    "fsdp_reshard_after_forward": combined(
        "text", "true", "parallel.reshard_after_forward", "as it is"
    ),
    "fsdp_offload_params": refused(
        "bool", False, "weights stay on the GPU; use quantization_bit, badam or more ranks"
    ),
    **{
        f"fsdp_{name}": no_effect("any", None, reason)
        for name, reason in (
            ("version", "FSDP 2 is always used"),
            ("auto_wrap_policy", _LAYERS),
            ("transformer_layer_cls_to_wrap", _LAYERS),
            ("min_num_params", _LAYERS),
            ("backward_prefetch", _COMMUNICATION),
            ("forward_prefetch", _COMMUNICATION),
            ("cpu_ram_efficient_loading", "each rank reads its own shards"),
            ("sync_module_states", "each rank reads its own shards"),
            ("use_orig_params", "FSDP 2 keeps the parameters"),
            ("state_dict_type", _TENSORS),
            ("activation_checkpointing", "model.gradient_checkpointing is set"),
        )
    },
    **{
        name: no_effect("any", None, _LAUNCH)
        for name in (
            *("compute_environment", "debug", "downcast_bf16", "enable_cpu_affinity"),
            *("machine_rank", "main_training_function", "num_machines", "rdzv_backend"),
            *("main_process_ip", "main_process_port", "same_network", "tpu_env", "use_cpu"),
            *("tpu_use_cluster", "tpu_use_sudo", "gpu_ids", "deepspeed_config"),
        )
    },
}
