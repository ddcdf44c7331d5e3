"""Verify an exported artefact against its receipt, and against the checkpoint that it was made of.

The checkpoint is opened as for chat, an adapter on its base; the artefact by transformers. Both
compute in float32, one after the other.
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForSequenceClassification

from ...batch import SCORES
from ...checkpoint.converting.targets import TARGETS, HuggingFaceModel
from ...data.example import Example, Message
from ...data.text.collation import collate
from ...data.text.ranking import up_to_last_label
from ...errors import ModelError, TemplateError, installation
from ...generate.generation import context_length
from ...model.config import auto_class
from ...model.loading import device
from ...network.heads import HEADS, V_HEAD
from ...recipe.prediction import PredictModel
from ...schema.locations import ModelPath
from ...storage import files
from ..model_loading import LoadedModel, ModelFolders, find_parts, open_predicted
from .opened_alone import ReadAlone, read_alone
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
    """The memory that a verification takes, and what is free."""

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


def compare_alone(
    target: str | Path, *, checkpoint: str | Path | None = None, base: str | Path | None = None
) -> ReadAlone:
    """What differs between the artefact ``target`` by itself and the run, as far as no model says
    it. Arguments and errors as ``verify_export``."""
    artefact_path = Path(target).expanduser().absolute()
    receipt = read_receipt(artefact_path)
    _refuse_adapter(receipt.artefact)
    parts = _parts(receipt.made_from, checkpoint, base)
    return read_alone(artefact_path, receipt.artefact, parts)


def verify_export(
    target: str | Path, *, checkpoint: str | Path | None = None, base: str | Path | None = None
) -> OutputComparison:
    """Verify the artefact ``target``, and write the result into its receipt.

    Args:
        target: the folder or file that an export wrote.
        checkpoint: what it was made from, if that moved.
        base: the base of its adapter, if that moved.

    Raises:
        ModelError: no receipt, files that changed, another checkpoint or base than the artefact was
            made from, or a package that is missing.
    """
    artefact_path = Path(target).expanduser().absolute()
    receipt = read_receipt(artefact_path)
    packages = _packages(receipt.artefact)
    if problems := changed_files(artefact_path, receipt):
        raise ModelError(f"{artefact_path}: {'; '.join(problems)}; export it again")
    _refuse_adapter(receipt.artefact)
    parts = _parts(receipt.made_from, checkpoint, base)
    _refuse_changed(receipt.made_from, parts)
    base = None if parts.adapter is None else ModelPath(parts.model)
    path, reading = ModelPath(parts.folder), parts.reading
    opened = open_predicted(PredictModel(path=path, base=base, reading=reading, dtype="float32"))
    probes = probes_of(opened)
    if parts.gives_scores:
        rewards = rewards_of(opened, probes)
    else:
        logps = logps_of(opened.model, probes)
    # The memory of one model in float32 was announced, not that of two.
    del opened
    gc.collect()
    # Opened by transformers alone, the checkpoint as chat does, an adapter by PEFT: neither uses
    # the code that wrote the artefact. To compare tensors by our own reader would prove only that
    # it understands our writer.
    model = _open_artefact(artefact_path, receipt.artefact)
    if parts.gives_scores:
        actual = artefact_rewards(model, _v_head_of(artefact_path), probes)
        result = compare_rewards(receipt.artefact, actual, rewards, len(probes))
    else:
        result = compare_texts(receipt.artefact, probes, logps_of(model, probes), logps)
    readers = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    store(artefact_path, replace(receipt, verified={**result.as_data(), "readers": readers}))
    return result


def _refuse_adapter(artefact: Artefact) -> None:
    if artefact.to == "gguf-adapter":
        raise ModelError("no package of Python opens an adapter in GGUF; try it with llama.cpp")


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
    options: dict[str, Any] = {} if target.is_dir() else {"gguf_file": target.name}
    options |= {"local_files_only": True, "trust_remote_code": False}
    is_scored = artefact.to == "reward" and _v_head_of(target) is None
    try:
        config = AutoConfig.from_pretrained(folder, **options)
        written_by = TARGETS.get(artefact.to, HuggingFaceModel)
        for name, value in written_by.unread_settings(target).items():
            setattr(config, name, value)
        loader = AutoModelForSequenceClassification if is_scored else auto_class(config)
        options |= {"config": config, "dtype": torch.float32}
        return loader.from_pretrained(folder, **options).to(device()).eval()
    except _OF_LOADERS as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if "ignore_mismatched_sizes" in reason:
            reason = "it reads the settings in part, and builds other shapes; the file has its own"
        raise UnopenedError(f"{target}: transformers cannot open it: {reason}") from None


def _v_head_of(target: Path) -> torch.Tensor | None:
    """The head [1, D] beside a language model; None if there is none."""
    path = target / f"{HEADS['values']}.safetensors"
    return load_file(path)[V_HEAD].float() if path.is_file() else None


def _parts(
    origin: ExportOrigin, checkpoint: str | Path | None, base: str | Path | None
) -> ModelFolders:
    """The folders from which the artefact was made, wherever they are now."""
    if checkpoint is None and not files.is_folder(Path(origin.checkpoint)):
        raise ModelError(
            f"{origin.checkpoint}, from which it was exported, does not exist; if it moved, name "
            "it with --checkpoint"
        )
    if origin.base is None:
        return find_parts(checkpoint or origin.checkpoint, reading=origin.reading)
    if base is None and not files.is_folder(Path(origin.base)):
        raise ModelError(
            f"{origin.base}, the base of its adapter, does not exist; if it moved, name it with "
            "--base"
        )
    path, base = checkpoint or origin.checkpoint, base or origin.base
    return find_parts(path, base=base, reading=origin.reading)


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


PROMPTS = (
    "Name the capital of France, and a river that flows through it.",
    "What is 17 + 25? Answer with the number only.",
    "Write a Python function that reverses a string.",
    "Translate into German: The weather is nice today.",
    "用一句话介绍长城。",
    "Once upon a time",
)
RESPONSES = ("Paris is on the Seine; the sum is 42.", "I do not know.")

# In nats per token, of the loss and of the probability that the checkpoint gives to the artefact's
# tokens. Unequal tokens would fail where the checkpoint is undecided, and tell nothing of how wrong
# the others are (docs/decisions/0067).
EXACT = 1e-3  # other orders of summation in float32
BOUNDS: Mapping[str, float] = {
    **dict.fromkeys(("float32", "f32"), EXACT),
    **dict.fromkeys(("bfloat16", "float16", "bf16", "f16"), 0.02),
    **dict.fromkeys(("q8_0", "w8a8", "fp8", "q6_k"), 0.1),
    **dict.fromkeys(("q5_k_m", "q5_k_s", "q5_0"), 0.2),
    **dict.fromkeys(("q4_k_m", "q4_k_s", "q4_0", "w4a16"), 0.5),
}
"""Nats per token by which the loss may differ, and by which the artefact's most probable tokens may
be less probable than the checkpoint's. Chosen here, with room over what small models show."""

Probe = Sequence[int]  # the token ids of a conversation, up to its end token


def probes_of(opened: LoadedModel) -> Sequence[Probe]:
    """The conversations that fit the model's positions; plain text for a model that writes text
    without a template for them. Raises ``ModelError`` if there are none."""
    limit = context_length(opened.model) or sys.maxsize
    codec = opened.codec.with_section(replace(opened.codec.section, cutoff_len=limit))
    pairs = [(prompt, response) for prompt in PROMPTS for response in RESPONSES]
    chats = [
        Example((Message("user", prompt), Message("assistant", response)), origin="a probe")
        for prompt, response in pairs
    ]
    try:
        if opened.template is None and (opened.classes or not opened.gives_scores):
            raise TemplateError("it has no template")
        probes = [
            [int(i) for i in up_to_last_label(outcome[-1])["input_ids"]]
            for outcome in codec.encode_chats(chats)
            if isinstance(outcome, list | tuple)  # neither dropped nor truncated
        ]
    except TemplateError as error:
        if opened.gives_scores and opened.classes is None:
            raise ModelError(f"{opened.folder}: no rewards can be compared: {error}") from None
        texts = [opened.continuation(" ".join(pair)) for pair in pairs]
        probes = [ids for ids in texts if len(ids) <= limit]
    if not probes:
        raise ModelError(f"{opened.folder}: no probe fits its context length of {limit}")
    return probes


@torch.no_grad()
def logps_of(model: Any, probes: Sequence[Probe]) -> list[torch.Tensor]:
    """[T, V] Of each probe: what a transformers model says of every next token."""
    rows = model.get_input_embeddings().weight.shape[0]
    if (largest := max(i for ids in probes for i in ids)) >= rows:
        raise ModelError(f"it has embeddings of {rows} tokens, but the probes have token {largest}")
    place = next(model.parameters()).device
    inputs = [torch.tensor([ids], device=place) for ids in probes]
    return [F.log_softmax(model(input_ids=ids).logits[0, :-1].float(), -1).cpu() for ids in inputs]


@dataclass(frozen=True)
class OutputComparison:
    """The outputs of an artefact beside those of its checkpoint."""

    figures: Mapping[str, float]  # for the receipt
    error: float  # what may be ``bound`` at most
    bound: float
    text: str  # for people

    @property
    def is_within(self) -> bool:
        """Whether the artefact computes the same, up to its format."""
        return self.error <= self.bound  # not so for NaN

    def as_data(self) -> dict[str, Any]:
        """For the receipt."""
        return {**self.figures, "bound": self.bound, "passed": self.is_within}


def compare_texts(
    artefact: Artefact,
    probes: Sequence[Probe],
    actual: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
) -> OutputComparison:
    """What both say of the next tokens. ``regret`` are the nats per token by which the checkpoint
    finds the artefact's most probable tokens less probable than its own: 0 where they are equal,
    and nearly so where it is undecided."""
    width = min(actual[0].shape[1], expected[0].shape[1])  # a file may have rows without a token
    artefact_logps, checkpoint_logps = (
        torch.cat(list(logps))[:, :width].double() for logps in (actual, expected)
    )
    targets = torch.tensor([i for ids in probes for i in ids[1:]])[:, None]
    best, chosen = checkpoint_logps.argmax(1, keepdim=True), artefact_logps.argmax(1, keepdim=True)
    loss, checkpoint_loss = (
        -float(logps.gather(1, targets).mean()) for logps in (artefact_logps, checkpoint_logps)
    )
    regret = float((checkpoint_logps.gather(1, best) - checkpoint_logps.gather(1, chosen)).mean())
    num_equal, bound = int((best == chosen).sum()), bound_of(artefact)
    figures = {
        "loss": loss,
        "checkpoint_loss": checkpoint_loss,
        "equal_tokens": num_equal,
        "compared_tokens": len(best),
        "regret": regret,
    }
    text = (
        f"loss {loss:.4f}, of the checkpoint {checkpoint_loss:.4f}; {num_equal} of {len(best)} "
        f"most probable tokens are equal, the others cost {regret:.4f} nats per token (bound of "
        f"both {bound:g})"
    )
    return OutputComparison(figures, _largest([loss - checkpoint_loss, regret]), bound, text)


def rewards_of(opened: LoadedModel, probes: Sequence[Probe]) -> list[float]:
    """Of a checkpoint of a reward model, or of a classifier the logits of all classes."""
    rewards = []
    with opened.network.evaluating():
        for ids in probes:
            item = {"input_ids": list(ids), "labels": list(ids)}
            batch = collate([item], packing=False).to(device())
            values = opened.network.forward(batch, SCORES).values
            assert values is not None
            rewards += values.double().flatten().tolist()
    return rewards


@torch.no_grad()
def artefact_rewards(model: Any, head: torch.Tensor | None, probes: Sequence[Probe]) -> list[float]:
    """Of a transformers model for sequence classification, or of the decoder of a language model
    whose last hidden states the ``head`` [1, D] reads."""
    rewards = []
    for ids in probes:
        inputs = torch.tensor([ids], device=device())
        if head is None:
            rewards += model(input_ids=inputs).logits[0].tolist()
        else:
            states_TD = model.get_decoder()(input_ids=inputs).last_hidden_state[0]
            rewards.append((states_TD[-1].float() @ head[0].to(states_TD.device)).item())
    return rewards


_SCORES = ("rewards", "logits")  # of one label, and of several classes


def compare_rewards(
    artefact: Artefact, actual: Sequence[float], expected: Sequence[float], num_probes: int
) -> OutputComparison:
    """The rewards of both, or the logits of classes. A reward is a logit, so its bound is that of
    losses; of large ones, relative to them."""
    largest = _largest(expected)
    worst = _largest([a - e for a, e in zip(actual, expected, strict=True)])
    bound = bound_of(artefact) * max(1.0, largest)
    text = (
        f"the {_SCORES[len(actual) > num_probes]} of {num_probes} fixed conversations, up to "
        f"{largest:.3f}, differ by at most {worst:.5f} (bound {bound:g})"
    )
    figures = {"num_probes": num_probes, "largest": largest, "difference": worst}
    return OutputComparison(figures, worst, bound, text)


def _largest(values: Sequence[float]) -> float:
    """The largest absolute value; NaN if there is one among them, which ``max`` may lose."""
    return torch.tensor(values, dtype=torch.float64).abs().max().item()


def bound_of(artefact: Artefact) -> float:
    """That of its format; exact weights differ by the order of sums alone."""
    return BOUNDS.get(artefact.type, EXACT) if artefact.is_rounded else EXACT
