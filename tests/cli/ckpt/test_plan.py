"""The plan command."""

import json

from checkpoint.sample import tree_bytes
from surefoot.checkpoint.converting.resharding import reshard
from surefoot.parallel.sharding import Mesh

from .runner import run


def sizes(folder):
    found = tree_bytes(folder)
    return {name: len(data) for name, data in found.items() if name != "manifest.json"}


def test_it_tells_what_convert_then_writes(folder, tmp_path):
    before = tree_bytes(tmp_path)
    done = run("plan", folder, "--mesh", "dp_shard=3", "--json")
    assert done.exit_code == 0, done.stderr
    assert tree_bytes(tmp_path) == before
    told = json.loads(done.stdout)
    out = reshard(folder, tmp_path / "out", layout="distributed", mesh=Mesh(1, 3)).path
    written = sizes(out)
    assert told["writes"] == {"num_bytes": sum(written.values()), "files": written}
    mesh = {"dp_replicate": 1, "dp_shard": 3, "tp": 1}
    assert told["to"] == {"layout": "distributed", "mesh": mesh}
    assert told["from"] == {"layout": "full", "mesh": {}}
    ranks = [
        sum(size for name, size in written.items() if name.startswith(f"rank_{rank:05d}"))
        for rank in range(3)
    ]
    assert told["ranks"] == {"count": 3, "largest": max(ranks), "mean": sum(ranks) / 3}
    read = told["reads"]["files"]
    assert read.keys() == {"model.safetensors", "optimizer.safetensors", "state.safetensors"}
    assert all(read[name] < (folder / name).stat().st_size for name in read)


def test_people_get_two_tables(folder, tmp_path):
    lines = run("plan", folder).stdout.splitlines()
    assert lines[0].split() == ["reads", "bytes"]
    assert [line.split()[0] for line in lines[1:4]] == [
        "model.safetensors",
        "optimizer.safetensors",
        "state.safetensors",
    ]
    assert lines[4].startswith("3 files")
    assert "ranks" not in lines[-1]
    lines = run("plan", folder, "--layout", "distributed", "--mesh", "dp_shard=20").stdout
    assert "more (--json lists them)" in lines
    assert lines.splitlines()[-1].startswith("20 ranks: the largest ")


def test_what_makes_no_sense_is_told(folder, theirs):
    for arguments, told in (
        ((folder, "--mesh", "pp=2"), "not 'pp'"),
        ((folder, "--layout", "full", "--mesh", "dp_shard=2"), "the same for every mesh"),
        ((theirs,), "weights only (huggingface), not a Surefoot checkpoint"),
    ):
        done = run("plan", *arguments)
        assert done.exit_code == 2
        assert told in done.stderr
