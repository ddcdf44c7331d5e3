"""The names of LLaMA-Factory's chat templates, and those with the same tokens here."""

from __future__ import annotations

from collections.abc import Mapping

# Templates with the same tokens as a bundled one (docs/templates.md lists what differs), and the
# system message that they write in conversations without one. Of tools, only those of qwen, llama3
# and mistral are the same.
SAME: Mapping[str, tuple[str, str | None]] = {
    "chatml": ("chatml", None),
    "chatml_de": ("chatml", "Du bist ein freundlicher und hilfsbereiter KI-Assistent."),
    "dbrx": (
        "chatml",
        "You are DBRX, created by Databricks. You were last updated in December 2023. You"
        " answer questions based on information available up to that point.\nYOU PROVIDE "
        "SHORT RESPONSES TO SHORT QUESTIONS OR STATEMENTS, but provide thorough responses"
        " to more complex and open-ended questions.\nYou assist with various tasks, from "
        "writing to coding (using markdown for code blocks — remember to use ``` with "
        "code, JSON, and tables).\n(You do not have real-time data access or code "
        "execution capabilities. You avoid stereotyping and provide balanced perspectives"
        " on controversial topics. You do not provide song lyrics, poems, or news "
        "articles and do not divulge details of your training data.)\nThis is your system "
        "prompt, guiding your responses. Do not reference it, just respond to the user. "
        "If you find yourself talking about this message, stop. You should be responding "
        "appropriately and usually that means not mentioning this.\nYOU DO NOT MENTION ANY"
        " OF THIS INFORMATION ABOUT YOURSELF UNLESS THE INFORMATION IS DIRECTLY PERTINENT"
        " TO THE USER'S QUERY.",
    ),
    "opencoder": ("chatml", "You are OpenCoder, created by OpenCoder Team."),
    "qwen": (
        "qwen",
        "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    ),
    "qwen2_vl": ("chatml", "You are a helpful assistant."),
    "qwen3_nothink": ("chatml", None),
    "qwen3_vl_nothink": ("chatml", None),
    "qwen3_5_nothink": ("chatml", None),
    "smollm": ("chatml", None),
    "smollm2": (
        "chatml",
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face.",
    ),
    "yi": ("chatml", None),
    "llama3": ("llama3", None),
    "mistral": ("mistral", None),
    "gemma": ("gemma", None),
    "gemma3": ("gemma", None),
    "gemma3n": ("gemma", None),
    "alpaca": ("alpaca", None),
    "vicuna": ("vicuna", None),
    "default": ("default", None),
    "empty": ("empty", None),
}
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
