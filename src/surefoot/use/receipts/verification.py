"""Verify an exported artefact against its receipt, and against the checkpoint that it was made of.

The checkpoint is opened as for chat, an adapter on its base; the artefact by transformers. Both
compute in float32, one after the other.
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ...errors import ModelError, installation
from ...model.loading import device
from ...network.heads import HEADS, V_HEAD
from ...storage import files
from ..model_loading import ModelFolders, find_parts, is_reward, open_model
from .probes import (
    RewardComparison,
    TextComparison,
    artefact_rewards,
    compare_rewards,
    compare_texts,
    logps_of,
    probes_of,
    rewards_of,
)
from .receipt import Artefact, ExportOrigin, changed_files, origin_of, read_receipt, store

PACKAGES = {"compressed-tensors": "compressed_tensors", "gguf": "gguf"}
_BYTES = 4  # of a weight in float32
_BESIDE = 1.2  # what else is in memory
_OF_LOADERS = (
    *(ValueError, OSError, ImportError, LookupError, RuntimeError),
    *(TypeError, AttributeError, AssertionError),
)


class UnopenedError(ModelError):
    """Transformers does not open what was written."""


@dataclass(frozen=True)
class Cost:
    """Of a verification."""

    num_bytes: int
    available: int

    @property
    def fits(self) -> bool:
        """Whether the memory is there now."""
        return self.num_bytes <= self.available


def verification_cost(target: Path) -> Cost:
    """The memory that ``verify_export`` takes."""
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
) -> TextComparison | RewardComparison:
    """Verify the artefact ``target``, and write the result into its receipt.

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
    packages = _packages(receipt.artefact)
    if problems := changed_files(found, receipt):
        raise ModelError(f"{found}: {'; '.join(problems)}; export it again")
    if receipt.artefact.to == "gguf-adapter":
        raise ModelError("no package of Python opens an adapter in GGUF; try it with llama.cpp")
    parts = _parts(receipt.made_from, checkpoint, base)
    _refuse_changed(receipt.made_from, parts)
    opened = open_model(
        parts.folder, base=None if parts.adapter is None else parts.model, dtype="float32"
    )
    probes = probes_of(opened)
    if is_reward(parts):
        rewards = rewards_of(opened, probes)
    else:
        logps = logps_of(opened.model, probes)
    del opened
    gc.collect()
    model = _open_artefact(found, receipt.artefact)
    result: TextComparison | RewardComparison
    if is_reward(parts):
        own = artefact_rewards(model, _v_head_of(found), probes)
        result = compare_rewards(receipt.artefact, own, rewards)
    else:
        result = compare_texts(receipt.artefact, probes, logps_of(model, probes), logps)
    readers = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    store(found, replace(receipt, verified={**result.as_data(), "readers": readers}))
    return result


def _packages(artefact: Artefact) -> list[str]:
    """The packages that open it. Raises ``ModelError`` if one is missing."""
    names = list(dict.fromkeys(("transformers", PACKAGES.get(artefact.to, "transformers"))))
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ModelError(
                f"the package {name.replace('_', '-')}, which opens the artefact, is "
                f"not installed: {installation(name)}"
            )
    return names


def _open_artefact(target: Path, artefact: Artefact) -> Any:
    """The transformers model, in float32, opened as other programs do. Raises ``UnopenedError``."""
    folder = target if target.is_dir() else target.parent
    given: dict[str, Any] = {} if target.is_dir() else {"gguf_file": target.name}
    given |= {"dtype": torch.float32, "local_files_only": True, "trust_remote_code": False}
    is_scored = artefact.to == "reward" and _v_head_of(target) is None
    loader = AutoModelForSequenceClassification if is_scored else AutoModelForCausalLM
    try:
        return loader.from_pretrained(folder, **given).to(device()).eval()
    except _OF_LOADERS as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnopenedError(f"{target}: transformers cannot open it: {said}") from None


def _v_head_of(target: Path) -> torch.Tensor | None:
    """The head [1, D] beside a language model; None if there is none."""
    path = target / f"{HEADS['values']}.safetensors"
    return load_file(path)[V_HEAD].float() if path.is_file() else None


def _parts(
    made: ExportOrigin, checkpoint: str | Path | None, base: str | Path | None
) -> ModelFolders:
    """The folders from which the artefact was made, wherever they are now."""
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
