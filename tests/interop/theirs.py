"""What MindSpore does with files, run in a Python that has it: ``theirs.py TASK JSON``.

Prints one line of JSON last. Imports nothing of ours, and no torch.
"""

import hashlib
import json
import sys
from pathlib import Path

import mindspore as ms
import numpy as np


def hashes(folder):
    """The SHA-256 of every tensor's bytes, as ``load_checkpoint`` reads the files of a folder."""
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        for name, tensor in ms.load_checkpoint(str(path), format="safetensors").items():
            data = np.ascontiguousarray(tensor.asnumpy()).tobytes()
            found[name] = [str(tensor.dtype), list(tensor.shape), hashlib.sha256(data).hexdigest()]
    return found


def into_net(folder):
    """What ``load_param_into_net`` leaves out of a net with these parameters, or of the files."""
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        found |= ms.load_checkpoint(str(path), format="safetensors")

    class Net(ms.nn.Cell):
        def __init__(self):
            super().__init__()
            for i, (name, tensor) in enumerate(found.items()):
                zeros = ms.ops.zeros(tensor.shape, tensor.dtype)
                setattr(self, f"p{i}", ms.Parameter(zeros, name=name))

    net = Net()
    missing, unknown = ms.load_param_into_net(net, found, strict_load=True)
    same = all(
        (p.asnumpy().tobytes() == found[p.name].asnumpy().tobytes()) for p in net.get_parameters()
    )
    return {"missing": missing, "unknown": unknown, "same": same}


def merge(source, strategy, target):
    """The ranks' slices as one, by ``unified_safetensors``."""
    merged = Path(target).with_suffix(".ckpt")
    ms.merge_pipeline_strategys(strategy, str(merged))
    ms.unified_safetensors(source, str(merged), target)
    return hashes(target)


def cut(source, strategy, target, ours):
    """Whole tensors as slices of ranks, by ``load_distributed_checkpoint``, and as ours are."""
    merged = Path(target).with_suffix(".ckpt")
    ms.merge_pipeline_strategys(strategy, str(merged))
    ms.load_distributed_checkpoint(
        None, predict_strategy=str(merged), format="safetensors",
        unified_safetensors_dir=source, dst_safetensors_dir=target,
    )  # fmt: skip
    folders = (Path(target), Path(ours))
    return [{rank.name: hashes(rank) for rank in sorted(f.glob("rank_*"))} for f in folders]


def save(target):
    """A file by ``save_checkpoint``, with a tensor of every type that it takes."""
    generator = np.random.default_rng(0)
    types = [ms.float16, ms.bfloat16, ms.float32, ms.float64, ms.int8, ms.int64, ms.uint8, ms.bool_]
    data = [
        {"name": f"model.{kind}", "data": ms.Tensor(generator.normal(size=(6, 4)) * 9, kind)}
        for kind in types
    ]
    Path(target).mkdir()
    ms.save_checkpoint(data, str(Path(target) / "one.safetensors"), format="safetensors")
    return hashes(target)


if __name__ == "__main__":
    task = {"hashes": hashes, "into_net": into_net, "merge": merge, "cut": cut, "save": save}
    print(json.dumps(task[sys.argv[1]](**json.loads(sys.argv[2]))))
