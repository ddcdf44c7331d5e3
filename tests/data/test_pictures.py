"""Rows with pictures: where they stand, how long their placeholders are, what is refused."""

import ast
import base64
import contextlib
import io
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps, PngImagePlugin
from transformers import AutoProcessor
from transformers.image_transforms import convert_to_rgb

import pictures
import surefoot
from surefoot.batch import IGNORE_INDEX
from surefoot.data.example import MEDIUM
from surefoot.data.media.files import FORMATS, MediaFiles, Seen, seen_in
from surefoot.data.rows.registry import read_entry
from surefoot.data.rows.rows import BOXES_OF_FILES
from surefoot.data.section import MediaSection
from surefoot.data.training_data import prepare
from surefoot.errors import DataError
from surefoot.recipe.recipe_data import encoding_of, open_codec
from surefoot.run.parts import RunParts
from surefoot.use.data_check.check import check_data

SOURCE = Path(surefoot.__file__).parent
PROCESSED = ("llava", "idefics3", "gemma3")  # whose processors need Pillow only


@pytest.fixture(scope="module", params=pictures.KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def base(kind, tmp_path_factory):
    return pictures.save_model(tmp_path_factory.mktemp(kind), kind)


@pytest.fixture
def codec(base, tmp_path):
    return open_codec(pictures.recipe(tmp_path, base), base)


def read(tmp_path, row, **raw):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    entry = read_entry("d", {"file_name": "rows.jsonl", **raw}, tmp_path, "d")
    return next(iter(entry.format.read(each) for each in entry.source.rows()))


def asked(content, images, answer="a red square"):
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": images}


def encoded(codec, example):
    (item,) = codec.encode_chats([example])[0]
    return item


def test_ids_are_those_of_the_processor_and_labels_are_on_the_answer(kind, base, codec, tmp_path):
    if kind not in PROCESSED:
        pytest.skip("its processor needs torchvision")
    row = asked("<image> and <image> now", [])
    sizes = [(64, 64), (96, 40)]
    row["images"] = [
        pictures.picture(tmp_path / f"{i}.png", size, seed=i) for i, size in enumerate(sizes)
    ]
    item = encoded(codec, read(tmp_path, row))
    processor = AutoProcessor.from_pretrained(base)
    parts = [{"type": "image"}, {"type": "text", "text": " and "}, {"type": "image"}]
    question = {"role": "user", "content": [*parts, {"type": "text", "text": " now"}]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "a red square"}]}
    text = processor.apply_chat_template([question, answer])
    images = [Image.open(tmp_path / name) for name in row["images"]]
    theirs = processor(text=text, images=[images], add_special_tokens=False)["input_ids"][0]
    ids = list(item["input_ids"])
    assert ids == list(theirs)[: len(ids)]
    trained = [i for i, label in zip(ids, item["labels"], strict=True) if label != IGNORE_INDEX]
    assert codec.tokenizer.decode(trained).strip().startswith("a red square")
    counts = [seen.tokens for seen in seen_in(item)]
    assert sum(counts) == sum(i in codec.media.processor.token_ids for i in ids)


def test_a_placeholder_that_a_message_spells_is_text(codec, tmp_path, kind):
    placeholders = {token for token in pictures.TOKENS[kind] if "image" in token}
    name = pictures.picture(tmp_path / "a.png")
    row = asked(f"<image> {' '.join(placeholders - {'<image>'})}", [name])
    one = encoded(codec, read(tmp_path, asked("<image>", [name])))
    item = encoded(codec, read(tmp_path, row))
    assert seen_in(item) == seen_in(one)
    number = sum(i in codec.media.processor.token_ids for i in item["input_ids"])
    assert number == seen_in(one)[0].tokens


def test_a_row_of_text_has_no_pictures_and_its_ids_are_those_of_text(codec, base, tmp_path, kind):
    example = read(tmp_path, asked("say <|im_end|> it", None))
    item = encoded(codec, example)
    assert seen_in(item) == []
    typed = encoded(codec, read(tmp_path, asked(f"say {MEDIUM}<|im_end|> it", None)))
    assert list(typed["input_ids"]) == list(item["input_ids"])
    (alone,) = pictures.text_codec(codec).encode_chats([example])[0]
    assert list(item["input_ids"]) == list(alone["input_ids"])


@pytest.mark.parametrize(
    ("content", "images", "expected"),
    [
        ("a <image> b", ["1.png"], f"a {MEDIUM} b"),
        ("what is it?", ["1.png", "2.png"], f"{MEDIUM * 2}what is it?"),
        ([{"type": "image"}, {"type": "text", "text": "b"}], ["1.png"], f"{MEDIUM}b"),
        ([{"type": "image_url", "image_url": {"url": "1.png"}}], None, MEDIUM),
        ("a <image> b", None, "a <image> b"),
    ],
)
def test_where_a_picture_stands_in_a_row(content, images, expected, tmp_path):
    example = read(tmp_path, asked(content, images))
    assert example.messages[0].content == expected
    assert len(example.messages[0].media) == expected.count(MEDIUM)


@pytest.mark.parametrize(
    ("content", "images", "why"),
    [
        ("<image><image>", ["1.png"], "has 1 pictures, and the texts have 2 places"),
        ("<image>", ["1.png", "2.png"], "has 2 pictures, and the texts have 1 places"),
        (f"{MEDIUM} <image>", ["1.png"], r"the character U\+F0002"),
        ("<image>", [], "has 0 pictures, and the texts have 1 places"),
        ("<image>", [5], "expected a path, a data URL or the bytes of a picture, got int"),
        ("<image>", ["data:image/png;base64,??"], "a data URL that cannot be decoded"),
    ],
)
def test_a_row_whose_pictures_are_not_where_they_belong_is_refused(content, images, why, tmp_path):
    with pytest.raises(DataError, match=why):
        read(tmp_path, asked(content, images))


def test_a_picture_in_an_answer_is_refused(tmp_path):
    with pytest.raises(DataError, match="in an answer"):
        read(tmp_path, asked("a", ["1.png"], answer="<image>"))


def png(size=(64, 48), mode="RGB", **options):
    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, format="PNG", **options)
    return buffer.getvalue()


def transparent(kind):
    """A drawing on a transparent ground, under which another colour is stored."""
    pixels = np.zeros((48, 64, 4), np.uint8)
    pixels[10:30, 10:40] = (200, 30, 30, 255)
    pixels[30:40, 10:40] = (10, 200, 30, 128)
    image = Image.fromarray(pixels, "RGBA")
    if kind in ("LA", "RGBA"):
        return image.convert(kind)
    palette = Image.new("P", (64, 48), 0)
    palette.putpalette([0, 0, 0, 200, 30, 30] + [255] * 762)
    palette.paste(1, (10, 10, 40, 30))
    palette.info["transparency"] = 0
    return palette


@pytest.mark.parametrize("suffix", ["png", "webp", "gif", "tiff"])
@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
@pytest.mark.parametrize("turned", [False, True])
def test_transparent_pictures_are_those_of_the_processor(mode, suffix, turned, tmp_path):
    image = transparent(mode)
    if (suffix, mode) in {("tiff", "P"), ("gif", "LA")}:
        pytest.skip("Pillow stores no transparency")
    options = {"lossless": True} if suffix == "webp" else {}
    if turned and suffix in ("png", "webp"):
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = 6
    image.save(tmp_path / f"a.{suffix}", **options)
    files = MediaFiles(MediaSection(), tmp_path, None)
    expected = convert_to_rgb(load_turned(tmp_path / f"a.{suffix}"), return_numpy=True)
    decoded = np.asarray(files.decode(files.look(f"a.{suffix}")))
    assert decoded.tolist() == expected.tolist()
    assert tuple(decoded[0, -1]) == (255, 255, 255)


def load_turned(path):
    with Image.open(path) as image:
        return ImageOps.exif_transpose(image)


@pytest.mark.parametrize("prefix", ["file://", ""])
def test_the_path_of_a_picture_may_be_an_address_of_a_file(prefix, tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    files = MediaFiles(MediaSection(), tmp_path, None)
    assert files.look(f"{prefix}{tmp_path / 'a.png'}").width == 64
    with pytest.raises(DataError, match="outside of data"):
        files.look(f"{prefix}/etc/passwd")
    with pytest.raises(DataError, match='write "data:image/png;base64," before it'):
        files.look(base64.b64encode(png() * 9).decode())


@pytest.fixture
def files(tmp_path, base):
    return open_codec(pictures.recipe(tmp_path, base), base).media.files


@pytest.mark.parametrize("kind", ["gemma3"], indirect=True)
def test_bytes_of_a_row_are_kept_and_read_again(kind, files, tmp_path):
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    example = read(tmp_path, asked("<image>", [url]))
    (source,) = example.messages[0].media
    seen = files.look(source)
    assert (seen.width, seen.height) == (64, 48)
    assert files.decode(seen).size == (64, 48)


@pytest.mark.parametrize("kind", ["gemma3"], indirect=True)
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("none.png", "no such file"),
        ("../a.png", "must be a file inside data.media.folder"),
        ("/etc/passwd", "outside of data.media.folder"),
        ("link.png", "through no link"),
        ("folder/a.png", "through no link"),
        ("https://example.com/a.png", "is a URL, and none is fetched"),
        ("cut.png", "truncated or damaged"),
        ("text.png", "truncated or damaged"),
        ("deep.png", "16 or 32 bits"),
        ("two.gif", "2 frames"),
        ("noise:0,64,64", "no such file"),
        ("kept:aaaa", "no such file"),
        ("inline:aaaa", "no such file"),
        ("pipe.png", "not a regular file"),
    ],
)
def test_a_bad_file_is_refused_by_name(kind, name, why, files, codec, tmp_path):
    import os

    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.png").write_bytes(png())
    (tmp_path / "link.png").symlink_to(outside / "a.png")
    (tmp_path / "folder").symlink_to(outside)
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, format="PNG")
    (tmp_path / "cut.png").write_bytes(buffer.getvalue()[:-2000])
    (tmp_path / "text.png").write_text("no picture")
    Image.fromarray(np.full((8, 8), 40000, np.uint16)).save(tmp_path / "deep.png")
    frames = [Image.new("L", (8, 8), shade) for shade in (0, 255)]
    frames[0].save(tmp_path / "two.gif", save_all=True, append_images=frames[1:])
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(DataError, match=f"picture {name}: .*{why}"):
        codec.encode_chats([read(tmp_path, asked("<image>", [name]))])


@pytest.mark.parametrize("kind", ["gemma3"], indirect=True)
def test_a_picture_beyond_the_limit_of_pixels_is_refused(kind, files, tmp_path):
    """Of which Pillow only warns, up to twice as many."""
    Image.new("1", (9500, 9500)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match="more than 89,478,485 pixels"):
        files.look("a.png")


DAMAGES = {
    "cut": lambda data: data[:-300],
    "half": lambda data: data[: len(data) // 2],
    "another middle": lambda data: data[:900] + bytes(range(255, 0, -1)) * 4 + data[1920:],
}


@pytest.mark.parametrize("kind", ["gemma3"], indirect=True)
@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "gif", "bmp", "tiff", "ppm"])
def test_what_cannot_be_decoded_is_found_when_its_row_is_encoded(kind, suffix, files, tmp_path):
    path = tmp_path / f"a.{suffix}"
    noise = np.random.default_rng(1).integers(0, 255, (56, 84, 3), np.uint8)
    options = {"gif": {}, "tiff": {"compression": "tiff_lzw"}}.get(suffix, {})
    Image.fromarray(noise).save(path, **options)
    sound, num_refused = path.read_bytes(), 0
    assert files.look(path.name)[2:4] == (84, 56)
    for damage in DAMAGES.values():
        path.write_bytes(damage(sound))
        try:
            seen = files.look(path.name)
        except DataError:
            num_refused += 1
        else:  # then training can decode it
            files.decode(seen)
    assert num_refused >= 1


@pytest.mark.parametrize("kind", ["gemma3"], indirect=True)
def test_a_picture_that_changes_is_noticed(kind, files, tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    seen = files.look("a.png")
    assert files.decode(seen).size == (64, 48)
    (tmp_path / "a.png").write_bytes(png((64, 49)))
    with pytest.raises(DataError, match=r"picture a\.png: it has changed since its row was encod"):
        files.decode(seen)


@pytest.mark.parametrize("kind", ["gemma3"], indirect=True)
def test_a_turned_picture_is_turned_and_a_large_one_made_smaller(kind, files, tmp_path, base):
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "a.png").write_bytes(png(exif=exif))
    assert files.look("a.png")[2:4] == (48, 64)
    assert files.decode(files.look("a.png")).size == (48, 64)
    small = open_codec(pictures.recipe(tmp_path, base, media={"max_pixels": 768}), base).media.files
    seen = small.look("a.png")
    assert seen[2:4] == (24, 32)
    assert small.decode(seen).size == (24, 32)


def behind_the_pixels(data, name):
    """A PNG of which the chunks ``name`` come last."""
    chunks, at = [], 8
    while at < len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4])
        chunks.append(data[at:end])
        at = end
    chunks.sort(key=lambda chunk: (chunk[4:8] == b"IEND", chunk[4:8] == name))
    assert chunks[-2][4:8] == name
    return data[:8] + b"".join(chunks)


@pytest.mark.parametrize("kind", ["gemma3"], indirect=True)
def test_a_png_is_turned_wherever_it_says_so(kind, files, tmp_path):
    exif, info = Image.Exif(), PngImagePlugin.PngInfo()
    exif[0x0112] = 6
    info.add_itxt("XML:com.adobe.xmp", '<a tiff:Orientation="6"/>')
    forms = [png(exif=exif), behind_the_pixels(png(exif=exif), b"eXIf"), png(pnginfo=info)]
    for data in [*forms, behind_the_pixels(forms[-1], b"iTXt")]:
        (tmp_path / "a.png").write_bytes(data)
        seen = files.look("a.png")
        assert seen[2:4] == files.decode(seen).size == (48, 64)


@pytest.mark.parametrize("kind", ["gemma3"], indirect=True)
def test_no_pixel_of_a_png_is_decoded_to_encode_it(kind, files, tmp_path, monkeypatch):
    Image.new("RGB", (64, 48)).save(tmp_path / "a.png")
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)
    assert files.look("a.png")[2:4] == (64, 48)


@pytest.mark.parametrize("kind", ["qwen2_vl"], indirect=True)
def test_a_size_that_the_processor_refuses_drops_the_row(kind, codec, tmp_path):
    (tmp_path / "a.png").write_bytes(png((20000, 30)))
    (outcome,) = codec.encode_chats([read(tmp_path, asked("<image>", ["a.png"]))])
    assert "the processor takes no picture of its size" in outcome.reason


@pytest.mark.parametrize("kind", ["llava"], indirect=True)
def test_a_row_is_not_cut_through_a_picture(kind, base, tmp_path):
    pictures.picture(tmp_path / "a.png")
    codec = open_codec(pictures.recipe(tmp_path, base, cutoff_len=60), base)
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "and <image>"},
        {"role": "assistant", "content": "a red square"},
    ]
    example = read(tmp_path, {"messages": turns, "images": ["a.png"]})
    (outcome,) = codec.encode_chats([example])
    (item,) = outcome.features
    assert seen_in(item) == []
    assert not codec.media.processor.token_ids & set(item["input_ids"])
    seen = [Seen("a.png", "", 64, 64, 16)]
    ids = next(iter(codec.media.processor.token_ids))
    assert codec.media.processor.kept([ids] * 15, seen) is None
    assert codec.media.processor.kept([ids] * 16, seen) == seen


@pytest.mark.parametrize("kind", ["gemma3"], indirect=True)
def test_nothing_is_trained_on_the_tokens_of_a_picture(kind, base, tmp_path):
    pictures.picture(tmp_path / "a.png")
    codec = open_codec(pictures.recipe(tmp_path, base, train_on_prompt=True), base)
    item = encoded(codec, read(tmp_path, asked("<image>", ["a.png"])))
    assert not codec.media.processor.token_ids & set(item["labels"])
    assert set(item["labels"]) - {IGNORE_INDEX}


@pytest.mark.parametrize("kind", ["qwen2_vl"], indirect=True)
def test_rows_with_other_pictures_are_not_those_that_are_trained_on(kind, base, tmp_path, caplog):
    """Nor duplicates; those with the same picture under another name are both."""
    names = [pictures.picture(tmp_path / f"{i}.png", seed=i) for i in range(4)]
    shutil.copy(tmp_path / names[0], tmp_path / "again.png")
    sets = {"rows": [*names[:2], "again.png"], "held": names[2:], "seen": ["again.png", names[3]]}
    for name, files in sets.items():
        lines = [json.dumps(asked("<image> what?", [file])) for file in files]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    evals = [str(tmp_path / f"{name}.jsonl") for name in ("held", "seen")]
    recipe = pictures.recipe(tmp_path, base, eval_datasets=evals)
    prepare(encoding_of(recipe, open_codec(recipe, base)))
    assert "held.jsonl': " not in caplog.text
    assert "seen.jsonl': 1 of its 2 examples are trained on, too" in caplog.text
    found = check_data(RunParts.unopened(recipe))
    rows = found.datasets[0]
    assert rows.equal.rows == ["rows.jsonl:2 is rows.jsonl:0"]
    assert [overlap.same.rows for overlap in found.overlaps] == [[], ["seen.jsonl:0"]]
    assert [overlap.prompt.count for overlap in found.overlaps] == [0, 0]
    assert rows.pictures == {(64, 64, 4): 3}
    assert "3 pictures of 64 x 64 pixels (12 tokens, 4 each)" in rows.totals


@pytest.mark.parametrize("kind", ["qwen2_vl"], indirect=True)
def test_each_picture_that_cannot_be_read_is_named_and_the_others_are_checked(kind, base, tmp_path):
    """Of a cut JPEG the header can be read, and its pixels cannot."""
    pictures.picture(tmp_path / "good.png")
    Image.effect_noise((64, 64), 50).save(tmp_path / "cut.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "cut.jpg").read_bytes()[:-800])
    url = "data:image/png;base64," + base64.b64encode(b"none").decode()
    rows = [asked("<image>", [name]) for name in ("good.png", "none.png", "cut.jpg", url)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = pictures.recipe(tmp_path, base)
    found = check_data(RunParts.unopened(recipe))
    none, cut, kept = found.datasets[0].bad_pictures
    assert none.startswith("rows.jsonl:1: picture none.png: no such file")
    assert cut.startswith(
        "rows.jsonl:2: picture cut.jpg: it is truncated or damaged (image file is"
    )
    assert kept.startswith("rows.jsonl:3: picture: it is truncated or damaged")
    assert found.has_problems
    assert json.loads(json.dumps(found.as_data()))["datasets"][0]["pictures"][0]["count"] == 1


@pytest.mark.parametrize(
    ("kind", "max_pixels", "named"),
    [("qwen2_vl", None, [1, 3]), ("qwen2_vl", 784, [0, 1, 3]), ("gemma3", None, [1, 3])],
    indirect=["kind"],
)
def test_boxes_beside_a_picture_of_another_size_than_its_file_are_named(
    kind, max_pixels, named, base, tmp_path
):
    """They were trained with coordinates that lie outside of what the model sees."""
    pictures.picture(tmp_path / "own.png", (56, 56))  # a size that both processors keep
    pictures.picture(tmp_path / "large.png", (112, 112))
    json_box, tag_box = '{"bbox_2d": [8, 8, 99, 99]}', "<|box_start|>(8,8),(99,99)<|box_end|>"
    told = [
        ("own.png", json_box),
        ("large.png", json_box),
        ("large.png", "red"),
        ("large.png", tag_box),
    ]
    rows = [asked("<image>", [name], answer) for name, answer in told]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = pictures.recipe(tmp_path, base, media={"max_pixels": max_pixels})
    notes = check_data(RunParts.unopened(recipe)).datasets[0].notes
    assert notes.keys() == {BOXES_OF_FILES}
    assert list(notes[BOXES_OF_FILES].rows) == [f"rows.jsonl:{row}" for row in named]


def test_a_model_of_text_says_that_it_reads_no_pictures(codec, tmp_path):
    with pytest.raises(DataError, match="the row has pictures, and this model or stage reads text"):
        pictures.text_codec(codec).encode_chats([read(tmp_path, asked("<image>", ["a.png"]))])


@pytest.mark.filterwarnings("ignore:IM image format")
def test_only_pixels_are_read_whatever_a_file_is_named(tmp_path, monkeypatch):
    """Pillow gives EPS to Ghostscript, which would run a stranger's PostScript."""
    monkeypatch.setattr(subprocess, "Popen", None)  # any program that is started fails the test
    media = MediaFiles(MediaSection(), tmp_path, None)
    Image.init()
    refused = set()
    for name in sorted(Image.SAVE.keys() & Image.OPEN.keys()):
        buffer = io.BytesIO()
        with contextlib.suppress(OSError, ValueError):  # no format of colors
            Image.new("RGB", (64, 64), "red").save(buffer, format=name)
            (tmp_path / "x.png").write_bytes(buffer.getvalue())
            if name in (*FORMATS, "MPO"):  # telephones' JPEG
                assert media.decode(media.look("x.png")).size == (64, 64)
            else:
                with pytest.raises(DataError, match="expected one of PNG, JPEG, WEBP"):
                    media.look("x.png")
                refused.add(name)
    assert {"EPS", "ICO", "PCX"} <= refused


def test_every_picture_is_opened_by_the_list_of_formats():
    opened = [
        call
        for file in SOURCE.rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("Image.open")
    ]
    assert len(opened) == 1
    assert "formats=FORMATS" in ast.unparse(opened[0])
