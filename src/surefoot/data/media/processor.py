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
_NAMES = (*FILES[:2], "tokenizer_config.json")  # of these, the first that names a class counts
_LONGEST_SIDE = 1 << 16  # pixels
_PLAIN = 64  # pixels: a size that every processor takes


def open_processor(
    base: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    trust_remote_code: bool = False,
    max_pixels: int | None = None,
) -> MediaProcessor | None:
    """The processor in a model's folder, with ``tokenizer`` in place of its own; None if the model
    reads text alone. It makes pictures of more than ``max_pixels`` smaller, if it has a setting for
    that. Raises ``ModelError``: it cannot be opened."""
    with files.reading(ModelError, f"{base}: the configuration of its processor"):
        configs = {n: dict(files.read_json(base / n)) for n in _NAMES if (base / n).is_file()}
    if not configs.keys() & set(FILES):
        return None
    try:
        model_config = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
        names = (config.get("processor_class") for config in configs.values())
        name = next(filter(None, names), None)
        kind = processor_class_from_name(name) if name else None
        kind = kind or PROCESSOR_MAPPING.get(type(model_config), None)
        if kind is None or "image_processor" not in kind.get_attributes():
            return None
        processor = _for_pictures(kind).from_pretrained(base)
    except ImportError as error:
        raise ModelError(
            f"{base}: its processor needs a package that is missing: {first_line(error)} "
            f"({installation('pillow')} has what most processors need)"
        ) from None
    except Exception as error:
        raise ModelError(f"{base}: cannot open its processor: {first_line(error)}") from None
    # Whether pictures are tokens of the row.
    writes_text = type(processor).replace_image_token is not ProcessorMixin.replace_image_token
    if not writes_text or getattr(processor, "image_token", None) is None:
        raise ModelError(
            f"{base}: {kind.__name__} writes no placeholders for pictures into the text, which is "
            "not supported"
        )
    processor.tokenizer = tokenizer
    contents = {name: files.read_file(base / name) for name in FILES if (base / name).is_file()}
    is_limited = max_pixels is not None and _limit(processor.image_processor, contents, max_pixels)
    media = MediaProcessor(processor, contents, is_limited)
    try:  # a processor of another kind shows itself here, and not in the first row
        _ = media.control, media.token_ids, media.fingerprint
    except (DataError, AttributeError, TypeError, KeyError) as error:
        raise ModelError(f"{base}: {kind.__name__} gives a picture no text: {error}") from None
    return media


def _limit(images: Any, contents: dict[str, bytes], max_pixels: int) -> bool:
    """Set the largest number of pixels of an image processor, and in the ``contents`` of its files;
    False if it has no such setting."""
    # ``longest_edge`` is an area where the class's own is one, and else the length of a side.
    if dict(getattr(type(images), "size", None) or {}).get("longest_edge", 0) <= _LONGEST_SIDE:
        return False
    size = {name: value for name, value in dict(images.size).items() if value is not None}
    if max_pixels >= size["longest_edge"]:
        return True
    size["longest_edge"] = max(max_pixels, size["shortest_edge"])
    images.size = type(images.size)(**size)
    for name in FILES[:2]:
        content = json.loads(contents.get(name, b"{}"))
        settings = content.get("image_processor", content if name == FILES[0] else None)
        if settings:
            settings["size"] = size
            if "max_pixels" in settings:  # older versions read this one, newer ones it first
                settings["max_pixels"] = size["longest_edge"]
            text = json.dumps(content, indent=2, ensure_ascii=False)
            contents[name] = f"{text}\n".encode()
    return True


def _for_pictures(kind: Any) -> Any:
    """A class of processors without the parts for videos and sounds: these may need packages, such
    as torchvision, that pictures do not."""
    all_parts = list(kind.get_attributes())
    parts = [name for name in all_parts if name in ("image_processor", "tokenizer")]

    class Base(ProcessorMixin):  # type: ignore[misc]
        # called by the constructor of ``kind``, which passes all parts: those left out are None
        def __init__(self, *args: Any, **options: Any) -> None:
            options |= zip(all_parts, args, strict=False)
            absent = set(all_parts) - set(parts)
            super().__init__(**{n: v for n, v in options.items() if n not in absent})

    class Pictures(kind, Base):  # type: ignore[misc]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return parts

        @classmethod
        def from_args_and_dict(cls, args: Any, processor_dict: Any, **options: Any) -> Any:
            # Gemma 3n and 4 demand all parts: the others are None, and ``Base`` leaves them out
            opened = dict(zip(parts, args, strict=True))
            args = [opened.get(name) for name in all_parts]
            return super().from_args_and_dict(args, processor_dict, **options)

    Pictures.__name__ = kind.__name__
    return Pictures


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
    files: Mapping[str, bytes]  # that it was opened from, with the limit of pixels
    is_limited: bool = False  # whether it keeps to the limit of pixels by itself
    _texts: dict[tuple[Size, ...], list[str]] = field(default_factory=dict, repr=False)
    _counts: dict[str, int] = field(default_factory=dict, repr=False)
    _sizes: dict[Size, Size | None] = field(default_factory=dict, repr=False)

    def expand(self, text: str, pictures: Sequence[Seen], *, is_whole: bool) -> Expanded:
        """Rendered ``text`` with the text of each picture at its placeholder. ``is_whole``: it has
        all of ``pictures``, rather than the first of them. Raises ``DataError``: the chat template
        has written another number of placeholders."""
        # A token that a message spells is between marks: it is text, and no placeholder.
        count = re.sub(f"{OPEN}[^{CLOSE}]*{CLOSE}", "", text).count(self._token)
        if count > len(pictures) or (is_whole and count < len(pictures)):
            raise DataError(
                "the chat template writes another number of placeholders than the row has "
                "pictures; choose the model's own template (data.template: auto)"
            )
        texts = self.texts_of([(each.width, each.height) for each in pictures])[:count]
        if not texts:
            return Expanded(text, (), ())
        expanded, offsets = self.processor.get_text_with_replacements([text], texts)
        spans = [(span["span"], span["new_span"]) for span in offsets[0]]
        ends, gains = [old[1] for old, _ in spans], [new[1] - old[1] for old, new in spans]
        return Expanded(expanded[0], ends, gains)

    def counts(self, sizes: Sequence[Size]) -> list[int]:
        """The tokens that each of these pictures of a row replaces."""
        texts = self.texts_of(sizes)
        for text in set(texts) - self._counts.keys():
            self._counts[text] = self._num_placeholders(self._ids(text))
        return [self._counts[text] for text in texts]

    def texts_of(self, sizes: Sequence[Size]) -> list[str]:
        """The texts of pictures of these sizes in one row. Raises ``DataError``: the model takes
        none of one of them."""
        if self.depends_on_others and len(sizes) > 1:
            return self._texts_in([*sizes])
        return [self._texts_in([size])[0] for size in sizes]

    def _texts_in(self, sizes: list[Size]) -> list[str]:
        key = tuple(sizes)
        if key not in self._texts:
            try:
                _, texts = self._process([[_blank(size) for size in sizes]])
            except (ValueError, RuntimeError, IndexError, ZeroDivisionError) as error:
                what = "picture of its size" if len(sizes) == 1 else "pictures of these sizes"
                reason = re.sub(r"[\d.]+", "N", first_line(error))  # equal reasons are counted
                raise DataError(f"the processor takes no {what}: {reason}") from None
            # Photos have thousands of sizes, whose texts are kilobytes, and few different ones.
            self._texts[key] = [sys.intern(text) for text in texts]
        return self._texts[key]

    def size_seen(self, size: Size) -> Size | None:
        """The size in which the model sees a picture of ``size``; None if that is not known, as of
        one that the processor cuts into tiles. Raises ``DataError``, as ``texts_of``."""
        if size not in self._sizes:
            self.texts_of([size])
            outputs, _ = self._process([[_blank(size)]])
            grids, pixels = outputs.get("image_grid_thw"), outputs.get("pixel_values")
            patch = getattr(self.processor.image_processor, "patch_size", None)
            self._sizes[size] = None
            if grids is not None and isinstance(patch, int):
                self._sizes[size] = int(grids[0, 2]) * patch, int(grids[0, 1]) * patch
            elif isinstance(pixels, torch.Tensor) and pixels.ndim == 4 and len(pixels) == 1:
                self._sizes[size] = pixels.shape[3], pixels.shape[2]
        return self._sizes[size]

    def kept(self, ids: Sequence[int], pictures: Sequence[Seen]) -> list[Seen] | None:
        """The pictures of a row that may have been cut; None if it was cut through one, or between
        those whose texts depend on each other."""
        num_placeholders, complete = self._num_placeholders(ids), list[Seen]()
        for picture in pictures:
            if not num_placeholders:
                break
            complete.append(picture)
            num_placeholders -= picture.tokens
        counts = self.counts([(picture.width, picture.height) for picture in complete])
        is_other = counts != [picture.tokens for picture in complete]
        return None if num_placeholders or is_other else complete

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

    @cached_property
    def depends_on_others(self) -> bool:
        """Whether the text of a picture is another one beside others, as in LLaVA-OneVision."""
        both = [(_PLAIN, _PLAIN), (2 * _PLAIN, _PLAIN)]
        try:
            return self._texts_in(both) != [self._texts_in([size])[0] for size in both]
        except DataError:  # it takes one at a time, and says so of a row with several
            return True

    @cached_property
    def fingerprint(self) -> str:
        """Of all that decides the tokens of a picture."""
        settings = self.processor.image_processor.to_dict()
        own = {n: v for n, v in vars(self.processor).items() if isinstance(v, str | int | float)}
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
        added = self.processor.tokenizer.added_tokens_decoder
        written = self._ids(self.texts_of([(_PLAIN, _PLAIN)])[0]) + self._ids(self.placeholder)
        return frozenset({self._token, *(added[i].content for i in written if i in added)})

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

    @cached_property
    def blank(self) -> Image:
        """A picture of a size that every processor takes."""
        return _blank((_PLAIN, _PLAIN))

    def example(self) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """The ids [1, T] of a short row about ``blank``, and all else that the processor itself
        gives the model of it. Raises ``ModelError``: it fails."""
        try:
            picture = self.placeholder if self._token in self.placeholder else self._token
            texts, images = [f"a{picture}b"], [[self.blank]]
            inputs = dict(self.processor(text=texts, images=images, return_tensors="pt"))
        except Exception as error:  # of any kind: code of one model
            raise ModelError(
                f"{type(self.processor).__name__} fails for a row with a picture: "
                f"{first_line(error)}"
            ) from None
        inputs.pop("attention_mask", None)
        return inputs.pop("input_ids"), inputs

    @property
    def _token(self) -> str:
        return str(self.processor.image_token)

    def _num_placeholders(self, ids: Sequence[int]) -> int:
        return sum(i in self.token_ids for i in ids)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _blank(size: Size) -> Image:
    import PIL.Image

    return PIL.Image.new("RGB", size)
