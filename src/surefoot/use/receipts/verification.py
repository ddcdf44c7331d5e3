"""Verify an exported artefact against its receipt, and against the checkpoint that it was made of.

The checkpoint is opened as for chat, an adapter on its base; the artefact by transformers. Both
compute in float32, one after the other.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from ...errors import DataError, ModelError, RecipeError
from ...storage import files
from ..model_loading import ModelFolders, find_parts, is_reward, open_model
from .artefact_loading import check_package, open_artefact, readers, v_head_of, without_bars
from .card import write_quality
from .probes import ProbeComparison, compare, outputs_of, probes_of
from .quality import HeldOutRow, Quality, held_out_rows, quality_of, scores
from .receipt import ExportOrigin, Receipt, changed_files, origin_of, read_receipt, update
from .reward_probes import (
    RewardComparison,
    artefact_rewards,
    compare_rewards,
    encoded_probes,
    rewards_of,
)

_FLOATS = ("float32", "float16", "bfloat16", "f32", "f16", "bf16")
_BYTES = 4  # of a weight in float32
_BESIDE = 1.2  # what else is in memory
_SPEED = 0.5e9  # bytes per second that load and compute together, on a laptop


@dataclass(frozen=True)
class Verification:
    """What was found."""

    comparison: ProbeComparison | RewardComparison
    quality: Quality | None = None
    why_no_quality: str = ""


@dataclass(frozen=True)
class Cost:
    """Of a verification."""

    num_bytes: int
    available: int

    @property
    def seconds(self) -> float:
        """A rough estimate on a CPU."""
        return 2 * self.num_bytes / _SPEED

    @property
    def fits(self) -> bool:
        """Whether the memory is there now."""
        return self.num_bytes <= self.available


def verification_cost(target: Path) -> Cost:
    """The memory and time that ``verify_export`` takes."""
    size = read_receipt(target).artefact.num_weights * _BYTES * _BESIDE
    memory = psutil.virtual_memory().available
    if torch.cuda.is_available():
        memory = torch.cuda.mem_get_info()[0]
    return Cost(int(size), memory)


def verify_export(
    target: str | Path,
    *,
    checkpoint: str | Path | None = None,
    base: str | Path | None = None,
) -> Verification:
    """Verify the artefact ``target``, and write the result into its receipt, of quantized weights
    with the loss of quality on held-out rows.

    Args:
        target: the folder or file that an export wrote.
        checkpoint: what it was made from, if that moved.
        base: the base of its adapter, if that moved.

    Raises:
        ModelError: no receipt, files that changed, another checkpoint or base than the artefact was
            made from, or a package that is missing.
    """
    found = Path(target).expanduser().absolute()
    receipt = read_receipt(found)
    check_package(receipt.artefact)
    if problems := changed_files(found, receipt):
        raise ModelError(f"{found}: {'; '.join(problems)}; export it again")
    parts = _parts(receipt, checkpoint, base)
    _refuse_changed(receipt.made_from, parts)
    compute = _rewards if is_reward(parts) else _texts
    result = compute(found, receipt, parts)
    quality = None if result.quality is None else result.quality.as_data()
    verified = {**result.comparison.as_data(), "readers": readers(receipt.artefact)}
    write_quality(found, update(found, receipt, verified=verified, quality=quality))
    return result


def _texts(target: Path, receipt: Receipt, parts: ModelFolders) -> Verification:
    """Of a model that writes text."""
    rows, why = _rows(parts, receipt)
    opened = open_model(parts.folder, base=_base(parts), dtype="float32")
    probes = probes_of(opened)
    expected, before = outputs_of(opened.model, probes), scores(opened.model, rows)
    del opened
    gc.collect()
    model = open_artefact(target, receipt.artefact, parts.model)
    with without_bars():  # some are opened completely by the first pass
        result = compare(receipt.artefact, outputs_of(model, probes), expected)
    quality = quality_of(scores(model, rows), before) if rows else None
    return Verification(result, quality, why)


def _rewards(target: Path, receipt: Receipt, parts: ModelFolders) -> Verification:
    """Of a reward model."""
    opened = open_model(parts.folder, base=_base(parts), dtype="float32")
    probes = encoded_probes(opened)
    expected = rewards_of(opened, probes)
    del opened
    gc.collect()
    model = open_artefact(target, receipt.artefact, parts.model)
    found = artefact_rewards(model, v_head_of(target), probes)
    return Verification(compare_rewards(receipt.artefact, found, expected))


def _rows(parts: ModelFolders, receipt: Receipt) -> tuple[list[HeldOutRow], str]:
    """The held-out rows, if the weights are quantized; otherwise, or if there are none, why not."""
    if receipt.artefact.type in _FLOATS:
        return [], ""
    try:
        return held_out_rows(parts), ""
    except (RecipeError, DataError, ModelError) as error:
        return [], str(error).splitlines()[0]


def _base(parts: ModelFolders) -> Path | None:
    return None if parts.adapter is None else parts.model


def _parts(
    receipt: Receipt, checkpoint: str | Path | None, base: str | Path | None
) -> ModelFolders:
    """The folders from which the artefact was made, wherever they are now."""
    made = receipt.made_from
    if checkpoint is None and not files.is_folder(Path(made.checkpoint)):
        raise ModelError(
            f"{made.checkpoint}, from which it was exported, does not exist; if it moved, name it "
            "with --checkpoint"
        )
    if made.base is None:
        return find_parts(checkpoint or made.checkpoint)
    if base is None and not files.is_folder(Path(made.base)):
        raise ModelError(
            f"{made.base}, the base of its adapter, does not exist; if it moved, name it with "
            "--base"
        )
    return find_parts(checkpoint or made.checkpoint, base=base or made.base)


def _refuse_changed(before: ExportOrigin, parts: ModelFolders) -> None:
    """Raise ``ModelError`` if the folders are not those from which the artefact was made."""
    now = origin_of(parts)
    moved = replace(now, checkpoint=before.checkpoint, base=before.base)
    if moved.files == before.files:
        return
    names = before.files.keys() | moved.files.keys()
    other = sorted(n for n in names if before.files.get(n) != moved.files.get(n))
    is_base = before.base is not None and not other[0].startswith("adapter/")
    what = parts.model if is_base else parts.folder
    option = "--base" if is_base else "--checkpoint"
    raise ModelError(
        f"{what}: is not what the artefact was exported from ({', '.join(other[:3])} "
        f"{'differs' if len(other) == 1 else 'differ'}); name the right one with {option}, or "
        "export again"
    )
