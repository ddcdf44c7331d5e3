"""What a model makes of pictures: their text in a row, and the tensors that it gets of them.

The processor of transformers says both, and nothing here knows a model by its name. The text of a
picture depends on its size alone, in some models also on those beside it, so it is computed once
for every distinct size, with a blank picture; rows are encoded without decoding a pixel. It
replaces the placeholder in the rendered text before that is tokenized: a tokenizer may join the
line breaks that some processors write around a picture with those beside it.
"""

from __future__ import annotations

import json
import re
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
import torch
import xxhash
from transformers import AutoConfig, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING, processor_class_from_name

from ...errors import DataError, ModelError, first_line, installation
from ...storage import files
from ..text._tokenization import CLOSE, OPEN
from .files import Seen, Size

if TYPE_CHECKING:
    from PIL.Image import Image

# Files of a model's folder that describe its processor; checkpoints have them as they are.
FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_CLASS = "processor_class"
_NAMES = (*FILES[:2], "tokenizer_config.json")  # of these, the first that names a class counts
_PLAIN = 64  # pixels: a size that every processor takes


class Expanded(NamedTuple):
    """Rendered text in which each placeholder is as long as its picture."""

    text: str
    ends: Sequence[int]  # of the placeholders before
    gains: Sequence[int]  # characters that the text has more, from there on

    def moved(self, position: int) -> int:
        """Where a character of the former text is now."""
        count = bisect_right(self.ends, position)
        return position + (self.gains[count - 1] if count else 0)


@dataclass(frozen=True)
class MediaProcessor:
    """The processor of one model, for pictures only."""

    processor: Any  # of transformers
    files: Mapping[str, bytes]  # that it was opened from
    _texts: dict[tuple[Size, ...], list[str]] = field(default_factory=dict, repr=False)
    _counts: dict[str, int] = field(default_factory=dict, repr=False)

    @cached_property
    def fingerprint(self) -> str:
        """Of all that decides the tokens of a picture."""
        settings = self.processor.image_processor.to_dict()
        plain = str | int | float
        own = {name: v for name, v in vars(self.processor).items() if isinstance(v, plain)}
        text = json.dumps([settings, own], sort_keys=True, default=str)
        return xxhash.xxh3_64_hexdigest(text.encode())

    @cached_property
    def token_ids(self) -> frozenset[int]:
        """The tokens whose embeddings those of a picture replace."""
        return frozenset(int(i) for i in self.processor.image_token_ids)

    @cached_property
    def control(self) -> frozenset[str]:
        """The tokens that stand for pictures, and around them: no message may produce one. The
        processor writes some of them, so those that the chat template writes are not enough."""
        tokenizer = self.processor.tokenizer
        added = tokenizer.added_tokens_decoder
        written = self._ids(self.texts_of([(_PLAIN, _PLAIN)])[0])
        written += self._ids(self.placeholder)
        token = str(self.processor.image_token)
        return frozenset({token, *(added[i].content for i in written if i in added)})

    @cached_property
    def placeholder(self) -> str:
        """What the model's own chat template writes for a picture, such as its token between those
        of its beginning and end: for templates that are made for text. Empty if it has no template
        or one that fails."""
        words: dict[str, object] = {"type": "text", "text": "a"}
        texts = []
        for parts in ([{"type": "image"}, words], [words]):
            turns = [{"role": "user", "content": parts}]
            try:
                text = self.processor.tokenizer.apply_chat_template(turns, tokenize=False)
            except (ValueError, TypeError, jinja2.TemplateError):
                return ""
            texts.append(str(text))
        start = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), 0)
        return texts[0][start : start + len(texts[0]) - len(texts[1])].strip()

    def texts_of(self, sizes: Sequence[Size]) -> list[str]:
        """The texts of pictures of these sizes in one row. Raises ``DataError``: the model takes
        none of one of them."""
        if self.depends_on_others and len(sizes) > 1:
            return self._texts_in([*sizes])
        return [self._texts_in([size])[0] for size in sizes]

    def counts(self, sizes: Sequence[Size]) -> list[int]:
        """The tokens that each of these pictures of a row replaces."""
        return [self._count(text) for text in self.texts_of(sizes)]

    @cached_property
    def depends_on_others(self) -> bool:
        """Whether the text of a picture is another one beside others, as in LLaVA-OneVision."""
        both = [(_PLAIN, _PLAIN), (2 * _PLAIN, _PLAIN)]
        try:
            return self._texts_in(both) != [self._texts_in([size])[0] for size in both]
        except DataError:  # it takes one at a time, and says so of a row with several
            return True

    def _texts_in(self, sizes: list[Size]) -> list[str]:
        key = tuple(sizes)
        if key not in self._texts:
            import PIL.Image

            try:
                _, texts = self._process([[PIL.Image.new("RGB", size) for size in sizes]])
            except (ValueError, RuntimeError, IndexError, ZeroDivisionError) as error:
                what = "picture of its size" if len(sizes) == 1 else "pictures of these sizes"
                raise DataError(f"the processor takes no {what}: {_words(error)}") from None
            # Photos have thousands of sizes, whose texts are kilobytes, and few different ones.
            self._texts[key] = [sys.intern(text) for text in texts]
        return self._texts[key]

    def _count(self, text: str) -> int:
        if text not in self._counts:
            self._counts[text] = self._placed(self._ids(text))
        return self._counts[text]

    def tensors(self, rows: Sequence[Sequence[Image]]) -> dict[str, torch.Tensor]:
        """What the model gets of the pictures of each row. One call for all of them: the image
        processor knows how their tensors are joined, which differs from model to model."""
        outputs, _ = self._process(rows)
        unused = set(self.processor.unused_input_names)
        return {
            name: value
            for name, value in outputs.items()
            if isinstance(value, torch.Tensor) and name not in unused
        }

    @cached_property
    def blank(self) -> Image:
        """A picture of a size that every processor takes."""
        import PIL.Image

        return PIL.Image.new("RGB", (_PLAIN, _PLAIN))

    def example(self) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """The ids [1, T] of a short row about ``blank``, and all else that the processor itself
        gives the model of it. Raises ``ModelError``: it fails."""
        try:
            token = str(self.processor.image_token)
            picture = self.placeholder if token in self.placeholder else token
            texts, images = [f"a{picture}b"], [[self.blank]]
            own = self.processor(text=texts, images=images, return_tensors="pt")
        except Exception as error:  # of any kind: code of one model
            raise ModelError(
                f"{type(self.processor).__name__} fails for a row with a picture: "
                f"{first_line(error)}"
            ) from None
        others = {name: own[name] for name in own if name not in ("input_ids", "attention_mask")}
        return own["input_ids"], others

    def expand(self, text: str, pictures: Sequence[Seen], *, is_whole: bool) -> Expanded:
        """Rendered ``text`` with the text of each picture at its placeholder. ``is_whole``: it has
        all of ``pictures``, rather than the first of them. Raises ``DataError``: the chat template
        has written another number of placeholders."""
        token = str(self.processor.image_token)
        count = re.sub(f"{OPEN}[^{CLOSE}]*{CLOSE}", "", text).count(token)
        if count > len(pictures) or (is_whole and count < len(pictures)):
            raise DataError(
                "the chat template writes another number of placeholders than the row has "
                "pictures; choose the model's own template (data.template: auto)"
            )
        texts = self.texts_of([(each.width, each.height) for each in pictures])[:count]
        if not texts:
            return Expanded(text, (), ())
        replaced, offsets = self.processor.get_text_with_replacements([text], texts)
        spans = offsets[0]
        gains = [span["new_span"][1] - span["span"][1] for span in spans]
        return Expanded(replaced[0], [span["span"][1] for span in spans], gains)

    def kept(self, ids: Sequence[int], pictures: Sequence[Seen]) -> list[Seen] | None:
        """The pictures of a row that may have been cut; None if it was cut through one, or between
        those whose texts depend on each other."""
        left, whole = self._placed(ids), list[Seen]()
        for picture in pictures:
            if not left:
                break
            whole.append(picture)
            left -= picture.tokens
        is_other = self.counts([(p.width, p.height) for p in whole]) != [p.tokens for p in whole]
        return None if left or is_other else whole

    def _placed(self, ids: Sequence[int]) -> int:
        return sum(i in self.token_ids for i in ids)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _process(self, rows: Sequence[Sequence[Image]]) -> tuple[Mapping[str, Any], list[str]]:
        """What the processor itself does with ``images``, without the text around them."""
        outputs, texts = self.processor._process_images(
            [list(row) for row in rows], **self._options
        )
        return outputs, texts

    @cached_property
    def _options(self) -> Mapping[str, Any]:
        options = self.processor._merge_kwargs(
            self.processor.valid_processor_kwargs,
            tokenizer_init_kwargs=self.processor.tokenizer.init_kwargs,
            return_tensors="pt",
        )
        return {**options["images_kwargs"]}


def _words(error: Exception) -> str:
    """What an error says, without numbers: equal reasons are counted together."""
    return re.sub(r"[\d.]+", "N", first_line(error))


def open_processor(
    base: Path, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool = False
) -> MediaProcessor | None:
    """The processor in a model's folder, with ``tokenizer`` in place of its own; None if the model
    reads text alone. Raises ``ModelError``: it cannot be opened."""
    present = {name: files.read_json(base / name) for name in _NAMES if (base / name).is_file()}
    if not present.keys() & set(FILES):
        return None
    try:
        config = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
        name = next((values[_CLASS] for values in present.values() if values.get(_CLASS)), None)
        kind = processor_class_from_name(name) if name else None
        kind = kind or PROCESSOR_MAPPING.get(type(config), None)
        if kind is None or "image_processor" not in kind.get_attributes():
            return None
        processor = _for_pictures(kind).from_pretrained(base)
    except ImportError as error:
        raise ModelError(
            f"{base}: its processor needs a package that is missing: {first_line(error)} "
            f"({installation('pillow')} has what most processors need)"
        ) from None
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{base}: cannot open its processor: {first_line(error)}") from None
    if not _expands(processor):
        raise ModelError(
            f"{base}: {kind.__name__} writes no placeholders for pictures into the text, which is "
            "not supported"
        )
    processor.tokenizer = tokenizer
    own = {name: (base / name).read_bytes() for name in FILES if (base / name).is_file()}
    media = MediaProcessor(processor, own)
    try:  # a processor of another kind shows itself here, and not in the first row
        _ = media.control, media.token_ids, media.fingerprint
    except (DataError, AttributeError, TypeError, KeyError) as error:
        raise ModelError(f"{base}: {kind.__name__} gives a picture no text: {error}") from None
    return media


def _expands(processor: Any) -> bool:
    """Whether pictures are tokens of the row."""
    is_own = type(processor).replace_image_token is not ProcessorMixin.replace_image_token
    return is_own and getattr(processor, "image_token", None) is not None


def _for_pictures(kind: Any) -> Any:
    """A class of processors without the parts for videos and sounds: these may need packages, such
    as torchvision, that pictures do not."""
    every = list(kind.get_attributes())
    parts = [name for name in every if name in ("image_processor", "tokenizer")]

    class Base(ProcessorMixin):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            given = {**dict(zip(every, args, strict=False)), **options}
            super().__init__(**{n: v for n, v in given.items() if n in parts or n not in every})

    class Pictures(kind, Base):  # type: ignore[misc]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return parts

        @classmethod
        def from_args_and_dict(cls, args: Any, processor_dict: Any, **options: Any) -> Any:
            # Gemma 3n and 4 demand all parts: the others are None, and ``Base`` leaves them out
            given = dict(zip(parts, args, strict=True))
            args = [given.get(name) for name in every]
            return super().from_args_and_dict(args, processor_dict, **options)

    Pictures.__name__ = kind.__name__
    return Pictures
