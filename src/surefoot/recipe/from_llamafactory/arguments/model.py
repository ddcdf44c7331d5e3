"""Arguments of LLaMA-Factory's ``ModelArguments``."""

from __future__ import annotations

from .argument import Argument, combined, no_effect, other_command, refused, same

_MEDIA = "only text is trained; rows with images, videos or sounds are not read"
_EXPORT = "`surefoot export FILE`"
_BACKEND = "`surefoot chat` and `predict` have an engine of their own"
_KT = "KTransformers is not supported; parallel.dp_shard shards a large mixture over GPUs"
_TOKEN = "a recipe is stored with its run, where a token does not belong; set {} in the environment"

BASE = {
    "model_name_or_path": same("text", None, "model.path"),
    "adapter_name_or_path": combined(
        "list",
        None,
        "model.adapter, model.frozen_adapters",
        "the last one is trained further, the others are frozen; checkpoints contain their sum",
    ),
    "adapter_folder": refused("text", None, "name the folder itself in adapter_name_or_path"),
    "cache_dir": no_effect("text", None, "HF_HOME in the environment moves the hub's cache"),
    "use_fast_tokenizer": refused("bool", True, "only fast tokenizers are used; remove it"),
    "resize_vocab": no_effect("bool", False, "embeddings are always resized for new tokens"),
    "split_special_tokens": refused(
        "bool", False, "special tokens in messages are always encoded as plain text; remove it"
    ),
    "add_tokens": refused("list", None, "new tokens are special ones; use add_special_tokens"),
    "add_special_tokens": same("list", None, "model.new_special_tokens"),
    "new_special_tokens_config": refused(
        "text", None, "name its tokens in add_special_tokens; their rows start as the mean"
    ),
    "init_special_tokens": Argument(
        "text",
        "noise_init",
        no_effect("text", "", "new rows start as the mean of the old ones, without noise").outcome,
        ("noise_init", "desc_init", "desc_init_w_noise"),
    ),
    "model_revision": combined("text", "main", "model.revision", "unless it is main"),
    "low_cpu_mem_usage": no_effect("bool", True, "weights are never in memory twice"),
    "rope_scaling": combined(
        "text",
        None,
        "model.rope_scaling, model.max_positions",
        "the positions are cutoff_len",
        *("linear", "dynamic", "yarn", "llama3"),
    ),
    "flash_attn": combined(
        "text",
        "auto",
        "model.attention",
        "disabled is eager; fa2 is flash_attention_2",
        *("auto", "disabled", "sdpa", "fa2", "fa3"),
    ),
    "shift_attn": combined(
        "bool", False, "model.shifted_attention_group", "a group is a quarter of cutoff_len"
    ),
    "mixture_of_depths": refused(
        "text",
        None,
        "in such a layer a router chooses the tokens of a row that it computes, so what a token "
        "gets depends on later tokens, which generation does not have; and no architecture of "
        "transformers opens the trained model; remove it",
    ),
    "use_unsloth": no_effect("bool", False, "Surefoot has kernels of its own; the loss is equal"),
    "use_unsloth_gc": combined("bool", False, "model.gradient_checkpointing", "offload"),
    "enable_liger_kernel": no_effect("bool", False, "the fused cross entropy is always used"),
    "moe_aux_loss_coef": same("float", None, "model.router_aux_loss_coef"),
    "disable_gradient_checkpointing": combined(
        "bool", False, "model.gradient_checkpointing", "full, or none if it is true"
    ),
    "use_reentrant_gc": no_effect("bool", True, "activations are recomputed without reentrance"),
    "upcast_layernorm": no_effect("bool", False, "norms are computed in float32 by the models"),
    "upcast_lmhead_output": no_effect("bool", False, "the loss is computed in float32"),
    "train_from_scratch": refused(
        "bool", False, "save a model with new weights by transformers, and name its folder"
    ),
    "infer_backend": Argument(
        "text",
        "huggingface",
        no_effect("text", "", _BACKEND).outcome,
        ("huggingface", "vllm", "sglang", "ktransformers"),
    ),
    "offload_folder": no_effect("text", "offload", "weights are not offloaded to the disk"),
    "use_kv_cache": no_effect("bool", True, "generation always has a cache, training has none"),
    "use_v1_kernels": no_effect("bool", False, "Surefoot chooses its kernels for the device"),
    "infer_dtype": no_effect("text", "auto", "`surefoot chat --dtype` sets it"),
    "hf_hub_token": refused("text", None, _TOKEN.format("HF_TOKEN")),
    "ms_hub_token": refused("text", None, _TOKEN.format("MODELSCOPE_API_TOKEN")),
    "om_hub_token": refused("text", None, "the OpenMind hub is not read; use a local folder"),
    "print_param_status": no_effect("bool", False, "the log names what is trainable"),
    "trust_remote_code": same("bool", False, "model.trust_remote_code"),
}
QUANTIZATION = {
    "quantization_method": refused(
        "text",
        "bnb",
        "only bnb (bitsandbytes) stores a base in fewer bits; write quantization_method: bnb, or "
        "dequantize the model first",
    ),
    "quantization_bit": combined("int", None, "model.quantization_bit", "4 or 8"),
    "quantization_type": same("text", "nf4", "model.quantization_type"),
    "double_quantization": combined(
        "bool", True, "model.double_quantization", "with quantization_bit: 4"
    ),
    "quantization_device_map": no_effect("text", None, "the base is stored where it is trained"),
}
PROCESSOR = {
    "image_max_pixels": no_effect("int", 768 * 768, _MEDIA),
    "image_min_pixels": no_effect("int", 32 * 32, _MEDIA),
    "image_do_pan_and_scan": no_effect("bool", False, _MEDIA),
    "crop_to_patches": no_effect("bool", False, _MEDIA),
    "video_max_pixels": no_effect("int", 256 * 256, _MEDIA),
    "video_min_pixels": no_effect("int", 16 * 16, _MEDIA),
    "video_fps": no_effect("float", 2.0, _MEDIA),
    "video_maxlen": no_effect("int", 128, _MEDIA),
    "use_audio_in_video": no_effect("bool", False, _MEDIA),
    "audio_sampling_rate": no_effect("int", 16000, _MEDIA),
}
EXPORT = {
    "export_dir": other_command("text", None, _EXPORT),
    "export_size": other_command("int", 5, f"{_EXPORT}, with --max-shard-size"),
    "export_device": other_command("text", "cpu", f"{_EXPORT}; it needs no device"),
    "export_quantization_bit": other_command("int", None, "a quantizer such as llm-compressor"),
    "export_quantization_dataset": other_command("text", None, "the same quantizer"),
    "export_quantization_nsamples": other_command("int", 128, "the same quantizer"),
    "export_quantization_maxlen": other_command("int", 1024, "the same quantizer"),
    "export_legacy_format": other_command("bool", False, "weights are always safetensors"),
    "export_hub_model_id": other_command("text", None, "`surefoot push` after `surefoot export`"),
}
VLLM = {
    "vllm_maxlen": no_effect("int", 4096, _BACKEND),
    "vllm_gpu_util": no_effect("float", 0.7, _BACKEND),
    "vllm_enforce_eager": no_effect("bool", False, _BACKEND),
    "vllm_max_lora_rank": no_effect("int", 32, _BACKEND),
    "vllm_config": no_effect("any", None, _BACKEND),
}
SGLANG = {
    "sglang_maxlen": no_effect("int", 4096, _BACKEND),
    "sglang_mem_fraction": no_effect("float", 0.7, _BACKEND),
    "sglang_tp_size": no_effect("int", -1, _BACKEND),
    "sglang_config": no_effect("any", None, _BACKEND),
    "sglang_lora_backend": no_effect("text", "triton", _BACKEND),
}
KTRANSFORMERS = {
    "use_kt": refused("bool", False, _KT),
    "kt_cpu_activation": refused("text", None, _KT),
    "kt_weight_path": refused("text", None, _KT),
    "kt_non_expert_weight_path": refused("text", None, _KT),
    "kt_expert_checkpoint_path": refused("text", None, _KT),
    "kt_use_lora_experts": refused("bool", None, _KT, False),
    "kt_lora_expert_num": refused("int", None, _KT),
    "kt_lora_expert_intermediate_size": refused("int", None, _KT),
}
