"""The model card: what the weights are, what they were trained on and how, in the hub's form.

Everything in it was recorded when the run trained; nothing is looked up again. What is not known is
omitted, or marked as unknown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from ...checkpoint.disk import trainer_state
from ...checkpoint.disk.folder import open_checkpoint
from ...checkpoint.disk.manifest import MANIFEST
from ...checkpoint.layouts.detection import is_sequence_classification
from ...errors import CheckpointError, RecipeError
from ...model.pretrained import base_identity
from ...recipe.files import ADAPTER, RUN_RECIPE, read_text
from ...recipe.yaml import emit, parse
from ...storage.files import read_json
from ...training.callbacks.launches import NAME as LAUNCHES
from ...training.callbacks.plot import NAME as PLOT
from .contents import BASE, Publication

RECEIPT = "receipt.json"
LICENSES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "USE_POLICY.md")
_SKIPPED = ("step", "epoch")
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class CardFacts:
    """What is known about a model."""

    title: str
    base: str | None = None
    license: str | None = None
    is_adapter: bool = False
    has_score: bool = False  # a reward model
    recipe: Facts = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    data: str | None = None  # the fingerprint of the encoded examples
    base_files: Mapping[str, str] = field(default_factory=dict)
    commands: Sequence[str] = ()
    has_plot: bool = False
    receipt: Facts | None = None
    gguf: Sequence[str] = ()


def model_card(facts: CardFacts) -> str:
    """The text of README.md."""
    head = _metadata(facts).to_yaml()
    lines = ["---", head, "---", "", f"# {facts.title}", "", _summary(facts), ""]
    for part in (_use, _training, _metrics, _data, _base, _receipt, _recipe):
        lines += part(facts)
    return "\n".join(lines).rstrip("\n") + "\n"


def facts_of(contents: Publication, name: str, base: str | None = None) -> CardFacts:
    """What the files of a model, its checkpoint and its run say."""
    folder, names = contents.folder, {file.path for file in contents.files}
    recipe, state = _recipe_in(folder), _json(folder / "state.json")
    versions, step = _versions(folder)
    origin = _origin(folder)
    return CardFacts(
        title=name.rpartition("/")[2],
        base=base or (None if origin is None else _shown(str(origin))),
        license=_license_of(origin),
        is_adapter=ADAPTER in names,
        has_score=is_sequence_classification(folder)
        or _json(folder / ADAPTER).get("task_type") == "SEQ_CLS",
        recipe=recipe,
        versions=versions,
        step=step,
        metrics=_last_metrics(folder, step),
        data=_fingerprint(state),
        base_files=_hashes_of_base(folder),
        commands=_commands(contents.run),
        has_plot=PLOT in names,
        receipt=_json(folder / RECEIPT) or None,
        gguf=[each for each in sorted(names) if each.endswith(".gguf")],
    )


def license_files(contents: Publication) -> Iterator[Path]:
    """The texts of the base model's license, which must go where its weights go."""
    base = _origin(contents.folder)
    for name in LICENSES if base is not None else ():
        assert base is not None
        if (base / name).is_file():
            yield base / name


def _origin(folder: Path) -> Path | None:
    """What an adapter or a recipe calls the base model: a folder, or an id of a hub."""
    model = _recipe_in(folder).get("model")
    found = _json(folder / ADAPTER).get(BASE) or (model or {}).get("path")
    return Path(str(found)) if found else None


def _metadata(facts: CardFacts) -> ModelCardData:
    stage, method = _choice(facts.recipe, "stage"), _choice(facts.recipe, "method")
    data = facts.recipe.get("data") or {}
    ids = [d for d in data.get("datasets") or [] if isinstance(d, str) and d.count("/") == 1]
    relation = "adapter" if facts.is_adapter else "quantized" if facts.gguf else "finetune"
    is_id = facts.base is not None and facts.base.count("/") == 1
    return ModelCardData(
        license=facts.license,
        base_model=facts.base if is_id else None,
        base_model_relation=relation if is_id else None,
        library_name="peft" if facts.is_adapter else None if facts.gguf else "transformers",
        pipeline_tag=None if facts.has_score else "text-generation",
        datasets=ids or None,
        tags=[tag for tag in ("surefoot", stage, method) if tag],
    )


def _summary(facts: CardFacts) -> str:
    stage, method = _choice(facts.recipe, "stage"), _choice(facts.recipe, "method")
    what = "An adapter of" if facts.is_adapter else "A model trained from"
    how = f" by {stage} ({method})" if stage and method else ""
    at = f", {facts.step:,} optimizer steps" if facts.step else ""
    return f"{what} {facts.base or 'an unknown base model'}{how}{at}, with Surefoot."


def _use(facts: CardFacts) -> list[str]:
    if facts.gguf or not facts.recipe:
        return []
    kind = "SequenceClassification" if facts.has_score else "CausalLM"
    module, prefix = ("peft", "AutoPeftModelFor") if facts.is_adapter else ("transformers", "")
    found = f"{prefix or 'AutoModelFor'}{kind}"
    code = f"from {module} import {found}\n\nmodel = {found}.from_pretrained(REPOSITORY)"
    return ["```python", code, "```", ""]


def _training(facts: CardFacts) -> list[str]:
    rows = list(facts.versions.items())
    lines = ["## Training", "", *_table(("library", "version"), rows)] if rows else []
    for command in facts.commands:
        lines += ["```sh", command, "```", ""]
    return lines + ([f"![Loss of the run]({PLOT})", ""] if facts.has_plot else [])


def _metrics(facts: CardFacts) -> list[str]:
    rows = [(f"`{name}`", f"{value:.6g}") for name, value in sorted(facts.metrics.items())]
    if not rows:
        return []
    at = f"At step {facts.step:,}: " if facts.step is not None else ""
    said = f"{at}the latest value of each; `eval_` is on held-out data."
    return ["## Metrics", "", said, "", *_table(("metric", "value"), rows)]


def _data(facts: CardFacts) -> list[str]:
    section = facts.recipe.get("data") or {}
    names = {key: section.get(key) or [] for key in ("datasets", "eval_datasets")}
    lines = [
        f"- `data.{key}`: {', '.join(map(_named, found))}" for key, found in names.items() if found
    ]
    if facts.data:
        lines.append(f"- hash of the encoded examples (xxh3-128): `{facts.data}`")
    return ["## Data", "", *lines, ""] if lines else []


def _base(facts: CardFacts) -> list[str]:
    if facts.base is None:
        return []
    said = facts.license or "unknown: see the page of the base model"
    lines = ["## Base model", "", f"{facts.base}. License: {said}.", ""]
    rows = [(f"`{name}`", f"`{found}`") for name, found in facts.base_files.items()]
    return lines + _table(("file", "xxh3-128"), rows)


def _receipt(facts: CardFacts) -> list[str]:
    if facts.receipt is None:
        return []
    text = json.dumps(facts.receipt, indent=2, ensure_ascii=False)
    return ["## Receipt of the export", "", "```json", text, "```", ""]


def _recipe(facts: CardFacts) -> list[str]:
    if not facts.recipe:
        return []
    return ["## Recipe", "", "```yaml", emit(dict(facts.recipe)).rstrip("\n"), "```", ""]


def _table(head: tuple[str, str], rows: Sequence[tuple[str, object]]) -> list[str]:
    if not rows:
        return []
    lines = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in rows]
    return [f"| {head[0]} | {head[1]} |", "|---|---|", *lines, ""]


def _named(dataset: object) -> str:
    """A dataset of a recipe: its name, or its settings."""
    return f"`{dataset}`" if isinstance(dataset, str) else f"`{json.dumps(dataset)}`"


def _choice(recipe: Facts, name: str) -> str | None:
    """The variant of a section, which is a name, or a name above its settings."""
    value = recipe.get(name)
    if isinstance(value, dict) and len(value) == 1:
        return str(next(iter(value)))
    return value if isinstance(value, str) else None


def _shown(base: str) -> str:
    return Path(base).name if Path(base).is_absolute() else base


def _recipe_in(folder: Path) -> dict[str, Any]:
    try:
        found = parse(read_text(folder / RUN_RECIPE, follow=False)).data
    except RecipeError:
        return {}
    return json.loads(json.dumps(found)) if isinstance(found, Mapping) else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _versions(folder: Path) -> tuple[Mapping[str, str], int | None]:
    if not (folder / MANIFEST).is_file():
        return {}, None
    manifest = open_checkpoint(folder).manifest
    return manifest.versions, manifest.step


def _last_metrics(folder: Path, step: int | None) -> dict[str, float]:
    """The last value of each metric up to the step of the checkpoint."""
    try:
        history = trainer_state.load(folder).get("log_history") or []
    except CheckpointError:
        return {}
    found: dict[str, float] = {}
    for record in history:
        if isinstance(record, dict) and (step is None or record.get("step", 0) <= step):
            found |= {k: v for k, v in record.items() if isinstance(v, int | float)}
    return {name: value for name, value in found.items() if name not in _SKIPPED}


def _fingerprint(state: Facts) -> str | None:
    loader = state.get("loader")
    found = loader.get("dataset") or loader.get("content") if isinstance(loader, dict) else None
    return str(found) if found else None


def _hashes_of_base(folder: Path) -> dict[str, str]:
    try:
        known = base_identity.read(folder)
    except (CheckpointError, OSError, ValueError):
        return {}
    return {name: one.hash for each in known.values() for name, one in each.files.items()}


def _commands(run: Path | None) -> list[str]:
    """The commands of the launches of a run, each once."""
    try:
        text = "" if run is None else (run / LAUNCHES).read_text(encoding="utf-8")
    except OSError:
        return []
    found = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("event") == "launch" and record.get("command"):
            program, _, rest = str(record["command"]).partition(" ")
            found.append(f"{Path(program).name} {rest}".strip())
    return list(dict.fromkeys(found))


def _license_of(base: Path | None) -> str | None:
    """The license in the card of a base model that is on this machine."""
    if base is None or not (base / "README.md").is_file():
        return None
    try:
        found = ModelCard.load(base / "README.md", ignore_metadata_errors=True).data.license
    except (OSError, ValueError):
        return None
    return str(found) if found else None
