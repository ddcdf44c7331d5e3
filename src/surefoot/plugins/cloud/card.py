"""The model card: what the weights are, what they were trained on and how, in the hub's form.

Everything in it was recorded when the run trained; nothing is looked up again. What is not known is
omitted, or marked as unknown.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Template

from ...checkpoint.disk.folder import load_trainer_state, open_checkpoint
from ...checkpoint.disk.manifest import MANIFEST
from ...checkpoint.layouts.detection import is_sequence_classification
from ...errors import CheckpointError, RecipeError
from ...recipe.files import ADAPTER, RUN_RECIPE, read_text
from ...recipe.yaml import emit, parse
from ...storage.files import read_json
from ...training.callbacks.metric_files import PLOT
from .contents import BASE, Publication

TEMPLATE = Path(__file__).with_name("card.md.jinja")
LICENSES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "USE_POLICY.md")
_NO_METRICS = ("step", "epoch")


def model_card(contents: Publication, name: str, base: str | None, terms: str | None) -> str:
    """The text of README.md for the repository ``name``. ``base`` is as ``base_name`` says,
    ``terms`` the name of its license."""
    folder, names = contents.folder, set(contents.files)
    recipe, is_adapter = _recipe_in(folder), ADAPTER in names
    stage, method = _variant(recipe, "stage"), _variant(recipe, "method")
    has_gguf = any(each.endswith(".gguf") for each in names)
    is_reward = is_sequence_classification(folder)
    is_reward = is_reward or _json(folder / ADAPTER).get("task_type") == "SEQ_CLS"
    manifest = open_checkpoint(folder).manifest if (folder / MANIFEST).is_file() else None
    step = None if manifest is None else manifest.step
    data = recipe.get("data") or {}
    # The hub links ids; names of local rows would lead nowhere.
    ids = [d for d in data.get("datasets") or [] if isinstance(d, str) and d.count("/") == 1]
    relation = "adapter" if is_adapter else "quantized" if has_gguf else "finetune"
    is_id = base is not None and base.count("/") == 1
    metadata = ModelCardData(
        license=terms,
        base_model=base if is_id else None,
        base_model_relation=relation if is_id else None,
        library_name="peft" if is_adapter else None if has_gguf else "transformers",
        pipeline_tag=None if is_reward else "text-generation",
        datasets=ids or None,
        tags=[tag for tag in ("surefoot", stage, method) if tag],
    )
    template = Template(TEMPLATE.read_text("utf-8"), trim_blocks=True, lstrip_blocks=True)
    card: str = template.render(
        metadata=metadata.to_yaml(),
        title=name.rpartition("/")[2],
        base=base,
        license=terms,
        is_adapter=is_adapter,
        is_reward=is_reward,
        gguf=has_gguf,
        stage=stage,
        method=method,
        step=step,
        versions=manifest.versions if manifest else {},
        plot=PLOT if PLOT in names else None,
        metrics=_last_metrics(folder, step),
        datasets=[*_datasets(data, _json(folder / "state.json"))],
        recipe=emit(recipe) if recipe else None,
    )
    return card.rstrip("\n") + "\n"


def origin_of(folder: Path) -> Path | None:
    """What an adapter or a recipe calls the base model: a folder, or an id of a hub."""
    model = _recipe_in(folder).get("model")
    path = _json(folder / ADAPTER).get(BASE) or (model or {}).get("path")
    return Path(str(path)) if path else None


def base_name(origin: Path | None) -> str | None:
    """The name of the base model for others: its id, or the last part of its folder."""
    return None if origin is None else origin.name if origin.is_absolute() else str(origin)


def license_files(origin: Path | None) -> Iterator[Path]:
    """The texts of the base model's license, which must go where its weights go."""
    paths = [] if origin is None else [origin / name for name in LICENSES]
    return (path for path in paths if path.is_file())


def license_of(origin: Path | None) -> str | None:
    """The license in the card of a base model that is on this machine."""
    if origin is None or not (origin / "README.md").is_file():
        return None
    try:
        terms = ModelCard.load(origin / "README.md", ignore_metadata_errors=True).data.license
    except (OSError, ValueError):
        return None
    return str(terms) if terms else None


def _datasets(data: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[str]:
    """Lines on the data: what the recipe calls it, and the hash of the encoded examples."""
    for key in ("datasets", "eval_datasets"):
        if listed := data.get(key):
            named = (each if isinstance(each, str) else json.dumps(each) for each in listed)
            yield f"`data.{key}`: {', '.join(f'`{each}`' for each in named)}"
    loader = state.get("loader")
    if isinstance(loader, dict) and (fingerprint := loader.get("dataset") or loader.get("content")):
        yield f"hash of the encoded examples (xxh3-128): `{fingerprint}`"


def _variant(recipe: Mapping[str, Any], name: str) -> str | None:
    """The variant of a section, which is a name, or a name above its settings."""
    value = recipe.get(name)
    if isinstance(value, dict) and len(value) == 1:
        return str(next(iter(value)))
    return value if isinstance(value, str) else None


def _recipe_in(folder: Path) -> dict[str, Any]:
    try:
        recipe = parse(read_text(folder / RUN_RECIPE, follow=False)).data
    except RecipeError:
        return {}
    return dict(recipe) if isinstance(recipe, Mapping) else {}


def _json(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        content = read_json(path)
        return content if isinstance(content, dict) else {}
    return {}


def _last_metrics(folder: Path, step: int | None) -> dict[str, float]:
    """The last value of each metric up to the step of the checkpoint, by name."""
    try:
        history = load_trainer_state(folder).get("log_history") or []
    except CheckpointError:
        return {}
    values: dict[str, float] = {}
    for record in history:
        if isinstance(record, dict) and (step is None or record.get("step", 0) <= step):
            values |= {k: v for k, v in record.items() if isinstance(v, int | float)}
    return {name: values[name] for name in sorted(values) if name not in _NO_METRICS}
