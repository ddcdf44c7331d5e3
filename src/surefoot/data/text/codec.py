"""Codec: conversations and documents to ids and labels; every response follows its own prompt.

Every trained response follows exactly the ids that
``tokenizer.apply_chat_template(messages, add_generation_prompt=True)`` gives for the messages
before it; the labels are on the response and its end-of-turn token. A conversation is rendered by
its template, tokenized together with those of its batch, then labeled (``_labels``). One codec
serves a recipe: a stage encodes rows with it, and chat, predict and serve encode prompts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from threading import Lock
from typing import NamedTuple

import xxhash
from transformers import PreTrainedTokenizerBase

from ...batch import IGNORE_INDEX, Features
from ...errors import DataError, TemplateError
from ...storage.files import reading
from ..example import (
    EMPTY,
    JSON,
    MEDIUM,
    Dicts,
    Dropped,
    Encoded,
    Example,
    Message,
    Truncated,
    items_of,
    sources_of,
)
from ..media.batch_media import BatchMedia
from ..media.files import Seen
from ..section import DataSection
from . import _pictures
from ._labels import RenderedConversation, label_responses, label_text
from ._tokenization import RenderedText, Tokenization, Tokens, canonical
from .templates import AUTO, Template, check_row_arguments, render
from .templates._response_spans import ResponseLocator, ResponseSpan, check_tools
from .templates.render import Renderer

VERSION = 5  # of what this module makes of an example; part of the fingerprint

MOST_ARGUMENTS = 64  # of rows, for which a codec is kept

NOTHING = Dropped("no response to train on in this conversation")
PLAIN = Dropped("plain text without a response; stage: pt trains on that")
NO_ROOM = Dropped("the prompt leaves no room for a response within data.cutoff_len")
TOO_LONG = Dropped("longer than data.cutoff_len (on_too_long: drop)")
UNCLEAR = Dropped(
    "a response has </think> in a line of text and no <think> before it; begin the response with "
    "<think> if a thought ends there, or write `</think>` in backticks if it is text"
)
NO_TEXT = Dropped("empty text")
ONLY_IDS = Dropped("token ids, which do not say what is the prompt")
CUT_THROUGH = Dropped("data.cutoff_len would cut through a picture")


def _has_label(labels: Sequence[int]) -> bool:
    """Whether one is trained on; nothing stands before the first."""
    return any(label != IGNORE_INDEX for label in labels[1:])


class NextTurn(NamedTuple):
    """What stands between a response and the next one."""

    follows: int  # the token that ends the response
    ids: list[int]


class Codec:
    """Converts examples to token ids and labels, and messages to prompts, for one recipe.

    Several threads may encode at the same time: while one is in the Rust tokenizer, another one
    renders.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: Template | None,
        section: DataSection,
        media: BatchMedia | None = None,
        why_text: str = "this model or stage reads text alone",
    ) -> None:
        """``template`` may be None if only documents are encoded (``stage: pt``), ``media`` if the
        model or the stage reads text alone, for the reason ``why_text``."""
        self.tokenizer = tokenizer
        self.section = section
        self.media = media
        self.why_text = why_text
        self._template = template
        self._of_arguments: dict[str, Codec] = {}  # see ``with_arguments``
        self._lock = Lock()  # what is Python; a template renders for one thread at a time only
        self._check_ends()

    def encode_chats(self, examples: Sequence[Example]) -> list[Encoded]:
        """Ids and labels of each conversation within ``cutoff_len``, or why it is dropped."""
        outcomes = list[RenderedConversation | Dropped]()
        with self._lock:
            for example in examples:
                with reading(DataError, example.origin):
                    outcomes.append(self._render_row(example))
            chat = self._chat
        texts = [each.text for each in outcomes if isinstance(each, RenderedConversation)]
        with reading(DataError, f"{examples[0].origin if examples else ''}, or a row behind it"):
            tokens = iter(chat.encode(texts))  # in Rust, without the lock: others may render
        with self._lock:
            return [
                outcome if isinstance(outcome, Dropped) else self._label(outcome, next(tokens))
                for outcome in outcomes
            ]

    def _render_row(self, example: Example) -> RenderedConversation | Dropped:
        """Render a conversation by the template with the arguments of its row."""
        codec = self
        if example.template_arguments:
            try:  # what the arguments of a row break costs that row, not the run
                codec = self.with_arguments(example.template_arguments)
                _ = codec._locator
            except TemplateError as error:
                return Dropped(str(error))
        return codec._render(example)

    def _render(self, example: Example) -> RenderedConversation | Dropped:
        """Render a conversation up to its last trained message, and find what is trained of it."""
        messages = self._with_system(example.messages)
        trained = [i for i in range(len(messages)) if self._is_trained(messages, i)]
        if not trained:
            return PLAIN if example.text else NOTHING
        if any(messages[i].is_empty for i in trained if messages[i].role == "assistant"):
            return EMPTY
        messages = messages[: trained[-1] + 1]
        if self.media is None:
            self._refuse_pictures(messages, example.origin)
        if any(render.is_unclear(message, self.template.thoughts) for message in messages):
            return UNCLEAR
        locator, is_all_trained = self._locator, self.section.train_on_prompt
        masked = [i for i in range(len(messages)) if i not in trained]
        selected = masked if is_all_trained else trained
        answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
        wanted = answers if is_all_trained else [i for i in answers if i in trained]
        try:
            dicts, tools, marked = self._template_inputs(messages, example.tools)
            text, responses = locator.locate(dicts, tools, wanted)
            spans = [locator.content(dicts, tools, i, text) for i in selected if i not in answers]
            if marked:  # this row may fail, its batch must not
                self._chat.encode([RenderedText(text, marked)])
        except TemplateError as error:
            return Dropped(str(error))
        if is_all_trained:
            spans += [response for response in responses if response.index in masked]
        if self.section.train_on_thoughts != "all":
            responses = [self._without_thought(response) for response in responses]
        rendered = RenderedConversation(
            RenderedText(text, marked),
            responses,
            trained=() if is_all_trained else spans,
            masked=spans if is_all_trained else (),
        )
        if self.media is None:
            return rendered
        return _pictures.place(rendered, messages, self.media, example.origin)

    def _label(self, rendered: RenderedConversation, tokens: Tokens) -> Encoded:
        """The sequences of a conversation, truncated to ``cutoff_len``, or why there is none."""
        if self.section.train_on_prompt:
            sequences = [label_text(rendered, tokens, self._chat)]
        else:
            sequences = label_responses(rendered, tokens, self._chat, self._last_ends)
        sequences = [sequence for sequence in sequences if sequence.num_trained_tokens]
        if not sequences:
            return NOTHING
        truncated = [sequence.truncated(self.section.longest) for sequence in sequences]
        loses_labels = any(
            short is None or short.num_trained_tokens < sequence.num_trained_tokens
            for short, sequence in zip(truncated, sequences, strict=True)
            if short is not sequence
        )
        if loses_labels and self.section.on_too_long == "drop":
            return TOO_LONG
        items = [short.features for short in truncated if short is not None]
        if not items:
            return NO_ROOM
        if self.media is not None:
            processor = self.media.processor
            in_full = [_pictures.attach(item, rendered.pictures, processor) for item in items]
            items = [item for item in in_full if item is not None]
            if len(items) < len(in_full):
                return CUT_THROUGH
        return Truncated(items) if loses_labels else items

    def encode_documents(self, texts: Sequence[str]) -> list[Encoded]:
        """Each text with its first and last token (BOS if the tokenizer has it, EOS), in pieces."""
        with self._lock:
            tokenization, head, tail = self._documents
        marked = [
            RenderedText(tokenization.protect(t), tokenization.spells_control(t)) for t in texts
        ]
        encoded = tokenization.encode(marked)
        return [
            list(self._pieces([*head, *tokens.ids, *tail])) if text else NO_TEXT
            for text, tokens in zip(texts, encoded, strict=True)
        ]

    def encode_texts(self, texts: Sequence[str]) -> list[Encoded]:
        """Each text as the tokenizer encodes it by itself, truncated to ``cutoff_len``; no label
        is set."""
        with self._lock:
            tokenization, (head, tail) = self._documents[0], self._around
        marked = [
            RenderedText(tokenization.protect(t), tokenization.spells_control(t)) for t in texts
        ]
        room = self.section.longest - len(head) - len(tail)
        outcomes: list[Encoded] = []
        for tokens in tokenization.encode(marked):
            ids = [*head, *tokens.ids[:room], *tail]
            item: Features = {"input_ids": ids, "labels": [IGNORE_INDEX] * len(ids)}
            if not tokens.ids or room < 1:
                outcomes.append(NO_TEXT if room > 0 else NO_ROOM)
            elif len(tokens.ids) > room:
                is_dropped = self.section.on_too_long == "drop"
                outcomes.append(TOO_LONG if is_dropped else Truncated([item]))
            else:
                outcomes.append([item])
        return outcomes

    def encode_ids(self, example: Example, *, in_pieces: bool = False) -> Encoded | None:
        """A row of token ids: truncated to ``cutoff_len``, or ``in_pieces`` of it; None for another
        row. Raises ``DataError``: an id is not in the vocabulary."""
        if example.token_ids is None:
            return None
        ids, labels = map(list, example.token_ids)
        if odd := [token for token in ids if not 0 <= token < len(self.tokenizer)]:
            raise DataError(
                f"{example.origin}: the token id {odd[0]} is not in the vocabulary of "
                f"{self.tokenizer.name_or_path}, which has {len(self.tokenizer):,} tokens; use the "
                "tokenizer that made the ids"
            )
        longest = self.section.longest
        loses_labels = not in_pieces and _has_label(labels[longest - 1 :])
        if loses_labels and self.section.on_too_long == "drop":
            return TOO_LONG
        whole: Features = {"input_ids": ids[:longest], "labels": labels[:longest]}
        pieces = self._pieces(ids, labels) if in_pieces else [whole]
        if items := [piece for piece in pieces if _has_label(piece["labels"])]:
            return Truncated(items) if loses_labels else items
        return NO_ROOM if loses_labels else NOTHING

    def _pieces(self, ids: list[int], labels: list[int] | None = None) -> Iterator[Features]:
        """Pieces of at most ``cutoff_len``; none has only one token, which could not be trained."""
        labels = ids if labels is None else labels
        length = self.section.longest
        bounds = [*range(0, len(ids), length), len(ids)]
        if len(bounds) > 2 and bounds[-1] - bounds[-2] == 1:
            bounds[-2] -= 1
        for start, end in pairwise(bounds):
            yield {"input_ids": ids[start:end], "labels": labels[start:end]}

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[JSON] = ()) -> list[int]:
        """Ids up to the beginning of the next response, as ``apply_chat_template`` gives them.
        Raises ``DataError``: there are pictures, of which ids alone say nothing."""
        if any(message.media for message in messages):
            raise DataError("the conversation has pictures, and only its text would be read here")
        return self.encode_with_pictures(messages, tools)[0]

    def encode_with_pictures(
        self, messages: Sequence[Message], tools: Sequence[JSON] = ()
    ) -> tuple[list[int], Sequence[Seen]]:
        """The same, and the pictures that the ids have the placeholders of. Raises ``DataError``:
        the model reads none, or one of them is missing or damaged."""
        messages = self._with_system(messages)
        if self.media is None and sources_of(messages):
            raise DataError(f"the conversation has pictures, and {self.why_text}")
        dicts, schemas, marked = self._template_inputs(messages, tools)
        text = self._renderer.render(dicts, schemas, prompt=True)
        check_tools(schemas, text)
        self._renderer.check_written(dicts, schemas, text)
        rendered = RenderedConversation(RenderedText(text, marked))
        if self.media is not None:
            pictures = _pictures.look_at(messages, self.media.files)
            rendered = _pictures.expand_placeholders(rendered, pictures, self.media.processor)
        return self._chat.encode([rendered.text])[0].ids, rendered.pictures

    def encode_prompts(self, examples: Sequence[Example]) -> list[Encoded]:
        """Each conversation up to its last answer, to be continued: ids without a label."""
        encoded: list[Encoded] = []
        for example in examples:
            messages = list(example.messages)
            if example.token_ids is not None:
                encoded.append(ONLY_IDS)
                continue
            if messages and messages[-1].role == "assistant":
                messages.pop()
            if self.media is None:
                self._refuse_pictures(messages, example.origin)
            try:
                with self._lock:
                    codec = self.with_arguments(example.template_arguments)
                    ids = codec.encode_prompt(messages, example.tools)
            except TemplateError as error:
                encoded.append(Dropped(str(error)))
                continue
            except DataError as error:
                raise DataError(f"{example.origin}: {error}") from None
            items = [{"input_ids": ids, "labels": [IGNORE_INDEX] * len(ids)}]
            encoded.append(items if 0 < len(ids) < self.section.longest else NO_ROOM)
        return encoded

    def _refuse_pictures(self, messages: Sequence[Message], origin: str) -> None:
        """Raise ``DataError`` if ``messages`` of a row have pictures."""
        if sources_of(messages):
            raise DataError(
                f"{origin}: the row has pictures, and {self.why_text}; leave such rows "
                'out, or add "columns": {"images": null} to the entry to train on the text without '
                "them"
            )

    def encode_turn(self, message: Message) -> NextTurn:
        """The ids after the end token of any response, with the ``message`` that answers it, up to
        the beginning of the next one. Raises ``TemplateError`` if the template ends no response, or
        renders one differently when others follow."""
        for thought in ("", "Thought"):  # some templates write an empty one after the last turn
            before = [
                Message("user", "Question"),
                Message("assistant", "Answer", reasoning=thought),
            ]
            if (next_turn := self._next_turn([*before, message])) is not None:
                return next_turn
        raise TemplateError(
            f"the chat template ({self.template.name}) changes a response when another turn "
            "follows it, so no conversation with an environment can continue its tokens; choose "
            "another data.template"
        )

    def _next_turn(self, messages: Sequence[Message]) -> NextTurn | None:
        """What follows the response of three messages; None if the third one changes it."""
        dicts, _, marked = self._template_inputs(messages, ())
        answered = self._renderer.render(dicts[:2])
        head, _, tail = answered.rpartition("Answer")
        stops = {self.tokenizer.decode([token]): token for token in self.stop_token_ids}
        positions = [tail.find(stop) for stop in stops if stop in tail]
        if not positions:
            name = self.template.name
            raise TemplateError(f"the chat template ({name}) writes no token that ends a response")
        end = len(head) + len("Answer") + min(positions)
        text = self._renderer.render(dicts, prompt=True)
        stop = next((stop for stop in stops if text.startswith(stop, end)), None)
        if stop is None or not text.startswith(answered[:end]):
            return None
        behind = RenderedText(text[end + len(stop) :], marked)
        return NextTurn(stops[stop], self._chat.encode([behind])[0].ids)

    def reads(self, key: str, of: str) -> bool:
        """Whether the text of a row shows a ``key`` of what it has, as ``Renderer.writes``."""
        return self._template is not None and self._renderer.writes(key, of)

    def picture_probe(self) -> list[Features]:
        """Two short conversations about pictures of noise, which stand at other offsets."""
        section = replace(self.section, cutoff_len=1 << 20, mask_history=False)
        outcomes = self.with_section(section).encode_chats(_pictures.noise_conversations())
        for outcome in outcomes:
            if isinstance(outcome, Dropped):
                raise TemplateError(
                    f"data.template: {self.template.name} cannot write a picture: {outcome.reason}"
                )
        return [item for outcome in outcomes for item in items_of(outcome)]

    def with_section(self, section: DataSection) -> Codec:
        """The same tokenizer and template with other settings, which only the fingerprint of all
        that was computed so far depends on."""
        codec = copy(self)
        codec.section, codec._of_arguments = section, {}
        vars(codec).pop("fingerprint", None)
        codec._check_ends()
        return codec

    def with_arguments(self, arguments: JSON) -> Codec:
        """This codec, or one that gives the template the arguments of a row too. Raises
        ``TemplateError``: the template cannot be used with them."""
        if not arguments:
            return self
        key = json.dumps(arguments, sort_keys=True, default=str)
        if key in self._of_arguments:
            return self._of_arguments[key]
        check_row_arguments(arguments)
        section = self.section
        if isinstance(thinking := arguments.get("enable_thinking"), bool):
            section = replace(section, enable_thinking=thinking)
        codec = self.with_section(section)
        codec._renderer, codec._chat = self._renderer.with_arguments(arguments), self._chat
        # Responses are located when they are trained on: a prompt need not begin a conversation.
        vars(codec).pop("_locator", None)
        if len(self._of_arguments) == MOST_ARGUMENTS:  # such as another date in each row
            self._of_arguments.clear()
        self._of_arguments[key] = codec
        return codec

    def _check_ends(self) -> None:
        """Refuse to train on a whole text in which nothing ends a response but the last one."""
        template, eos = self._template, self.tokenizer.eos_token
        if template and self.section.train_on_prompt and template.last_ends == (eos,):
            raise TemplateError(
                f"data.train_on_prompt: template {template.name!r} writes no token between a "
                "response and the next turn, so the model would not learn to stop; switch it off"
            )

    @property
    def template_text(self) -> str:
        """The chat template as it is written; empty without one."""
        return "" if self._template is None else self._template.source

    @cached_property
    def template(self) -> Template:
        """The chat template of this codec."""
        if self._template is None:
            raise TemplateError("conversations need a chat template; set data.template")
        return self._template

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response: the template's, and the tokenizer's end of sequence."""
        names = [*(self._template.stop if self._template else ()), self.tokenizer.eos_token]
        vocabulary = self.tokenizer.get_vocab()
        return tuple(dict.fromkeys(vocabulary[name] for name in names if name in vocabulary))

    def response_text(self, ids: Sequence[int]) -> str:
        """A sampled response as ``chat`` shows it, without what ends and delimits turns. Other
        special tokens are text, such as tags that a run has added."""
        written = [token for token in ids if token not in self._delimiters]
        return str(self.tokenizer.decode(written, clean_up_tokenization_spaces=False))

    @cached_property
    def _delimiters(self) -> frozenset[int]:
        """The tokens that end and delimit turns."""
        names = sorted({*self._renderer.between_turns(), *self._ends})
        return frozenset({*self.stop_token_ids, *self.tokenizer.convert_tokens_to_ids(names)})

    @property
    def decoding(self) -> str:
        """Equal if equal tokens become equal text."""
        spaces = self.tokenizer.clean_up_tokenization_spaces
        special = sorted(map(str, self.tokenizer.all_special_tokens))
        parts = [canonical(self.tokenizer), spaces, special]
        return xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal ids and labels: of tokenizer, template and relevant settings."""
        fields = ("default_system", "cutoff_len", "on_too_long", "train_on_prompt", "mask_history")
        parts = [
            VERSION,
            canonical(self.tokenizer),
            sorted((name, str(token)) for name, token in self.tokenizer.special_tokens_map.items()),
            self._template
            and [self._template.source, self._template.stop, *self._template.last_ends],
            list(self.section.cache_settings(fields).values()),
        ]
        if (trained := self.section.train_on_thoughts) != "all":
            parts.append(trained)
        if self.media is not None:
            parts += [self.media.processor.fingerprint, self.section.media.max_pixels]
            parts.append(str(self.media.files.folder))
        return xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())

    # Messages as the template takes them.

    def _is_trained(self, messages: Sequence[Message], index: int) -> bool:
        """Whether to train on the message at ``index``: its own setting, else the recipe's."""
        message = messages[index]
        if message.learn is not None:
            return message.learn
        if message.role != "assistant":
            return self.section.train_on_prompt
        later = (message.role == "assistant" for message in messages[index + 1 :])
        return not self.section.mask_history or not any(later)

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, after the recipe's system message if they have none."""
        system = self.section.default_system
        if system is None or (messages and messages[0].role == "system"):
            return list(messages)
        return [Message("system", system), *messages]

    def _template_inputs(
        self, messages: Sequence[Message], tools: Sequence[JSON]
    ) -> tuple[Dicts, Dicts | None, bool]:
        """Messages and tools for the template, and whether they contain marks around plain text."""
        messages = [self._thinking(message) for message in messages]
        if self.media is not None:  # no text stands for a picture
            messages = [
                m if m.media else replace(m, content=m.content.replace(MEDIUM, ""))
                for m in messages
            ]
        dicts = render.message_dicts(messages, self._renderer, self.template.thoughts)
        schemas = render.tool_dicts(tools)
        marked = self._chat.spells_control([dicts, schemas])
        if marked:
            dicts, schemas = self._chat.protect(dicts), self._chat.protect(schemas)
        return dicts, schemas or None, marked

    def _thinking(self, message: Message) -> Message:
        """A message with its thought where the template takes it, or without any."""
        words = self.template.thoughts
        message = render.with_opening(message, words)
        if self.section.enable_thinking is False:
            return render.without_thought(message, words)
        if self._renderer.thoughts_field and self._has_control_thoughts:
            # In the content, words that a message spells are plain text.
            return render.split_thought(message, words)
        return message

    def _without_thought(self, response: ResponseSpan) -> ResponseSpan:
        """A response without what ``train_on_thoughts`` masks."""
        start = render.end_of_thought(
            response.text,
            response.start,
            response.end,
            self.template.thoughts,
            only_empty=self.section.train_on_thoughts == "written",
        )
        return replace(response, start=start)

    # Shared by all codecs of one tokenizer and template, and made when they are needed.

    @cached_property
    def _renderer(self) -> Renderer:
        picture = None if self.media is None else self.media.processor.placeholder
        return Renderer(self.template.source, self.tokenizer, picture=picture)

    @cached_property
    def _locator(self) -> ResponseLocator:
        try:
            return ResponseLocator(self._renderer, self.template.last_ends)
        except TemplateError as error:
            is_own = self.template.name == AUTO
            place = self.tokenizer.name_or_path if is_own else f"data.template {self.template.name}"
            raise TemplateError(f"{place}: {error}" if place else str(error)) from error

    @cached_property
    def _chat(self) -> Tokenization:
        written = self._renderer.written_tokens()
        media = () if self.media is None else self.media.processor.control
        return Tokenization(self.tokenizer, {*written, *self.template.stop, *self._ends, *media})

    @cached_property
    def _last_ends(self) -> list[int]:
        """The ids of the template's ``last_ends``."""
        return list(self.tokenizer.convert_tokens_to_ids([*self.template.last_ends]))

    @cached_property
    def _has_control_thoughts(self) -> bool:
        """Whether the words around a thought are control tokens."""
        return self._chat.spells_control(self.template.thoughts)

    @cached_property
    def _documents(self) -> tuple[Tokenization, list[int], list[int]]:
        """The tokenization of plain text, and the ids before and after a document."""
        first = self.tokenizer("a", add_special_tokens=True)["input_ids"][:1]
        head = first if first == [self.tokenizer.bos_token_id] else []
        return Tokenization(self.tokenizer, self._ends), head, [self.tokenizer.eos_token_id]

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer adds before and after a text."""
        full, bare = (
            self.tokenizer("a", add_special_tokens=adds)["input_ids"] for adds in (True, False)
        )
        start = next(i for i in range(len(full)) if full[i : i + len(bare)] == bare)
        return full[:start], full[start + len(bare) :]

    @cached_property
    def _ends(self) -> set[str]:
        """The tokens that begin, end and pad a sequence."""
        special, names = self.tokenizer.special_tokens_map, ("bos_token", "eos_token", "pad_token")
        return {str(special[name]) for name in names if special.get(name)}
