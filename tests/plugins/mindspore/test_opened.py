import json
import shutil

import pytest
import torch
from transformers import LlamaConfig

from project import surefoot
from surefoot.checkpoint.disk.folder import FolderWeights
from surefoot.checkpoint.layouts.detection import detect_layout, open_contents
from surefoot.checkpoint.layouts.opening import open_folder
from surefoot.checkpoint.sources import FolderSource, read_whole
from surefoot.errors import CheckpointError
from surefoot.plugins.mindspore.opening import LAYOUT, form_of, open_mindspore_state
from surefoot.plugins.mindspore.slicing import UNKNOWN, Slicing
from surefoot.plugins.mindspore.tensor_layout import ParallelConfig

from .real import SOURCES, rank_file, rewrite

FORMS = {
    "dp2mp2": "ranks",
    "dp2mp2/checkpoint": "ranks",
    "dp2mp2/unified": "full",
    "ckpt2_dp2mp2/checkpoint2": "iteration",
    "ckpt2_dp2mp2/checkpoint2/iteration_00000020": "iteration",
    "ckpt2_single/checkpoint2": "iteration",
}


def every(folder, slicing=UNKNOWN):
    source = FolderSource(opened(folder, slicing))
    return {name: read_whole(source, name) for name in source.shapes()}


def opened(folder, slicing=UNKNOWN):
    return FolderWeights("mindspore", folder, open_mindspore_state(folder, slicing))


def assert_true(found, truth):
    assert truth.keys() <= found.keys()
    for name, tensor in truth.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(("name", "form"), FORMS.items())
def test_every_form_is_recognised(real, name, form):
    assert form_of(real / name) == form
    assert detect_layout(real / name).name == "mindspore"


@pytest.mark.parametrize("name", [*SOURCES, *FORMS])
def test_every_form_holds_the_tensors_that_were_saved(real, truth, name):
    assert_true(every(real / name), truth)


def test_bfloat16_is_bitwise(real, truth):
    expected = {name: tensor.bfloat16() for name, tensor in truth.items()}
    assert_true(every(real / "mp2_bf16"), expected)
    assert_true(every(real / "mp2_bf16/unified"), expected)


@pytest.mark.parametrize("name", [n for n in SOURCES if n != "single"])
def test_what_mindspore_merged_is_what_its_ranks_hold(real, name):
    merged, ranks = every(real / name / "unified"), every(real / name)
    assert merged.keys() == ranks.keys()
    assert all(torch.equal(merged[key], ranks[key]) for key in merged)


@pytest.mark.parametrize(
    "name", ["mp4__to__dp2mp2", "w8_pp2dp2mp2_opt__to__pp2mp2", "dp4_opt__to__w8_pp2dp2mp2_opt"]
)
def test_the_strategy_may_lie_elsewhere(real, truth, name):
    strategy = real / name.split("__to__")[1] / "strategy"
    assert_true(every(real / "transformed" / name, Slicing(strategy)), truth)


def test_moments_and_numbers_of_the_training_are_not_the_model(real):
    names = open_contents(real / "dp2mp2").tensors
    assert "optimizer/adam_m.lm_head.weight" in names
    assert {"state/step_num", "state/global_step", "state/learning_rate"} <= names.keys()
    assert all(not n.startswith(("adam", "step")) for n in open_folder(real / "dp2mp2").shapes())


def test_a_file_of_a_rank_names_the_step(copied, truth):
    folder = copied("mp4")
    for rank in range(4):
        file = rank_file(folder, rank)
        newer = file.with_name(file.name.replace("-2_10", "-2_20"))
        newer.write_bytes(file.read_bytes())
        rewrite(newer, lambda tensors: [tensor.add_(1) for tensor in tensors.values()])
    old = folder / "checkpoint/rank_0/llama_rank_0-2_10.safetensors"
    assert_true(every(old), truth)
    assert torch.equal(every(folder)["lm_head.weight"], truth["lm_head.weight"] + 1)
    assert [saved.step for saved in LAYOUT.saves_in(folder)] == [20, 21]


def test_a_rank_that_is_behind_is_refused_and_the_common_step_named(copied):
    folder = copied("mp4")
    for rank in range(3):
        file = rank_file(folder, rank)
        newer = file.with_name(file.name.replace("-2_10", "-2_20"))
        newer.write_bytes(file.read_bytes())
    problem = (
        r"different steps: llama_rank_0-2_20.*the latest step on all ranks is .*llama_rank_0-2_10"
    )
    with pytest.raises(CheckpointError, match=problem):
        open_folder(folder)


def test_a_missing_rank_is_named(copied):
    folder = copied("mp4")
    rank_file(folder, 2).unlink()
    with pytest.raises(CheckpointError, match="the files of rank 2 are missing"):
        open_folder(folder)
    rank_file(folder, 3).unlink()
    with pytest.raises(CheckpointError, match=r"files of 2 ranks, but .* is about 4"):
        open_folder(folder)


def test_files_of_other_steps_under_the_same_name_are_found_by_what_they_say(copied):
    folder = copied("dp2mp2")
    rewrite(rank_file(folder, 3), lambda tensors: tensors["step_num"].add_(1))
    with pytest.raises(CheckpointError, match=r"saved at another step than .* \(step_num: 21 and"):
        open_folder(folder)


@pytest.mark.parametrize(
    ("files", "strategy"),
    [("mp4", "dp2mp2"), ("dp2mp2", "mp4"), ("dp4_opt", "mp4"), ("mp4", "dp4_opt")],
)
def test_a_strategy_for_other_files_is_refused(real, files, strategy):
    with pytest.raises(CheckpointError, match="does not fit"):
        open_mindspore_state(real / files, Slicing(real / strategy / "strategy"))


def test_a_strategy_for_other_ranks_is_refused(real):
    with pytest.raises(CheckpointError, match=r"of 4 ranks, but .* is about 8 \(2 pipeline stages"):
        open_mindspore_state(real / "mp4", Slicing(real / "w8_pp2dp2mp2_opt" / "strategy"))


def test_a_slice_that_the_strategy_does_not_know_is_refused(copied):
    folder = copied("mp4")
    for rank in range(4):
        rewrite(rank_file(folder, rank), lambda t: t.update(frozen=t["lm_head.weight"].clone()))
    with pytest.raises(CheckpointError, match="the slicing of 'frozen' is unknown"):
        open_folder(folder)


def test_a_slice_that_was_left_out_everywhere_is_missed(copied):
    folder = copied("dp2mp2_rr")
    for rank in range(1, 4):
        rewrite(rank_file(folder, rank), lambda t: t.pop("lm_head.weight", None))
    with pytest.raises(CheckpointError, match=r"of 'lm_head.weight' only slices of rank 0"):
        open_folder(folder)


def test_one_rank_of_several_is_no_model(copied):
    folder = copied("mp4")
    with pytest.raises(CheckpointError, match="the part of one rank; use the folder"):
        open_folder(folder / "checkpoint" / "rank_1")


def test_the_map_keeps_its_word(copied):
    folder = copied("dp2mp2") / "unified"
    rewrite(folder / "part0.safetensors", lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"promises 'lm_head.weight' in part0.safetensors"):
        open_folder(folder)


def test_a_flat_map_and_no_map_are_read(copied, truth):
    folder = copied("dp2mp2") / "unified"
    (folder / "hyper_param.safetensors").unlink()
    (folder / "param_name_map.json").unlink()
    assert_true(every(folder), truth)
    (folder / "part0.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    flat = ",".join(f'"{name}": "model-00001-of-00001.safetensors"' for name in truth)
    (folder / "param_name_map.json").write_text("{" + flat + "}")
    assert_true(every(folder), truth)


def test_an_iteration_with_a_missing_file_is_refused(copied):
    folder = copied("ckpt2_dp2mp2") / "checkpoint2"
    (folder / "iteration_00000020/llama-model-0000001-0000004.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"0000001-0000004.safetensors: is missing"):
        open_folder(folder)


def test_their_older_format_is_refused_with_the_way_out(tmp_path):
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "rank_0" / "llama_rank_0-2_10.ckpt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"convert it with mindspore.ckpt_to_safetensors"):
        open_folder(tmp_path)


def test_a_tracker_that_names_nothing_is_refused(copied):
    folder = copied("ckpt2_dp2mp2") / "checkpoint2"
    (folder / "latest_checkpointed_iteration.txt").write_text("30")
    with pytest.raises(CheckpointError, match="names iteration '30', which does not exist"):
        open_folder(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The configuration of the model that the real files are of, without weights."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaConfig(**sizes, **heads, num_hidden_layers=2).save_pretrained(folder)
    return folder


def without_strategy(folder):
    shutil.rmtree(folder / "strategy")
    return folder


AS_TOLD = {
    "dp2mp2": "data_parallel=2,model_parallel=2",
    "mp4": "model_parallel=4",
    "pp2mp2": "pipeline_stage=2,model_parallel=2",
    "dp4_opt": "data_parallel=4,enable_parallel_optimizer=true",
    "dp2mp2_rr": "data_parallel=2,model_parallel=2",
}


@pytest.mark.parametrize("name", ["dp2mp2", "mp4", "pp2mp2", "dp4_opt", "dp2mp2_rr"])
def test_without_strategy_files_the_shapes_of_the_model_say_the_slices(copied, truth, model, name):
    folder = without_strategy(copied(name))
    assert_true(every(folder, Slicing(model=model)), truth)
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    assert_true(every(folder), truth)  # the configuration beside the ranks is enough


@pytest.mark.parametrize("name", AS_TOLD)
def test_the_parallel_config_of_the_training_says_the_slices(copied, truth, model, name):
    config = ParallelConfig.from_text(AS_TOLD[name])
    assert_true(every(without_strategy(copied(name)), Slicing(model=model, config=config)), truth)


def test_a_parallel_config_that_does_not_fit_is_refused_with_what_does(copied, model):
    folder, wrong = without_strategy(copied("dp2mp2")), ParallelConfig.from_text("model_parallel=4")
    with pytest.raises(CheckpointError) as error:
        opened(folder, Slicing(model=model, config=wrong))
    said = str(error.value)
    assert "parallel_config model_parallel=4 does not fit" in said
    assert "what fits is data_parallel=2,model_parallel=2,pipeline_stage=1" in said
    fewer = ParallelConfig.from_text("model_parallel=2")
    with pytest.raises(CheckpointError, match=r"4 ranks .* is about 2 ranks"):
        opened(folder, Slicing(model=model, config=fewer))


SHARDED = "data_parallel=2,model_parallel=2,enable_parallel_optimizer=true"


@pytest.mark.parametrize("told", [None, SHARDED])
def test_slices_that_fit_several_ways_are_refused_with_all_of_them(copied, model, told):
    """Of the head: by both kinds of parallelism, or by the optimizer alone."""
    slicing = Slicing(model=model, config=told and ParallelConfig.from_text(told))
    with pytest.raises(CheckpointError) as error:
        opened(without_strategy(copied("dp2mp2_opt")), slicing)
    said = str(error.value)
    assert "1 by model_parallel and 4 by enable_parallel_optimizer" in said
    assert "2 by model_parallel and 2 by enable_parallel_optimizer" in said
    assert "--source-parallel-config" in said


def test_ranks_of_no_known_model_are_refused(copied, model, tmp_path):
    folder = without_strategy(copied("dp2mp2"))
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"4 ranks without strategy files.*--base MODEL"):
        open_folder(folder)
    config = json.loads((model / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    with pytest.raises(CheckpointError, match="no layout on 4 devices gives these shapes"):
        opened(folder, Slicing(model=other))


def test_a_command_takes_the_parallel_config_of_the_source(real, model, tmp_path):
    """Of ranks of which the shapes leave two ways, made from the real ones of another training."""
    told, cut = f"{SHARDED},parallel_optimizer_threshold=0,vocab_emb_dp=false", tmp_path / "cut"
    words = ["--to", "mindspore", "--layout", "distributed", "--parallel-config", told]
    code, _, said = surefoot("ckpt", "convert", real / "single", cut, *words)
    assert code == 0, said
    words = ["--to", "mindspore", "--base", model]
    code, _, said = surefoot("ckpt", "convert", cut, tmp_path / "by_files", *words)
    assert code == 0, said
    without_strategy(cut)
    code, _, said = surefoot("ckpt", "convert", cut, tmp_path / "no", *words)
    assert code != 0
    assert "several ways" in said
    words += ["--source-parallel-config", told]
    code, _, said = surefoot("ckpt", "convert", cut, tmp_path / "by_words", *words)
    assert code == 0, said
    written = [tmp_path / name / "part0.safetensors" for name in ("by_files", "by_words")]
    assert written[0].read_bytes() == written[1].read_bytes()
