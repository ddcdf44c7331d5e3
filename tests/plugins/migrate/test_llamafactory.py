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

FOLDER = Path(__file__).parent / "llamafactory"
THEIRS = json.loads((FOLDER / "arguments.json").read_text())
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
        assert set(argument.settings) <= known, name
        assert argument.settings or len(argument.says) > 8, name


def test_every_combined_argument_is_read_by_a_rule():
    folder = Path(inspect.getfile(convert_llamafactory)).parent
    names = ("rules.yaml", "llamafactory.py", "rules.py", "run_extras.py", "conversion.py")
    code = "".join((folder / name).read_text() for name in names)
    code += " galore_rank galore_update_interval galore_scale use_galore use_adam_mini use_muon"
    code += " apollo_rank apollo_update_interval apollo_scale use_apollo"  # by f-strings
    for name, argument in ARGUMENTS.items():
        if argument.outcome == "makes":
            assert re.search(rf"\b{name}\b", code), name


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
    assert ":4:1 stage: expected one of pt, sft, rm, ppo, dpo, kto, got 'sfft' (did you" in lines[2]


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


def test_methods_and_their_settings():
    assert recipe(finetuning_type="lora").method.rank == 8
    lora = recipe(lora_rank=4, lora_target="q_proj,v_proj", use_dora=True, lora_dropout=0.1).method
    assert (lora.rank, lora.targets, lora.dora, lora.dropout) == (
        4,
        ("q_proj", "v_proj"),
        True,
        0.1,
    )
    pissa = recipe(pissa_init=True, pissa_iter=-1).method
    assert (pissa.init, pissa.init_iterations) == ("pissa", 0)
    assert recipe(finetuning_type="oft", oft_block_size=16).method.block_size == 16
    freeze = recipe(finetuning_type="freeze", freeze_trainable_layers=-3).method
    assert (freeze.num_layers, freeze.modules) == (-3, ("all",))
    badam = {"finetuning_type": "full", "use_badam": True}
    ratio = recipe(**badam, badam_mode="ratio", badam_mask_mode="scatter").method
    assert (ratio.update_ratio, ratio.mask, ratio.switch_interval) == (0.05, "scatter", 100)
    never = recipe(**badam, badam_switch_interval=-1, badam_start_block=3).method
    assert (never.order, never.start_block) == ("fixed", 3)
    half = recipe(**badam, bf16=True)
    assert (half.model.dtype, half.optim.bf16_weights) == ("bfloat16", "master")
    assert "needs finetuning_type: full, not lora" in refusal(use_badam=True)
    assert "needs finetuning_type: lora" in refusal(finetuning_type="full", use_dora=True)


def test_llama_pro_is_had_by_the_override_that_its_error_names(tmp_path):
    (tmp_path / "their.yaml").write_text(
        EXAMPLES["examples/extras/llama_pro/llama3_freeze_sft.yaml"]
    )
    with pytest.raises(RecipeError, match=r"add use_llama_pro=false method\.llama_pro\.num_new_la"):
        load(tmp_path / "their.yaml")
    cure = ["use_llama_pro=false", "method.llama_pro.num_new_layers=8"]
    assert load(tmp_path / "their.yaml", cure).method.num_new_layers == 8


def test_several_adapters():
    found = recipe(adapter_name_or_path="a,b,c", lora_rank=3)
    assert [path.name for path in found.model.frozen_adapters] == ["a", "b"]
    assert found.model.adapter.name == "c"
    found = recipe(adapter_name_or_path="a,b", create_new_adapter=True, lora_rank=3)
    assert [path.name for path in found.model.frozen_adapters] == ["a", "b"]
    assert (found.model.adapter, found.method.rank) == (None, 3)


@pytest.mark.parametrize(
    ("values", "name", "settings"),
    [
        ({"use_galore": True, "galore_rank": 4}, "GaLore", {"rank": 4, "scale": 2.0}),
        ({"use_apollo": True}, "Apollo", {"rank": 16, "scale": 32.0, "scaling": "channel"}),
        ({"use_adam_mini": True, "adam_beta1": 0.8}, "AdamMini", {"beta1": 0.8}),
        ({"use_muon": True, "weight_decay": 0.1}, "Muon", {"weight_decay": 0.1}),
        ({"optim": "adamw_8bit"}, "AdamW8bit", {}),
        ({"optim": "paged_adamw_8bit"}, "AdamW8bit", {"offload_state": True}),
        ({"optim": "adamw_torch_4bit"}, "AdamW4bit", {}),
        ({"optim": "lion_32bit"}, "Lion", {"beta2": 0.999}),
        ({"optim": "adafactor"}, "Adafactor", {}),
        ({"optim": "schedule_free_adamw"}, "ScheduleFree", {}),
        ({"loraplus_lr_ratio": 16.0}, "AdamW", {"learning_rates": {"lora_B": 16.0}}),
    ],
)
def test_optimizers(values, name, settings):
    kind = "lora" if "loraplus_lr_ratio" in values else "full"
    found = recipe(finetuning_type=kind, **values).optim
    assert type(found).__name__ == name
    assert {key: getattr(found, key) for key in settings} == settings


def test_optimizers_that_are_not_supported_are_named():
    assert "'lomo' is not supported" in refusal(optim="lomo")
    assert "excludes LoRA" in refusal(use_galore=True)


@pytest.mark.parametrize(
    ("values", "stage"),
    [
        ({"stage": "pt", "label_smoothing_factor": 0.1}, {"label_smoothing_factor": 0.1}),
        ({"use_dft_loss": True, "stage": "sft"}, {"loss_type": "dft"}),
        (
            {"use_eaft_loss": True, "eaft_alpha": 2.0, "stage": "sft"},
            {"loss_type": "eaft", "eaft_alpha": 2.0},
        ),
        ({"use_asft_loss": True, "stage": "sft"}, {"loss_type": "asft", "asft_alpha": 0.1}),
        ({"stage": "rm"}, {}),
        ({"stage": "dpo", "pref_loss": "ipo", "pref_beta": 0.2}, {"loss_type": "ipo", "beta": 0.2}),
        ({"stage": "dpo", "pref_loss": "simpo", "simpo_gamma": 0.7}, {"gamma": 0.7}),
        ({"stage": "dpo", "ld_alpha": 0.4}, {"ld_alpha": 0.4}),
        (
            {"stage": "dpo", "pref_ftx": 0.5, "ref_model": "r"},
            {"sft_weight": 0.5, "reference": "r"},
        ),
        ({"stage": "kto", "kto_chosen_weight": 2.0}, {"desirable_weight": 2.0, "beta": 0.1}),
    ],
)
def test_stages(values, stage):
    found = recipe(**values).stage
    assert type(found).__name__.lower() == values["stage"]
    assert {key: getattr(found, key) for key in stage} == stage


def test_losses_of_sft_are_refused_where_theirs_ignores_a_setting():
    assert "use_dft_loss: needs stage: sft, not pt" in refusal(stage="pt", use_dft_loss=True)
    smoothed = refusal(use_eaft_loss=True, label_smoothing_factor=0.1)
    assert "label_smoothing_factor: has no effect with use_eaft_loss" in smoothed
    assert "asft: its means are over the tokens of a step" in notes(use_asft_loss=True)


def test_ppo_has_the_settings_of_trl():
    values = {"reward_model": "r", "ppo_epochs": 2, "ppo_buffer_size": 3, "ppo_target": 5.0}
    found = recipe(stage="ppo", per_device_train_batch_size=4, **values)
    stage = found.stage
    assert (stage.passes, stage.mini_batches, found.train.global_batch_size) == (2, 3, 12)
    assert (stage.kl_target, stage.kl_coefficient, stage.temperature) == (5.0, 0.2, 0.95)
    assert stage.reward[0].path == "r"
    assert "is needed for stage: ppo" in refusal(stage="ppo")


def test_losses_that_trl_ignores_are_named():
    notes = "\n".join(translation(stage="dpo", pref_loss="hinge").notes)
    assert "pref_loss: hinge computes sigmoid" in notes
    notes = "\n".join(translation(stage="dpo", ld_alpha=0.5).notes)
    assert "ld_alpha weighs the tokens of the policy and not those of the reference" in notes
    assert "write stage: kto" in refusal(stage="dpo", pref_loss="kto_pair")


def test_intervals_of_steps_and_epochs():
    found = recipe(eval_strategy="epoch", val_size=0.1, save_strategy="epoch", logging_steps=7)
    assert found.train.eval_epoch and found.checkpoint.save_epoch
    assert (found.train.eval_steps, found.checkpoint.save_steps, found.train.log_steps) == (
        None,
        None,
        7,
    )
    found = recipe(eval_strategy="steps", val_size=3, logging_steps=7, save_strategy="no")
    assert (found.train.eval_steps, found.checkpoint.save_steps) == (7, None)
    found = recipe(max_steps=50, save_steps=0.25, evaluation_strategy="steps", val_size=3)
    assert (found.checkpoint.save_steps, found.train.eval_steps) == (13, 500)
    found = recipe(save_strategy="best", eval_strategy="steps", eval_steps=9, val_size=3)
    assert found.checkpoint.save_steps == 9
    assert "set max_steps, or write a number" in refusal(save_steps=0.25)
    assert "nothing to evaluate on; set val_size" in refusal(eval_strategy="steps")


def test_mixed_datasets_are_mixed_alike():
    found = recipe(
        dataset="a,b", mix_strategy="interleave_over", interleave_probs="0.25,0.75", val_size=0.1
    ).data
    assert (found.mix_strategy, found.interleave_probs) == ("interleave_over", (0.25, 0.75))
    assert recipe(mix_strategy="interleave_under").data.mix_strategy == "concat", "one dataset"
    said = translation(dataset="a,b", mix_strategy="interleave_over", val_size=0.1).notes
    assert any("evaluates on rows that are trained on" in line for line in said)
    with pytest.raises(RecipeError, match=r"interleave_probs.*a mix_strategy that interleaves"):
        translation(dataset="a,b", interleave_probs="0.5,0.5")
    with pytest.raises(RecipeError, match=r"interleave_probs: expected 2 numbers.* got 3"):
        recipe(dataset="a,b", mix_strategy="interleave_once", interleave_probs="0.5,0.3,0.2")


def test_a_folder_of_tokens_is_the_cache_unless_it_is_full_of_theirs(tmp_path):
    assert recipe(tokenized_path=str(tmp_path)).data.cache_dir == tmp_path
    (tmp_path / "dataset_dict.json").write_text("{}")
    assert recipe(tokenized_path=str(tmp_path)).data.cache_dir is None
    with pytest.raises(RecipeError, match="name the datasets, as the tokens in tokenized_path"):
        translation(tokenized_path=str(tmp_path), dataset=None)


def test_hubs_are_settings_of_the_environment():
    found = recipe({"USE_MODELSCOPE_HUB": "1"}, dataset_dir="ONLINE", dataset="a/b,c/d")
    assert (found.model.hub, found.data.hub) == ("modelscope", "modelscope")
    assert [str(name) for name in found.data.datasets] == ["a/b", "c/d"]
    found = recipe(dataset_dir="ONLINE", dataset="a/b")
    assert (found.model.hub, found.data.hub) == ("huggingface", "huggingface")
    assert "'identity' is no hub id" in refusal(dataset_dir="ONLINE", dataset="identity")
    assert "hf download x/y --repo-type dataset" in refusal(dataset_dir="REMOTE:x/y")


def test_generation_has_their_defaults_if_any_is_set():
    found = recipe(temperature=0.5).generate
    assert (found.do_sample, found.temperature, found.top_p, found.top_k) == (True, 0.5, 0.7, 50)
    assert recipe().generate.do_sample is False


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
    assert recipe(template="qwen", default_system="x").data.default_system == "x"
    assert recipe(template="youtu_vl").data.default_system == "You are a helpful assistant."
    assert recipe(template="qwen3", tool_format="glm4").data.tool_format == "glm4"


@pytest.mark.parametrize(
    ("given", "expected"),
    [  # enable_thinking, preserve_thinking, train_on_thoughts
        ({"template": "qwen3"}, (True, True, "all")),
        ({"template": "qwen3", "mask_history": True}, (True, False, "all")),
        ({"template": "qwen3", "enable_thinking": False}, (False, True, "all")),
        ({"template": "qwen3", "enable_thinking": None}, (True, True, "written")),
        ({"template": "qwen3_nothink", "enable_thinking": False}, (None, False, "all")),
        (
            {"mask_history": True, "preserve_thinking": True, "template": "qwen3"},
            (True, True, "all"),
        ),
    ],
)
def test_thoughts_are_trained_on_as_there(given, expected):
    data = recipe(**given).data
    assert (data.enable_thinking, data.preserve_thinking, data.train_on_thoughts) == expected


def notes(**values):
    return "\n".join(translation(**values).notes)


def test_a_reference_with_the_adapter_is_noted_where_theirs_is_without_it():
    adapter = {"adapter_name_or_path": "sft"}
    for stage in ({"stage": "dpo"}, {"stage": "kto"}, {"stage": "ppo", "reward_model": "r"}):
        said = notes(**stage, **adapter)
        assert "the reference is the model with the adapter, as it is before the first step" in said
        assert "there it is the model without it" in said
        assert "the reference is" not in notes(**stage)
    for others in ({"create_new_adapter": True}, {"ref_model": "r"}, {"pref_loss": "simpo"}):
        assert "the reference is" not in notes(stage="dpo", **adapter, **others)
    assert "the reference is" not in notes(**adapter)


def test_other_means_and_beginnings_are_noted():
    assert "eval_loss is a mean over tokens" in notes(eval_strategy="epoch", val_size=0.1)
    assert "eval_loss" not in notes() + notes(stage="dpo", eval_strategy="epoch", val_size=0.1)
    assert "kto: the baseline is a mean over the global batch" in notes(stage="kto")
    assert "rm: a new head begins at 0" in notes(stage="rm")
    badam = {"finetuning_type": "full", "use_badam": True}
    assert "the first block has 50 steps, as the others; there one less" in notes(**badam)
    for others in ({"badam_mode": "ratio"}, {"badam_switch_mode": "fixed"}):
        assert "first block" not in notes(**badam, **others)
    assert "first block" not in notes(**badam, badam_switch_interval=-1)


def test_divisors_that_they_get_wrong_are_noted():
    assert "divided by a token a row too many" in notes(stage="pt")
    assert "divided by a token a row too many" in notes(train_on_prompt=True)
    assert "too many" not in notes()
    smoothed = {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 4}
    assert "its gradient are 4 times too large" in notes(**smoothed)
    assert "times too large" not in notes(label_smoothing_factor=0.1)


def test_notes_on_packing_and_long_rows_are_those_of_the_stage():
    assert "as it has blocks of joined texts there" in notes(stage="pt")
    unpacked = notes(stage="pt", packing=False)
    assert "packing:" not in unpacked
    assert "there the rest of each is lost, so an epoch has fewer steps" in unpacked
    assert "as it has packed rows there" in notes(packing=True)
    assert "packing" not in notes(stage="dpo", packing=True), "theirs packs sft and pt alone"
    assert "a pair with a response that does not fit is dropped" in notes(stage="rm")
    assert "never the prompt" in notes(stage="kto")
    assert "later turns" in notes()


def test_a_template_has_no_note_that_is_false_for_it():
    assert "the line break after a response is not trained on" in notes(template="qwen3")
    for name in ("llama3", "zephyr", "deepseek3"):
        assert "line break" not in notes(template=name)
    assert "ends in <|user|> or <|observation|>" in notes(template="glm4")
    assert "a turn ends in" not in notes(template="falcon")
    predict = {"do_predict": True, "predict_with_generate": True, "val_size": 0.1}
    assert "the template's line break" in notes(template="qwen", **predict)
    assert "line break" not in notes(template="llama3", **predict)


def test_what_chat_does_not_repeat_of_training_is_said():
    said = "\n".join(translation(template="qwen3").notes)
    assert "thoughts of earlier turns are trained on" in said
    assert "begin with empty ones" in said
    assert "thoughts" not in "\n".join(translation(template="qwen").notes)


def test_a_secret_is_refused_with_the_variable_that_holds_it():
    assert "set HF_TOKEN in the environment" in refusal(hf_hub_token="hf_x")


def test_uploads_are_those_of_the_trainer():
    assert recipe().train.push_to_hub is None
    assert recipe(hub_model_id="me/a").train.push_to_hub is None
    made = recipe(push_to_hub=True, hub_model_id="me/a", hub_strategy="checkpoint").train
    assert (made.push_to_hub, made.hub_strategy) == ("me/a", "all_checkpoints")
    assert made.hub_private_repo
    made = recipe(push_to_hub=True, hub_model_id="me/a", hub_private_repo=False).train
    assert (made.hub_strategy, made.hub_private_repo) == ("every_save", False)
    assert "name the repository" in refusal(push_to_hub=True)
    assert "set HF_TOKEN" in refusal(push_to_hub=True, hub_token="hf_x")


def test_resuming_names_auto_or_a_folder():
    assert recipe().checkpoint.resume == "auto"
    assert recipe(resume_from_checkpoint=True).checkpoint.resume == "auto"
    assert recipe(resume_from_checkpoint="x/checkpoint-3").checkpoint.resume == "x/checkpoint-3"


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


def test_schedules_that_depend_on_results_are_refused():
    assert "function of the step" in refusal(lr_scheduler_type="reduce_lr_on_plateau")
    assert "num_cycles is not supported" in refusal(
        lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 3}
    )


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


def test_the_order_of_the_files():
    for values in ({"disable_shuffling": True}, {"train_sampling_strategy": "sequential"}):
        assert recipe(**values).data.shuffle is False
    assert recipe().data.shuffle


def test_switching_off_what_is_always_on_is_refused():
    assert "only fast tokenizers are used" in refusal(use_fast_tokenizer=False)
    assert recipe(use_fast_tokenizer=True, kt_use_lora_experts=False, optim_args="")


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


# Evaluations after training, or instead of it


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"do_predict": True, "val_size": 1}, "do_predict: needs predict_with_generate: true"),
        ({"predict_with_generate": True, "stage": "dpo"}, "needs stage: sft"),
        (
            {"predict_with_generate": True, "compute_accuracy": True, "do_predict": True},
            "compute_accuracy: excludes predict_with_generate",
        ),
        ({"do_eval": True}, "do_eval: there are no rows for it; set eval_dataset or val_size"),
        ({"do_predict": True, "stage": "rm", "val_size": 1}, "`surefoot predict RUN --prompts"),
    ],
)
def test_evaluations_that_they_refuse_are_refused(values, says):
    with pytest.raises(RecipeError, match=re.escape(says)):
        translation(**values)


def test_an_evaluation_follows_training_if_it_is_asked_for():
    assert translation().extras.after is None
    found = translation(do_eval=True, val_size=4, compute_accuracy=True)
    assert found.extras.after.parts == ("eval",)
    assert any("compute_accuracy: eval_token_accuracy" in line for line in found.notes)
    logged = translation(do_eval=True, val_size=4, eval_strategy="steps", eval_steps=5)
    assert logged.extras.after is None  # training evaluates


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


def test_trackers_are_those_of_the_file_with_their_names():
    train = recipe(report_to="wandb, tensorboard", project="p", run_name="r").train
    assert (train.report_to, train.project, train.run_name) == (("wandb", "tensorboard"), "p", "r")
    swanlab = recipe(use_swanlab=True, swanlab_run_name="s", swanlab_mode="local").train
    assert (swanlab.report_to, swanlab.report_offline) == (("swanlab",), True)
    assert (swanlab.project, swanlab.run_name) == ("llamafactory", "s")
    both = recipe(report_to=["mlflow"], use_swanlab=True, project="p").train
    assert (both.report_to, both.project, both.report_offline) == (
        ("mlflow", "swanlab"),
        "p",
        False,
    )
    assert recipe(use_swanlab=True, swanlab_mode="disabled").train.report_to == ()
    assert recipe(report_to="none", run_name="r").train.report_to == ()


def test_what_is_not_taken_of_trackers_is_said():
    said = translation(report_to="all").notes
    assert any(line.endswith("name those that you want") for line in said)
    assert any(
        "comet_ml is not written" in line for line in translation(report_to="comet_ml").notes
    )
    found = translation(use_swanlab=True, swanlab_api_key="k3y-of-mine")
    assert any("set SWANLAB_API_KEY" in line for line in found.notes)
    assert "k3y-of-mine" not in str(found.document)
