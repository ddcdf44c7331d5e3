"""The names of LLaMA-Factory's chat templates, and what they are here."""

from __future__ import annotations

from collections.abc import Mapping

from ...data.text.families import families

# Templates that are files here, and the system message that theirs write in conversations without
# one (docs/templates.md lists what differs). The others of version 0.9.5 are families.
_FILES: Mapping[str, tuple[str, str | None]] = {
    "qwen": (
        "qwen",
        "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    ),
    **{name: (name, None) for name in ("chatml", "llama3", "mistral", "gemma")},
    **{name: (name, None) for name in ("alpaca", "vicuna", "default", "empty")},
}


def same_template(name: str) -> tuple[str, str | None]:
    """The template here, and the default system message there. Newer ones than those of version
    0.9.5 are the model's own."""
    if name in families():
        return name, families()[name].default_system
    return _FILES.get(name, ("auto", None))


_WITH_LINE_BREAK = ("qwen", "chatml", "gemma", "alpaca", "default")  # of the files


def masks_line_break(name: str) -> bool:
    """Whether LLaMA-Factory trains a line break after the end of a response, which is masked
    here."""
    if name in families():
        return families()[name].masks_line_break
    return name in _WITH_LINE_BREAK


def next_roles(name: str) -> tuple[str, ...]:
    """What ends a turn here where LLaMA-Factory trains the eos token."""
    return (
        tuple(end for end in families()[name].ends if end != "{eos}") if name in families() else ()
    )


def thinks(name: str | None) -> bool:
    """Whether LLaMA-Factory writes empty thoughts in a template."""
    return name is not None and name in families() and bool(families()[name].thoughts)


_NAMES = """
alpaca bailing bailing_v2 breeze chatglm3 chatml chatml_de cohere cpm4 dbrx deepseek deepseek3
deepseekr1 hy3 deepseekcoder default dots_ocr empty ernie ernie_nothink ernie_vl exaone falcon
falcon_h1 fewshot gemma gemma2 gemma3 gemma3n gemma4 gemma4n glm4 glm4_moe glm4v glm4_5v glm_ocr
glm4_7 glmz1 gpt_oss granite3 granite3_vision granite4 index hunyuan hunyuan_small intern2 intern_vl
intern_s1 keye_vl kimi_vl lfm2 lfm2_vl llama2 llama2_zh llama3 llama4 mllama moonlight llava
llava_next llava_next_llama3 llava_next_mistral llava_next_qwen llava_next_yi llava_next_video
llava_next_video_mistral llava_next_video_yi mimo mimo_v2 mimo_vl minicpm_v minicpm_v_4_6 minicpm_o
minimax1 minimax2 ministral mistral mistral_small ministral3 olmo openchat openchat-3.6 opencoder
paligemma paligemma_chat phi phi_small phi4 phi4_mini pixtral qwen qwen3 qwen3_nothink qwen2_audio
qwen2_omni qwen3_omni qwen3_omni_nothink qwen2_vl qwen3_vl qwen3_vl_nothink qwen3_5 qwen3_5_nothink
qwen3_6 sailor seed_coder seed_oss smollm smollm2 solar starchat telechat2 vicuna video_llava
xuanyuan yi yi_vl youtu youtu_vl yuan zephyr aeva hy_dense_1_8b hy_dense_7b moss_vl
"""
TEMPLATES = tuple(_NAMES.split())
