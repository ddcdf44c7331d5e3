"""Codec: conversations and documents to ids and labels; every response follows its own prompt.

Every trained response follows exactly the ids that
``tokenizer.apply_chat_template(messages, add_generation_prompt=True)`` gives for the messages
before it; the labels are on the response and its end-of-turn token. Nearly always, one sequence is
enough for all responses of a conversation. A response gets a sequence of its own if later turns
change its rendering, or if the tokenizer would merge its first characters with the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from threading import Lock
from typing import NamedTuple

import xxhash
from transformers import PreTrainedTokenizerBase

from ...batch import IGNORE_INDEX, Features
from ...errors import DataError, TemplateError
from ..example import (
    EMPTY,
    JSON,
    MEDIA_COLUMN,
    MEDIUM,
    Dicts,
    Dropped,
    Encoded,
    Example,
    Message,
    Truncated,
    items_of,
)
from ..media.batch_media import BatchMedia
from ..media.files import Noise, Seen, as_column
from ..section import DataSection
from ._tokenization import Bounds, RenderedText, Tokenization, Tokens, canonical
from .templates import AUTO, Template, check_row_arguments
from .templates._response_spans import ResponseLocator, ResponseSpan, check_tools
from .templates.render import (
    Renderer,
    end_of_thought,
    is_unclear,
    message_dicts,
    split_thought,
    tool_dicts,
    with_opening,
    without_thought,
)

VERSION = 4  # of what this module makes of an example; part of the fingerprint

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
CUT_THROUGH = Dropped("data.cutoff_len would cut through a picture")


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
        is_unwritten = template and template.last_ends == (tokenizer.eos_token,)
        if template and is_unwritten and section.train_on_prompt:
            raise TemplateError(
                f"data.train_on_prompt: template {template.name!r} writes no token between a "
                "response and the next turn, so the model would not learn to stop; switch it off"
            )
        self.tokenizer = tokenizer
        self.section = section
        self.media = media
        self.why_text = why_text
        self._template = template
        self._of_arguments: dict[str, Codec] = {}  # see ``given``
        self._lock = Lock()  # what is Python; a template renders for one thread at a time only

    def encode_chats(self, examples: Sequence[Example]) -> list[Encoded]:
        """Ids and labels of each conversation within ``cutoff_len``, or why it is dropped."""
        with self._lock:
            drafts = [self._drafted(example) for example in examples]
            chat = self._chat
        tokens = iter(chat.encode([d.text for d in drafts if isinstance(d, RenderedConversation)]))
        with self._lock:
            return [
                self._encoded(draft, next(tokens))
                if isinstance(draft, RenderedConversation)
                else draft
                for draft in drafts
            ]

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
        sources = sources_of(messages)
        if sources and self.media is None:
            raise DataError(f"the conversation has pictures, and {self.why_text}")
        dicts, schemas, marked = self._protected(messages, tools)
        text = self._renderer.render(dicts, schemas, prompt=True)
        check_tools(schemas, text)
        rendered = RenderedConversation(RenderedText(text, marked), (), (), sources)
        if self.media is not None:
            rendered = self._placed(rendered, [self._looked_at(source) for source in sources])
        return self._chat.encode([rendered.text])[0].ids, rendered.pictures

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
        dicts, _, marked = self._protected(messages, ())
        alone = self._renderer.render(dicts[:2])
        head, _, tail = alone.rpartition("Answer")
        ends = {self.tokenizer.decode([token]): token for token in self.stop_token_ids}
        end_positions = [tail.find(end) for end in ends if end in tail]
        if not end_positions:
            name = self.template.name
            raise TemplateError(f"the chat template ({name}) writes no token that ends a response")
        place = len(head) + len("Answer") + min(end_positions)
        whole = self._renderer.render(dicts, prompt=True)
        end = next((end for end in ends if whole.startswith(end, place)), None)
        if end is None or not whole.startswith(alone[:place]):
            return None
        behind = RenderedText(whole[place + len(end) :], marked)
        return NextTurn(ends[end], self._chat.encode([behind])[0].ids)

    def encode_prompts(self, examples: Sequence[Example]) -> list[Encoded]:
        """Each conversation up to its last answer, to be continued: ids without a label."""
        encoded: list[Encoded] = []
        for example in examples:
            messages = list(example.messages)
            if messages and messages[-1].role == "assistant":
                messages.pop()
            if self.media is None:
                self._refuse_pictures(example, messages)
            try:
                with self._lock:
                    codec = self.given(example.template_arguments)
                    ids = codec.encode_prompt(messages, example.tools)
            except TemplateError as error:
                encoded.append(Dropped(str(error)))
                continue
            except DataError as error:
                raise DataError(f"{example.origin}: {error}") from None
            is_long = len(ids) >= self.section.longest
            items = [{"input_ids": ids, "labels": [IGNORE_INDEX] * len(ids)}]
            encoded.append(NO_ROOM if is_long or not ids else items)
        return encoded

    def with_section(self, section: DataSection) -> Codec:
        """The same tokenizer and template with other settings."""
        codec = Codec(self.tokenizer, self._template, section, self.media, self.why_text)
        shared = ("_renderer", "_locator", "_chat", "_documents", "_lock")
        vars(codec).update({name: vars(self)[name] for name in shared if name in vars(self)})
        return codec

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
        """The tokens that end every response, and are written after the last one only."""
        vocabulary = self.tokenizer.get_vocab()
        return [vocabulary[end] for end in self.template.last_ends]

    @cached_property
    def _ends(self) -> set[str]:
        """The tokens that begin, end and pad a sequence."""
        special, names = self.tokenizer.special_tokens_map, ("bos_token", "eos_token", "pad_token")
        return {str(special[name]) for name in names if special.get(name)}

    @cached_property
    def _documents(self) -> tuple[Tokenization, list[int], list[int]]:
        """The tokenization of plain text, and the ids before and after a document."""
        first = self.tokenizer("a", add_special_tokens=True)["input_ids"][:1]
        head = first if first == [self.tokenizer.bos_token_id] else []
        return Tokenization(self.tokenizer, self._ends), head, [self.tokenizer.eos_token_id]

    def _pieces(self, ids: list[int]) -> Iterator[Features]:
        """Pieces of at most ``cutoff_len``; none has only one token, which could not be trained."""
        length = self.section.longest
        bounds = [*range(0, len(ids), length), len(ids)]
        if len(bounds) > 2 and bounds[-1] - bounds[-2] == 1:
            bounds[-2] -= 1
        for start, end in pairwise(bounds):
            yield {"input_ids": ids[start:end], "labels": ids[start:end]}

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, after the recipe's system message if they have none."""
        system = self.section.default_system
        if system is None or (messages and messages[0].role == "system"):
            return list(messages)
        return [Message("system", system), *messages]

    def _protected(
        self, messages: Sequence[Message], tools: Sequence[JSON]
    ) -> tuple[Dicts, Dicts | None, bool]:
        """Messages and tools for the template, and whether they contain marks around plain text."""
        messages = [self._thinking(message) for message in messages]
        if self.media is not None:  # no text stands for a picture
            messages = [m if m.media else without_marks(m) for m in messages]
        dicts = message_dicts(messages, self._renderer, self.template.thoughts)
        schemas = tool_dicts(tools)
        marked = self._chat.spells_control([dicts, schemas])
        if marked:
            dicts, schemas = self._chat.protect(dicts), self._chat.protect(schemas)
        return dicts, schemas or None, marked

    def _thinking(self, message: Message) -> Message:
        """A message with its thought where the template takes it, or without any."""
        words = self.template.thoughts
        message = with_opening(message, words)
        if self.section.enable_thinking is False:
            return without_thought(message, words)
        if self._renderer.thoughts_field and self._chat.spells_control(words):
            return split_thought(message, words)  # as in the content its words are plain text
        return message

    def _answer(self, turn: ResponseSpan) -> ResponseSpan:
        """A response without what ``train_on_thoughts`` masks."""
        only_empty = self.section.train_on_thoughts == "written"
        words = self.template.thoughts
        start = end_of_thought(turn.text, turn.start, turn.end, words, only_empty=only_empty)
        return replace(turn, start=start)

    def _is_trained(self, messages: Sequence[Message], index: int) -> bool:
        """Whether to train on the message at ``index``: its own setting, else the recipe's."""
        message = messages[index]
        if message.learn is not None:
            return message.learn
        if message.role != "assistant":
            return self.section.train_on_prompt
        later = (message.role == "assistant" for message in messages[index + 1 :])
        return not self.section.mask_history or not any(later)

    def _drafted(self, example: Example) -> RenderedConversation | Dropped:
        try:
            codec = self.given(example.template_arguments)
            if codec is not self:  # what the arguments of a row break costs that row, not the run
                _ = codec._locator
        except TemplateError as error:
            return Dropped(str(error))
        rendered = codec._draft(example)
        if self.media is None or isinstance(rendered, Dropped):
            return rendered
        pictures = [self._looked_at(source, example.origin) for source in rendered.sources]
        try:
            return self._placed(rendered, pictures)
        except DataError as error:
            return Dropped(str(error))

    def given(self, arguments: JSON) -> Codec:
        """This codec, or one that gives the template the arguments of a row too. Raises
        ``TemplateError``: the template cannot be used with them."""
        if not arguments:
            return self
        key = json.dumps(arguments, sort_keys=True, default=str)
        if key not in self._of_arguments:
            if len(self._of_arguments) == MOST_ARGUMENTS:  # such as another date in each row
                self._of_arguments.clear()
            self._of_arguments[key] = self._with_arguments(arguments)
        return self._of_arguments[key]

    def _with_arguments(self, arguments: JSON) -> Codec:
        check_row_arguments(self.template.source, arguments, self.template.name)
        section = self.section
        if isinstance(thinking := arguments.get("enable_thinking"), bool):
            section = replace(section, enable_thinking=thinking)
        codec = self.with_section(section)
        # Responses are located when they are trained on: a prompt need not begin a conversation.
        vars(codec).pop("_locator", None)
        vars(codec).update(_renderer=self._renderer.with_arguments(arguments), _chat=self._chat)
        return codec

    def _draft(self, example: Example) -> RenderedConversation | Dropped:
        """Render a conversation up to the last trained message."""
        messages = self._with_system(example.messages)
        trained = [i for i in range(len(messages)) if self._is_trained(messages, i)]
        if not trained:
            return PLAIN if example.text else NOTHING
        if any(messages[i].is_empty for i in trained if messages[i].role == "assistant"):
            return EMPTY
        messages = messages[: trained[-1] + 1]
        sources = sources_of(messages)
        if self.media is None:
            self._refuse_pictures(example, messages)
        if any(is_unclear(message, self.template.thoughts) for message in messages):
            return UNCLEAR
        locator, is_whole = self._locator, self.section.train_on_prompt
        masked = [i for i in range(len(messages)) if i not in trained]
        # The labels are those of the whole text but these, or only of these.
        selected = masked if is_whole else trained
        indices = range(len(messages)) if is_whole else trained
        responses = [i for i in indices if messages[i].role == "assistant"]
        try:
            dicts, tools, marked = self._protected(messages, example.tools)
            text, turns = locator.locate(dicts, tools, responses)
            parts = [locator.content(dicts, tools, i, text) for i in selected if i not in responses]
            if self.section.train_on_thoughts != "all":
                turns = [self._answer(turn) for turn in turns]
            if marked:  # this row may fail, its batch must not
                self._chat.encode([RenderedText(text, marked)])
        except TemplateError as error:
            return Dropped(str(error))
        if is_whole:
            parts += [turn for turn in turns if turn.index in selected]
        return RenderedConversation(RenderedText(text, marked), turns, parts, sources)

    def _refuse_pictures(self, example: Example, messages: Sequence[Message]) -> None:
        """Raise ``DataError`` if ``messages`` of an example have pictures."""
        if sources_of(messages):
            raise DataError(
                f"{example.origin}: the row has pictures, and {self.why_text}; leave such rows "
                'out, or add "columns": {"images": null} to the entry to train on the text without '
                "them"
            )

    def _looked_at(self, source: str | bytes, origin: str = "") -> Seen:
        """A picture of a row. Raises ``DataError``, which stops the run: a file can be mended, and
        a row that was dropped for it would be missing from the cache for good."""
        assert self.media is not None
        try:
            return self.media.files.look(source)
        except DataError as error:
            name = f" {source}" if isinstance(source, str) else ""
            where = f"{origin}: " if origin else ""
            raise DataError(f"{where}picture{name}: {error}") from None

    def _placed(
        self, rendered: RenderedConversation, pictures: Sequence[Seen]
    ) -> RenderedConversation:
        """The same with placeholders as long as pictures, and spans where they are then. Raises
        ``DataError``: the model takes no picture of a size, or the template writes none."""
        assert self.media is not None
        processor, whole = self.media.processor, rendered.text.text
        counts = processor.counts([(p.width, p.height) for p in pictures])
        pictures = [p._replace(tokens=n) for p, n in zip(pictures, counts, strict=True)]
        expanded = {whole: processor.expand(whole, pictures, is_whole=True)}

        def moved(span: ResponseSpan) -> ResponseSpan:
            if span.text not in expanded:
                expanded[span.text] = processor.expand(span.text, pictures, is_whole=False)
            to = expanded[span.text]
            return replace(span, text=to.text, start=to.moved(span.start), end=to.moved(span.end))

        text = replace(rendered.text, text=expanded[whole].text)
        turns, parts = list(map(moved, rendered.turns)), list(map(moved, rendered.parts))
        return replace(rendered, text=text, turns=turns, parts=parts, pictures=pictures)

    def _encoded(self, rendered: RenderedConversation, tokens: Tokens) -> Encoded:
        """Set labels, and truncate to ``cutoff_len``."""
        if self.section.train_on_prompt:
            sequences = [whole(rendered, tokens, self._chat)]
        else:
            sequences = split(rendered, tokens, self._chat, self._last_ends)
        items = [item for item in sequences if item.num_trained_tokens]
        if not items:
            return NOTHING
        fitted = [item.fit(self.section.longest) for item in items]
        is_cut = any(  # whether trained tokens are lost
            fit is not item and (fit is None or fit.num_trained_tokens < item.num_trained_tokens)
            for fit, item in zip(fitted, items, strict=True)
        )
        if is_cut and self.section.on_too_long == "drop":
            return TOO_LONG
        features = [item.features for item in fitted if item is not None]
        if not features:
            return NO_ROOM
        if self.media is not None:
            with_media = [self._with_media(each, rendered.pictures) for each in features]
            features = [each for each in with_media if each is not None]
            if len(features) < len(with_media):
                return CUT_THROUGH
        return Truncated(features) if is_cut else features

    def _with_media(self, item: Features, pictures: Sequence[Seen]) -> Features | None:
        """An item with its pictures, whose tokens nothing is trained on; None if
        ``cutoff_len`` splits one."""
        assert self.media is not None
        processor, ids = self.media.processor, item["input_ids"]
        if (whole := processor.kept(ids, pictures)) is None:
            return None
        labels = item["labels"]
        if whole:
            placed = processor.token_ids
            labels = [IGNORE_INDEX if i in placed else n for i, n in zip(ids, labels, strict=True)]
        return {"input_ids": ids, "labels": labels, MEDIA_COLUMN: as_column(whole)}

    def picture_probe(self) -> list[Features]:
        """Two short conversations about pictures of noise, which stand at other offsets."""
        examples = []
        for number, words in enumerate(
            ("one", "what is it, and where, and why is it there, if it is")
        ):
            noise = Noise.of(number, 96 + 64 * number, 96)
            question = Message("user", f"{words} {MEDIUM} then?", media=(noise,))
            examples.append(Example((question, Message("assistant", f"{words} is the answer"))))
        section = replace(self.section, cutoff_len=None, mask_history=False)
        found = self.with_section(replace(section, cutoff_len=1 << 20)).encode_chats(examples)
        items = [item for outcome in found for item in items_of(outcome)]
        if len(items) < len(examples):
            why = next(each.reason for each in found if isinstance(each, Dropped))
            raise TemplateError(
                f"data.template: {self.template.name} cannot write a picture: {why}"
            )
        return items


def sources_of(messages: Sequence[Message]) -> list[str | bytes]:
    """The pictures of a conversation, in the order of their placeholders."""
    return [source for message in messages for source in message.media if source]


def without_marks(message: Message) -> Message:
    """A message without the characters that would stand for pictures, of which it has none."""
    return replace(message, content=message.content.replace(MEDIUM, ""))


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """The text of a conversation, and its response spans."""

    text: RenderedText
    turns: Sequence[ResponseSpan]  # trained responses; all of them if the whole text is trained
    parts: Sequence[ResponseSpan]  # other trained contents; masked ones if the whole text is
    sources: Sequence[str | bytes] = ()  # of its pictures, in the order of their placeholders
    pictures: Sequence[Seen] = ()  # the same, once they are looked at


@dataclass(frozen=True, slots=True)
class Item:
    """One sequence of token ids and labels, which may be truncated at its ``answers``, in order."""

    ids: list[int]
    labels: list[int]
    answers: Sequence[Bounds]

    @property
    def features(self) -> Features:
        """As the cache stores it."""
        return {"input_ids": self.ids, "labels": self.labels}

    @property
    def num_trained_tokens(self) -> int:
        """Number of tokens with a label."""
        return len(self.labels) - self.labels.count(IGNORE_INDEX)

    def fit(self, length: int) -> Item | None:
        """Truncate to the last response that fits, or else the first response."""
        if len(self.ids) <= length:
            return self
        if ends := [end for _, end in self.answers if end <= length]:
            return self.cut(ends[-1])
        if self.answers and self.answers[0][0] < length:
            return self.cut(length)
        return None

    def cut(self, end: int) -> Item:
        """Its first ``end`` tokens."""
        return replace(self, ids=self.ids[:end], labels=self.labels[:end])


def whole(rendered: RenderedConversation, tokens: Tokens, tokenization: Tokenization) -> Item:
    """A conversation as one trained text, except the messages that are masked."""
    labels = list(tokens.ids)
    for start, end in _bounds(rendered, tokens, tokenization, rendered.parts):
        labels[start:end] = [IGNORE_INDEX] * (end - start)
    inside = [turn for turn in rendered.turns if turn.text is rendered.text.text]
    return Item(tokens.ids, labels, _bounds(rendered, tokens, tokenization, inside))


def split(
    rendered: RenderedConversation,
    tokens: Tokens,
    tokenization: Tokenization,
    last_ends: Sequence[int] = (),
) -> list[Item]:
    """One sequence for all responses whose prompt stays the same later, then one for each other.

    ``last_ends`` are the tokens that end a response, and are written after the last one only. One
    of them is the label of the first token behind every other one: this token itself, if it is one
    of them, such as the role of the next turn; else the first of them.
    """
    inside = [turn for turn in rendered.turns if turn.text is rendered.text.text]
    spans = [(turn.start, turn.end) for turn in inside]
    span_bounds = tokenization.bounds(tokens, rendered.text, spans, behind_prompt=True)
    answers = [bounds for bounds in span_bounds if bounds]
    separate: list[Item] = []
    if len(answers) < len(rendered.turns):
        placed = {turn for turn, bounds in zip(inside, span_bounds, strict=True) if bounds}
        others = [turn for turn in rendered.turns if turn not in placed]
        separate = [_alone(rendered, tokenization, turn) for turn in others]
    trained = answers
    if rendered.parts:
        trained = [*answers, *_bounds(rendered, tokens, tokenization, rendered.parts)]
    if not trained:
        return separate
    labels = [IGNORE_INDEX] * len(tokens.ids)
    for start, end in trained:
        labels[start:end] = tokens.ids[start:end]
    if last_ends:
        for i, (start, end) in enumerate(answers):
            if end < len(labels) and tokens.ids[end - 1] not in last_ends:
                labels[end] = tokens.ids[end] if tokens.ids[end] in last_ends else last_ends[0]
                answers[i] = (start, end + 1)  # a cut keeps the label
    item = Item(tokens.ids, labels, answers)
    return [item.cut(max(end for _, end in [*trained, *answers])) if separate else item, *separate]


def _alone(rendered: RenderedConversation, tokenization: Tokenization, turn: ResponseSpan) -> Item:
    """A sequence for one response: its prompt as chat encodes it, then the response."""
    text = RenderedText(turn.text, rendered.text.marked)
    prompt = tokenization.encode([text[: turn.start]])[0].ids
    answer = tokenization.encode_after(text[turn.start : turn.end])
    ids = prompt + answer
    return Item(ids, [IGNORE_INDEX] * len(prompt) + answer, [(len(prompt), len(ids))])


def _bounds(
    rendered: RenderedConversation,
    tokens: Tokens,
    tokenization: Tokenization,
    turns: Sequence[ResponseSpan],
) -> list[Bounds]:
    """The response spans that begin and end at token boundaries."""
    spans = [(turn.start, turn.end) for turn in turns]
    return [bounds for bounds in tokenization.bounds(tokens, rendered.text, spans) if bounds]
