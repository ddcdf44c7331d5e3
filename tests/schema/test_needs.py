"""A setting that does nothing without another one is refused, unless a run has saved it so."""

from dataclasses import dataclass
from typing import Annotated

import pytest

from surefoot.errors import RecipeError
from surefoot.recipe.prediction import load as load_prediction
from surefoot.recipe.recipe import ConvertedFile, Recipe, dump, load, load_converted, read
from surefoot.recipe.yaml import Document
from surefoot.schema import Needs, idle, paths, setting_at

BASE = {
    "model": {"path": "m"},
    "data": {"datasets": ["rows.jsonl"], "val_size": 2},
    "train": {"output_dir": "r"},
}
# Settings that do something whatever the others are, or that a check of their own section refuses
# beside them. A new setting stands here, or has the mark ``Needs`` where it is declared.
ALONE = {
    "ModelSection": "path new_weights reading revision hub adapter frozen_adapters dtype attention "
    "max_positions new_special_tokens eos_token gradient_checkpointing neftune_noise_alpha "
    "router_aux_loss_coef router_bias_update_rate compile float8 quantization_bit "
    "trust_remote_code",
    "DataSection": "datasets dataset_dir text_unit hub eval_datasets val_size "
    "interleave_probs max_samples max_broken_rows template tool_format enable_thinking "
    "preserve_thinking train_on_thoughts chat_template_kwargs default_system cutoff_len "
    "on_too_long train_on_prompt mask_history packing shuffle streaming cache_dir",
    "MediaSection": "folder max_pixels",
    "Full": "frozen_modules",
    "Freeze": "num_layers extra_modules",
    "LoRA": "rank alpha rank_pattern alpha_pattern dropout targets parts layers modules_to_save "
    "new_tokens rslora dora init freeze_a",
    "OFT": "block_size dropout targets parts modules_to_save",
    "VeRA": "rank dropout initial_scale projection_seed targets parts modules_to_save",
    "BAdam": "order switch_interval start_block embeddings_and_head",
    "BAdamRatio": "update_ratio mask switch_interval embeddings_and_head",
    "LISA": "num_layers switch_interval",
    "LLaMAPro": "num_new_layers",
    "PT": "label_smoothing_factor",
    "SFT": "loss_type label_smoothing_factor",
    "DPO": "beta loss_type losses label_smoothing gamma ld_alpha sft_weight reference",
    "RM": "center_rewards_coefficient use_margins",
    "Classify": "labels multi_label label_column label_weights label_smoothing_factor focal_gamma",
    "KTO": "beta loss_type desirable_weight undesirable_weight reference precompute_reference",
    "OnPolicy": "reward reward_timeout on_reward_error passes mini_batches reference "
    "max_new_tokens temperature sampling_batch_size sampler",
    "_Address": "url timeout concurrency",
    "VLLM": "model",
    "OpenAICompletions": "update_url model",
    "GRPO": "group_size surrogate clip clip_high dual_clip sapo_temperature "
    "sapo_temperature_negative advantage average_over drop_flat_groups mask_truncated_completions "
    "beta kl_estimator environment max_turns max_sampling_weight",
    "PPO": "passes clip value_clip value_coefficient gamma gae_lambda kl_coefficient kl_target "
    "kl_horizon kl_estimator whiten_advantages whiten_rewards normalize_scores clip_scores "
    "missing_end_penalty",
    "Distill": "teacher divergence temperature sft_weight on_policy max_new_tokens sampler",
    "TrainSection": "output_dir cache_dir max_steps global_batch_size micro_batch_size seed "
    "precision deterministic max_grad_norm on_nan on_out_of_memory log_steps log_minutes log_epoch "
    "eval_steps eval_minutes eval_epoch load_best_model_at_end early_stopping_patience callbacks "
    "extra report_to run_name webhook push_to_hub",
    "Optimizer": "learning_rate learning_rates schedule warmup_steps offload_state weight_decay",
    "Plateau": "factor patience threshold threshold_mode cooldown",
    "Adam": "beta1 beta2 epsilon",
    "Muon": "momentum nesterov ns_steps lr_scale adamw_learning_rate adamw_beta1 adamw_beta2 "
    "adamw_epsilon",
    "Lion": "beta1 beta2",
    "AdEMAMix": "beta1 beta3 alpha ramp_steps",
    "Adafactor": "beta2_decay max_update_rms min_scale",
    "LowRank": "rank",
    "Apollo": "scale scaling seed update_gap",
    "GaLore": "scale update_gap",
    "ScheduleFree": "schedule beta1",
    "CheckpointSection": "save_steps save_minutes save_epoch keep resume "
    "max_shard_size layout async_save share_unchanged on_save_error",
    "ParallelSection": "num_processes dp_replicate dp_shard tp sequence_parallel cp pp "
    "pp_stages_per_rank reshard_after_forward max_restarts timeout",
    "GenerateSection": "max_new_tokens do_sample repetition_penalty stop batch_size "
    "batch_invariant",
}
# A value of each marked setting that is not its default, and of what another one is turned on with.
VALUES = {
    "temperature": 0.7, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "max_skipped_steps": 3,
    "cache_dir": "c", "num_epochs": 2, "metric_for_best_model": "eval_x", "max_positions": 4096,
    "greater_is_better": True, "early_stopping_threshold": 0.1, "report_offline": True,
    "project": "p", "hub_strategy": "every_save", "hub_private_repo": False, "keep_best": 2,
    "on_save_busy": "skip", "remote_timeout_minutes": 2, "rope_scaling": "linear", "pp": 2,
    "quantization_type": "fp4", "double_quantization": False, "buffer_size": 9, "modules": ["mlp"],
    "pp_schedule": "gpipe", "warmup_ratio": 0.1, "min_lr_ratio": 0.1, "decay_ratio": 0.2,
    "bf16_weights": "master", "eaft_alpha": 2, "asft_alpha": 2, "beta": 0.3, "num_layers": 1,
    "sampling_temperature": 2, "sampling_batch_size": 3, "init_iterations": 3, "eval_steps": 5,
    "report_to": "tensorboard", "keep_every": 4, "keep_hours": 2, "keep": 3,
    "mix_strategy": "interleave_once", "datasets": ["a.jsonl", "b.jsonl"],
    "push_to_hub": "me/x", "early_stopping_patience": 2, "on_policy": 1,
}  # fmt: skip
OFF = {"max_steps": 3, "warmup_steps": 3, "schedule": "constant", "async_save": False,
       "num_layers": 0, "keep": None}  # fmt: skip
BESIDE = {  # what a value needs beside it
    "early_stopping_patience": {"train.eval_steps": 5},
    "on_policy": {"stage.distill.max_new_tokens": 8},
    "streaming": {"train.max_steps": 9},
    "num_layers": {"method.freeze.extra_modules": ["norm"]},
    "distill": {"stage.distill.teacher": "t"},
    "quantization_bit": {"method.lora.rank": 4},
    "model.quantization_bit": {"method.lora.rank": 4},
}


def marked():
    return [path for path in paths(Recipe) if (s := setting_at(Recipe, path)) and s.needs]


def declaring(setting):
    classes = setting.owner.__mro__
    return next(c for c in classes if setting.name in vars(c).get("__annotations__", {})).__name__


def unmarked(section):
    """The settings under ``section`` that have no mark, by the class that declares them."""
    found = (setting_at(section, path) for path in paths(section))
    plain = (s for s in found if s and not s.needs and not s.section and not s.choices)
    return {f"{declaring(s)}.{s.name}" for s in plain}


def test_every_setting_works_alone_or_says_what_it_needs():
    known = {f"{owner}.{name}" for owner, names in ALONE.items() for name in names.split()}
    assert unmarked(Recipe) == known - {"OnPolicy.sampler", "Distill.sampler"}


@dataclass(frozen=True, kw_only=True)
class New:
    is_on: bool = False
    rate: Annotated[float, Needs("is_on", (True,))] = 1.0
    size: int = 3
    """Only if ``is_on``."""


def test_a_new_setting_without_a_mark_is_found_and_one_with_it_is_refused():
    assert unmarked(New) == {"New.is_on", "New.size"}
    problems = [*idle(New(rate=2.0), lambda path, others: True)]
    assert [str(p) for p in problems] == [
        "rate: has no effect unless is_on is true; set that, or leave it out"
    ]
    assert not [*idle(New(rate=2.0, is_on=True), lambda path, others: True)]
    assert not [*idle(New(is_on=True), lambda path, others: True)]


def overrides_of(path):
    """The setting with the others off, and what its message says turns them on."""
    setting = setting_at(Recipe, path)
    (other, *_) = setting.needs.paths(path[:-1])
    others = setting.needs.paths(path[:-1])
    off = {".".join(way): OFF[way[-1]] for way in others if way[-1] in OFF}
    values = setting.needs.values
    on = values[0] if values else VALUES[other[-1]]
    on = "s3://bucket/run" if isinstance(on, type) else on
    stage = {"stage": path[1] if path[0] == "stage" else "sft"}
    beside = BESIDE.get(path[1], {}) if path[0] == "stage" else {}
    extra = BESIDE.get(other[-1], {})
    base = {**stage, **beside}
    if path[-1] == "modules":
        base |= BESIDE["num_layers"]
    return {".".join(path): VALUES[path[-1]]}, {**base, **off}, {**base, **extra}, other, on


@pytest.mark.parametrize("path", marked(), ids=".".join)
def test_what_does_nothing_is_refused_and_the_cure_in_the_message_works(path):
    mine, off, beside, other, on = overrides_of(path)
    with pytest.raises(RecipeError) as error:
        read(BASE, {**off, **mine})
    name = ".".join(path)
    assert f"{name}: has no effect unless " in str(error.value)
    assert ".".join(other) in str(error.value)
    read(BASE, {**off, **beside, **mine, ".".join(other): on})
    read(BASE, off)


def test_an_override_that_turns_another_setting_off_is_not_refused(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(dump(read(BASE, ["stage=sft", "generate.do_sample=true"])))
    sampled = ["generate.do_sample=true", "generate.temperature=0.5"]
    file.write_text(dump(read(BASE, ["stage=sft", *sampled])))
    assert load(file, ["generate.do_sample=false"]).generate.temperature == 0.5
    with pytest.raises(RecipeError, match=r":\d+:\d+ generate.temperature: has no effect"):
        file.write_text(file.read_text().replace("do_sample: true", "do_sample: false"))
        load(file)


def test_what_a_run_has_saved_is_read_as_it_is(tmp_path):
    text = dump(read(BASE, ["stage=sft", "generate.do_sample=true", "generate.temperature=0.5"]))
    (tmp_path / "recipe.yaml").write_text(text.replace("do_sample: true", "do_sample: false"))
    assert load(tmp_path).generate.temperature == 0.5
    with pytest.raises(RecipeError, match=r"generate\.top_p: has no effect unless"):
        load(tmp_path, ["generate.top_p=0.5"])


def test_a_prediction_refuses_what_only_sampling_has(tmp_path):
    with pytest.raises(RecipeError, match=r"generate\.temperature: has no effect unless"):
        load_prediction(str(tmp_path), ["generate.temperature=0.7"])
    found = load_prediction(str(tmp_path), ["generate.temperature=0.7", "generate.do_sample=true"])
    assert found.generate.temperature == 0.7


def test_a_file_of_another_program_is_converted_with_a_word(caplog):
    data = {**BASE, "stage": "sft", "generate": {"top_k": 5}}
    assert load_converted(ConvertedFile("X", Document(data, "x.yaml"))).generate.top_k == 5
    assert "x.yaml: generate.top_k: has no effect unless generate.do_sample is true" in caplog.text
