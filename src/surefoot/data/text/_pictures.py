"""The pictures of a conversation: looked at, given their room in its text, stored with its tokens.

Encoding needs the size of a picture alone, since that decides how many tokens it takes the place
of. ``Codec`` calls this for rows with pictures; pixels are read when a batch is about to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...batch import IGNORE_INDEX, Features
from ...errors import DataError
from ..example import MEDIA_COLUMN, MEDIUM, Dropped, Example, Message, sources_of
from ..media.batch_media import BatchMedia
from ..media.files import MediaFiles, Noise, Seen, as_column
from ..media.processor import MediaProcessor
from ._labels import RenderedConversation
from .templates._response_spans import ResponseSpan


def place(
    rendered: RenderedConversation, messages: Sequence[Message], media: BatchMedia, origin: str
) -> RenderedConversation | Dropped:
    """The rendered ``messages`` of the row ``origin`` with the text of its pictures. Raises
    ``DataError``, as ``look_at``."""
    pictures = look_at(messages, media.files, origin)
    try:
        return expand_placeholders(rendered, pictures, media.processor)
    except DataError as error:
        return Dropped(str(error))


def look_at(messages: Sequence[Message], files: MediaFiles, origin: str = "") -> list[Seen]:
    """The pictures of a conversation. Raises ``DataError``, which stops the run: a file can be
    mended, and a row that was dropped for it would be missing from the cache for good."""
    pictures = []
    for source in sources_of(messages):
        try:
            pictures.append(files.look(source))
        except DataError as error:
            name = f"picture {source}" if isinstance(source, str) else "picture"
            raise DataError(f"{origin and f'{origin}: '}{name}: {error}") from None
    return pictures


def expand_placeholders(
    rendered: RenderedConversation, pictures: Sequence[Seen], processor: MediaProcessor
) -> RenderedConversation:
    """The same with the text of each picture at its placeholder, and spans where they are then.
    Raises ``DataError``: the model takes no picture of a size, or the template writes none."""
    counts = processor.counts([(picture.width, picture.height) for picture in pictures])
    pictures = [p._replace(tokens=count) for p, count in zip(pictures, counts, strict=True)]
    text = rendered.text.text
    expanded = {text: processor.expand(text, pictures, is_whole=True)}

    def moved(span: ResponseSpan) -> ResponseSpan:
        if span.text not in expanded:  # a response in a text of its own, up to its end
            expanded[span.text] = processor.expand(span.text, pictures, is_whole=False)
        to = expanded[span.text]
        return replace(span, text=to.text, start=to.moved(span.start), end=to.moved(span.end))

    return RenderedConversation(
        replace(rendered.text, text=expanded[text].text),
        [moved(span) for span in rendered.responses],
        [moved(span) for span in rendered.trained],
        [moved(span) for span in rendered.masked],
        pictures,
    )


def attach(item: Features, pictures: Sequence[Seen], processor: MediaProcessor) -> Features | None:
    """An item with the column of its pictures, on whose tokens nothing is trained. None if
    ``cutoff_len`` splits one."""
    ids, labels = item["input_ids"], item["labels"]
    if (complete := processor.kept(ids, pictures)) is None:
        return None
    if complete:
        placeholders = processor.token_ids
        labels = [
            IGNORE_INDEX if token in placeholders else label
            for token, label in zip(ids, labels, strict=True)
        ]
    return {"input_ids": ids, "labels": labels, MEDIA_COLUMN: as_column(complete)}


def noise_conversations() -> list[Example]:
    """Two short conversations about pictures of noise, which stand at other offsets."""
    examples = []
    for number, words in enumerate(("one", "what is it, and where, and why is it there, if it is")):
        noise = Noise.of(number, 96 + 64 * number, 96)
        question = Message("user", f"{words} {MEDIUM} then?", media=(noise,))
        examples.append(Example((question, Message("assistant", f"{words} is the answer"))))
    return examples
