"""Arguments for generation, profiling, Ray and evaluation."""

from __future__ import annotations

from .argument import combined, no_effect, other_command, refused

_GENERATE = "as it is; set with the others, unset ones have their defaults there"
_PROFILE = "`surefoot bench` measures a recipe; PyTorch's profiler can be a callback"
_RAY = "several machines are started by torchrun or SLURM"
_EVAL = "`surefoot eval FILE` runs lm-eval's task of the same name"
_SCALE = "products in 8 bits are chosen by fp8 alone"

GENERATING = {
    "do_sample": combined("bool", True, "generate.do_sample", _GENERATE),
    "temperature": combined("float", 0.95, "generate.temperature", _GENERATE),
    "top_p": combined("float", 0.7, "generate.top_p", _GENERATE),
    "top_k": combined("int", 50, "generate.top_k", _GENERATE),
    "num_beams": refused("int", 1, "there is no beam search; write num_beams: 1"),
    "max_length": combined("int", 1024, "generate.max_new_tokens", "unless that is set"),
    "max_new_tokens": combined("int", 1024, "generate.max_new_tokens", _GENERATE),
    "repetition_penalty": combined("float", 1.0, "generate.repetition_penalty", _GENERATE),
    "length_penalty": no_effect("float", 1.0, "it is of beam search"),
    "skip_special_tokens": combined("bool", True, "generate", "of predict_with_generate"),
}
RAY = {
    "ray_num_workers": no_effect("int", 1, f"{_RAY}; parallel.num_processes, those of one"),
    "ray_init_kwargs": no_effect("any", None, _RAY),
    "master_addr": no_effect("text", None, _RAY),
    "master_port": no_effect("text", None, _RAY),
}
PROFILER = {
    "enable_torch_profiler": no_effect("bool", False, _PROFILE),
    "profiler_output_dir": no_effect("text", None, _PROFILE),
    "profiler_wait_steps": no_effect("int", 1, _PROFILE),
    "profiler_warmup_steps": no_effect("int", 1, _PROFILE),
    "profiler_active_steps": no_effect("int", 1, _PROFILE),
    "profiler_repeat": no_effect("int", 1, _PROFILE),
    "profiler_record_shapes": no_effect("bool", True, _PROFILE),
    "profiler_profile_memory": no_effect("bool", True, _PROFILE),
    "profiler_with_stack": no_effect("bool", True, _PROFILE),
    "profile_modules": no_effect("text", None, _PROFILE),
}
FP8 = {
    "fp8": combined("bool", False, "model.float8", "rowwise"),
    "fp8_backend": no_effect("text", "auto", f"torchao computes them; {_SCALE}"),
    "fp8_enable_fsdp_float8_all_gather": no_effect("bool", False, _SCALE),
}
EVALUATION = {
    "task": other_command("text", None, f"{_EVAL}: mmlu_test, ceval_validation, cmmlu_test"),
    "task_dir": other_command("text", "evaluation", f"{_EVAL}; a folder is refused"),
    "batch_size": other_command("int", 4, f"{_EVAL}, with generate.batch_size"),
    "lang": other_command("text", "en", f"{_EVAL}, in the language of the task"),
    "n_shot": other_command("int", 5, f"{_EVAL}, with --shots"),
    "save_dir": other_command("text", None, f"{_EVAL}, with --output"),
    "download_mode": other_command("text", "reuse_dataset_if_exists", _EVAL),
}
