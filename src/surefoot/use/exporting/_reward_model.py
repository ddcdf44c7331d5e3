"""A reward model, or a classifier, for other tools: transformers' sequence classification with
``score``, which vLLM and OpenRLHF read too, or a language model with ``v_head``, as TRL and
LLaMA-Factory have it."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any, cast

import torch
from safetensors.torch import save
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from ...batch import Classes
from ...checkpoint.converting.targets import RewardHead
from ...checkpoint.layouts.opening import SCORE, open_role
from ...checkpoint.sources import JoinedSource, Renamed, TensorSource, read_whole
from ...errors import ModelError
from ...model.loading import on_meta
from ...model.packed_attention import one_document
from ...network.heads import HEADS
from ..model_loading import ModelFolders

logger = logging.getLogger(__name__)
_FILE = HEADS["values"]


def head_of(parts: ModelFolders, kind: RewardHead) -> TensorSource | None:
    """The head to store as ``kind``: that of a reward model, and that of any other model, such as
    the values of ``stage: ppo``, only as ``v_head``. None if there is none, or, with a warning, if
    it is omitted."""
    head = open_role(parts.folder, _FILE)
    if head is None or parts.is_scorer_run or kind == "v_head":
        return head
    logger.warning(
        "%s: its %s is not exported: the files of a language model have none; --reward-head v_head "
        "writes it beside them",
        parts.folder,
        _FILE,
    )
    return None


def as_sequence_classification(
    source: TensorSource,
    head: TensorSource,
    model: PreTrainedModel,
    classes: Classes | None = None,
) -> tuple[TensorSource, dict[str, object]]:
    """``source``, the weights of the language model ``model`` (on the meta device), with the head
    ``score`` in place of its output embeddings, and the changes of config.json: the names of
    ``classes``, or of one label for a reward. Opens with ``AutoModelForSequenceClassification``.
    Raises ``ModelError`` if transformers has none for it."""
    classifier = sequence_classification_of(model)
    tied = set(classifier.all_tied_weights_keys)
    own = {name for name, _ in classifier.named_parameters(remove_duplicate=False)}
    expected_names = own - tied - {SCORE}  # the score of a base is replaced
    present = {name: name for name in source.shapes() if name in expected_names}
    if missing := sorted(expected_names - present.keys()):
        raise _unknown(model, f"{type(classifier).__name__} has other tensors ({missing[0]})")
    score = Renamed(head, {SCORE: f"{_FILE}.weight"})
    names = ("LABEL_0",) if classes is None else classes.names
    changes: dict[str, object] = {
        "architectures": [type(classifier).__name__],
        # transformers takes the number of labels, and so of outputs, from this.
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }
    if classes is not None:
        kind = "multi" if classes.is_multi_label else "single"
        changes["problem_type"] = f"{kind}_label_classification"
    return JoinedSource([("", Renamed(source, present)), ("", score)]), changes


def sequence_classification_of(model: PreTrainedModel) -> PreTrainedModel:
    """transformers' sequence classification of one label on the language model ``model``, on the
    meta device. Raises ``ModelError`` if there is none whose head reads the same hidden states."""
    labels = {"id2label": {0: "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    config = type(model.config).from_dict({**model.config.to_dict(), **labels})
    try:
        with torch.device("meta"):
            classifier = AutoModelForSequenceClassification.from_config(config)
    except ValueError:
        raise _unknown(model, "transformers has no sequence classification for it") from None
    # MiniCPM3 scales its hidden states before the output head: its exported rewards were an eighth
    # of the checkpoint's (docs/decisions/0049).
    if not _head_reads_last_hidden_states(model):
        raise _unknown(model, "it changes its last hidden states before the head")
    return cast(PreTrainedModel, classifier)


def v_head_file(head: TensorSource) -> dict[str, bytes]:
    """The head in a file of its own beside the language model, with a bias of 0. Raises
    ``ModelError``: it gives more than one number."""
    weight = read_whole(head, f"{_FILE}.weight")
    if len(weight) > 1:
        raise ModelError(
            f"--reward-head v_head: it stores one number, and this head scores {len(weight)} "
            "classes; omit the option"
        )
    tensors = {"v_head.summary.weight": weight, "v_head.summary.bias": weight.new_zeros(1)}
    return {f"{_FILE}.safetensors": save(tensors)}


def _head_reads_last_hidden_states(model: PreTrainedModel) -> bool:
    """Whether the output head, and so the head of rewards, gets what ``score`` gets. Runs the
    model's code on two tokens, on the meta device."""
    seen: dict[str, torch.Tensor] = {}

    def entering(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen["head"] = inputs[0]

    def leaving(_: nn.Module, __: object, outputs: Any) -> None:
        seen["last"] = outputs[0]

    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    with ExitStack() as stack, torch.no_grad(), on_meta(model):
        stack.callback(model.get_output_embeddings().register_forward_pre_hook(entering).remove)
        for inner in {model.base_model, model.get_decoder()}:
            stack.callback(inner.register_forward_hook(leaving).remove)
        model(input_ids=ids, use_cache=False, **{"attention_mask": None, **one_document(model, 2)})
    head, last = seen["head"], seen["last"]
    # A slice of all positions is another object, but a view of the same one (`_base`).
    owners = [tensor if tensor._base is None else tensor._base for tensor in (head, last)]
    return owners[0] is owners[1] and head.shape == last.shape


def _unknown(model: PreTrainedModel, reason: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__}: {reason}, so its head cannot be stored as score; add "
        "--reward-head v_head"
    )
