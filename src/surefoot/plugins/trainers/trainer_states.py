"""The parts of a Hugging Face Trainer as states, and the settings that are not supported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from ...checkpoint.disk.folder import tokenizer_of
from ...checkpoint.state.roles import Stateful
from ...checkpoint.state.states import ModuleState, NamedOptimizer
from ...errors import RunError, counted
from ...model.pretrained import companions
from ...model.pretrained.weights import AdapterWeights, FullWeights, trained


@dataclass
class Generators:
    """The random generators at the beginning of the epoch and, within it, of the next step."""

    epoch: dict[str, Any] = field(default_factory=dict)
    step: dict[str, Any] | None = None  # None: the next step is the first of an epoch

    def state_dict(self) -> dict[str, Any]:
        """Both."""
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Both; the caller sets them at the right moment."""
        self.epoch, self.step = state["epoch"], state["step"]


@dataclass(frozen=True)
class TrainerStates:
    """The states of a Trainer's run for every checkpoint."""

    states: Mapping[str, Stateful]
    kind: Literal["full", "adapter"]
    companions: Mapping[str, bytes]
    optimizer_has_moved: bool  # whether it has any state yet


def refuse_unsupported(trainer: Trainer) -> None:
    """Raise ``RunError`` if the Trainer saves itself, or keeps its state in several places."""
    args = trainer.args
    saves_itself = f"save_strategy is {args.save_strategy.value!r}"
    settings = {
        saves_itself: args.save_strategy != "no",
        "enable_jit_checkpoint is on": args.enable_jit_checkpoint,
        "auto_find_batch_size is on": args.auto_find_batch_size,
    }
    for setting, is_on in settings.items():
        if is_on:
            value = '"no"' if setting == saves_itself else "False"
            raise RunError(
                f"SurefootCheckpoints: {setting}, so the Trainer would save or restart by "
                f"itself; set {setting.split()[0]}={value}"
            )
    kinds = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled,
        "a model that is sharded while it loads": trainer.is_distributed_loading_by_transformers,
        "several processes": args.world_size > 1,
        "several GPUs in one process": args.n_gpu > 1,
    }
    for kind, is_on in kinds.items():
        if is_on:
            raise RunError(
                f"SurefootCheckpoints: {kind}: not supported; it saves the state of one process on "
                "one device"
            )


def parts_of(trainer: Trainer, model: nn.Module, optimizer: Any, scheduler: Any) -> TrainerStates:
    """The states of a run that is about to begin. Raises ``RunError`` for a model of no kind."""
    weights, kind = _weights(model)
    named = list(model.named_parameters())
    if not isinstance(weights, ModuleState):
        named = trained(model, weights.state_dict())
    states: dict[str, Stateful] = {
        "model": weights,
        "optimizer": NamedOptimizer(optimizer, named),
        "scheduler": scheduler,
    }
    if optimizer.scaler is not None:
        states["scaler"] = optimizer.scaler
    files = {**_model_files(model, kind), **_processing_files(trainer)}
    return TrainerStates(states, kind, files, bool(optimizer.state))


def _weights(
    model: nn.Module,
) -> tuple[FullWeights | AdapterWeights | ModuleState, Literal["full", "adapter"]]:
    from peft import PeftModel

    if isinstance(model, PeftModel):
        _refuse_adapters(model)
        return AdapterWeights(model), "adapter"
    if not isinstance(model, PreTrainedModel):
        _refuse_ties(model)
        return ModuleState(model), "full"
    if getattr(model, "_hf_peft_config_loaded", False):
        raise RunError(
            "SurefootCheckpoints: adapters added with add_adapter() are not supported; wrap the "
            "model with peft.get_peft_model() instead"
        )
    return FullWeights(model), "full"


def _refuse_ties(model: nn.Module) -> None:
    if tied := sorted(model.state_dict().keys() - ModuleState(model).state_dict().keys()):
        raise RunError(
            f"SurefootCheckpoints: {tied[0]} is tied to another tensor, and the Trainer can only "
            "load tied tensors into a PreTrainedModel"
        )


def _refuse_adapters(model: Any) -> None:
    """Reject what could not be restored from the one file from which PEFT reads an adapter."""
    if list(model.peft_config) != ["default"]:
        raise RunError(
            f"SurefootCheckpoints: the adapters {', '.join(model.peft_config)}: expected one, "
            "called default"
        )
    weights = AdapterWeights(model)
    known = weights.state_dict()
    if lost := [name for name, _ in trained(model, known) if name not in known]:
        found = counted(len(lost), "trainable parameter is", "trainable parameters are")
        raise RunError(
            f"SurefootCheckpoints: {found} not in a PEFT adapter's file (for example {lost[0]}); "
            "freeze every such parameter, or name its module in modules_to_save"
        )


def _model_files(model: nn.Module, kind: Literal["full", "adapter"]) -> dict[str, bytes]:
    if kind == "adapter":
        return companions.adapter_files(model)
    if not isinstance(model, PreTrainedModel):
        return {}
    has_code = bool(getattr(model.config, "auto_map", None)) and bool(model.name_or_path)
    code = Path(model.name_or_path) if has_code else None
    return companions.model_files(model, code, ())


def _processing_files(trainer: Trainer) -> dict[str, bytes]:
    """The tokenizer's or processor's files; as in the Trainer, the collator's if there is none."""
    processing = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    if isinstance(processing, PreTrainedTokenizerBase):
        own = tokenizer_of(Path(processing.name_or_path))
        return companions.tokenizer_files(processing, own)
    return {} if processing is None else companions.saved_files(processing)
