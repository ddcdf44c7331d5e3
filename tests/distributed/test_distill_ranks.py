"""Ranks that share a student and its teacher learn what one rank learns alone."""

from itertools import product

import pytest
import torch

import folders
import small
from each import some
from spread import compare
from surefoot.methods import LoRA
from surefoot.stages import Distill

TRAIN = {"global_batch_size": 8, "micro_batch_size": 2}
MESHES = [{"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 1}]


@pytest.mark.parametrize(
    ("packing", "parallel"),
    some([*product((True, False), MESHES)], [(True, MESHES[0]), (False, MESHES[1])]),
    ids=str,
)
def test_a_sharded_teacher_says_what_a_whole_one_says(packing, parallel, tmp_path):
    teacher = folders.save_model(tmp_path / "teacher", "qwen3", hidden_size=48)
    stage = Distill(teacher=str(teacher), divergence="jsd", beta=0.3, sft_weight=0.5)
    compare(
        2,
        tmp_path,
        parallel=parallel,
        stage=stage,
        packing=packing,
        train=TRAIN,
        examples=small.examples(14),
    )


@pytest.mark.parametrize("again", [True, pytest.param(False, marks=pytest.mark.proof)])
def test_the_base_under_a_sharded_adapter_is_the_same_teacher_to_float64(again, tmp_path):
    compare(
        2,
        tmp_path,
        parallel={"dp_shard": 2, "reshard_after_forward": again},
        stage=Distill(divergence="reverse_kl"),
        method=LoRA(rank=2),
        packing=True,
        train=TRAIN,
        examples=small.examples(14),
        steps=3,
        close=1e-10,
        dtype=torch.float64,
    )
