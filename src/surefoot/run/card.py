"""The model card, ``README.md``: what the weights are, what they were trained on and how, in the
form of a model hub.

Everything in it was recorded when the run trained; nothing is looked up again. What is not known is
omitted, or marked as unknown. A short one, without the recipe and folders of this machine, is left
beside a run's checkpoints, an export and an adapter.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import Template

from ..checkpoint.disk.folder import load_trainer_state, open_checkpoint
from ..checkpoint.disk.manifest import MANIFEST
from ..checkpoint.layouts.detection import is_sequence_classification
from ..errors import CheckpointError, RecipeError, RunError
from ..recipe.files import ADAPTER, RUN_RECIPE, read_text
from ..recipe.yaml import emit, parse
from ..storage import files
from ..training.callbacks.metric_files import PLOT

CARD = "README.md"
BASE = "base_model_name_or_path"
TEMPLATE = Path(__file__).with_name("card.md.jinja")
LICENSES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "USE_POLICY.md")
_NO_METRICS = ("step", "epoch")
_MARK = (
    "<!-- Written by surefoot train, and again whenever a run ends here. Without this line it is "
    "kept. -->"
)


def write_card(folder: Path, trained: Path, *, inside: str = "") -> None:
    """Write the short card of ``folder``, whose weights are in its folder ``inside``; ``trained``
    is the checkpoint that they are, or were made from. One that somebody has written or edited is
    kept. Raises ``RunError``."""
    origin, described, path = origin_of(trained) or trained, folder / inside, folder / CARD
    with files.raising(RunError, "cannot write the model card"):
        if files.exists(path) and not is_written_here(path):
            return
        names = files.names_in(described)
        card = model_card(
            described,
            [*names, *([PLOT] if files.exists(folder / PLOT) else [])],
            folder.absolute().name,
            base_name(origin),
            license_of(origin),
            trained=trained,
            opens=inside or folder.absolute().name,
        )
        files.write_aside(path, card.encode())


def is_written_here(path: Path) -> bool:
    """Whether the card at ``path`` is one of ``write_card``, and nobody's own."""
    with files.open_file(path) as file:
        return _MARK.encode() in files.read_all(file, 1 << 24)


def model_card(
    folder: Path,
    names: Collection[str],
    name: str,
    base: str | None,
    terms: str | None,
    *,
    trained: Path | None = None,
    opens: str = "",
) -> str:
    """The text of README.md for the repository ``name`` with the files ``names`` of ``folder``.
    ``base`` is as ``base_name`` says, ``terms`` the name of its license. ``opens`` is the folder
    that the code of a short card opens, ``trained`` the checkpoint if it is another folder."""
    described, folder = folder, trained or folder
    recipe, is_adapter = _recipe_in(folder), ADAPTER in names
    stage, method = _variant(recipe, "stage"), _variant(recipe, "method")
    has_gguf = any(each.endswith(".gguf") for each in names)
    is_reward = is_sequence_classification(described)
    is_reward = is_reward or _json(described / ADAPTER).get("task_type") == "SEQ_CLS"
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
        datasets=[*_datasets(data, _json(folder / "state.json"), is_short=bool(opens))],
        opens=json.dumps(opens) if opens else "REPOSITORY" if recipe else None,
        mark=_MARK if opens else None,
        recipe=emit(recipe) if recipe and not opens else None,
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
    if origin is None:
        return None
    try:
        _, _, rest = read_text(origin / CARD).partition("---\n")
        about = parse(rest.partition("\n---")[0]).data
    except RecipeError:  # there is none, or it is damaged, which is no reason to end a run
        return None
    terms = about.get("license") if isinstance(about, Mapping) else None
    return str(terms) if terms else None


def _datasets(
    data: Mapping[str, Any], state: Mapping[str, Any], *, is_short: bool
) -> Iterator[str]:
    """Lines on the data: what the recipe calls it, and the hash of the encoded examples. Short ones
    have no folder of this machine."""
    for key in ("datasets", "eval_datasets"):
        if listed := data.get(key):
            named = [each if isinstance(each, str) else json.dumps(each) for each in listed]
            if is_short:
                named = [each for each in listed if isinstance(each, str)]
                named = [Path(each).name if Path(each).is_absolute() else each for each in named]
                named += ["others"] * (len(named) < len(listed))
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
        content = files.read_json(path)
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
