"""The files of pictures: found in rows, looked at at encoding, decoded at training.

A path in a row is written by a stranger. It is followed inside one folder only, through no link, up
to a limit of bytes and pixels, and no URL is fetched. Encoding reads the header of a picture; a
digest of its bytes is kept beside the tokens, so that training on a file that has changed since is
an error, and not another picture.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from ...batch import Features
from ...errors import DataError, first_line
from ...storage import files
from ..example import MEDIA_COLUMN
from ..section import MediaSection

if TYPE_CHECKING:
    from PIL.Image import Image

Size = tuple[int, int]  # width and height in pixels
_NOISE = "noise:"  # in place of a path: a picture of noise, for checks: seed, width, height
_KEPT = "kept:"  # in place of a path: a file of the cache, by its digest; the row had its bytes
_INLINE = "inline:"  # in place of a path: the file itself, where no cache is
MAX_BYTES = 1 << 28  # of a picture
_MAX_PIXELS = 89_478_485  # where Pillow begins to warn
_LONGEST = 255  # characters of the name of a file
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+=*\s*")
_SMALL = 160  # pixels of the longer side of a thumbnail
_ORIENTATION, _QUARTER_TURNED = 0x0112, 5  # of EXIF: from this value on, width is height
# Pillow has 40 readers, of which one starts another program: a file that says it is EPS goes to
# Ghostscript, whatever its name. These contain pixels alone.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_TURNING = (b"eXIf", b"Raw profile type", b"adobe.xmp")  # in a PNG: what may have an orientation


class Noise(str):
    """A picture of noise, for checks; the text of a row is none, whatever it says."""

    @classmethod
    def of(cls, seed: int, width: int, height: int) -> Noise:
        """The same picture every time."""
        return cls(f"{_NOISE}{seed},{width},{height}")


class Seen(NamedTuple):
    """A picture as it was when its row was encoded."""

    path: str
    digest: str
    width: int  # as the model sees it: turned, and not larger than ``data.media.max_pixels``
    height: int
    tokens: int  # of the row, that it takes the place of

    @property
    def name(self) -> str:
        """The name of its file, for people."""
        is_inline = self.path.startswith(_INLINE)
        return self.digest if is_inline else self.path.removeprefix(_KEPT)


def has_file(path: str) -> bool:
    """Whether ``path`` of a ``Seen`` is a file, in the folder or in the cache."""
    return not path.startswith((_NOISE, _INLINE))


def seen_in(item: Features) -> list[Seen]:
    """The pictures of an encoded item, in the order of their placeholders."""
    column = item.get(MEDIA_COLUMN, b"")
    data = column if isinstance(column, bytes) else np.asarray(column, np.uint8).tobytes()
    return [Seen(*each) for each in json.loads(data)] if data else []


def as_column(pictures: Sequence[Seen]) -> bytes:
    """Pictures as the cache stores them."""
    return json.dumps(pictures, separators=(",", ":")).encode() if pictures else b""


@dataclass(frozen=True)
class MediaFiles:
    """Where the pictures of a recipe are."""

    section: MediaSection
    folder: Path  # of paths in rows
    cache: Path | None  # of pictures that rows contain themselves; None: they stay in memory
    setting: str = "data.media.folder"  # that names the folder, for people
    most_pixels: int = _MAX_PIXELS  # of a file, whatever the model is to see of it

    def look(self, source: str | bytes) -> Seen:
        """A picture of a row, by its header; its tokens are not known here. Raises ``DataError``:
        there is none, or the model would see another one."""
        return self.look_with_size(source)[0]

    def look_with_size(self, source: str | bytes) -> tuple[Seen, Size]:
        """The same, and the size of its file, which may be larger."""
        if isinstance(source, Noise):
            size = _noise(source).size
            return Seen(source, source, *size, 0), size
        path = self._kept(source) if isinstance(source, bytes) else source
        if isinstance(source, str) and path.startswith((_NOISE, _KEPT, _INLINE)):
            path = f"./{path}"  # a file of that name, of which nothing but a path is meant
        data = self._read(path)
        with _damage_said(), self._opened(data) as image:
            width, height = image.size
            frames = getattr(image, "n_frames", 1)
            if frames > 1 and image.format != "MPO":  # telephones add a thumbnail in this form
                raise DataError(
                    f"it has {frames} frames, of which the model would see the first alone; "
                    "save that one"
                )
            if image.mode.startswith("I") or image.mode == "F":
                raise DataError(
                    "it has 16 or 32 bits a channel, of which all but the darkest would "
                    "become white; convert it to 8 bits"
                )
            is_png = image.format == "PNG"
            self._verify(data)
            # Of a PNG, Pillow decodes all pixels first, as the chunk may be behind them.
            may_turn = not is_png or any(mark in data for mark in _TURNING)
            if may_turn and image.getexif().get(_ORIENTATION, 1) >= _QUARTER_TURNED:
                width, height = height, width
        size = width, height
        return Seen(path, xxhash.xxh3_64_hexdigest(data), *self.fitted(size), 0), size

    def decode(self, seen: Seen) -> Image:
        """The pixels of a picture. Raises ``DataError``: it is not what it was when its row was
        encoded."""
        from PIL import ImageOps

        if seen.path.startswith(_NOISE):
            return _noise(seen.path)
        try:
            data = self._read(seen.path)
            if xxhash.xxh3_64_hexdigest(data) != seen.digest:
                raise DataError("it has changed since its row was encoded")
            with self._opened(data) as image:
                rgb = _as_rgb(ImageOps.exif_transpose(image))
        except Exception as error:  # as in ``_damage_said``
            cure = "restore the file, or start again: its row is then encoded again"
            raise DataError(f"picture {seen.name}: {first_line(error)}; {cure}") from None
        size = (seen.width, seen.height)
        return rgb if rgb.size == size else rgb.resize(size)

    def is_same(self, path: str, digest: str) -> bool:
        """Whether the file at ``path`` is what it was when its row was encoded."""
        try:
            return xxhash.xxh3_64_hexdigest(self._read(path)) == digest
        except DataError:
            return False

    def place(self, path: str) -> str:
        """Where the file at ``path`` is, if it may be read."""
        if self.cache is not None and path.startswith(_KEPT):
            return f"{self.cache}/{path.removeprefix(_KEPT)}"
        # No Path: of a million it would take 6 s.
        return path if path.startswith("/") else f"{self.folder}/{path}"

    def thumbnail(self, seen: Seen) -> str:
        """A small copy of a picture, as a data URL. Raises ``DataError`` as ``decode`` does."""
        image, buffer = self.decode(seen), BytesIO()
        image.thumbnail((_SMALL, _SMALL))
        image.save(buffer, format="PNG")
        return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"

    def _read(self, path: str) -> bytes:
        """The bytes of a file inside the folder."""
        if self.cache is None and path.startswith(_INLINE):
            return base64.b64decode(path.removeprefix(_INLINE))
        if self.cache is not None and path.startswith(_KEPT):
            folder, name = self.cache, path.removeprefix(_KEPT)
        elif path.startswith("data:") or ("://" in path and not path.startswith("file://")):
            raise DataError("it is a URL, and none is fetched; download it first")
        else:
            folder, name = self.folder, path.removeprefix("file://")  # as in Qwen's documents
            if Path(name).is_absolute():
                try:
                    name = str(Path(name).relative_to(folder.absolute()))
                except ValueError:
                    raise DataError(
                        f"it is outside of {self.setting}; name the folder that it is in there"
                    ) from None
        if len(path) > _LONGEST and _BASE64.fullmatch(path):
            raise DataError('it is no path, but base64; write "data:image/png;base64," before it')
        try:
            return files.read_inside(folder, name, MAX_BYTES)
        except FileNotFoundError:
            raise DataError(
                f"no such file; its path is relative to {self.setting}, which is {folder}"
            ) from None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise DataError(
                f"it is not read: {reason}; it must be a file inside {self.setting}, "
                "reached through no link"
            ) from None

    def _opened(self, data: bytes) -> Image:
        """A picture of which the header was read, and no more: what is too large is not decoded."""
        import PIL.Image

        too_large = DataError(f"it has more than {self.most_pixels:,} pixels")
        try:
            image = PIL.Image.open(BytesIO(data), formats=FORMATS)
        except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning):
            raise too_large from None
        except Exception:  # as in ``_damage_said``
            raise DataError(
                "it is truncated or damaged, or in another format than its name says; expected "
                f"one of {', '.join(FORMATS)}"
            ) from None
        if image.width * image.height > self.most_pixels:  # Pillow allows twice as many
            image.close()
            raise too_large
        return image

    def _verify(self, data: bytes) -> None:
        """Check a picture to its end: a PNG by its checksums, which need no pixel; a JPEG, which
        is read to its end in an eighth of its size, at a third of the time; others as they are
        decoded."""
        with _damage_said(), self._opened(data) as image:
            if image.format == "PNG":
                image.verify()
            else:
                image.draft("L", (1, 1))
                image.load()

    def _kept(self, data: bytes) -> str:
        """The place of a picture that a row contains, written to the cache if there is one."""
        if self.cache is None:
            return _INLINE + base64.b64encode(data).decode()
        name = xxhash.xxh3_128_hexdigest(data)
        try:  # never believed by its name: it may be cut off, or another one
            is_there = files.read_inside(self.cache, name, MAX_BYTES) == data
        except (OSError, ValueError):
            is_there = False
        if not is_there:
            files.make_folder(self.cache)
            files.remove_tree(self.cache / name)
            files.write_aside(self.cache / name, data)
        return _KEPT + name

    def fitted(self, size: Size) -> Size:
        """A size within the limit of pixels, of the same shape."""
        most, pixels = self.section.max_pixels, size[0] * size[1]
        if most is None or pixels <= most:
            return size
        share = (most / pixels) ** 0.5
        return max(1, int(size[0] * share)), max(1, int(size[1] * share))


def _as_rgb(image: Image) -> Image:
    """A picture as the processors of transformers 5 make it (``convert_to_rgb``), and vLLM:
    transparent parts are white, whatever colour is stored under them."""
    import PIL.Image

    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = PIL.Image.new("RGBA", image.size, "white")
    return PIL.Image.alpha_composite(white, image).convert("RGB")


@contextmanager
def _damage_said() -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # whatever Pillow's readers meet in a stranger's bytes
        raise DataError(f"it is truncated or damaged ({first_line(error)})") from None


def _noise(path: str) -> Image:
    import PIL.Image

    seed, width, height = map(int, path.removeprefix(_NOISE).split(","))
    dice = np.random.default_rng(seed)
    return PIL.Image.fromarray(dice.integers(0, 255, (height, width, 3), np.uint8))
