"""What LLaMA-Factory does after training, or instead of it: ``do_eval`` and ``do_predict``."""

from __future__ import annotations

from dataclasses import dataclass

from .arguments.argument import RefusedArgumentError
from .given import GivenArguments, Settings
from .rules.train import eval_strategy


@dataclass(frozen=True)
class AfterTraining:
    """An evaluation with the files and metrics of LLaMA-Factory."""

    parts: tuple[str, ...]  # eval, predict
    with_generate: bool  # responses are generated and compared with those of the data
    by_row: bool  # the accuracy of tokens is averaged over rows
    hides_special: bool  # special tokens are not shown in responses


def evaluations_of(given: GivenArguments) -> AfterTraining | None:
    """The evaluation that the arguments ask for, if any; of stage sft alone."""
    evaluates = given["do_eval"] and (eval_strategy(given) == "no" or not given["do_train"])
    parts = [
        name for name, is_on in (("eval", evaluates), ("predict", given["do_predict"])) if is_on
    ]
    if not parts or given["stage"] != "sft":
        return None
    return AfterTraining(
        tuple(parts),
        with_generate=given["predict_with_generate"],
        by_row=given["compute_accuracy"],
        hides_special=given["skip_special_tokens"],
    )


def _consistent(given: GivenArguments) -> Settings:
    """What LLaMA-Factory refuses, too."""
    if given["predict_with_generate"]:
        if given["stage"] != "sft":
            raise RefusedArgumentError("predict_with_generate", "needs stage: sft")
        if given["compute_accuracy"]:
            message = "excludes predict_with_generate; remove one of the two"
            raise RefusedArgumentError("compute_accuracy", message)
    if given["do_predict"]:
        if given["stage"] == "rm":
            message = "of stage rm: `surefoot predict RUN --prompts FILE` scores the rows of a file"
            raise RefusedArgumentError("do_predict", message)
        if given["stage"] == "sft" and not given["predict_with_generate"]:
            raise RefusedArgumentError("do_predict", "needs predict_with_generate: true")
    asks = given["do_predict"] or given["do_eval"]
    if asks and not given["eval_dataset"] and not given["val_size"]:
        name = "do_predict" if given["do_predict"] else "do_eval"
        message = "there are no rows for it; set eval_dataset or val_size"
        raise RefusedArgumentError(name, message)
    return {}


AFTER = (("do_predict", _consistent),)
