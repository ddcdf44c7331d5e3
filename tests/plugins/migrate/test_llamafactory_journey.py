"""LLaMA-Factory's command and its example files, run as they are, on tiny models."""

import json
import signal
from pathlib import Path

import pytest
import torch

from commands import ok, refused
from project import assert_same, final_weights, marked, metrics, model_folder, pairs, rows, start
from project import surefoot as cli
from surefoot.recipe.recipe import convert
from surefoot.recipe.yaml import emit
from surefoot.use._model_location import locate

from .test_llamafactory import COMMAND

EXAMPLES = json.loads((Path(__file__).parent / "llamafactory" / "examples.json").read_text())
SPEC = {"columns": {"prompt": "instruction", "response": "output"}}
DATASETS = {
    "alpaca_zh": (rows, SPEC),
    "identity": (rows, SPEC),
    "alpaca_en_demo": (rows, SPEC),
    "dpo_en_demo": (pairs, {"ranking": True}),
    "kto_en_demo": (marked, {"columns": {"kto_tag": "is_good"}}),
    "c4_demo": (lambda count: [{"text": row["output"]} for row in rows(count)], {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and the datasets that the examples name."""
    found = tmp_path_factory.mktemp("moved")
    model_folder(found / "model", max_position_embeddings=2048)
    (found / "data").mkdir()
    info = {}
    for name, (make, entry) in DATASETS.items():
        (found / "data" / f"{name}.json").write_text(json.dumps(make(24)))
        info[name] = {"file_name": f"{name}.json", **entry}
    info["c4_demo"]["columns"] = {"prompt": "text"}
    (found / "data" / "dataset_info.json").write_text(json.dumps(info))
    return found


def test_their_command_is_killed_and_resumed_to_the_same_bits(folder):
    """The run of the converted recipe, without a break, is the reference."""
    places = {"MODEL": f"{folder}/model", "DATA": f"{folder}/data", "OUT": f"{folder}/out"}
    words = [places.get(word, word) for word in COMMAND]
    (folder / "recipe.yaml").write_text(emit(convert(words).document.data))
    code, _, err = cli("train", folder / "recipe.yaml", f"train.output_dir={folder}/whole")
    assert code == 0, err
    assert ("fp16 is computed in fp32 on a CPU" in err) != torch.cuda.is_available()

    process = start("train", *words)
    for line in process.stderr:
        if "steps 1 to 50 train layer 0" in line:
            process.send_signal(signal.SIGTERM)
            break
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, rest
    code, _, err = cli("train", *words)
    assert code == 0 and "resuming from checkpoint-" in err
    assert err.index("without effect here: preprocessing_num_workers") < err.index("resuming from")

    assert_same(final_weights(folder / "out"), final_weights(folder / "whole"))
    logged = [line for line in metrics(folder / "out") if "learning_rate" in line]
    assert [line["step"] for line in logged][-1] == 6  # 3 x ceil(ceil(21 / 2) / 8), as there
    assert all(0 < line["learning_rate"] < 5e-5 for line in logged)
    assert [line["step"] for line in metrics(folder / "out") if "eval_loss" in line] == [6]


def example(name):
    """Its values that do not fit in a tiny model or a short test."""
    changed = ["model_name_or_path={0}/model", "dataset_dir={0}/data", "max_steps=2"]
    changed += ["output_dir={0}/" + name.replace("/", "-"), "gradient_accumulation_steps=2"]
    content = EXAMPLES[f"examples/{name}.yaml"]
    if "template: llama3" in content:
        changed.append("template=chatml")
    if "deepspeed:" in content:
        content = content.replace("examples/deepspeed", "{0}/deepspeed")
    if "oft" in name:
        changed.append("oft_block_size=16")
    if "freeze" in name:
        changed += ["use_llama_pro=false", "method.llama_pro.num_new_layers=1"]
    return content, changed


CHEAP = ["train_lora/qwen3_lora_dpo"]
PROVEN = """
extras/galore/llama3_full_sft extras/apollo/llama3_full_sft extras/badam/llama3_full_sft
extras/adam_mini/qwen2_full_sft extras/muon/qwen2_full_sft extras/llama_pro/llama3_freeze_sft
extras/loraplus/llama3_lora_sft extras/pissa/llama3_lora_sft extras/oft/llama3_oft_sft
train_lora/qwen3_lora_sft train_lora/qwen3_lora_kto train_lora/qwen3_lora_pretrain
train_lora/qwen3_lora_reward train_lora/qwen3_lora_sft_ds3 train_lora/qwen3_preprocess
train_full/qwen3_full_sft
"""


@pytest.mark.proof
@pytest.mark.parametrize(
    "name", [*CHEAP, *(pytest.param(name, marks=pytest.mark.proof) for name in PROVEN.split())]
)
def test_their_example_runs_to_its_end(folder, name):
    content, changed = example(name)
    (folder / "deepspeed").mkdir(exist_ok=True)
    for path in (path for path in EXAMPLES if "deepspeed/" in path):
        (folder / "deepspeed" / Path(path).name).write_text(EXAMPLES[path])
    file = folder / f"{Path(name).name}.yaml"
    file.write_text(content.replace("{0}", str(folder)))
    code, _, err = cli("train", file, *(word.replace("{0}", str(folder)) for word in changed))
    assert code == 0, err
    assert "trained: 2 steps" in err
    out = folder / name.replace("/", "-")
    assert final_weights(out)
    weights = [path.name for path in (out / "checkpoint-2").glob("*model*.safetensors*")]
    assert weights
    for file in weights:
        assert (out / file).read_bytes() == (out / "checkpoint-2" / file).read_bytes()
    assert locate(out).folder == out / "checkpoint-2"


def test_preview_and_plan_take_the_words_of_train(folder):
    """Options of the commands, too; ``--dataset`` is LLaMA-Factory's."""
    places = {"MODEL": f"{folder}/model", "DATA": f"{folder}/data", "OUT": f"{folder}/no"}
    words = [places.get(word, word) for word in COMMAND]
    (dataset,) = json.loads(ok("preview", *words, "-n", "1", "--json"))["datasets"]
    assert dataset["name"] == "alpaca_zh" and len(dataset["shown"]) == 1
    plan = json.loads(ok("plan", *words, "--json", "train.max_steps=2", "--num-processes", "1"))
    assert plan["steps"] == 2
    assert "did you mean cutoff_len" in refused("preview", *words, "--cutof_len", "2").lower()
    (folder / "a.yaml").write_text("{}")
    assert "'--json'" in refused("plan", folder / "a.yaml", "--jsno")
