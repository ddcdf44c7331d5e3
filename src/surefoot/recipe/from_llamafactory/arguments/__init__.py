"""Every argument of LLaMA-Factory 0.9.5 and its counterpart here, by group."""

from __future__ import annotations

from collections.abc import Mapping

from .argument import Argument
from .data import DATA
from .files import DEEPSPEED, FSDP
from .finetuning import APOLLO, BADAM, FINETUNING, FREEZE, GALORE, LORA, OFT, RLHF, SWANLAB
from .model import BASE, EXPORT, KTRANSFORMERS, PROCESSOR, QUANTIZATION, SGLANG, VLLM
from .other import EVALUATION, FP8, GENERATING, PROFILER, RAY
from .trainer import FORMER, TRAINING

GROUPS: Mapping[str, Mapping[str, Argument]] = {
    "Model": BASE,
    "Quantization": QUANTIZATION,
    "Data": DATA,
    "Fine-tuning": FINETUNING,
    "Freeze": FREEZE,
    "LoRA": LORA,
    "OFT": OFT,
    "Preferences and reinforcement learning": RLHF,
    "GaLore": GALORE,
    "APOLLO": APOLLO,
    "BAdam": BADAM,
    "Hugging Face's training arguments": TRAINING,
    "Hugging Face's former training arguments": FORMER,
    "Float8": FP8,
    "Generation": GENERATING,
    "Export": EXPORT,
    "Evaluation": EVALUATION,
    "Ray": RAY,
    "Profiler": PROFILER,
    "SwanLab": SWANLAB,
    "vLLM": VLLM,
    "SGLang": SGLANG,
    "KTransformers": KTRANSFORMERS,
    "Images, videos and sounds": PROCESSOR,
}
FILES: Mapping[str, Mapping[str, Argument]] = {
    "DeepSpeed files": DEEPSPEED,
    "FSDP files of accelerate": FSDP,
}
ARGUMENTS: Mapping[str, Argument] = {
    name: argument for group in GROUPS.values() for name, argument in group.items()
}
