"""The section ``stage``."""

from __future__ import annotations

from ..arguments import RefusedError
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
            raise RefusedError(switch, f"needs stage: sft, not {stage}")
        if smoothing:
            message = f"has no effect with {switch}; remove it"
            raise RefusedError("label_smoothing_factor", message)
        loss, alpha = _LOSSES[switch]
        more = {} if alpha is None else {f"stage.sft.{alpha}": given[alpha]}
        return {"stage.sft.loss_type": loss, **more}
    return {f"stage.{stage}.label_smoothing_factor": smoothing} if smoothing else {"stage": stage}


def _dpo(given: GivenArguments) -> Settings:
    loss = given["pref_loss"]
    if loss == "kto_pair":
        message = "kto_pair was removed from TRL; write stage: kto, or sigmoid"
        raise RefusedError("pref_loss", message)
    if given["dpo_label_smoothing"] and loss != "sigmoid":
        raise RefusedError("dpo_label_smoothing", "needs pref_loss: sigmoid")
    names = {"sft_weight": "pref_ftx", "label_smoothing": "dpo_label_smoothing"}
    found: Settings = {"stage.dpo.beta": given["pref_beta"], "stage.dpo.loss_type": loss}
    found |= given.on("stage.dpo", names | {"reference": "ref_model"})
    if given["ld_alpha"] is not None:
        found["stage.dpo.ld_alpha"] = given["ld_alpha"]
    return found | ({"stage.dpo.gamma": given["simpo_gamma"]} if loss == "simpo" else {})


def _kto(given: GivenArguments) -> Settings:
    if given["pref_ftx"]:
        raise RefusedError("pref_ftx", "kto has no such term here; write stage: dpo")
    return {
        "stage.kto.beta": given["pref_beta"],
        "stage.kto.desirable_weight": given["kto_chosen_weight"],
        "stage.kto.undesirable_weight": given["kto_rejected_weight"],
    } | given.on("stage.kto", {"reference": "ref_model"})


def _ppo(given: GivenArguments) -> Settings:
    """With the values that TRL 0.9 has where they set none."""
    if given["reward_model_type"] == "api":
        message = "api: a server gets other JSON here; set stage.ppo.reward in a recipe"
        raise RefusedError("reward_model_type", message)
    if given["reward_model"] is None:
        raise RefusedError("reward_model", "is needed for stage: ppo")
    return {
        "stage.ppo.reward": [{"reward_model": {"path": given["reward_model"]}}],
        "stage.ppo.passes": given["ppo_epochs"],
        "stage.ppo.mini_batches": given["ppo_buffer_size"],
        "stage.ppo.kl_coefficient": 0.2,
        "stage.ppo.kl_target": given["ppo_target"],
        "stage.ppo.whiten_rewards": given["ppo_whiten_rewards"],
        "stage.ppo.normalize_scores": given["ppo_score_norm"],
        "stage.ppo.temperature": given["temperature"],
        "stage.ppo.max_new_tokens": given["max_new_tokens"],
    } | given.on("stage.ppo", {"reference": "ref_model"})


_STAGES = {"pt": _text, "sft": _text, "dpo": _dpo, "kto": _kto, "ppo": _ppo}


def _stage(given: GivenArguments) -> Settings:
    stage = given["stage"]
    if given["label_smoothing_factor"] and stage not in ("pt", "sft"):
        message = f"{stage} has no such loss; dpo has dpo_label_smoothing"
        raise RefusedError("label_smoothing_factor", message)
    return _STAGES[stage](given) if stage in _STAGES else {"stage": stage}


STAGE = (("stage", _stage),)
