"""The embeddings of new tokens, which an adapter may train beside a frozen vocabulary.

Which tokens are new is noted on the model when its embeddings are resized, since a method sees the
model alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from ...errors import RecipeError

_KEY = "method.lora.new_tokens"
_NEW = "new_token_ids"  # an attribute of such models
_UNKNOWN = (0,)  # stands for the tokens of a tokenizer that is not there: names are what matters


def note_new_tokens(model: PreTrainedModel, ids: Sequence[int]) -> None:
    """Note which tokens ``model`` has embeddings for since its tokenizer has got them."""
    vars(model)[_NEW] = sorted(set(ids))


def embeddings_to_train(model: PreTrainedModel) -> dict[str, list[int]]:
    """The new tokens, by the name of each matrix that has a row for them: the input embeddings, and
    the output head unless it is the same matrix. Raises ``RecipeError`` if there are no new tokens,
    or PEFT would compute them differently."""
    ids = list(vars(model).get(_NEW, _UNKNOWN))
    if not ids:
        raise RecipeError(
            f"{_KEY}: there are no new tokens; name them in model.new_special_tokens, or leave it "
            "out"
        )
    names = {module: name for name, module in model.named_modules()}
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embeddings, nn.Embedding) or _has_own_forward(embeddings):
        raise _refusal(model, "its input embeddings are more than rows of a matrix")
    if head is None:
        return {names[embeddings]: ids}
    is_tied = head.weight is embeddings.weight
    if is_tied != bool(model.config.tie_word_embeddings):
        raise _refusal(
            model, "its config.json and its files differ in whether head and embeddings are tied"
        )
    if type(head).forward is not nn.Linear.forward or head.bias is not None:
        raise _refusal(model, "its output head is more than a product with a matrix")
    return {names[embeddings]: ids} if is_tied else {names[embeddings]: ids, names[head]: ids}


def untrained_matrices(model: PreTrainedModel, *, has_grown: bool) -> list[str]:
    """The matrices of ``model`` in which a method that was applied to it does not train the rows of
    new tokens, if any were added (``has_grown``) or rows are trained one by one."""
    ids, found = set(vars(model).get(_NEW, _UNKNOWN)), []
    names = {module: name for name, module in model.named_modules()}
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if module is None:
            continue
        rows = dict(module.named_children()).get("token_adapter")
        if rows is not None:
            is_left = bool(ids - {*rows.token_indices["default"]})
        else:
            is_left = has_grown and not any(p.requires_grad for p in module.parameters())
        found += [names[module].rpartition(".")[2]] if is_left else []
    return found


def refuse_divided(model: nn.Module, *, tp: int, pp: int) -> None:
    """Raise ``RecipeError`` if an adapter in ``model`` trains the embeddings of some tokens, and
    ranks of ``tp`` or ``pp`` would have parts of the vocabulary or of the layers alone."""
    has_rows = any(name.endswith(".token_adapter") for name, _ in model.named_modules())
    if has_rows and max(tp, pp) > 1:
        raise RecipeError(
            f"{_KEY}: PEFT needs the input embeddings and the output head on one rank; leave "
            "parallel.tp and parallel.pp at 1, and use parallel.dp_shard"
        )


def _has_own_forward(embeddings: nn.Embedding) -> bool:
    """Whether they do more than PEFT, which also multiplies by ``embed_scale``."""
    is_plain = type(embeddings).forward is nn.Embedding.forward
    return not is_plain and not hasattr(embeddings, "embed_scale")


def _refusal(model: PreTrainedModel, reason: str) -> RecipeError:
    return RecipeError(
        f"{_KEY}: {type(model).__name__} is not supported: {reason}; name both in "
        "method.lora.modules_to_save instead"
    )
