"""Convert a YAML file of MindSpore Transformers with ``run_mode: predict`` to the settings of a
prediction.

Sampling settings are at three places there: in ``model.model_config``, in a section of their own,
and, from their command line, at the top level, which has precedence. Keys for training only are not
looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from ...recipe.yaml import Document
from .ranks import model_near
from .rules import (
    AXES,
    SAFETENSORS,
    UNCUT,
    KeyRule,
    RefusedKeyError,
    Settings,
    apply,
    mesh,
    nothing,
    only,
    reading_of,
    to,
)

_SAME = ("do_sample", "temperature", "top_p", "top_k", "repetition_penalty", "max_new_tokens")
_WHOLE = ("max_decode_length", "max_length", "predict_length")  # prompt and response together
_SECTIONS = ("generation", "generation_config")


def convert_prediction(document: Document) -> Document:
    """The settings of a ``Prediction``. Raises ``RecipeError``: with every unsupported key, each
    with line, reason and alternative."""
    return Document(apply(document, _RULES, _TOGETHER).nested(), document.name)


def _parallel(content: Mapping[str, Any]) -> Settings:
    axes = mesh(content.get("parallel_config") or {}, "dp_replicate")
    if content.get("use_parallel") is False or (count := prod(axes.values())) == 1:
        return {}
    if axes["pp"] > 1:
        raise RefusedKeyError(
            f"pipeline_stage {axes['pp']}: responses are generated token by token, and a pipeline "
            "would idle; use model_parallel"
        )
    written = {axis: size for axis, size in axes.items() if size > 1 or axis == "tp"}
    return {"parallel.num_processes": count, **{f"parallel.{a}": n for a, n in written.items()}}


def _model(content: Mapping[str, Any]) -> Settings:
    weights = content.get("load_checkpoint") or ""
    model = content.get("pretrained_model_dir") or ""
    reading = reading_of(content, weights)
    if not weights or not model or model_near(Path(weights)) == Path(weights):
        return {"model.path": weights or model, **reading} if weights or model else {}
    return {"model.path": model, "model.weights": weights, **reading}


def _sampling(content: Mapping[str, Any]) -> Settings:
    settings: dict[str, object] = {}
    for section in _places(content):
        if section.get("num_beams") not in (None, 1):
            raise RefusedKeyError(
                f"num_beams {section['num_beams']!r}: beam search is not supported"
            )
        given = {name: section[name] for name in _SAME if section.get(name) is not None}
        longest = next((section[name] for name in _WHOLE if section.get(name)), None)
        if longest is not None and "max_new_tokens" not in given:
            given["max_new_tokens"] = longest
        settings |= given
    if settings.get("temperature") == 0:
        settings |= {"temperature": 1.0, "do_sample": False}
    return {f"generate.{name}": value for name, value in settings.items()}


def _places(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The places of sampling settings; later ones have precedence."""
    model = content.get("model")
    config = model.get("model_config") if isinstance(model, Mapping) else None
    for section in (config, *(content.get(name) for name in _SECTIONS), content):
        if isinstance(section, Mapping):
            yield section


_TOGETHER = (
    (("parallel_config",), _parallel),
    (("load_checkpoint",), _model),
    (("model",), _sampling),
)
_RULES: dict[str, KeyRule] = {
    **dict.fromkeys(("run_mode", "seed", "output_dir", "use_parallel", "auto_trans_ckpt"), nothing),
    **dict.fromkeys(("remove_redundancy", "resume_training", "load_checkpoint"), nothing),
    **dict.fromkeys(("pretrained_model_dir", "predict_data", "model.model_config"), nothing),
    **{f"parallel_config.{name}": nothing for name in (*AXES, "vocab_emb_dp")},
    **UNCUT,
    "load_ckpt_format": SAFETENSORS,
    "src_strategy_path_or_dir": nothing,  # reading_of
    "only_save_strategy": only((False, None), "compilation is not needed"),
    "predict_batch_size": to("generate.batch_size", int),
    "adapter_id": only(
        (None,), "only one adapter is used at a time; name its folder in model.adapter"
    ),
    "modal_type": only((None,), "prompts must be text"),
    **{
        f"{place}{name}": nothing  # _sampling
        for place in ("", *(f"{section}." for section in _SECTIONS))
        for name in (*_SAME, *_WHOLE, "num_beams")
    },
}
