"""Responses to a list of prompts, on any number of ranks, with the same result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass

from ..data.text.prompts import Prompt
from ..errors import DataError, TemplateError
from ..generate.generation import context_length, room
from ..generate.responses import decoder
from ..generate.section import GenerateSection
from ..parallel.world import World
from ..recipe.prediction import Prediction, load
from .answer_journal import Output, open_journal
from .conversation import Answer, answer_of, finish_reason, with_thinking
from .model_loading import LoadedModel, open_model, refuse_reward_model

# A bar for work of a title and a length: entered, it gives what is called with each advance.
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class AnswerOptions:
    """How to answer, beside the generation settings."""

    seed: int = 42
    thinks: bool | None = None  # switches the thinking of the template; None changes nothing


DEFAULTS = AnswerOptions()


def answer_prompts(
    asked: Prediction,
    path: str,
    overrides: Sequence[str],
    prompts: Sequence[Prompt],
    world: World,
    *,
    output: Output,
    options: AnswerOptions = DEFAULTS,
    progress: Progress,
) -> list[Answer]:
    """The answer to every prompt, in order, in every process of ``world``. ``asked`` is what
    ``path`` and ``overrides`` say; what they leave open of generation, the model's run says.
    Answers are stored beside ``output`` as they are made. Raises as ``open_model`` and ``predict``
    do."""
    opened = open_model(**asdict(asked.model), world=world, parallel=asked.parallel)
    opened = with_thinking(opened, options.thinks)
    section = load(path, overrides, generate=opened.generate).generate
    with progress("answers", len(prompts)) as advance:
        seed = options.seed
        return predict(opened, prompts, section, seed=seed, on_answered=advance, output=output)


def predict(
    opened: LoadedModel,
    prompts: Sequence[Prompt],
    section: GenerateSection,
    *,
    system: str | None = None,
    seed: int = 42,
    on_answered: Callable[[int], None] | None = None,
    output: Output | None = None,
) -> list[Answer]:
    """The response to every prompt, in order, on every rank of ``opened.world``. The prompts are
    divided among the replicas of the model. Without a chat template, texts are continued.

    Args:
        opened: the model.
        prompts: conversations that end in a user turn.
        section: generation settings, and ``batch_size``.
        system: a system message for prompts without one.
        seed: a sample depends only on it, the prompt and the settings.
        on_answered: called with numbers of responses as they end.
        output: beside which the responses are stored as they are made, and from which those of an
            earlier attempt are taken; the caller writes it, and then removes them.

    Raises ``DataError`` if a prompt leaves no room, or the model supports no conversations.
    """
    refuse_reward_model(opened)
    asked = [_ids(opened, prompt.with_system(system)) for prompt in prompts]
    left = [room(opened.model, ids) for ids in asked]
    _refuse_full(opened, prompts, asked, left)
    store = None if output is None else open_journal(output, opened, asked, section, seed)
    decode = decoder(opened.tokenizer)
    found = opened.network.generate(
        asked,
        section,
        seed=seed,
        stop_token_ids=opened.stop_token_ids,
        decode=decode,
        on_answered=on_answered,
        store=store,
    )
    return [
        answer_of(opened, one.text(decode), finish_reason(one, space), prompt.tools)
        for one, space, prompt in zip(found, left, prompts, strict=True)
    ]


def _ids(opened: LoadedModel, prompt: Prompt) -> list[int]:
    if opened.template is not None:
        try:
            return opened.prompt(prompt.messages, prompt.tools, prompt.template_arguments)
        except TemplateError as error:
            raise TemplateError(f"{prompt.origin}: {error}") from None
    if [message.role for message in prompt.messages] != ["user"] or prompt.tools:
        raise TemplateError(
            f"{prompt.origin}: this model has no chat template, so it supports plain texts "
            "only, without a system message"
        )
    return opened.continuation(prompt.messages[0].content)


def _refuse_full(
    opened: LoadedModel,
    prompts: Sequence[Prompt],
    asked: Sequence[Sequence[int]],
    left: Sequence[int | None],
) -> None:
    """Check all prompts before the first response: an error afterwards would come too late."""
    full = [i for i, space in enumerate(left) if space == 0]
    if full:
        first, more = full[0], len(full) - 1
        also = f" ({more:,} more of {len(prompts):,} prompts are too long)" if more else ""
        raise DataError(
            f"{prompts[first].origin}: no room for a response: the prompt has "
            f"{len(asked[first]):,} tokens, the model's context length is "
            f"{context_length(opened.model):,}{also}"
        )
