"""Files of MindSpore Transformers with ``run_mode: predict``, as `surefoot predict` takes them."""

import pytest

from surefoot import schema
from surefoot.errors import RecipeError
from surefoot.plugins.mindspore.prediction import convert_prediction
from surefoot.recipe.prediction import Prediction
from surefoot.recipe.yaml import parse

FILE = """\
seed: 3
output_dir: ./output
run_mode: predict
load_checkpoint: out/checkpoint
pretrained_model_dir: hf
load_ckpt_format: safetensors
auto_trans_ckpt: True
use_parallel: True
parallel_config: {data_parallel: 2, model_parallel: 4, vocab_emb_dp: True}
predict_batch_size: 4
optimizer: {type: Muon}
model:
  model_config: {type: Qwen3Config, do_sample: True, top_k: 3, max_decode_length: 512}
generation: {temperature: 0.7}
top_k: 5
"""


def settings(text):
    return convert_prediction(parse(text, "theirs.yaml")).data


def test_a_file_of_mindspore_transformers_is_a_prediction():
    data = settings(FILE)
    assert data == {
        "model": {"path": "hf", "weights": "out/checkpoint"},
        "parallel": {"num_processes": 8, "tp": 4, "dp_replicate": 2},
        "generate": {
            "batch_size": 4,
            "do_sample": True,
            "top_k": 5,
            "temperature": 0.7,
            "max_new_tokens": 512,
        },
    }
    prediction = schema.read(Prediction, data, fail=AssertionError)
    assert [*prediction.parallel.axes(8).values()] == [1, 2, 1, 4]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pretrained_model_dir: hf\nload_checkpoint: ''", {"model": {"path": "hf"}}),
        ("load_checkpoint: w", {"model": {"path": "w"}}),
        ("use_parallel: False\nparallel_config: {model_parallel: 8}", {}),
        ("temperature: 0", {"generate": {"temperature": 1.0, "do_sample": False}}),
        ("max_length: 9\nmax_new_tokens: 5", {"generate": {"max_new_tokens": 5}}),
    ],
)
def test_the_model_and_the_way_to_answer(text, expected):
    assert settings(f"run_mode: predict\n{text}\n") == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("parallel_config: {pipeline_stage: 2}", "pipeline_stage 2: responses are generated token"),
        ("parallel_config: {context_parallel: 2}", "2: it is not supported here"),
        ("parallel_config: {model_parallel: x}", "model_parallel must be a whole number"),
        ("num_beams: 4", "num_beams 4: beam search is not supported"),
        ("load_ckpt_format: ckpt", "convert it with mindspore.ckpt_to_safetensors"),
        ("adapter_id: a", "only one adapter is used at a time; name its folder in model.adapter"),
        ("modal_type: image", "prompts must be text"),
        ("predict_batch_size: x", "expected int, got 'x'"),
    ],
)
def test_what_a_prediction_cannot_have_is_refused(text, problem):
    with pytest.raises(RecipeError) as error:
        settings(f"run_mode: predict\n{text}\n")
    assert str(error.value).startswith("theirs.yaml:")
    assert problem in str(error.value)
