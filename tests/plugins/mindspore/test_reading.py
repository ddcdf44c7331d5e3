"""Ranks without strategy files: what is stated of their folder reaches every command."""

import shutil

import pytest

import commands
from folders import save_data, save_model, save_recipe
from surefoot.errors import CheckpointError
from surefoot.plugins.mindspore.prediction import convert_prediction
from surefoot.plugins.mindspore.recipe import convert as convert_recipe
from surefoot.plugins.mindspore.target import MindSporeFolder
from surefoot.plugins.mindspore.tensor_layout import ParallelConfig
from surefoot.recipe.prediction import PredictModel
from surefoot.recipe.recipe import load
from surefoot.recipe.yaml import parse
from surefoot.run.training_run import build, run
from surefoot.schema.locations import ModelPath
from surefoot.use.exporting.conversion import convert
from surefoot.use.model_loading import open_predicted

STATED = "data_parallel=2,model_parallel=2,enable_parallel_optimizer=true,vocab_emb_dp=false"
STATED += ",parallel_optimizer_threshold=0"
SAID = ["--source-parallel-config", STATED]
WRONG = ["--source-parallel-config", "model_parallel=4"]
ASK = ["--prompt", "1 + 1 =", "--greedy", "--max-new-tokens", "2"]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A model, and its ranks in folders with padded numbers, which fit several strategies."""
    folder = tmp_path_factory.mktemp("project")
    save_data(folder / "data")
    save_model(folder / "model", vocab_size=260, num_key_value_heads=4)
    to = MindSporeFolder(layout="distributed", parallel_config=ParallelConfig.from_text(STATED))
    convert(folder / "model", folder / "cut", to)
    shutil.copytree(folder / "model", folder / "ranks", ignore=lambda *_: ["model.safetensors"])
    for rank in range(4):
        (stored,) = (folder / "cut" / "checkpoint" / f"rank_{rank}").glob("*.safetensors")
        (folder / "ranks" / f"rank_0{rank}").mkdir()
        stored.rename(folder / "ranks" / f"rank_0{rank}" / f"llama_rank_{rank}.safetensors")
    return folder


COMMANDS = {
    "show": ("ckpt", "show", "{ranks}"),
    "verify": ("ckpt", "verify", "{ranks}"),
    "diff": ("ckpt", "diff", "{ranks}", "{ranks}"),
    "chat": ("chat", "{ranks}", *ASK),
    "export": ("export", "{ranks}", "{out}", "--no-verify"),
    "predict": ("predict", "{ranks}", "--prompts", "{prompts}", "--output", "{out}"),
    "weights": (
        *("predict", "{model}", "model.weights={ranks}"),
        *("--prompts", "{prompts}", "--output", "{out}"),
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_opens_weights_takes_the_parallel_config(project, tmp_path, name):
    (tmp_path / "prompts.txt").write_text("1 + 1 =\n")
    places = {name: project / name for name in ("ranks", "model")}
    places |= {"out": tmp_path / "out", "prompts": tmp_path / "prompts.txt"}
    words = [word.format(**places) for word in COMMANDS[name]]
    unsaid, wrong = commands.run(*words), commands.run(*words, *WRONG)
    assert unsaid.exit_code != 0
    assert "several ways" in unsaid.output
    assert wrong.exit_code != 0
    assert "does not fit" in wrong.output
    assert "several ways" in wrong.output
    commands.ok(*words, *SAID)


def test_strategy_files_elsewhere_are_named_for_every_command(project):
    answer = commands.ok("chat", project / "model", *ASK)
    found = commands.ok("chat", project / "ranks", *ASK, "--strategy", project / "cut" / "strategy")
    assert found == answer


def test_what_one_model_is_read_by_is_no_state_of_the_process(project):
    path = ModelPath(project / "ranks")
    stated = PredictModel(path=path, reading={"source_parallel_config": ModelPath(STATED)})
    assert open_predicted(stated).network.num_parameters
    with pytest.raises(CheckpointError, match="several ways"):
        open_predicted(PredictModel(path=path))


def test_what_is_stated_of_another_folder_is_refused(project):
    assert "has no effect on" in commands.refused("ckpt", "show", project / "model", *SAID)


def test_a_run_from_ranks_records_how_they_are_read(project, tmp_path):
    """An adapter: its base is read again by a resume and by chat."""
    settings = {"model": {"path": str(project / "ranks")}, "method": "lora"}
    train = {"max_steps": 2, "eval_steps": None, "output_dir": str(tmp_path / "run")}
    recipe = save_recipe(project, **settings, train=train)
    with pytest.raises(CheckpointError, match="several ways"):  # before the data is read
        build(load(recipe, ["data.datasets=[missing]", "data.dataset_dir=/nowhere"]))
    reading = f"model.reading.source_parallel_config={STATED}"
    assert run(load(recipe, [reading])).state.global_step == 2
    assert run(load(tmp_path / "run", ["train.max_steps=3"])).state.global_step == 3
    commands.ok("chat", tmp_path / "run", *ASK)


def test_an_export_is_verified_later_as_its_ranks_were_read(project, tmp_path):
    """An adapter alone has no recipe: that of its run said how the base is read."""
    train = {"max_steps": 1, "eval_steps": None, "output_dir": str(tmp_path / "run")}
    recipe = save_recipe(
        project, model={"path": str(project / "model")}, method="lora", train=train
    )
    run(load(recipe))
    commands.ok("ckpt", "convert", tmp_path / "run/checkpoint-1", tmp_path / "peft", "--to", "peft")
    words = ("--base", project / "ranks", *SAID)
    commands.ok("export", tmp_path / "peft", tmp_path / "out", "--no-verify", *words)
    commands.ok("export", "verify", tmp_path / "out")


THEIRS = """\
run_mode: {mode}
load_checkpoint: {ranks}
load_ckpt_format: safetensors
parallel_config: {{data_parallel: 2, model_parallel: 2, pipeline_stage: 1}}
"""
CUT = "data_parallel=2,model_parallel=2,pipeline_stage=1"
MORE = "parallel: {enable_parallel_optimizer: True}\n"


@pytest.mark.parametrize(
    ("more", "reading"),
    [
        ("", {"source_parallel_config": CUT}),
        (MORE, {"source_parallel_config": f"{CUT},enable_parallel_optimizer=true"}),
        ("auto_trans_ckpt: True\n", None),  # the parallel_config is that of the new task
        ("use_parallel: False\n", None),
        ("src_strategy_path_or_dir: s\nauto_trans_ckpt: True\n", {"strategy": "s"}),
    ],
)
def test_their_yaml_says_how_its_ranks_are_read(project, more, reading):
    text = THEIRS.format(mode="finetune", ranks=project / "ranks") + more
    settings = convert_recipe(parse(text, "theirs.yaml")).settings
    assert settings.get("model.reading") == reading
    text = THEIRS.format(mode="predict", ranks=project / "ranks") + more
    assert convert_prediction(parse(text, "theirs.yaml")).data["model"].get("reading") == reading


def test_a_resume_by_the_wrong_parallel_config_is_refused_before_the_data_is_read(
    project, tmp_path
):
    text = (
        THEIRS.format(mode="finetune", ranks=project / "ranks")
        + f"output_dir: {tmp_path}/run\nresume_training: True\n"
    )
    (tmp_path / "theirs.yaml").write_text(text.replace("model_parallel: 2", "model_parallel: 1"))
    words = ("data.datasets=[missing.json]", "parallel.num_processes=1", "parallel.dp_replicate=1")
    said = commands.refused("train", tmp_path / "theirs.yaml", *words, "stage=pt")
    assert "it is about 2 ranks" in said
