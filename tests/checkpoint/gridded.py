"""A checkpoint of version 1.1 as the page describes it, written with nothing of Surefoot: torch
cuts the tensors, safetensors writes the files."""

import itertools
import json
import shutil
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file

DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.bool: "BOOL",
    torch.uint8: "U8",
}
BLOCK = 64 << 10
AXES = {"pp": 2, "dp_shard": 2, "tp": 2}


def digest(data):
    return xxhash.xxh3_128_hexdigest(data)


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def cuts_of(tensor):
    """Matrices by columns over tp, then by rows; vectors over both."""
    if tensor.ndim == 0 or not tensor.numel():
        return []
    return [["tp", tensor.ndim - 1], ["dp_shard", 0]]


def stage_of(name):
    return 0 if "embed" in name or "norm" in name else 1


def part_of(tensor, cuts, axes, place):
    """What torch gives the rank at ``place``; None if it has nothing to write."""
    cut = {axis for axis, _ in cuts}
    if any(place[axis] for axis in axes if axis != "pp" and axis not in cut):
        return None
    for axis, dim in cuts:
        chunks = torch.chunk(tensor, axes[axis], dim)
        if place[axis] >= len(chunks):
            return None
        tensor = chunks[place[axis]]
    return tensor


def sealed(manifest):
    text = json.dumps({**manifest, "seal": "0" * 32}, sort_keys=True).encode()
    return text.replace(b"0" * 32, digest(text).encode())


def resealed(folder, change):
    """Change a manifest, and seal it again."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_bytes(sealed(manifest))


def relisted(folder, rank, change):
    """Change a hash list, and say so in the manifest."""
    name = f"rank_{rank:05d}/hashes.json"
    listed = json.loads((folder / name).read_text())
    change(listed)
    data = json.dumps(listed).encode()
    (folder / name).write_bytes(data)

    def note(manifest):
        manifest["files"][name], manifest["hashes"][name] = len(data), digest(data)

    resealed(folder, note)


def gridded(source, target, axes=AXES, cuts_of=cuts_of, stage_of=stage_of):
    """The checkpoint ``source`` of one rank and layout full as many ranks would have written it."""
    target.mkdir(parents=True)
    manifest = json.loads((source / "manifest.json").read_text())
    files, hashes, rules, pieces, lists = {}, {}, [], [], {}

    def note(name, data, covered):
        files[name], hashes[name] = len(data), digest(data[:covered])

    ranks = list(itertools.product(*(range(size) for size in axes.values())))
    parts = {}
    for role in ("model", "optimizer"):
        with safe_open(source / f"{role}.safetensors", "pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no dict
                tensor = file.get_tensor(key)
                cuts, stage = cuts_of(tensor), stage_of(key)
                rule = {"tensor": f"{role}/{key}", "dtype": DTYPES[tensor.dtype], "stage": stage}
                rules.append({**rule, "shape": list(tensor.shape), "cuts": cuts})
                for rank, coordinates in enumerate(ranks):
                    place = dict(zip(axes, coordinates, strict=True))
                    if place.get("pp", 0) == stage:
                        part = part_of(tensor, cuts, axes, place)
                        if part is not None:
                            parts.setdefault((rank, role), {})[key] = part.contiguous()
    for rank in range(len(ranks)):
        folder = target / f"rank_{rank:05d}"
        folder.mkdir()
        listed = {}
        for role in ("model", "optimizer"):
            if (rank, role) not in parts:
                continue
            save_file(parts[rank, role], folder / f"{role}.safetensors")
            data = (folder / f"{role}.safetensors").read_bytes()
            note(f"{folder.name}/{role}.safetensors", data, 8 + int.from_bytes(data[:8], "little"))
            entries = listed[f"{role}.safetensors"] = {}
            for key, part in parts[rank, role].items():
                data = raw(part)
                starts = range(0, len(data), BLOCK) if len(data) > BLOCK else ()
                blocks = [digest(data[at : at + BLOCK]) for at in starts]
                entries[f"{role}/{key}"] = [digest(data), *blocks]
        lists[rank] = json.dumps(listed).encode()
        (folder / "hashes.json").write_bytes(lists[rank])
        note(f"{folder.name}/hashes.json", lists[rank], None)
    for name in manifest["files"]:
        if Path(name).stem not in ("model", "optimizer"):
            shutil.copy(source / name, target / name)
            files[name], hashes[name] = manifest["files"][name], manifest["hashes"][name]
    pieces = [piece for piece in manifest["pieces"] if piece["tensor"].startswith("state/")]
    manifest |= {"version": "1.1", "layout": "distributed", "world_size": len(ranks)}
    manifest |= {"mesh": axes, "axes": list(axes), "rules": rules, "pieces": pieces}
    manifest |= {"files": files, "hashes": hashes}
    (target / "manifest.json").write_bytes(sealed(manifest))
    return target
