"""The section ``stage``."""

from __future__ import annotations

from collections.abc import Callable

from ..arguments.argument import RefusedArgumentError
from ..given import GivenArguments, Settings

_LOSSES = {  # of several the first one counts, as there
    "use_dft_loss": ("dft", None),
    "use_eaft_loss": ("eaft", "eaft_alpha"),
    "use_asft_loss": ("asft", "asft_alpha"),
}


def _text(given: GivenArguments) -> Settings:
    stage, smoothing = given["stage"], given["label_smoothing_factor"]
    if switch := next((name for name in _LOSSES if given[name]), None):
        if stage != "sft":
            raise RefusedArgumentError(switch, f"needs stage: sft, not {stage}")
        if smoothing:
            message = f"has no effect with {switch}; remove it"
            raise RefusedArgumentError("label_smoothing_factor", message)
        loss, alpha = _LOSSES[switch]
        more = {} if alpha is None else {f"stage.sft.{alpha}": given[alpha]}
        return {"stage.sft.loss_type": loss, **more}
    return {f"stage.{stage}.label_smoothing_factor": smoothing} if smoothing else {"stage": stage}


def _dpo(given: GivenArguments) -> Settings:
    loss = given["pref_loss"]
    if loss == "kto_pair":
        message = "kto_pair was removed from TRL; write stage: kto, or sigmoid"
        raise RefusedArgumentError("pref_loss", message)
    found: Settings = {"stage.dpo.beta": given["pref_beta"], "stage.dpo.loss_type": loss}
    if given["pref_ftx"]:
        found["stage.dpo.sft_weight"] = given["pref_ftx"]
    if given["dpo_label_smoothing"]:
        if loss != "sigmoid":
            raise RefusedArgumentError("dpo_label_smoothing", "needs pref_loss: sigmoid")
        found["stage.dpo.label_smoothing"] = given["dpo_label_smoothing"]
    if given["ld_alpha"] is not None:
        found["stage.dpo.ld_alpha"] = given["ld_alpha"]
    if loss == "simpo":
        found["stage.dpo.gamma"] = given["simpo_gamma"]
    return found | _reference(given, "dpo")


def _kto(given: GivenArguments) -> Settings:
    if given["pref_ftx"]:
        raise RefusedArgumentError("pref_ftx", "kto has no such term here; write stage: dpo")
    found: Settings = {
        "stage.kto.beta": given["pref_beta"],
        "stage.kto.desirable_weight": given["kto_chosen_weight"],
        "stage.kto.undesirable_weight": given["kto_rejected_weight"],
    }
    return found | _reference(given, "kto")


def _reference(given: GivenArguments, stage: str) -> Settings:
    model = given["ref_model"]
    return {f"stage.{stage}.reference": model} if model else {}


def _rm(_given: GivenArguments) -> Settings:
    return {"stage": "rm"}


def _ppo(given: GivenArguments) -> Settings:
    """With the values that TRL 0.9 has where they set none."""
    if given["reward_model_type"] == "api":
        message = "api: a server gets other JSON here; set stage.ppo.reward in a recipe"
        raise RefusedArgumentError("reward_model_type", message)
    if given["reward_model"] is None:
        raise RefusedArgumentError("reward_model", "is needed for stage: ppo")
    found: Settings = {
        "reward": [{"reward_model": {"path": given["reward_model"]}}],
        "passes": given["ppo_epochs"],
        "mini_batches": given["ppo_buffer_size"],
        "kl_coefficient": 0.2,
        "kl_target": given["ppo_target"],
        "whiten_rewards": given["ppo_whiten_rewards"],
        "normalize_scores": given["ppo_score_norm"],
        "temperature": given["temperature"],
        "max_new_tokens": given["max_new_tokens"],
    }
    return {f"stage.ppo.{name}": value for name, value in found.items()} | _reference(given, "ppo")


BY_STAGE: dict[str, Callable[[GivenArguments], Settings]] = {
    "pt": _text,
    "sft": _text,
    "rm": _rm,
    "dpo": _dpo,
    "kto": _kto,
    "ppo": _ppo,
}


def _stage(given: GivenArguments) -> Settings:
    stage = given["stage"]
    if given["label_smoothing_factor"] and stage not in ("pt", "sft"):
        message = f"{stage} has no such loss; dpo has dpo_label_smoothing"
        raise RefusedArgumentError("label_smoothing_factor", message)
    return BY_STAGE[stage](given)


STAGE = (("stage", _stage),)
