"""Pictures in requests: contained in them, or in the folder that the owner named."""

import base64
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest

import pictures
from surefoot.data.example import MEDIUM, Message
from surefoot.data.media.files import MediaFiles
from surefoot.data.text.prompts import Prompt
from surefoot.generate.section import GenerateSection
from surefoot.use.model_loading import open_model
from surefoot.use.prediction import predict

from .running import running


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    pictures.save_model(folder / "base", "gemma3")
    (folder / "shots").mkdir()
    pictures.picture(folder / "shots" / "a.png")
    (folder / "shots" / "cut.jpg").write_bytes(b"no picture")
    pictures.picture(folder / "b.png")
    return folder


@pytest.fixture(scope="module")
def served(folder):
    with running(folder / "base", media_folder=folder / "shots") as client:
        yield client


def asked(url, text="what is it?"):
    picture = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [picture, {"type": "text", "text": text}]}]


def test_responses_to_pictures_are_those_of_predict(folder, served):
    data = (folder / "shots" / "a.png").read_bytes()
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    opened = open_model(folder / "base")
    question = Message("user", f"{MEDIUM}what is it?", media=(data,))
    (expected,) = predict(opened, [Prompt("x", (question,))], GenerateSection(max_new_tokens=6))
    for source in (url, "a.png"):
        found = served.chat(asked(source), max_tokens=6)
        assert found["choices"][0]["message"]["content"] == expected.text
    parts = served.chunks("/v1/chat/completions", messages=asked(url), max_tokens=6)
    text = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts)
    assert text == expected.text
    assert served.chat("hello", max_tokens=6)["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://example.com/a.png", "it is a URL, and none is fetched"),
        ("file:///etc/passwd", "it is a URL, and none is fetched"),
        ("../b.png", "must be a file inside --media-folder"),
        ("/etc/passwd", "must be a file inside --media-folder"),
        ("none.png", "No such file"),
        ("noise:0,100000,100000", "No such file"),
        ("cut.jpg", "truncated or damaged"),
        ("data:image/png;base64,??", "cannot be decoded"),
        ("data:image/png;base64,aGVsbG8=", "truncated or damaged"),
    ],
)
def test_a_picture_that_is_not_read_is_an_error_that_says_why(url, why, served):
    status, found = served.post("/v1/chat/completions", messages=asked(url), max_tokens=2)
    assert status == 400
    assert why in found["error"]["message"]


def test_without_a_folder_no_file_is_read(folder):
    with running(folder / "base") as client:
        status, found = client.post("/v1/chat/completions", messages=asked("a.png"), max_tokens=2)
    assert status == 400
    assert "start the server with --media-folder FOLDER" in found["error"]["message"]


def test_a_picture_of_too_many_pixels_is_refused_by_its_header(folder, served):
    data = (folder / "b.png").read_bytes()
    header = b"IHDR" + struct.pack(">II", 5000, 3201) + data[24:29]
    checked = header + struct.pack(">I", zlib.crc32(header))
    url = "data:image/png;base64," + base64.b64encode(data[:12] + checked + data[33:]).decode()
    status, found = served.post("/v1/chat/completions", messages=asked(url), max_tokens=2)
    assert status == 400
    assert "more than 16,000,000 pixels" in found["error"]["message"]


def test_a_slow_picture_holds_up_no_other_request(folder, served, monkeypatch):
    """Of two that are read at a time, one waits until all others are answered."""
    slow, begun, decode = threading.Event(), threading.Event(), MediaFiles.decode
    pictures.picture(folder / "shots" / "slow.png", (56, 48))

    def decoded(self, seen):
        if (seen.width, seen.height) == (56, 48):
            begun.set()
            assert slow.wait(30)
        return decode(self, seen)

    monkeypatch.setattr(MediaFiles, "decode", decoded)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(served.chat, asked("slow.png"), max_tokens=2)
        assert begun.wait(30)
        assert served.chat("hello", max_tokens=2)["choices"]
        assert served.chat(asked("a.png"), max_tokens=2)["choices"]
        assert not waiting.done()
        slow.set()
        assert waiting.result()["choices"]


def test_pixels_are_read_once_for_all_responses_of_a_request(served, monkeypatch):
    read, decode = [], MediaFiles.decode
    monkeypatch.setattr(
        MediaFiles, "decode", lambda self, seen: (read.append(seen), decode(self, seen))[1]
    )
    assert len(served.chat(asked("a.png"), max_tokens=2, n=3)["choices"]) == 3
    assert len(read) == 1
