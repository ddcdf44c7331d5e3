"""The workflows of MindSpore Transformers' page about safetensors, by its own files and words: its
folders are written by hand, as they are there, without strategy files."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

import commands
from folders import save_data, save_model

PREDICT = """\
run_mode: predict
load_checkpoint: ''
load_ckpt_format: safetensors
use_parallel: True
parallel_config: {data_parallel: 1, model_parallel: 2, pipeline_stage: 1}
max_new_tokens: 4
"""
TRAIN = """\
run_mode: finetune
output_dir: ./output
load_checkpoint: ''
load_ckpt_format: safetensors
parallel_config: {data_parallel: 1, model_parallel: 2, pipeline_stage: 1}
runner_config: {epochs: 1, batch_size: 2}
callbacks: [{type: CheckpointMonitor, checkpoint_format: safetensors, save_checkpoint_steps: 2}]
"""
ALONE = [
    "parallel.num_processes=1",
    "parallel.tp=1",
    "parallel.dp_replicate=1",
    "parallel.dp_shard=1",
]
NAMES = {  # Hugging Face's, MindSpore's, and the dimension that model_parallel shards
    "model.embed_tokens.weight": ("model.tok_embeddings.embedding_weight", None),
    "model.norm.weight": ("model.norm_out.weight", None),
    "lm_head.weight": ("lm_head.weight", 0),
    "self_attn.q_proj.weight": ("attention.wq.weight", 0),
    "self_attn.k_proj.weight": ("attention.wk.weight", 0),
    "self_attn.v_proj.weight": ("attention.wv.weight", 0),
    "self_attn.o_proj.weight": ("attention.wo.weight", 1),
    "mlp.gate_proj.weight": ("feed_forward.w1.weight", 0),
    "mlp.up_proj.weight": ("feed_forward.w3.weight", 0),
    "mlp.down_proj.weight": ("feed_forward.w2.weight", 1),
    "input_layernorm.weight": ("attention_norm.weight", None),
    "post_attention_layernorm.weight": ("ffn_norm.weight", None),
}


def theirs(name):
    """MindSpore's name, and the dimension."""
    before, _, rest = name.partition("layers.")
    number, _, inner = rest.partition(".")
    if not rest:
        return NAMES[name]
    new, dim = NAMES[inner]
    return f"{before}layers.{number}.{new}", dim


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A model as Hugging Face has it, and as full, distributed and de-duplicated weights."""
    folder = tmp_path_factory.mktemp("project")
    save_data(folder / "data")
    save_model(folder / "hf", "llama", vocab_size=260, num_key_value_heads=4)
    tensors = load_file(folder / "hf" / "model.safetensors")
    small = [path for path in (folder / "hf").iterdir() if path.suffix != ".safetensors"]
    for form in ("merged", "distributed", "deduplicated"):
        (folder / form).mkdir()
        for path in small:
            (folder / form / path.name).write_bytes(path.read_bytes())
    names = {theirs(name)[0]: "model-00001-of-00001.safetensors" for name in tensors}
    whole = {theirs(name)[0]: tensor for name, tensor in tensors.items()}
    save_file(whole, folder / "merged" / "model-00001-of-00001.safetensors")
    (folder / "merged" / "param_name_map.json").write_text(json.dumps(names))
    for rank in range(2):
        parts = {}
        for name, tensor in tensors.items():
            new, dim = theirs(name)
            parts[new] = tensor if dim is None else tensor.chunk(2, dim)[rank].contiguous()
        once = {n: t for n, t in parts.items() if rank == 0 or t.shape != whole[n].shape}
        for form, content in (("distributed", parts), ("deduplicated", once)):
            (folder / form / f"rank_{rank}").mkdir()
            save_file(content, folder / form / f"rank_{rank}" / f"qwen2_7b_rank_{rank}.safetensors")
    (folder / "predict.yaml").write_text(PREDICT)
    (folder / "finetune.yaml").write_text(TRAIN)
    return folder


def answer(project, weights, *words):
    config = (
        "--config",
        project / "predict.yaml",
        "--run_mode",
        "predict",
        "--use_parallel",
        "True",
    )
    words = (*config, "--load_checkpoint", project / weights, "--predict_data", "1 + 1 =", *words)
    return commands.ok("predict", *words, *ALONE)


OTHER = ("--auto_trans_ckpt", "True", "--model_parallel", "1")
WORKFLOWS = {
    "whole": ("hf", "--auto_trans_ckpt", "True"),
    "distributed": ("distributed",),
    "de-duplicated": ("deduplicated", "--remove_redundancy", "True"),
    "merged": ("merged", "--auto_trans_ckpt", "True"),
    "other strategy": ("distributed", *OTHER),
}


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_a_prediction_is_that_of_the_model(project, workflow):
    expected = commands.ok(
        "chat", project / "hf", "--prompt", "1 + 1 =", "--greedy", "--max-new-tokens", 4
    )
    assert answer(project, *WORKFLOWS[workflow]) == expected


def losses(project, run, weights, *words):
    config = ("--config", project / "finetune.yaml", "--run_mode", "finetune", "--output_dir", run)
    words = (*config, "--load_checkpoint", project / weights, "--register_path", "research", *words)
    data = ("data.datasets=[sums]", f"data.dataset_dir={project / 'data'}", "train.max_steps=4")
    settings = ("train.log_steps=1", "train.global_batch_size=4", *data, *ALONE)
    commands.ok("train", *words, *settings)
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def test_a_training_begins_and_resumes_from_each_form(project, tmp_path):
    """The page's fine-tuning; what it saved in MindSpore's form is resumed, with moments."""
    expected = losses(project, tmp_path / "hf", *WORKFLOWS["whole"])
    assert len(expected) == 4
    for workflow in ("distributed", "de-duplicated", "merged", "other strategy"):
        assert losses(project, tmp_path / workflow, *WORKFLOWS[workflow]) == expected
    to = ("--to", "mindspore", "--layout", "distributed", "--parallel-config", "model_parallel=2")
    commands.ok("ckpt", "convert", tmp_path / "hf" / "checkpoint-2", tmp_path / "theirs", *to)
    shutil.rmtree(tmp_path / "theirs" / "strategy")
    resume = ("--resume_training", "True", "--pretrained_model_dir", project / "hf")
    ranks = tmp_path / "theirs" / "checkpoint"
    assert losses(project, tmp_path / "resumed", ranks, *resume) == expected[2:]
