import dataclasses
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from surefoot.checkpoint.section import CheckpointSection
from surefoot.data.section import DataSection
from surefoot.errors import RecipeError
from surefoot.generate.section import GenerateSection
from surefoot.methods import METHODS, Freeze, Full, LoRA
from surefoot.model.section import ModelSection
from surefoot.optim._variants.adamw import AdamW
from surefoot.recipe.comparison import RecipeChange, changes
from surefoot.recipe.recipe import RULES, Recipe, dump, load, read
from surefoot.schema import paths, write
from surefoot.stages import SFT
from surefoot.training.section import TrainSection

GOOD = """\
model:      {path: Qwen/Qwen2.5-0.5B, dtype: bfloat16}
data:       {dataset_dir: data, datasets: [alpaca_en, identity], template: qwen, cutoff_len: 512}
method:     {lora: {rank: 16}}
stage:      sft
train:      {output_dir: runs/qwen, num_epochs: 2, global_batch_size: 64, micro_batch_size: 2}
optim:      {adamw: {learning_rate: 1.0e-4, schedule: cosine}}
checkpoint: {save_steps: 100, keep: 3, resume: auto}
"""
SMALL = {
    "model": {"path": "m"},
    "data": {"datasets": "d"},
    "stage": "sft",
    "train": {"output_dir": "runs/x"},
}


@pytest.fixture
def recipe_file(tmp_path):
    def write_file(text):
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return path

    return write_file


def refused(path, *overrides):
    with pytest.raises(RecipeError) as caught:
        load(path, overrides)
    return str(caught.value).replace(str(path), path.name)


def small(**sections):
    return read({**SMALL, **sections})


def refused_data(**sections):
    with pytest.raises(RecipeError) as caught:
        small(**sections)
    return str(caught.value).splitlines()


def test_a_recipe_is_read_from_its_file(recipe_file):
    path = recipe_file(GOOD)
    assert load(path) == Recipe(
        model=ModelSection(path="Qwen/Qwen2.5-0.5B", dtype="bfloat16"),
        data=DataSection(
            dataset_dir=path.parent / "data",
            datasets=("alpaca_en", "identity"),
            template="qwen",
            cutoff_len=512,
        ),
        method=LoRA(rank=16),
        stage=SFT(),
        train=TrainSection(
            output_dir=Path("runs/qwen"), num_epochs=2, global_batch_size=64, micro_batch_size=2
        ),
        optim=AdamW(learning_rate=1e-4),
        checkpoint=CheckpointSection(save_steps=100),
        generate=GenerateSection(),
    )


def test_what_is_left_out_has_its_default():
    recipe = small()
    assert recipe.method == Full()
    assert recipe.optim == AdamW()
    assert recipe.checkpoint == CheckpointSection()


def test_the_eight_lines_of_a_beginner_are_enough(recipe_file):
    load(recipe_file("model: {path: m}\ndata: {datasets: d}\nstage: sft\ntrain: {output_dir: x}"))


def test_all_problems_have_file_line_column_path_and_advice(recipe_file):
    text = """\
model: {pth: 3}
learning_rate: 1
num_train_epochs: 4
cutoff_len: 512
data:
  datasets: [1, a]
  template: [1]
method: {lroa: {rank: 16}}
stage: {sft: {x: 1}}
train:
  output_dir: runs/x
  max_steps: true
  precision: bf17
  save_steps: 3
  learning_rat: 3
  global_batch_size: "16"
optim: {adamw: {learning_rate: 0}}
checkpoint: 3
"""
    assert refused(recipe_file(text)).splitlines() == [
        "recipe.yaml:1:1 model.path: missing; expected text",
        "recipe.yaml:1:9 model.pth: unknown key (did you mean path?)",
        "recipe.yaml:2:1 learning_rate: unknown key (did you mean optim.adamw.learning_rate?)",
        "recipe.yaml:3:1 num_train_epochs: unknown key (did you mean train.num_epochs?)",
        "recipe.yaml:4:1 cutoff_len: unknown key (did you mean data.cutoff_len?)",
        "recipe.yaml:6:14 data.datasets[0]: expected a name, a file, a hub id or an entry, got 1",
        "recipe.yaml:7:3 data.template: expected text, got [1]",
        "recipe.yaml:8:1 method: expected one of " + ", ".join(METHODS) + ", got 'lroa' "
        "(did you mean lora?)",
        "recipe.yaml:9:15 stage.sft.x: unknown key; expected one of loss_type, eaft_alpha, "
        "asft_alpha, label_smoothing_factor",
        "recipe.yaml:12:3 train.max_steps: expected an integer or null, got true",
        "recipe.yaml:13:3 train.precision: expected one of auto, fp32, bf16, fp16, got 'bf17' "
        "(did you mean bf16?)",
        "recipe.yaml:14:3 train.save_steps: unknown key (did you mean checkpoint.save_steps?)",
        "recipe.yaml:15:3 train.learning_rat: unknown key "
        "(did you mean optim.adamw.learning_rate?)",
        "recipe.yaml:16:3 train.global_batch_size: expected an integer, got '16'",
        "recipe.yaml:17:17 optim.adamw.learning_rate: must be positive, got 0.0",
        "recipe.yaml:18:1 checkpoint: expected a section (key: value), got 3",
    ]


def test_an_empty_file_lists_the_sections_that_must_be_there(recipe_file):
    assert refused(recipe_file("")).splitlines() == [
        "recipe.yaml:1:1 model: missing; expected a section with path",
        "recipe.yaml:1:1 data: missing; expected a section with datasets",
        "recipe.yaml:1:1 stage: missing; expected one of pt, sft, dpo, rm, kto, grpo, ppo, "
        "distill, classify",
        "recipe.yaml:1:1 train: missing; expected a section with output_dir",
    ]


@pytest.mark.parametrize("text", ["- 1\n", "just text\n", "3\n"])
def test_a_file_without_keys_is_refused(recipe_file, text):
    assert refused(recipe_file(text)).startswith(
        "recipe.yaml:1:1 expected a section (key: value), got "
    )


def test_a_wrong_override_is_told_beside_what_is_wrong_in_the_file(recipe_file):
    path = recipe_file(GOOD.replace("cutoff_len: 512", "cutoff_len: 1"))
    assert refused(path, "optim.adamw.learning_rat=5e-5").splitlines() == [
        "recipe.yaml:2:82 data.cutoff_len: must be at least 4 tokens, got 1",
        "command line: optim.adamw.learning_rat=5e-5: optim.adamw.learning_rat: unknown key "
        "(did you mean learning_rate?)",
    ]


def test_from_python_overrides_are_a_mapping(recipe_file):
    overrides = {"optim": {"adamw": {"schedule": "linear"}}, "train.max_steps": 3}
    recipe = load(recipe_file(GOOD), overrides)
    assert recipe.optim == AdamW(learning_rate=1e-4, schedule="linear")
    assert recipe.train.max_steps == 3
    assert read(recipe, overrides) == recipe
    assert read(recipe, {"method": LoRA(rank=2)}).method == LoRA(rank=2)


def test_report_to_none_means_no_tracker(recipe_file):
    for value in ("none", "[none]", "null", "[]"):
        assert load(recipe_file(GOOD), [f"train.report_to={value}"]).train.report_to == ()
    assert load(recipe_file(GOOD), ["train.report_to=tensorboard"]).train.report_to == (
        "tensorboard",
    )
    assert "expected one of tensorboard" in refused(recipe_file(GOOD), "train.report_to=comet")


def test_folders_are_found_beside_the_recipe(recipe_file, tmp_path):
    for folder in ("models/base", "adapter", "data"):
        (tmp_path / folder).mkdir(parents=True)
    text = GOOD.replace("Qwen/Qwen2.5-0.5B", "models/base").replace(
        "model:      {", "model: {adapter: adapter, "
    )
    recipe = load(recipe_file(text))
    assert recipe.model.path == str(tmp_path / "models/base")
    assert recipe.model.adapter == tmp_path / "adapter"
    assert recipe.data.dataset_dir == tmp_path / "data"
    assert recipe.train.output_dir == Path("runs/qwen")


@pytest.mark.parametrize("is_there", [True, False])
def test_a_path_in_an_override_is_relative_to_the_current_folder(tmp_path, monkeypatch, is_there):
    for folder in ("recipes/data", "recipes/model", "recipes/adapter"):
        (tmp_path / folder).mkdir(parents=True)
        if is_there:
            (tmp_path / "here" / Path(folder).name).mkdir(parents=True)
    (tmp_path / "here").mkdir(exist_ok=True)
    path = tmp_path / "recipes/r.yaml"
    path.write_text(GOOD)
    monkeypatch.chdir(tmp_path / "here")
    arguments = ["data.dataset_dir=data", "model.path=model", "model.adapter=adapter"]
    mapping = {"data": {"dataset_dir": "data"}, "model": {"path": "model", "adapter": "adapter"}}
    for overrides in (arguments, mapping):
        found = load(path, overrides)
        assert found.data.dataset_dir == tmp_path / "here/data"
        assert found.model.path == (str(tmp_path / "here/model") if is_there else "model")
        assert found.model.adapter == tmp_path / "here/adapter"
    found = load(path, {"data": {"cutoff_len": 9}})  # another setting of the same section
    assert found.data.dataset_dir == tmp_path / "recipes/data"


def test_so_is_a_function_or_a_model_in_the_settings_of_a_stage(tmp_path, monkeypatch):
    for folder in ("recipes", "here"):
        (tmp_path / folder / "reference").mkdir(parents=True)
        (tmp_path / folder / "rewards.py").write_text("")
    path = tmp_path / "recipes/r.yaml"
    path.write_text(GOOD)
    monkeypatch.chdir(tmp_path / "here")
    grpo = load(path, ["stage.grpo.reward=rewards.py:f"]).stage
    assert grpo.reward[0].path == f"{tmp_path / 'here/rewards.py'}:f"
    path.write_text(GOOD.replace("sft", "{grpo: {reward: [rewards.py:f]}}"))
    grpo = load(path, ["stage.grpo.beta=0.3"]).stage
    assert grpo.reward[0].path == f"{tmp_path / 'recipes/rewards.py'}:f"
    path.write_text(GOOD)
    dpo = load(path, ["stage.dpo.reference=reference"]).stage
    assert dpo.reference == str(tmp_path / "here/reference")
    path.write_text(GOOD.replace("sft", "{dpo: {reference: reference}}"))
    dpo = load(path, ["stage.dpo.beta=0.3"]).stage
    assert dpo.reference == str(tmp_path / "recipes/reference")


def test_a_resolved_recipe_means_the_same_in_another_folder(recipe_file, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    recipe = load(recipe_file(GOOD))
    run = tmp_path / "runs/qwen"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text(dump(recipe))
    monkeypatch.chdir(run)
    assert load(Path("recipe.yaml")) == recipe


def test_the_folder_of_a_run_or_checkpoint_stands_for_its_recipe(
    recipe_file, tmp_path, monkeypatch
):
    (tmp_path / "data").mkdir()
    recipe = load(recipe_file(GOOD))
    run = tmp_path / "moved/qwen"
    for folder in (run, run / "checkpoint-7"):
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text(dump(recipe))
    monkeypatch.chdir(tmp_path / "moved")
    for path in ("qwen", run, "qwen/checkpoint-7", "qwen/recipe.yaml"):
        found = load(Path(path))
        is_folder = not str(path).endswith(".yaml")
        expected = run if is_folder else Path("runs/qwen")
        assert found.train.output_dir.absolute() == expected.absolute()
        assert dataclasses.replace(found, train=recipe.train) == recipe
    assert load(run, ["train.output_dir=other"]).train.output_dir == Path("other")
    remote = dump(recipe).replace("runs/qwen", "s3://bucket/run")
    (run / "recipe.yaml").write_text(remote)
    assert load(run).train.output_dir == "s3://bucket/run"


def test_changes_are_named_by_path_with_both_values():
    old = small(method="lora")
    new = small(
        method={"lora": {"rank": 4}}, optim={"adamw": {"beta1": 0.5}}, data={"datasets": ["d", "e"]}
    )
    assert changes(old, old) == []
    assert list(map(str, changes(old, new))) == [
        "data.datasets: ['d'] -> ['d', 'e']",
        "method.lora.rank: 8 -> 4",
        "method.lora.alpha: 16 -> 8",
        "optim.adamw.beta1: 0.9 -> 0.5",
    ]


def test_another_variant_is_one_change():
    assert changes(small(method="lora"), small()) == [RecipeChange("method", "lora", "full")]


NO_DATA = "nothing to evaluate on; set data.val_size or data.eval_datasets"
NO_EVALUATIONS = "needs evaluations; set train.eval_steps, eval_minutes or eval_epoch"
NO_TURNS = "has no effect with stage pt, which trains on whole texts"
NOT_ROUNDED = (
    "optim.adamw.bf16_weights: has no effect unless model.dtype is bfloat16; set that, or leave it "
    "out"
)
HELD_OUT = {"data.val_size": 0.1}
MASTER = {"optim.adamw.bf16_weights": "master"}
OF_ROWS = "is of whole rows, which no rank has with parallel.cp; remove one of the two"
BROKEN = {  # settings, the problems that they have, and settings without which they have them
    "evaluation by steps": ({"train.eval_steps": 5}, [f"train.eval_steps: {NO_DATA}"], HELD_OUT),
    "by minutes": ({"train.eval_minutes": 1}, [f"train.eval_minutes: {NO_DATA}"], HELD_OUT),
    "by epochs": ({"train.eval_epoch": True}, [f"train.eval_epoch: {NO_DATA}"], HELD_OUT),
    "best and early": (
        {"train.load_best_model_at_end": True, "train.early_stopping_patience": 3},
        [
            f"train.load_best_model_at_end: {NO_EVALUATIONS}",
            f"train.early_stopping_patience: {NO_EVALUATIONS}",
        ],
        {"train.eval_epoch": True, "data.eval_datasets": "e"},
    ),
    "a metric of training": (
        {"train.eval_steps": 5, "train.metric_for_best_model": "loss", "data.val_size": 2},
        [
            "train.metric_for_best_model: expected a metric of evaluations such as eval_loss, "
            "got 'loss'"
        ],
        {"train.metric_for_best_model": "eval_token_accuracy"},
    ),
    "a metric of the clock": (
        {"train.eval_steps": 5, "train.metric_for_best_model": "eval_runtime", "data.val_size": 2},
        [
            "train.metric_for_best_model: expected a metric of evaluations such as eval_loss, "
            "got 'eval_runtime'"
        ],
        {"train.metric_for_best_model": "eval_loss"},
    ),
    "an adapter": (
        {"model.adapter": "a"},
        [
            "model.adapter: method full does not train adapters; use method: lora, or merge it "
            "into the model first with `surefoot export`"
        ],
        {"method": "lora"},
    ),
    "rolling back": (
        {"train.on_nan": "rollback", "checkpoint.save_steps": None},
        ["train.on_nan: rollback needs checkpoints; set checkpoint.save_steps"],
        {"checkpoint.save_steps": 3},
    ),
    "plain text": (
        {"stage": "pt", "data.mask_history": True, "data.default_system": "Be brief."},
        [f"data.mask_history: {NO_TURNS}", f"data.default_system: {NO_TURNS}"],
        {"stage": "sft"},
    ),
    "parts of rows that are padded": (
        {"parallel.dp_shard": 2, "parallel.cp": 2, "data.packing": False},
        [
            "data.packing: parallel.cp divides packed rows; set it to true, or leave parallel.cp "
            "at 1"
        ],
        {"data.packing": True},
    ),
    "parts of rows in stages": (
        {"parallel.dp_shard": 2, "parallel.cp": 2, "parallel.pp": 2},
        [
            "parallel.pp: the stages of a pipeline cannot share rows (parallel.cp); set one of "
            "them to 1"
        ],
        {"parallel.pp": 1},
    ),
    "what is of whole rows": (
        {
            **{"parallel.dp_shard": 2, "parallel.cp": 2, "model.neftune_noise_alpha": 5.0},
            **{"model.router_bias_update_rate": 0.001, "model.attention": "flash_attention_2"},
        },
        [
            f"model.neftune_noise_alpha: {OF_ROWS}",
            f"model.router_bias_update_rate: {OF_ROWS}",
            "model.attention: takes no part of a row (parallel.cp); use auto",
        ],
        {"parallel.cp": 1},
    ),
    "rounding": (MASTER, [NOT_ROUNDED], {"model.dtype": "bfloat16"}),
    "float32": ({**MASTER, "model.dtype": "float32"}, [NOT_ROUNDED], {"model.dtype": "bfloat16"}),
}


@pytest.mark.parametrize(("settings", "problems", "cure"), BROKEN.values(), ids=BROKEN)
def test_settings_that_need_others_are_refused_without_them(settings, problems, cure):
    with pytest.raises(RecipeError) as caught:
        read(SMALL, settings)
    told = [line.partition(": ")[2] for line in str(caught.value).splitlines()]
    assert told == problems
    read(SMALL, {**settings, **cure})


def test_trained_weights_cannot_be_float16():
    model = {"path": "m", "dtype": "float16"}
    (problem,) = refused_data(model=model)
    assert problem.startswith("model.dtype: trainable weights cannot be float16")
    small(model=model, method="lora")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nearest(AdamW):
    bf16_weights: str = "nearest"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithoutChoice:
    bf16_weights: ClassVar[str] = "nearest"
    follows_evaluations: ClassVar[bool] = False


@pytest.mark.parametrize("optimizer", [Nearest, WithoutChoice])
def test_an_optimizer_s_own_way_of_rounding_is_no_setting_of_the_recipe(optimizer):
    recipe = dataclasses.replace(small(), optim=optimizer())
    assert recipe.model.dtype != "bfloat16"
    assert [problem for rule in RULES for problem in rule(recipe)] == []


def test_a_schedule_that_follows_evaluations_needs_them_and_its_settings_need_it():
    plateau = {"adamw": {"schedule": "reduce_lr_on_plateau"}}
    (problem,) = refused_data(optim=plateau)
    assert problem.startswith("optim.adamw.schedule: reduce_lr_on_plateau needs evaluations; set ")
    assert "train.eval_steps" in problem and "data.val_size" in problem
    sections = {
        "train": {**SMALL["train"], "eval_steps": 2},
        "data": {**SMALL["data"], "val_size": 2},
    }
    made = small(optim=plateau, **sections)
    assert made.optim.follows_evaluations
    (problem,) = refused_data(optim={"adamw": {"plateau": {"patience": 2}}})
    assert "plateau has no effect on schedule cosine; set schedule to reduce_lr" in problem


def test_every_rule_that_is_broken_is_told(recipe_file):
    path = recipe_file(GOOD.replace("num_epochs: 2", "eval_steps: 2, load_best_model_at_end: on"))
    assert "expected true or false, got 'on'" in refused(path)
    path.write_text(GOOD.replace("num_epochs: 2", "eval_steps: 2"))
    assert refused(path, "model.adapter=x", "method=full").splitlines() == [
        "command line: model.adapter=x: model.adapter: method full does not train adapters; use "
        "method: lora, or merge it into the model first with `surefoot export`",
        "recipe.yaml:5:37 train.eval_steps: nothing to evaluate on; set data.val_size or "
        "data.eval_datasets",
    ]


def test_every_rule_says_what_it_is():
    assert all(rule.__doc__ for rule in RULES)


WORDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
NAMES = st.lists(WORDS, max_size=3).map(tuple)
DATASETS = WORDS.filter(lambda word: not set(",/.~") & set(word))
FOLDERS = st.from_regex(r"/[a-z0-9_][a-z0-9_. -]{0,8}(/[a-z0-9 ]{1,5})?", fullmatch=True).map(Path)
COUNTS = st.integers(1, 10**6)
SHARES = st.floats(0, 1)
TRAIN = {
    "output_dir": FOLDERS,
    "global_batch_size": st.sampled_from([8, 16]),
    "seed": st.integers(0, 2**63),
    "precision": st.sampled_from(["auto", "fp32", "bf16", "fp16"]),
    "log_minutes": st.none() | st.floats(1e-9, 1e9),
    "report_to": st.sampled_from([(), ("tensorboard",)]),
}
RECIPES = st.builds(
    Recipe,
    model=st.builds(
        ModelSection,
        path=st.from_regex(r"[A-Z]{3}/[a-z0-9.]{1,9}[a-z0-9]", fullmatch=True),
        revision=st.none() | WORDS,
        dtype=st.sampled_from(["auto", "float32", "bfloat16"]),
        new_special_tokens=NAMES,
        gradient_checkpointing=st.booleans(),
    ),
    data=st.builds(
        DataSection,
        datasets=st.lists(DATASETS, min_size=1, max_size=3, unique=True).map(tuple),
        dataset_dir=FOLDERS,
        val_size=SHARES,
        max_samples=st.none() | COUNTS,
        default_system=st.none() | WORDS,
        cutoff_len=st.integers(4, 10**6),
        packing=st.booleans(),
        cache_dir=st.none() | FOLDERS,
    ),
    method=st.one_of(
        st.just(Full()),
        st.builds(Freeze, num_layers=COUNTS, modules=NAMES, extra_modules=NAMES),
        st.builds(
            LoRA,
            rank=COUNTS,
            alpha=st.none() | st.floats(1e-300, 1e300),
            dropout=st.floats(0, 0.9),
            targets=st.lists(WORDS, min_size=1, max_size=3).map(tuple),
            dora=st.booleans(),
        ),
    ),
    stage=st.just(SFT()),
    train=st.builds(TrainSection, num_epochs=st.floats(1e-9, 1e9), **TRAIN)
    | st.builds(TrainSection, max_steps=COUNTS, **TRAIN),
    optim=st.builds(
        AdamW,
        learning_rate=st.floats(1e-300, 1e3),
        schedule=st.sampled_from(["cosine", "linear", "constant", "wsd"]),
        warmup_ratio=SHARES,
        weight_decay=SHARES,
    ),
    checkpoint=st.builds(CheckpointSection, keep=st.none() | COUNTS, resume=WORDS),
    generate=st.builds(
        GenerateSection, do_sample=st.just(True), temperature=st.floats(1e-5, 1e6), top_k=COUNTS
    ),
)


@given(RECIPES)
@examples(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_recipe_that_is_dumped_reads_back_equal(recipe_file, recipe):
    assert load(recipe_file(dump(recipe))) == recipe
    again = read(write(recipe))
    assert again == recipe
    assert changes(recipe, again) == []


KEYS = st.sampled_from(sorted({str(way[-1]) for way in paths(Recipe)}))
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | WORDS
NONSENSE = st.recursive(
    VALUES,
    lambda inner: st.dictionaries(KEYS | WORDS, inner, max_size=4) | st.lists(inner, max_size=3),
    max_leaves=15,
)


@given(st.dictionaries(KEYS, NONSENSE, max_size=8))
@examples(suppress_health_check=[HealthCheck.too_slow])
def test_nonsense_gives_nothing_but_a_recipe_error(data):
    try:
        read(data)
    except RecipeError as error:
        assert str(error)


@given(st.sampled_from(paths(Recipe)), NONSENSE)
@example(("stage", "distill", "sampler", "engine"), None)
@examples(suppress_health_check=[HealthCheck.too_slow])
def test_one_wrong_value_never_does_more_than_name_itself(path, value):
    whole = ".".join(map(str, path))
    try:
        recipe = read(SMALL, {whole: value})
    except RecipeError as error:
        places = ("override: ", "train.global_batch_size: ")
        beside = ".".join(map(str, path[:2]))  # of a variant that requires another setting too
        for line in str(error).split("\n"):
            assert line.startswith(places) or (
                line.startswith(f"{beside}.")
                and (": missing" in line or ": expected a model: without one" in line)
            )
    else:
        assert read(write(recipe)) == recipe


def test_sections_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        small().train.seed = 3


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("stage=stf", "sft"),
        ("stage=SFT", "sft"),
        ("model.dtype=fp16", "float16"),
        ("model.dtype=bf16", "bfloat16"),
        ("train.precision=float32", "fp32"),
        ("optim.adamw.schedule=COSINE", "cosine"),
    ],
)
def test_a_value_in_other_words_or_letters_gets_a_proposal(recipe_file, override, meant):
    assert refused(recipe_file(GOOD), override).endswith(f"(did you mean {meant}?)")
