"""Every kind of store does the same: S3, the memory of this process, a folder of a file system."""

import pytest

from surefoot.plugins.cloud.store import MissingError, Store, StoreError
from surefoot.storage.remote import Address


@pytest.fixture(params=["s3", "gateway", "memory", "file"])
def store(request, tmp_path):
    if request.param in ("s3", "gateway"):
        request.getfixturevalue("server").is_strict = request.param == "gateway"
        return Store(Address(request.getfixturevalue("bucket").url), seconds=5)
    if request.param == "memory":
        request.getfixturevalue("memory")
        return Store(Address("memory://runs/tiny"))
    return Store(Address(f"file://{tmp_path}/there/run"))


def test_an_empty_store_has_no_files(store):
    assert store.list() == {}
    assert store.list("checkpoint-1") == {}


def test_what_is_written_is_listed_and_read(store, tmp_path):
    local = tmp_path / "large"
    local.write_bytes(bytes(range(256)) * 10)
    store.write("a.txt", b"one")
    store.write("a.txt", b"three")
    store.put("checkpoint-1/rank_00000/x", local)
    assert store.list() == {"a.txt": 5, "checkpoint-1/rank_00000/x": 2560}
    assert store.list("checkpoint-1") == {"checkpoint-1/rank_00000/x": 2560}
    assert store.read("a.txt") == b"three"
    assert store.read_range("checkpoint-1/rank_00000/x", 255, 258) == b"\xff\x00\x01"


def test_a_name_is_created_once(store):
    assert store.create("m.json", b"one")
    assert store.create("m.json", b"one")  # as after an answer that was lost
    assert not store.create("m.json", b"two")
    assert store.read("m.json") == b"one"


def test_what_is_deleted_is_gone(store):
    store.write("c/d/e", b"x")
    store.write("f", b"y")
    store.delete("c/d/e")
    store.delete("c/d/e")
    store.delete_folder("c")
    assert store.list() == {"f": 1}


def test_what_is_not_there_is_said(store):
    with pytest.raises(MissingError, match=r"nothing: it does not exist"):
        store.read("nothing")
    with pytest.raises(StoreError):
        store.read_range("nothing", 0, 5)


def test_a_large_file_goes_in_parts(bucket, tmp_path):
    data = bytes(range(251)) * 150_000  # 36 MiB: three parts
    (tmp_path / "x").write_bytes(data)
    store = Store(Address(bucket.url))
    store.put("x", tmp_path / "x")
    assert store.list() == {"x": len(data)}
    assert store.read_range("x", len(data) - 3, len(data)) == data[-3:]
    assert bucket.get("x") == data


@pytest.mark.parametrize(
    ("status", "code", "why"),
    [
        (403, "RequestTimeTooSkewed", "the clock of this machine is wrong"),
        (400, "AuthorizationHeaderMalformed", "in another region"),
    ],
)
def test_a_setting_that_is_wrong_is_named_at_once(bucket, server, status, code, why):
    store = Store(Address(bucket.url), seconds=60)
    server.rule = lambda *_request: (status, code)
    for call in (lambda: store.create("x", b"1"), lambda: store.read("x"), store.list):
        with pytest.raises(StoreError, match=why):
            call()
