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


_NEWER = ("hy_dense_1_8b", "hy_dense_7b", "moss_vl")  # than version 0.9.5
TEMPLATES = (*families(), *_FILES, *_NEWER)  # all names that LLaMA-Factory knows


def same_template(name: str) -> tuple[str, str | None]:
    """The template here, and the default system message there. Newer ones than those of version
    0.9.5 are the model's own."""
    if name in families():
        return name, families()[name].default_system
    return _FILES.get(name, ("auto", None))


# What ends a turn becomes the eos token there (`replace_eos`), but of these families.
_KEEP_EOS = (
    *("cpm4", "ernie", "ernie_nothink", "falcon_h1", "granite4", "hunyuan", "hunyuan_small"),
    *("intern2", "intern_vl", "intern_s1", "kimi_vl", "llava_next_yi", "llava_next_video_yi"),
    *("minicpm_v", "minicpm_v_4_6", "minicpm_o", "minimax1", "minimax2", "openchat-3.6"),
    *("opencoder", "sailor", "smollm", "smollm2", "starchat", "yi", "youtu_vl", "yuan"),
)
_EOS = {"qwen": "<|im_end|>", "chatml": "<|im_end|>", "llama3": "<|eot_id|>"}
_EOS |= {"gemma": "<end_of_turn>"}


def eos_of(name: str) -> str | None:
    """The eos token of the tokenizer that LLaMA-Factory saves; None: the model's own."""
    if name not in families():
        return _EOS.get(name)
    family = families()[name]
    keeps = family.ends_once or not family.stop or name in _KEEP_EOS
    return None if keeps else family.stop[0]


_WITH_LINE_BREAK = ("qwen", "chatml", "gemma", "alpaca", "default")  # of the files


def masks_line_break(name: str) -> bool:
    """Whether LLaMA-Factory trains a line break after the end of a response, which is masked
    here."""
    if name in families():
        return families()[name].masks_line_break
    return name in _WITH_LINE_BREAK


def next_roles(name: str) -> tuple[str, ...]:
    """What ends a turn here where LLaMA-Factory trains the eos token."""
    ends = families()[name].ends if name in families() else ()
    return tuple(end for end in ends if end != "{eos}")


def thinks(name: str | None) -> bool:
    """Whether LLaMA-Factory writes empty thoughts in a template."""
    return name is not None and name in families() and bool(families()[name].thoughts)
