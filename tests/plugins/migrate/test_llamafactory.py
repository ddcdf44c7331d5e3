"""LLaMA-Factory's files and command lines as recipes, against its own arguments and examples."""

import dataclasses
import inspect
import json
import math
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Seq2SeqTrainingArguments, get_scheduler

from surefoot.data.data_order import hold_out
from surefoot.errors import RecipeError
from surefoot.plugins.migrate.arguments import ARGUMENTS, FILES, GROUPS
from surefoot.plugins.migrate.commands import read_command_line
from surefoot.plugins.migrate.conversion import convert_llamafactory
from surefoot.plugins.migrate.templates import TEMPLATES
from surefoot.plugins.mindspore.recipe import IMPORTER
from surefoot.recipe.recipe import Recipe, convert, load, load_converted
from surefoot.recipe.yaml import parse
from surefoot.schema import dotted, paths
from surefoot.training.windows import num_steps

from . import cases

FOLDER = Path(__file__).parent / "llamafactory"
THEIRS = json.loads((FOLDER / "arguments.json").read_text())
RELEASES = json.loads((FOLDER / "releases.json").read_text())
EXAMPLES = json.loads((FOLDER / "examples.json").read_text())
COMMAND = shlex.split(
    "--stage sft --do_train True --model_name_or_path MODEL --preprocessing_num_workers 16 "
    "--finetuning_type full --template qwen --flash_attn auto --dataset_dir DATA "
    "--dataset alpaca_zh --cutoff_len 1024 --learning_rate 5e-05 --num_train_epochs 3.0 "
    "--max_samples 1000 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 "
    "--lr_scheduler_type cosine --max_grad_norm 1.0 --logging_steps 5 --save_steps 100 "
    "--warmup_steps 0 --optim adamw_torch --packing False --report_to none --use_badam True "
    "--output_dir OUT --fp16 True --plot_loss True --ddp_timeout 180000000 "
    "--include_num_input_tokens_seen True --badam_mode layer --badam_switch_mode ascending "
    "--badam_switch_interval 50 --badam_update_ratio 0.05 --val_size 0.1 --eval_strategy steps "
    "--eval_steps 100 --per_device_eval_batch_size 2"
)
FOUR = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
LEAST = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o", "do_train": True}


def translation(environment=None, **values):
    """The arguments of a file with the least that a run needs, and ``values``."""
    document = parse(json.dumps({**LEAST, **values}), "their.yaml")
    return convert_llamafactory(document, (), environment or {})


def recipe(environment=None, **values):
    return load_converted(translation(environment, **values))


def refusal(**values):
    with pytest.raises(RecipeError) as caught:
        recipe(**values)
    return str(caught.value)


# The table


def test_no_argument_of_theirs_is_missing():
    names = {name for group in THEIRS.values() for name in group}
    assert len(names) > 340
    assert names <= ARGUMENTS.keys()
    installed = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments) if field.init}
    assert installed <= ARGUMENTS.keys()
    assert sum(map(len, GROUPS.values())) == len(ARGUMENTS)  # none is in two groups


def test_every_name_of_their_releases_has_a_rule():
    """Their names of 0.7.1 to 0.9.5, each with its first and its last release."""
    names = RELEASES["names"]
    assert RELEASES["releases"][0] == "0.7.1" and len(names) > 250
    assert not [name for name in names if name not in ARGUMENTS]
    gone = {name for name, span in names.items() if not span.endswith(RELEASES["releases"][-1])}
    present = {name for group in THEIRS.values() for name in group}
    assert {"new_special_tokens", "visual_inputs", "dpo_beta"} <= gone
    former = GROUPS["Former arguments of LLaMA-Factory"].keys()
    assert former == names.keys() - present


def test_former_names_mean_what_they_meant():
    before = recipe(new_special_tokens="<a>,<b>", visual_inputs=False, reserved_label_len=1)
    assert before.model.new_special_tokens == ("<a>", "<b>")
    assert before == recipe(add_special_tokens="<a>,<b>")
    dpo = {"dpo_beta": 0.2, "dpo_loss": "ipo", "dpo_ftx": 0.5}
    now = {name.replace("dpo", "pref"): value for name, value in dpo.items()}
    assert recipe(stage="dpo", **dpo) == recipe(stage="dpo", **now)
    assert recipe(stage="orpo", orpo_beta=0.3) == recipe(
        stage="dpo", pref_loss="orpo", pref_beta=0.3
    )
    assert recipe(flash_attn="off").model.attention == "eager"
    assert recipe(quantization_method="bitsandbytes", quantization_bit=4).model.quantization_bit
    both = recipe(new_special_tokens="<old>", add_special_tokens="<new>")
    assert both.model.new_special_tokens == ("<new>",)


def test_former_names_of_pictures_mean_what_they_meant(tmp_path):
    entry = {"file_name": "d.json", "columns": {"images": "images"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"d": entry}))
    pictured = {"dataset_dir": str(tmp_path), "finetuning_type": "full"}
    for value in (512, 512 * 512):  # a side in 0.9.0, pixels in 0.9.1
        old = recipe(**pictured, image_resolution=value, image_dir="pictures")
        assert old == recipe(**pictured, image_max_pixels=512 * 512, media_dir="pictures")
    projector = recipe(**pictured, train_mm_proj_only=True)
    assert projector.method.frozen_modules == ("tower", "language")
    lora = pictured | {"finetuning_type": "lora"}
    assert "train_mm_proj_only: needs finetuning_type: full" in refusal(
        **lora, train_mm_proj_only=True
    )


def test_pictures_that_would_be_enlarged_are_refused(tmp_path):
    entry = {"file_name": "d.json", "columns": {"images": "images"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"d": entry}))
    pictured = {"dataset_dir": str(tmp_path), "finetuning_type": "full"}
    assert recipe(**pictured, image_min_pixels=1024) == recipe(**pictured)
    said = refusal(**pictured, image_min_pixels=50176)
    assert "image_min_pixels: the model's own processor alone" in said


def test_an_error_of_a_former_name_names_it():
    assert "their.yaml" in (message := refusal(stage="dpo", dpo_loss="nonsense"))
    assert "dpo_loss: expected one of sigmoid, hinge" in message
    assert "pref_loss" not in message
    assert "split: 'test' is not supported: until 0.8.2; name it in" in refusal(split="test")


def test_the_defaults_are_theirs():
    for fields in THEIRS.values():
        for name, default in fields.items() if isinstance(fields, dict) else ():
            if default != "(required)":
                ours = ARGUMENTS[name]
                is_listed = ours.kind == "any" and ours.outcome in ("ignored", "refused")
                is_accepted = default is None or not ours.refuses(ours.read(name, default))
                assert is_accepted and (is_listed or ours.default in (default, [default])), name


def test_every_setting_of_the_table_exists():
    known = {dotted(path) for path in paths(Recipe)}
    for name, argument in [
        *ARGUMENTS.items(),
        *((k, a) for f in FILES.values() for k, a in f.items()),
    ]:
        assert set(argument.settings) <= known | ARGUMENTS.keys(), name
        assert argument.settings or len(argument.says) > 8, name


def test_every_combined_argument_is_read_by_a_rule():
    folder = Path(inspect.getfile(convert_llamafactory)).parent
    names = ["rules.yaml", "llamafactory.py", "rules.py", "run_extras.py", "conversion.py"]
    names += ["optimizer_arguments.py"]
    code = "".join((folder / name).read_text() for name in names)
    code += " galore_rank galore_update_interval galore_scale use_galore use_adam_mini use_muon"
    code += " apollo_rank apollo_update_interval apollo_scale use_apollo"  # by f-strings
    for name, argument in ARGUMENTS.items():
        if argument.outcome == "makes":
            assert re.search(rf"\b{name}\b", code), name


def test_training_from_scratch_is_training_from_new_weights():
    assert recipe(train_from_scratch=True).model.new_weights
    assert not recipe(train_from_scratch=False).model.new_weights


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_of_no_checkpoints_deletes_none(limit):
    # As transformers.trainer_utils.rotate_checkpoints: only limits above 0 delete anything.
    assert recipe(save_total_limit=limit).checkpoint.keep is None
    assert recipe(save_total_limit=2).checkpoint.keep == 2


def test_ranks_wait_as_long_as_ddp_timeout_says():
    assert recipe().parallel.timeout == "auto"
    assert recipe(ddp_timeout=1800).parallel.timeout == 30
    assert recipe(ddp_timeout=180000000).parallel.timeout == 3_000_000  # never, in effect
    assert "parallel" in refusal(ddp_timeout=-1)
    assert "must be positive" in refusal(ddp_timeout=-1)


# The command of the page that users learn from


def test_the_command_from_their_page_is_a_recipe():
    document, overrides = read_command_line(COMMAND)
    found = load_converted(convert_llamafactory(document, (), {}))
    assert overrides == []
    assert (found.model.path, found.model.gradient_checkpointing) == ("MODEL", "full")
    data, train = found.data, found.train
    assert [str(name) for name in data.datasets] == ["alpaca_zh"]
    assert (data.template, data.cutoff_len, data.max_samples) == ("qwen", 1024, 1000)
    assert data.default_system.startswith("You are Qwen, created by Alibaba Cloud.")
    assert (data.val_size, data.dataset_dir.name, data.packing) == (0.1, "DATA", True)
    method = found.method
    assert (type(method).__name__, method.order, method.switch_interval) == (
        "BAdam",
        "ascending",
        50,
    )
    assert (train.num_epochs, train.micro_batch_size, train.global_batch_size) == (3.0, 2, 16)
    assert (train.precision, train.log_steps, train.eval_steps) == ("fp16", 5, 100)
    assert (found.checkpoint.save_steps, found.checkpoint.keep) == (100, None)
    optim = found.optim
    assert (optim.learning_rate, optim.schedule, optim.weight_decay) == (5e-5, "cosine", 0.0)
    assert (optim.warmup_ratio, optim.warmup_steps) == (0.0, None)


def test_what_differs_is_named_in_a_few_lines():
    document, _ = read_command_line(COMMAND)
    lines = list(convert_llamafactory(document, (), {}).notes)
    assert len(lines) <= 11 and max(map(len, lines)) < 180
    text = "\n".join(lines)
    assert "LLaMA-Factory: weight_decay 0 is ignored with BAdam: 0.01 is applied" in text
    assert "without effect here: preprocessing_num_workers, " in text
    assert "'False' is text" not in text  # a command line has text only


def test_flags_without_values_and_their_other_spellings():
    words = "--model_name_or_path m --do_train --bf16 --max-steps=-1 --lora_target q_proj v_proj"
    document, overrides = read_command_line([*words.split(), "train.on_nan=skip"])
    assert document.data == {
        "model_name_or_path": "m",
        "do_train": True,
        "bf16": True,
        "max_steps": "-1",
        "lora_target": ["q_proj", "v_proj"],
    }
    assert overrides == ["train.on_nan=skip"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--stage sft dpo", "'dpo' belongs to no argument"),
        ("--stage sft --stage dpo", "--stage occurs twice"),
        ("--model_name_or_path m --learning_rte 1", "--learning_rte: learning_rte: no argument of"),
        ("--model_name_or_path m --lora_rank x", "--lora_rank: lora_rank: expected a whole number"),
    ],
)
def test_a_wrong_command_line_is_refused_with_its_word(words, said):
    with pytest.raises(RecipeError, match=re.escape(said)):
        convert(words.split())


# Files


def test_yaml_and_json_are_read_with_overrides_of_both_kinds(tmp_path):
    content = {**LEAST, "learning_rate": 1e-4}
    for name in ("their.yaml", "their.json"):
        (tmp_path / name).write_text(json.dumps(content))
        found = load(tmp_path / name, ["learning_rate=2e-4", "optim.adamw.beta1=0.8"])
        assert (found.optim.learning_rate, found.optim.beta1) == (2e-4, 0.8)
    assert load(tmp_path / name, {"learning_rate": 3e-4}).optim.learning_rate == 3e-4
    with pytest.raises(RecipeError, match=r"command line: lora_rank: lora_rank: expected a whole"):
        load(tmp_path / name, ["lora_rank=x"])


def test_all_mistakes_are_named_at_once_with_their_lines(tmp_path):
    text = "model_name_or_path: m\nlora_rnk: 8\nmixture_of_depths: convert\nstage: sfft\n"
    (tmp_path / "file.yaml").write_text(text)
    with pytest.raises(RecipeError) as caught:
        load(tmp_path / "file.yaml")
    lines = str(caught.value).splitlines()
    assert (
        "file.yaml:2:1 lora_rnk: no argument of LLaMA-Factory (did you mean lora_rank?)" in lines[0]
    )
    assert re.search(r":3:1 mixture_of_depths: .*later tokens, which generation does not", lines[1])
    assert (
        ":4:1 stage: expected one of pt, sft, rm, ppo, dpo, kto, orpo, got 'sfft' (did you"
        in lines[2]
    )


def test_an_error_of_a_setting_names_the_argument_it_is_of(tmp_path):
    (tmp_path / "file.yaml").write_text("\n".join(f"{k}: {v}" for k, v in LEAST.items()))
    with pytest.raises(RecipeError, match=r"command line: cutoff_len: data.cutoff_len: must be"):
        load(tmp_path / "file.yaml", ["cutoff_len=2"])


def test_a_recipe_and_a_file_of_mindspore_are_not_taken_for_theirs(tmp_path):
    text = "model: {path: x}\ndata: {datasets: [d]}\ntrain: {output_dir: x}\nstage: sft\n"
    (tmp_path / "recipe.yaml").write_text(text)
    assert convert([str(tmp_path / "recipe.yaml")]) is None
    assert not any(IMPORTER.recognise({name: None}) for name in ARGUMENTS)


V1_FILES = (
    "model: m\nmodel_class: llm\ntrain_dataset: data.yaml\ncutoff_len: 2048\nlearning_rate: 1e-4\n",
    "model: m\ntrain_dataset: data.yaml\noutput_dir: o\nmicro_batch_size: 1\n",
    "model: m\npeft_config: {name: lora, adapter_name_or_path: a}\noutput_dir: o\n",
    "model: m\nsample_backend: hf\nmax_new_tokens: 9\n",
)


@pytest.mark.parametrize("text", V1_FILES)
def test_a_file_of_their_v1_is_named_and_converted_to_nothing(tmp_path, text):
    (tmp_path / "v1.yaml").write_text(text)
    for opened in (load, lambda path: convert([str(path)])):
        with pytest.raises(RecipeError, match=r"LLaMA-Factory's v1 \(USE_V1=1\), whose arguments"):
            opened(tmp_path / "v1.yaml")


def test_text_for_a_switch_is_read_as_it_is_meant():
    found = translation(packing="false", lora_rank="16", learning_rate="1e-4")
    assert load_converted(found).method.rank == 16
    assert any("packing: 'false' is text, which counts as true" in line for line in found.notes)


# Settings of several arguments


@pytest.mark.parametrize(
    ("environment", "ranks"), [({}, 1), (FOUR, 4), ({"NPROC_PER_NODE": "2"}, 2)]
)
def test_a_global_batch_counts_all_ranks(environment, ranks):
    sizes = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 5}
    found = recipe(environment, **sizes)
    assert found.train.global_batch_size == 15 * ranks
    assert found.train.micro_batch_size == 3
    if ranks > 1:
        assert (found.parallel.dp_replicate, found.parallel.dp_shard) == (ranks, 1)
    assert found.parallel.num_processes == (2 if "NPROC_PER_NODE" in environment else None)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("z0", (4, 1, True, 1)),
        ("z2", (1, 4, False, 1)),
        ("z2_autotp", (1, 2, False, 2)),
        ("z3", (1, 4, True, 1)),
    ],
)
def test_deepspeed_files_shard_alike(tmp_path, name, mesh):
    text = EXAMPLES[f"examples/deepspeed/ds_{name}_config.json"]
    (tmp_path / "ds.json").write_text(text)
    found = recipe(FOUR, deepspeed=str(tmp_path / "ds.json"))
    parallel = found.parallel
    assert mesh == (
        parallel.dp_replicate,
        parallel.dp_shard,
        parallel.reshard_after_forward,
        parallel.tp,
    )
    assert found.train.global_batch_size == 8 * 4 // parallel.tp


def test_what_deepspeed_keeps_in_main_memory(tmp_path):
    for name, is_refused in (("z2_offload", False), ("z3_offload", True)):
        content = json.loads(EXAMPLES[f"examples/deepspeed/ds_{name}_config.json"])
        if is_refused:
            assert "offload_param: weights stay on the GPU" in refusal(deepspeed=content)
        else:
            assert recipe(deepspeed=content).optim.offload_state
    assert "DeepSpeed files" in refusal(deepspeed={"zero_optimisation": {"stage": 3}})
    assert "no such file" in refusal(deepspeed=str(tmp_path / "missing.json"))


@pytest.mark.parametrize("name", [n for n in EXAMPLES if n.startswith("examples/accelerate")])
def test_fsdp_files_shard_alike(name):
    content = json.loads(json.dumps(parse(EXAMPLES[name]).data))
    if "offload" in name:
        assert "weights stay on the GPU" in refusal(fsdp_config=content)
        return
    parallel = recipe(FOUR, fsdp_config=content).parallel
    assert (parallel.dp_replicate, parallel.dp_shard) == (1, 4)


def test_llama_pro_is_had_by_the_override_that_its_error_names(tmp_path):
    (tmp_path / "their.yaml").write_text(
        EXAMPLES["examples/extras/llama_pro/llama3_freeze_sft.yaml"]
    )
    with pytest.raises(RecipeError, match=r"add use_llama_pro=false method\.llama_pro\.num_new_la"):
        load(tmp_path / "their.yaml")
    cure = ["use_llama_pro=false", "method.llama_pro.num_new_layers=8"]
    assert load(tmp_path / "their.yaml", cure).method.num_new_layers == 8


def test_a_folder_of_tokens_is_the_cache_unless_it_is_full_of_theirs(tmp_path):
    assert recipe(tokenized_path=str(tmp_path)).data.cache_dir == tmp_path
    (tmp_path / "dataset_dict.json").write_text("{}")
    assert recipe(tokenized_path=str(tmp_path)).data.cache_dir is None
    with pytest.raises(RecipeError, match="name the datasets, as the tokens in tokenized_path"):
        translation(tokenized_path=str(tmp_path), dataset=None)


def test_the_saved_tokenizer_ends_as_theirs_does():
    """By their templates' `replace_eos`; what is newer than 0.9.5 has the model's own."""
    recorded = json.loads((FOLDER / "eos.json").read_text())
    for token, names in recorded.items():
        expected = token or None
        found = {name: recipe(template=name).model.eos_token for name in names}
        assert found == dict.fromkeys(names, expected) | {
            name: None for name in names if name == "moss_vl"
        }
    assert recipe(template="qwen", stage="pt").model.eos_token is None


def test_every_template_is_here_by_its_name():
    from surefoot.data.text.templates import names

    assert set(TEMPLATES) == set((FOLDER / "templates.txt").read_text().split())
    newer = {"hy_dense_1_8b", "hy_dense_7b", "moss_vl"}  # than version 0.9.5
    assert set(TEMPLATES) - newer <= set(names())
    found = {name: recipe(template=name).data.template for name in TEMPLATES}
    assert found == {name: "auto" if name in newer else name for name in TEMPLATES}
    notes = "\n".join(translation(template="moss_vl").notes)
    assert "template: moss_vl is the model's own chat template here" in notes
    assert "(did you mean qwen3?)" in refusal(template="qwenn3")
    assert "0.9.5 has no template 'baichuan2'" in refusal(template="baichuan2")  # 0.9.4 has
    assert recipe(template="qwen", default_system="x").data.default_system == "x"
    assert recipe(template="youtu_vl").data.default_system == "You are a helpful assistant."
    assert recipe(template="qwen3", tool_format="glm4").data.tool_format == "glm4"


@pytest.mark.parametrize("case", cases.of(FOLDER / "cases.yaml"))
def test_a_file_means_what_its_case_says(case):
    cases.check(case, lambda case: translation(case.get("environment"), **case["file"]))


def test_a_key_is_nowhere_in_the_recipe():
    found = translation(use_swanlab=True, swanlab_api_key="k3y-of-mine")
    assert "k3y-of-mine" not in str(found.document)


def test_the_reward_model_of_ppo_is_a_reward():
    assert recipe(stage="ppo", reward_model="r").stage.reward[0].path == "r"


# Learning rates and lengths, against transformers


def factors(name, steps, warmup, **kwargs):
    """The factor of the learning rate at every step, by transformers."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    optimizer.defaults["lr"] = 1.0
    schedule = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=steps,
        scheduler_specific_kwargs=kwargs or None,
    )
    return [schedule.lr_lambdas[0](step) for step in range(steps)]


@pytest.mark.parametrize(
    "warmup", [{}, {"warmup_steps": 7}, {"warmup_ratio": 0.1}, {"warmup_steps": 0.1}]
)
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("linear", {}),
        ("cosine", {}),
        ("cosine_with_restarts", {}),
        ("polynomial", {"lr_end": 0.1}),
        ("constant", {}),
        ("constant_with_warmup", {}),
        ("inverse_sqrt", {}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.2}),
        ("warmup_stable_decay", {}),
    ],
)
@pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps")
def test_the_schedule_is_theirs_after_warmup_and_one_step_ahead_in_it(name, kwargs, warmup):
    for steps in (50, 51, 52):
        values = {"max_steps": steps, "learning_rate": 1.0, "lr_scheduler_type": name, **warmup}
        optim = recipe(**values, lr_scheduler_kwargs=kwargs or None).optim
        share = warmup.get("warmup_ratio", warmup.get("warmup_steps", 0))
        count = int(share) if share >= 1 else math.ceil(share * steps)
        if name == "warmup_stable_decay":  # as their create_custom_scheduler sets it
            stable = (steps - count) // 3
            kwargs = {"num_stable_steps": stable, "num_decay_steps": steps - count - stable}
        theirs = factors(name, steps, count, **kwargs)
        count = 0 if name == "constant" else count
        schedule = optim.schedule_over(steps)
        ours = [schedule.factor(step) for step in range(steps)]
        assert schedule.warmup_steps == count
        assert ours[count:] == pytest.approx(theirs[count:], abs=1e-12)
        assert ours[: max(0, count - 1)] == pytest.approx(theirs[1:count], abs=1e-12)
        kwargs = {} if name == "warmup_stable_decay" else kwargs


# Their examples

REFUSED = {
    "llama_pro/": "use_llama_pro: true is not supported: scripts/llama_pro.py is not needed",
    "mod/": "mixture_of_depths: 'convert' is not supported",
    "inference/qwen3_lora": "type: surefoot chat Qwen/Qwen3-4B-Instruct-2507 --adapter saves/qwen3",
    "inference/": "type: surefoot chat ",
    "merge_lora/qwen3_gptq": "GPTQ models are not written",
    "merge_lora/qwen3_lora": "type: surefoot export saves/qwen3-4b/lora/sft saves/qwen3_sft_merged",
    "merge_lora/": "type: surefoot export saves/qwen3-4b/full/sft saves/qwen3_sft_merged",
    "sft_ray": "hf download llamafactory/demo_data",
}
NO_RUNS = ("accelerate", "deepspeed/", "multi_tokens", ".sh")


@pytest.mark.parametrize("name", [n for n in EXAMPLES if not any(w in n for w in NO_RUNS)])
def test_their_example_is_a_recipe_or_refused_with_what_to_do(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (n for n in EXAMPLES if "deepspeed/" in n):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(EXAMPLES[path])
    document = parse(EXAMPLES[name], name)
    reason = next((said for part, said in REFUSED.items() if part in name), None)
    if reason is not None:
        with pytest.raises(RecipeError, match=re.escape(reason)):
            convert_llamafactory(document, (), {})
        return
    found = load_converted(convert_llamafactory(document, (), {}))
    told = document.data
    assert found.train.global_batch_size == told.get("per_device_train_batch_size", 8) * told.get(
        "gradient_accumulation_steps", 1
    )
    assert found.optim.learning_rate == told.get("learning_rate", 5e-5)
    assert found.data.cutoff_len == told["cutoff_len"]


def test_their_shell_script_is_the_same_run_as_its_yaml():
    script = EXAMPLES["examples/train_lora/qwen3_lora_sft.sh"]
    words = shlex.split(
        script.replace("\\\n", "").replace("${MODEL_PATH}", "Qwen/Qwen3-4B-Instruct-2507")
    )
    words = words[words.index("train") + 1 :]
    document, _ = read_command_line(words)
    theirs = parse(EXAMPLES["examples/train_lora/qwen3_lora_sft.yaml"], "qwen3_lora_sft.yaml")
    assert load_converted(convert_llamafactory(document, (), {})) == load_converted(
        convert_llamafactory(theirs, (), {})
    )


def test_refused_arguments_say_what_to_do_instead():
    for name, argument in ARGUMENTS.items():
        if argument.outcome == "refused":
            assert re.search(r"; |write|set |remove|name ", argument.says), name
        assert not argument.says.endswith("."), name


@pytest.mark.parametrize("num_rows", [7, 40, 41, 999, 1000])
@pytest.mark.parametrize(("epochs", "ranks"), [(3.0, 1), (0.5, 1), (2.7, 4), (1.0, 3)])
def test_a_run_has_as_many_steps_and_held_out_rows_as_theirs(num_rows, epochs, ranks):
    """The arithmetic of datasets' ``train_test_split`` and of transformers' Trainer."""
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}
    values = {**sizes, "num_train_epochs": epochs, "val_size": 0.1}
    found = recipe({**FOUR, "WORLD_SIZE": str(ranks)}, **values)
    trained = num_rows - math.ceil(0.1 * num_rows)
    batches = math.ceil(math.ceil(trained / 2) / ranks)  # of a rank
    theirs = math.ceil(epochs * max(batches // 8 + (batches % 8 > 0), 1))

    held = hold_out(np.arange(num_rows), num_rows=num_rows, val_size=found.data.val_size, seed=42)
    assert int(held.sum()) == num_rows - trained
    per_epoch = math.ceil(trained / found.train.global_batch_size)  # of the Loader
    assert num_steps(found.train, per_epoch) == theirs


# Their other commands


def command(name, **values):
    """What to type for `llamafactory-cli NAME --model_name_or_path m --key value ...`."""
    document = parse(json.dumps({"model_name_or_path": "m", **values}), "their.yaml")
    with pytest.raises(RecipeError) as caught:
        convert_llamafactory(document, (), {})
    found = re.search(rf"arguments of `llamafactory-cli {name}`; type: (.*)", str(caught.value))
    return found[1] if found else str(caught.value)


def test_their_eval_is_a_task_of_lm_eval():
    values = {"n_shot": 3, "template": "fewshot", "save_dir": "out", "batch_size": 2}
    assert command("eval", task="cmmlu_test", lang="zh", **values) == (
        "surefoot eval m generate.batch_size=2 --tasks cmmlu --shots 3 --output out.jsonl"
    )
    adapted = command("eval", task="mmlu_test", template="qwen", adapter_name_or_path="a")
    assert adapted.startswith("surefoot eval a --base m generate.batch_size=4 --tasks mmlu")
    assert adapted.endswith("--shots 5 --prompts chat")
    own = command("eval", task="mmlu_test", task_dir="my_tasks")
    assert "task_dir: 'my_tasks': a local folder of questions" in own
    unknown = command("eval", task="ceval_test")
    assert re.search(r"task: expected one of mmlu_test.*got 'ceval_test'", unknown)


def test_their_chat_samples_as_theirs_does():
    assert command("chat", template="qwen", adapter_name_or_path="a") == (
        "surefoot chat m --adapter a --system 'You are Qwen, created by Alibaba Cloud. You are a "
        "helpful assistant.' --max-new-tokens 1024 --temperature 0.95 --top-p 0.7 --top-k 50 "
        "--repetition-penalty 1"
    )
    greedy = command("chat", temperature=0, trust_remote_code=True, infer_dtype="float16")
    expected = "--max-new-tokens 1024 --greedy --dtype float16 --trust-remote-code"
    assert greedy == f"surefoot chat m {expected}"
    several = command("chat", adapter_name_or_path="a,b")
    assert "begin with: surefoot export a MERGED --base m" in several


def test_their_export_is_ours():
    found = command("export", adapter_name_or_path="a", export_dir="o", export_size=2)
    assert found == "surefoot export a o --base m --max-shard-size 2GB"
    quantized = command("export", export_dir="o", export_quantization_bit=4)
    assert "GPTQ models are not written" in quantized
