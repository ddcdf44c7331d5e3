"""Doors x odd files: whatever a stranger has made of a file, who opens it gets what it says, or an
error with its name. Nothing hangs, nothing fills the memory, no traceback."""

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import struct
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import save

import folders
import pictures
from surefoot.data.example import MEDIUM, BrokenRow, Message
from surefoot.data.media.files import MediaFiles
from surefoot.data.media.processor import open_processor
from surefoot.data.rows import _row_sources
from surefoot.data.rows._row_sources import find_files
from surefoot.data.rows.formats import Alpaca
from surefoot.data.rows.registry import read_entry, read_registry
from surefoot.data.rows.rows import read_examples
from surefoot.data.section import DataSection, MediaSection
from surefoot.data.text import _tokenization
from surefoot.data.text._pictures import look_at
from surefoot.data.text.codec import Codec
from surefoot.data.text.prompts import read_prompts, read_tools
from surefoot.data.text.templates import load_template
from surefoot.errors import DataError, SurefootError
from surefoot.model.adapter_files import is_addable
from surefoot.model.config import read_config
from surefoot.model.section import ModelSection
from surefoot.model.tokenizer import load_tokenizer
from surefoot.network._file_checks import check_files
from surefoot.plugins.trainers.pickles import read_pickle
from surefoot.recipe.recipe import load
from surefoot.run.code_files import _hash, _modules
from surefoot.training.callbacks.metric_files import restore
from surefoot.use.estimate.plan import measured_speed

SECONDS = 20  # of the longest look at one file, on a busy machine
ROW = {"prompt": "What?", "response": "That."}


@contextlib.contextmanager
def answered():
    """A block that ends by itself."""

    def late(*_):
        pytest.fail(f"no answer in {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# Files as they should be, by their endings.


def columnar(ending):
    table = pa.table({name: [value] * 3 for name, value in ROW.items()})
    buffer = io.BytesIO()
    if ending == "parquet":
        pq.write_table(table, buffer)
    else:
        with pa.ipc.new_file(buffer, table.schema) as writer:
            writer.write_table(table)
    return buffer.getvalue()


def png():
    buffer = io.BytesIO()
    Image.effect_noise((64, 48), 50).convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


GOOD = {
    "jsonl": lambda: (json.dumps(ROW) + "\n").encode() * 3,
    "json": lambda: json.dumps([ROW] * 3).encode(),
    "csv": lambda: b"prompt,response\nWhat?,That.\n",
    "tsv": lambda: b"prompt\tresponse\nWhat?\tThat.\n",
    "txt": lambda: "Ein Löwe.\n".encode(),
    "parquet": lambda: columnar("parquet"),
    "arrow": lambda: columnar("arrow"),
    "png": png,
    "yaml": lambda: b"stage: sft\nmodel: {path: x}\n",
    "jinja": lambda: folders.CHATML.encode(),
    "py": lambda: b"import json\n",
    "pt": lambda: b"PK\x03\x04",
    "safetensors": lambda: save({"base_model.model.a.lora_A.weight": torch.ones(2, 2)}),
}


def rows(path):
    source = find_files(path)
    source.stamp()
    source.content_hash()
    return list(source.rows())


def picture(path):
    media = MediaFiles(MediaSection(), path.parent, path.parent / "cache")
    (seen,) = look_at([Message("user", MEDIUM, media=(path.name,))], media, "rows:0")
    return media.decode(seen)


def code(path):
    return _hash(path), _modules(path)


def base_with(path, name, make=folders.save_model):
    """A model whose file ``name`` is what lies at ``path``."""
    folder = make(path.parent / "base")
    (folder / name).unlink()
    path.rename(folder / name)
    return folder


def registered(path):
    return read_registry(path.rename(path.with_name("dataset_info.json")))


def processor(path):
    base = base_with(path, "processor_config.json", lambda f: pictures.save_model(f, "llava"))
    return open_processor(base, load_tokenizer(base))


def adapter(path):
    folder = path.parent / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    path.rename(folder / "adapter_model.safetensors")
    return is_addable(folder)


DOORS = {  # of what is read, the ending of its file and what reads it
    "rows of JSON Lines": ("jsonl", rows),
    "rows of JSON": ("json", rows),
    "rows of CSV": ("csv", rows),
    "rows of TSV": ("tsv", rows),
    "a text": ("txt", rows),
    "rows of Parquet": ("parquet", rows),
    "rows of Arrow": ("arrow", rows),
    "a registry": ("json", registered),
    "a picture": ("png", picture),
    "prompts of JSON Lines": ("jsonl", read_prompts),
    "prompts of JSON": ("json", read_prompts),
    "prompts of CSV": ("csv", read_prompts),
    "prompts of text": ("txt", read_prompts),
    "tools": ("json", read_tools),
    "a template": ("jinja", lambda path: load_template(str(path), folders.tokenizer())),
    "a recipe": ("yaml", load),
    "a tokenizer": ("json", lambda path: load_tokenizer(base_with(path, "tokenizer.json"))),
    "a configuration": (
        "json",
        lambda path: read_config(base_with(path, "config.json"), ModelSection(path="x")),
    ),
    "a processor": ("json", processor),
    "weights": (
        "safetensors",
        lambda path: check_files(base_with(path, "model.safetensors"), ModelSection(path="x")),
    ),
    "an adapter": ("safetensors", adapter),
    "code of a reward": ("py", code),
    "a pickle": ("pt", read_pickle),
    "metrics of a run": ("jsonl", lambda path: restore(path, [])),
    "the speed of a run": (
        "jsonl",
        lambda path: measured_speed(path.rename(path.parent / "metrics.jsonl").parent),
    ),
}


def png_of(pixels):
    """A picture that says it has so many, of which there are few."""
    header = b"IHDR" + struct.pack(">IIBBBBB", pixels, 1, 8, 2, 0, 0, 0)
    return png()[:12] + header + struct.pack(">I", zlib.crc32(header)) + png()[33:]


CONTENTS = {
    "good": lambda good: good,
    "empty": lambda good: b"",
    "cut": lambda good: good[: len(good) * 2 // 3],
    "cut early": lambda good: good[:9],
    "another kind": lambda good: png() if not good.startswith(b"\x89PNG") else b"hello",
    "compressed": lambda good: b"\x1f\x8b\x08\x00" + b"\0" * 50,
    "a bomb": lambda good: png_of(89_478_486),
    "a huge header": lambda good: good[:8] + b"\xff" * 8 + good[16:],
    "a huge footer": lambda good: good[:-8] + b"\xff\xff\xff\x7f" + good[-4:],
    "bytes changed": lambda good: bytes(b ^ (i % 7 == 3) for i, b in enumerate(good)),
    "Latin-1": lambda good: "Ein Löwe, öde".encode("latin-1") * 9,
    "UTF-16": lambda good: good.decode("latin-1").encode("utf-16"),
    "NULs": lambda good: b"\0" * 999,
    "half a character": lambda good: good.replace(b"That.", b"\\ud800").replace(b"t", b"\xc3"),
    "deep lists": lambda good: b"[" * 100_000,
    "deep objects": lambda good: b'{"a":' * 100_000,
    "deep blocks": lambda good: b"- " * 1000,
    "a long number": lambda good: b'{"prompt": ' + b"9" * 5000 + b', "response": "a"}',
    "another type": lambda good: b'{"prompt": {"a": [1]}, "response": [[]], "a": NaN}',
    "a list of numbers": lambda good: b"[1, 2.5, null, true]",
    "one text": lambda good: b'"text"',
    "a lone quote": lambda good: b'a,b\n"' + b"x\n" * 99,
    "aliases": lambda good: (
        b"a: &a [1,1]\n"
        + b"".join(b"%c: &%c [*%c,*%c]\n" % (c, c, c - 1, c - 1) for c in range(98, 123))
    ),
}


def device(path):
    path.symlink_to("/dev/zero")


def broken_link(path):
    path.symlink_to(path.parent / "nowhere")


def plug(path):
    os.chdir(path.parent)  # the name of a socket has 107 characters at most
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as made:
        made.bind(path.name)


PLACES = {
    "a pipe": os.mkfifo,
    "a device": device,
    "a folder": Path.mkdir,
    "a broken link": broken_link,
    "a socket": plug,
}


@pytest.mark.parametrize("door", DOORS)
def test_no_odd_file_stops_anything_but_with_its_name(door, tmp_path, monkeypatch):
    ending, read = DOORS[door]
    good, walked = GOOD[ending](), 0
    most = 1000 if ending == "yaml" else 1 << 20  # of nested YAML a reader in Python takes long
    made = {n: lambda p, m=make: p.write_bytes(m(good)[:most]) for n, make in CONTENTS.items()}
    for name, make in {**made, **PLACES}.items():
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        path = folder / f"odd.{ending}"
        make(path)
        monkeypatch.chdir(folder)
        with answered():
            try:
                read(path)
            except SurefootError as error:
                assert str(folder) in str(error) or path.name in str(error), (name, str(error))
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(folder)
        walked += 1
    assert walked == len(CONTENTS) + len(PLACES) == 28


class WeirdError(Exception):
    """Of a reader that nobody knows yet."""


class PanicException(BaseException):
    """Of pyo3: as tokenizers and safetensors raise it."""


@pytest.mark.parametrize("kind", [WeirdError, PanicException, MemoryError, RecursionError])
def test_a_reader_that_raises_something_new_is_an_error_of_its_file_and_row(
    kind, tmp_path, monkeypatch
):
    def fails(*_, **__):
        raise kind("out of order")

    def rows_then_failure(_):
        yield ROW
        fails()

    path = tmp_path / "odd.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    with monkeypatch.context() as planted:
        planted.setitem(_row_sources.READERS, ".jsonl", rows_then_failure)
        with pytest.raises(DataError, match=rf"odd.jsonl: row 1: .*{kind.__name__}: out of order"):
            rows(path)
    codec = Codec(folders.tokenizer(), load_template("auto", folders.tokenizer()), SECTION)
    (example,) = read_examples(entry_of(path))
    with monkeypatch.context() as planted:
        planted.setattr(_tokenization.Tokenization, "encode", fails)
        with pytest.raises(DataError, match=rf"rows:0.*{kind.__name__}: out of order"):
            codec.encode_chats([example])
    if issubclass(kind, Exception):
        Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
        media = MediaFiles(MediaSection(), tmp_path, None)
        seen, num_errors = media.look("a.png"), 0
        for name in ("open", "Image.load", "Image.getexif", "PngImagePlugin.PngImageFile.verify"):
            with monkeypatch.context() as planted:
                planted.setattr(f"PIL.Image.{name}" if "Png" not in name else f"PIL.{name}", fails)
                for read, what in ((media.look, "a.png"), (media.decode, seen)):
                    try:
                        read(what)
                    except DataError:
                        num_errors += 1
        assert num_errors == 5
        with monkeypatch.context() as planted:  # a format of rows, such as a plugin's
            planted.setattr(Alpaca, "read", fails)
            (broken,) = read_examples(entry_of(path), max_broken_rows=1)
        assert f"{kind.__name__}: out of order" in broken.reason


SECTION = DataSection(datasets=("rows",))


def entry_of(path):
    written = {"file_name": str(path), "formatting": "alpaca"}
    written["columns"] = {"prompt": "prompt", "response": "response"}
    return read_entry("rows", written, path.parent, "rows", "huggingface", "file")


def test_an_interrupt_is_no_error_of_a_file(tmp_path, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    (tmp_path / "a.jsonl").write_text("{}\n")
    monkeypatch.setitem(_row_sources.READERS, ".jsonl", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rows(tmp_path / "a.jsonl")


def test_one_row_that_cannot_be_python_objects_is_broken_and_the_others_are_read(tmp_path):
    late = pa.array([0, 2**62, 1], pa.timestamp("s"))  # a year beyond those of Python
    data = pa.py_buffer(b"a\xffb")
    text = pa.StringArray.from_buffers(3, pa.py_buffer(struct.pack("<4i", 0, 1, 2, 3)), data)
    for column in (late, text):
        table, path = pa.table({"x": column, "n": [0, 1, 2]}), tmp_path / "odd.arrow"
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
        found = rows(path)
        assert [row["n"] for row in found if not isinstance(row, BrokenRow)] == [0, 2]
        assert found[1].index == 1
        assert found[1].reason.startswith("odd.arrow: cannot be read (")


def test_a_picture_of_too_many_pixels_is_refused_by_its_header(tmp_path, monkeypatch):
    def decodes(*_):
        pytest.fail("it is decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decodes)
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.verify", decodes)
    for pixels, limit in ((89_478_486, None), (16_000_001, 16_000_000)):
        (tmp_path / "a.png").write_bytes(png_of(pixels))
        limits = {} if limit is None else {"most_pixels": limit}
        media = MediaFiles(MediaSection(), tmp_path, None, **limits)
        with pytest.raises(DataError, match=f"more than {limit or 89_478_485:,} pixels"):
            media.look("a.png")
