"""Open what was written as a program does that has nothing else, and hold it to the run.

No model is loaded: tokenizer, chat template, end tokens and the processor of pictures decide what a
model reads. Rows are the first of the run's training data, and a few of our own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from ...checkpoint.converting.targets import TARGETS, Alone, HuggingFaceModel
from ...data.example import MEDIUM, Dicts, Example, Message, sources_of
from ...data.media.batch_media import BatchMedia
from ...data.media.processor import open_processor
from ...data.rows.catalog import training_examples
from ...data.text.codec import Codec
from ...data.text.templates import saved_source
from ...data.text.templates.render import Renderer
from ...errors import DataError, ModelError, TemplateError, counted, first_line
from ...model.section import ModelSection
from ...recipe.recipe_data import media_of
from ...storage.remote import HubError
from ..model_loading import ModelFolders, codec_of
from .receipt import Artefact

_ROWS = 32  # of the training data
_SIZES = ((640, 480), (1600, 1200))  # of pictures, where rows have none
TEXTS = (
    "Name the capital of France, and a river that flows through it.",
    "What is 17 + 25? Answer with the number only.",
    "  two  spaces\n\nand lines\t用一句话介绍长城。 it's 🙂",
)


@dataclass(frozen=True)
class ReadAlone:
    """What was compared, and sentences about what differs."""

    num_prompts: int
    num_pictures: int
    differences: Sequence[str]

    def __str__(self) -> str:
        pictures = f" and {counted(self.num_pictures, 'picture')}" if self.num_pictures else ""
        return f"{counted(self.num_prompts, 'prompt')}{pictures}"


@dataclass(frozen=True)
class _Folder:
    """A folder of transformers."""

    path: Path
    tokenizer: PreTrainedTokenizerBase

    def prompt_ids(self, messages: Dicts) -> list[int]:
        """The ids up to the next response."""
        if Renderer(saved_source(self.tokenizer) or "", self.tokenizer).needs_parts:
            parts = ([{"type": "text", "text": m["content"]}] for m in messages)
            messages = [{**m, "content": p} for m, p in zip(messages, parts, strict=True)]
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
        ids: list[int] = self.tokenizer.apply_chat_template(messages, **options)["input_ids"]
        return ids

    def text_ids(self, text: str) -> list[int]:
        """The ids of plain text."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def ends(self) -> Collection[int]:
        """The tokens that end a response."""
        has_file = (self.path / "generation_config.json").is_file()
        name = None if has_file else "config.json"
        ids = GenerationConfig.from_pretrained(self.path, config_file_name=name).eos_token_id
        return ids if isinstance(ids, list) else [ids]


def read_alone(target: Path, artefact: Artefact, parts: ModelFolders) -> ReadAlone:
    """What differs between ``target`` by itself and the run in ``parts``."""
    try:
        codec = codec_of(parts)
    except (ModelError, TemplateError):
        return ReadAlone(0, 0, [])  # whoever opens the run is told
    opener = TARGETS.get(artefact.to, HuggingFaceModel)  # a reward model is a folder, too
    alone = opener.open_alone(target, codec.tokenizer)
    if alone is None:
        try:
            alone = _Folder(target, AutoTokenizer.from_pretrained(target, local_files_only=True))
        except (ValueError, OSError, KeyError, TypeError) as error:
            return ReadAlone(0, 0, [f"transformers opens no tokenizer in it: {first_line(error)}"])
    examples = list(_examples(parts))
    num_prompts, differences = _compare_prompts(alone, codec, examples)
    if not parts.gives_scores:
        ends = set(alone.ends())
        missing = [token for token in codec.stop_token_ids if token not in ends]
        names = codec.tokenizer.convert_ids_to_tokens(missing)
        differences += [f"it does not end responses with {', '.join(names)}"] if missing else []
    num_pictures, media = 0, _media(parts, codec)
    if isinstance(alone, _Folder) and media is not None:
        num_pictures, more = _compare_pictures(alone, media, examples)
        differences += more
    return ReadAlone(num_prompts, num_pictures, differences)


def _examples(parts: ModelFolders) -> Iterator[Example]:
    """The first conversations of the training data; none where they are not here."""
    if parts.recipe is not None:
        with suppress(DataError, HubError, OSError):  # data may have moved since
            yield from islice(training_examples(parts.data), _ROWS)


def _compare_prompts(
    alone: Alone, codec: Codec, examples: Sequence[Example]
) -> tuple[int, list[str]]:
    """How many prompts were compared, and the first that differs."""
    has_template = saved_source(codec.tokenizer) is not None
    own = [Example((Message("user", text),), origin="a prompt of our own") for text in TEXTS]
    count = 0
    for example in (*own, *examples):
        messages = _plain_prompt(example, codec)
        if messages is None:
            continue
        dicts: Dicts = [{"role": m.role, "content": m.content} for m in messages]
        text = messages[-1].content
        try:
            if has_template:
                expected = codec.encode_prompt(messages)
            else:
                expected = codec.tokenizer(text, add_special_tokens=False)["input_ids"]
        except (TemplateError, DataError):
            continue  # not trained on, either
        count += 1
        try:
            ids = alone.prompt_ids(dicts) if has_template else alone.text_ids(text)
        except Exception as error:  # of any kind, by a template: another program gets it, too
            return count, [f"{example.origin}: it has no prompt: {first_line(error)}"]
        if ids != expected:
            texts = [codec.tokenizer.decode(each) for each in (ids, expected)]
            return count, [f"{example.origin}: its prompt is {texts[0]!r}, of the run {texts[1]!r}"]
    return count, []


def _plain_prompt(example: Example, codec: Codec) -> list[Message] | None:
    """The messages before the last response, and the words around pictures, which are compared by
    their sizes; None of a row of which programs ask in ways of their own."""
    messages = [
        replace(m, content=m.content.replace(MEDIUM, ""), media=()) for m in example.messages
    ]
    while messages and messages[-1].role == "assistant":
        messages.pop()
    if any(m.tool_calls or m.reasoning or m.fields or not m.content for m in messages):
        return None
    # What spells a token of the template is protected in training; other programs do not.
    special = [token.content for token in codec.tokenizer.added_tokens_decoder.values()]
    if any(token in m.content for m in messages for token in special):
        return None
    return None if example.tools or example.template_arguments or not messages else messages


def _media(parts: ModelFolders, codec: Codec) -> BatchMedia | None:
    """How the run reads pictures."""
    try:
        section = ModelSection(path=str(parts.model))
        return media_of(section, parts.data, parts.model, codec.tokenizer)
    except ModelError:  # it reads text alone
        return None


def _compare_pictures(
    alone: _Folder, media: BatchMedia, examples: Sequence[Example]
) -> tuple[int, list[str]]:
    """How many pictures were compared, and which have other tokens."""
    processor = open_processor(alone.path, alone.tokenizer)
    if processor is None:
        return 0, ["it has no processor of pictures"]
    as_they_are = replace(media.files, section=replace(media.files.section, max_pixels=None))
    sizes = [*_SIZES]
    for source in (source for example in examples for source in sources_of(example.messages)):
        with suppress(DataError):  # what is damaged, the run does not see, either
            picture = as_they_are.look(source)
            sizes.append((picture.width, picture.height))
    differences: list[str] = []
    for size in sizes:
        with suppress(DataError):  # the model takes none of such a size
            expected = media.processor.counts([media.files.fitted(size)])[0]
            count = processor.counts([size])[0]
            if count != expected and not differences:
                differences = [f"it has {count} tokens for a picture of {size}, the run {expected}"]
    if (most := media.files.section.max_pixels) is not None:
        differences.append(
            f"training made pictures of more than {most:,} pixels smaller (data.media.max_pixels), "
            f"for which {type(processor.processor.image_processor).__name__} has no setting; make "
            "them smaller before the model sees them"
        )
    return len(sizes), differences
