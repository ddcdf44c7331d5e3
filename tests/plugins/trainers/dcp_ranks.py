"""One of several processes that save a sharded model as PyTorch does: RANK SIZE FOLDER."""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tiny


def main(rank, size, folder):
    warnings.simplefilter("ignore")
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    model = tiny.model("llama", vocab_size=61)  # 61 rows on 3 ranks: 21, 21, 19
    if rank == 0:
        torch.manual_seed(0)
        model.save_pretrained(folder / "whole")
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    state = model.state_dict()
    moments = {name: {"exp_avg": torch.zeros(3)} for name in list(state)[:1]}
    dcp.save(state, checkpoint_id=folder / "plain")
    dcp.save({"model": state, "optimizer": {"state": moments, "lr": 0.1}},
             checkpoint_id=folder / "both")  # fmt: skip
    # as accelerate, and with it the Trainer, does with SHARDED_STATE_DICT
    dcp.save({"model": state}, checkpoint_id=folder / "checkpoint-3" / "pytorch_model_fsdp_0")
    writer = dcp.HuggingFaceStorageWriter(str(folder / "safetensors"), save_distributed=True)
    dcp.save(state, storage_writer=writer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
