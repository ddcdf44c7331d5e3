"""Convert a YAML file of MindSpore Transformers with ``run_mode: predict`` to the settings of a
``Prediction``.

Sampling settings occur at three places there: in ``model.model_config``, in a section of their own,
and, from their command line, at the top level, which has precedence. Keys for training only are
ignored.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ....recipe.document import Document
from ..reading.ranks import model_near
from .keys import Converted, Found, KeyRule, RefusedKeyError, apply, nothing, only, to

CONVERTER = "convert it with mindspore.ckpt_to_safetensors"
_PLURAL = ("context_parallel", "expert_parallel", "seq_split_num", "micro_batch_interleave_num")
SAFETENSORS = only(("safetensors",), f"only safetensors are supported; {CONVERTER}")
STRATEGY = only(
    ("", None),
    "strategy files must be in `strategy` beside the ranks; move them there, or convert the "
    "weights once with `surefoot ckpt convert --to huggingface --strategy`",
)
UNCUT = {f"parallel_config.{n}": only((1, None), "it is not supported here") for n in _PLURAL}
_SAME = ("do_sample", "temperature", "top_p", "top_k", "repetition_penalty", "max_new_tokens")
_WHOLE = ("max_decode_length", "max_length", "predict_length")  # prompt and answer together
_SECTIONS = ("generation", "generation_config")
_AXES = ("data_parallel", "model_parallel", "pipeline_stage")


def sizes(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """``data_parallel``, ``model_parallel`` and ``pipeline_stage`` of a ``parallel_config``."""
    data, model, stages = (config.get(name, 1) for name in _AXES)
    for name, value in zip(_AXES, (data, model, stages), strict=True):
        if type(value) is not int or value < 1:
            raise RefusedKeyError(f"{name} must be a whole number of at least 1, got {value!r}")
    return data, model, stages


def convert_prediction(document: Document) -> Converted:
    """The settings of the keys of ``document``, and the command for them. Raises ``RecipeError`` as
    ``conversion.convert``."""
    done = apply(document, _RULES, _TOGETHER)
    done.is_prediction = True
    told = document.data
    assert isinstance(told, dict)
    done.advice += _advice(told)
    return done


def _parallel(told: Mapping[str, Any]) -> Found:
    data, model, stages = sizes(told.get("parallel_config") or {})
    if told.get("use_parallel") is False or data * model * stages == 1:
        return {}
    if stages > 1:
        raise RefusedKeyError(
            f"pipeline_stage {stages}: responses are generated token by token, and a pipeline "
            "would idle; use model_parallel"
        )
    found = {"parallel.num_processes": data * model, "parallel.tp": model}
    return found | ({"parallel.dp_replicate": data} if data > 1 else {})


def _model(told: Mapping[str, Any]) -> Found:
    weights, model = told.get("load_checkpoint") or "", told.get("pretrained_model_dir") or ""
    if not weights or not model or model_near(Path(weights)) == Path(weights):
        return {"model.path": weights or model} if weights or model else {}
    return {"model.path": model, "model.weights": weights}


def _sampling(told: Mapping[str, Any]) -> Found:
    found: dict[str, object] = {}
    for section in _places(told):
        if section.get("num_beams") not in (None, 1):
            raise RefusedKeyError(
                f"num_beams {section['num_beams']!r}: beam search is not supported"
            )
        given = {n: section[n] for n in _SAME if section.get(n) is not None}
        longest = next((section[name] for name in _WHOLE if section.get(name)), None)
        if longest is not None and "max_new_tokens" not in given:
            given["max_new_tokens"] = longest
        found |= given
    if found.get("temperature") == 0:
        found |= {"temperature": 1.0, "do_sample": False}
    return {f"generate.{name}": value for name, value in found.items()}


def _places(told: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The places of sampling settings; later ones have precedence."""
    model = told.get("model")
    config = model.get("model_config") if isinstance(model, Mapping) else None
    for section in (config, *(told.get(name) for name in _SECTIONS), told):
        if isinstance(section, Mapping):
            yield section


def _advice(told: Mapping[str, Any]) -> Iterator[str]:
    """Settings for the command line, and notes."""
    for section in _places(told):
        whole = next((name for name in _WHOLE if section.get(name)), None)
        if whole is not None and not section.get("max_new_tokens"):
            yield (
                f"{whole} counts the prompt, too; generate.max_new_tokens, which now has its "
                "value, counts the response only"
            )
    data, prompts = told.get("predict_data"), "FILE"
    if isinstance(data, str) and Path(data).is_file():
        prompts = shlex.quote(data)
    elif data:
        yield "predict_data: write the prompts into a FILE, one per line"
    seed = f" --seed {told['seed']}" if type(told.get("seed")) is int else ""
    yield f"then: surefoot predict RECIPE --prompts {prompts} --output answers.jsonl{seed}"


_TOGETHER = (
    (("parallel_config",), _parallel),
    (("load_checkpoint",), _model),
    (("model",), _sampling),
)
_RULES: dict[str, KeyRule] = {
    **dict.fromkeys(("run_mode", "seed", "output_dir", "use_parallel", "auto_trans_ckpt"), nothing),
    **dict.fromkeys(("remove_redundancy", "resume_training", "load_checkpoint"), nothing),
    **dict.fromkeys(("pretrained_model_dir", "predict_data", "model.model_config"), nothing),
    **{f"parallel_config.{name}": nothing for name in (*_AXES, "vocab_emb_dp")},
    **UNCUT,
    "load_ckpt_format": SAFETENSORS,
    "src_strategy_path_or_dir": STRATEGY,
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
