"""What is no recipe: the files of other programs, and their names of settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain

from ..schema import Problem
from .document import Document
from .from_llamafactory.arguments import ARGUMENTS
from .from_llamafactory.arguments.argument import Argument, Combined, NoEffect, Refused, Same
from .from_trainers.arguments import SOURCES
from .importers import Importer, importer_of

# Programs whose files are not converted, by keys that are in nobody else's.
UNCONVERTED = {
    "actor_rollout_ref": "verl",
    "zero_optimization": "DeepSpeed",
    "train_micro_batch_size_per_gpu": "DeepSpeed",
    "compute_environment": "Accelerate",
    "distributed_type": "Accelerate",
    "_component_": "torchtune",
}
_SHARED = set[str]().union(*(SOURCES[name].arguments for name in SOURCES))
_ONLY_LLAMAFACTORY = ARGUMENTS.keys() - _SHARED | {"do_train"}
_TRAINING = SOURCES["transformers"].arguments
# Settings, and what Unsloth, PEFT, Lightning and habit call them, if no table of arguments does.
_HABITS = {
    "data.cutoff_len": "max_seq_length max_seq_len max_sequence_length max_len seq_len seq_length "
    "sequence_length model_max_length context_length block_size max_tokens",
    "train.micro_batch_size or train.global_batch_size": "batch_size train_batch_size bs "
    "per_gpu_train_batch_size data.batch_size",
    "train.micro_batch_size": "batch_size_per_device device_batch_size",
    "train.global_batch_size": "total_batch_size effective_batch_size grad_accum "
    "grad_accum_steps accumulate_grad_batches accumulation_steps gradient_accumulation",
    "train.num_epochs": "epochs epoch n_epochs max_epochs num_epoch",
    "train.max_steps": "steps num_steps train_steps max_iters iterations total_steps",
    "optim.adamw.learning_rate": "lr base_lr max_lr",
    "optim.adamw.schedule": "scheduler lr_scheduler lr_schedule",
    "optim.adamw.warmup_ratio or optim.adamw.warmup_steps": "warmup warmup_proportion",
    "optim.adamw.beta1 and beta2": "betas",
    "optim.adamw.weight_decay": "wd decay",
    "optim": "optimizer optimiser",
    "train.precision": "mixed_precision amp use_fp16 use_bf16 half_precision",
    "model.dtype": "torch_dtype compute_dtype",
    "train.max_grad_norm": "clip_grad_norm gradient_clip_val grad_clip gradient_clipping clip_grad "
    "gradient_clip",
    "train.log_steps": "log_every log_every_n_steps log_interval",
    "train.eval_steps": "eval_every eval_interval val_check_interval",
    "checkpoint.save_steps": "save_every save_interval checkpoint_every save_freq "
    "checkpoint.every checkpoint.steps checkpoint.interval",
    "train.output_dir": "out_dir output save_path output_path run_dir work_dir default_root_dir",
    "train.seed": "random_state random_seed",
    "train.report_to": "logger wandb use_wandb tracker trackers",
    "train.project": "wandb_project",
    "model.path": "model_name base_model_name model_id model_name_or_dir pretrained_model "
    "model.name model.id checkpoint_path",
    "model.attention": "attn_impl use_flash_attention flash_attention attention_implementation",
    "model.gradient_checkpointing": "use_gradient_checkpointing activation_checkpointing recompute",
    "model.quantization_bit": "load_in_4bit load_in_8bit bits load_in quantize quantization",
    "data.datasets": "dataset train_dataset dataset_path data_path data_files train_file "
    "train_files train_data data.path data.name data.file data.files data.train dataset_id",
    "data.eval_datasets": "eval_dataset val_dataset valid_dataset validation_dataset eval_file "
    "validation_file eval_data test_dataset",
    "data.val_size": "test_size val_ratio validation_split val_split eval_split_ratio",
    "data.max_samples": "max_train_samples num_samples limit max_examples",
    "data.template": "chat_template prompt_template",
    "data.train_on_prompt": "train_on_inputs",
    "method.lora.rank": "r lora_r lora.r",
    "method.lora.targets": "target_modules lora_target_modules target",
    "method.lora": "lora peft peft_config use_peft lora_config use_lora",
    "parallel.num_processes": "gpus num_gpus n_gpu n_gpus nproc_per_node world_size num_nodes",
    "parallel.tp": "tensor_parallel tensor_parallel_size tp_size",
    "parallel.pp": "pipeline_parallel pipeline_parallel_size pp_size",
    "parallel.dp_replicate": "ddp data_parallel data_parallel_size",
    "train.early_stopping_patience": "patience",
    "parallel.dp_shard": "fsdp zero zero_stage deepspeed",
    "generate.max_new_tokens": "max_gen_len max_completion_tokens generate.max_length "
    "generate.max_tokens",
}
HABITS = {name for names in _HABITS.values() for name in names.split()}
_DEVICE = (
    "the GPUs that there are are used, otherwise the CPU; CUDA_VISIBLE_DEVICES chooses among them, "
    "and parallel.num_processes is how many processes there are"
)
_COLUMNS = (
    "the entry of a dataset says how its rows are read, as in data.datasets: [{file_name: "
    "rows.csv, columns: {prompt: question, response: answer}}]"
)
_REASONS = {
    _COLUMNS: "columns column_mapping text_field text_column prompt_column response_column "
    "input_column data.format data.split data.type dataset_text_field",
    "the architecture is that of config.json in model.path": "model_type model.type architecture",
    "batches are prefetched by a thread": "num_workers train.workers pin_memory",
    _DEVICE: "device devices device_map use_cpu no_cuda cuda use_cuda accelerator",
    "the tokenizer is that of model.path": "tokenizer tokenizer_name tokenizer_name_or_path",
}


@cache
def names() -> Mapping[str, str]:
    """What to say of an unknown key of a recipe, by the key, or by its section and itself."""
    found = dict[str, str]()
    for table in (SOURCES["transformers"].arguments, SOURCES["trl-sft"].arguments, ARGUMENTS):
        for name, argument in table.items():
            found.setdefault(name, _hint(argument))
    for settings, habits in _HABITS.items():
        found |= dict.fromkeys(habits.split(), f" (did you mean {settings}?)")
    for reason, habits in _REASONS.items():
        found |= dict.fromkeys(habits.split(), f"; {reason}")
    return {name: hint for name, hint in found.items() if hint}


def _hint(argument: Argument) -> str:
    outcome = argument.outcome
    if isinstance(outcome, Same | Combined):
        settings = (outcome.setting,) if isinstance(outcome, Same) else outcome.settings
        if ARGUMENTS.get(settings[0], argument) is not argument:
            return _hint(ARGUMENTS[settings[0]])
        return f" (did you mean {' or '.join(settings)}?)" if "." in settings[0] else ""
    if isinstance(outcome, NoEffect):
        return f"; no setting is needed: {outcome.reason}"
    return f"; not supported: {outcome.reason}" if isinstance(outcome, Refused) else ""


def sources_of(data: object) -> list[str]:
    """Whose settings these are, of ``SOURCES``: those that know most of the keys. None if they are
    LLaMA-Factory's, or a recipe's."""
    if not isinstance(data, Mapping) or {"model", "data", "train"} <= data.keys():
        return []
    counts = {name: len(data.keys() & source.arguments.keys()) for name, source in SOURCES.items()}
    most, theirs = max(counts.values()), len(data.keys() & ARGUMENTS.keys())
    is_shared = not data.keys() & _ONLY_LLAMAFACTORY and bool(data.keys() & _TRAINING.keys())
    if most < theirs or (most == theirs and not is_shared) or 2 * most <= len(data):
        return []
    return [name for name, count in counts.items() if count == most]


# In every file of LLaMA-Factory's v1 is one of these, or `model` and `train_dataset` as text.
_V1 = (
    *("init_config", "peft_config", "kernel_config", "quant_config", "dist_config"),
    *("model_class", "sample_backend", "batching_strategy"),
)


def refuse_v1(document: Document) -> None:
    """Raises ``RecipeError``: the file is LLaMA-Factory's, of its second generation."""
    found = document.data
    if not isinstance(found, dict) or isinstance(found.get("model"), dict):
        return
    has_text = all(isinstance(found.get(name), str) for name in ("model", "train_dataset"))
    if has_text or any(name in found for name in _V1):
        message = (
            "this is a file of LLaMA-Factory's v1 (USE_V1=1), whose arguments are not converted; "
            "write those of `llamafactory-cli train` (model_name_or_path, dataset, ...), or a "
            "recipe: docs/how-to/own-model-and-data.md"
        )
        raise document.error([Problem((), message)])


def check_recipe(document: Document) -> None:
    """Raises ``RecipeError``: the file is not a recipe but another program's, with what to do."""
    found = document.data
    if not isinstance(found, dict):
        return
    refuse_v1(document)
    for message in _foreign(found, importer_of(document)):
        raise document.error([Problem((), message)])


def _foreign(found: Mapping[str, object], importer: Importer | None) -> Iterator[str]:
    inner = chain.from_iterable(value for value in found.values() if isinstance(value, Mapping))
    for key in dict.fromkeys((*found, *inner)):
        if key in UNCONVERTED:
            title = UNCONVERTED[key]
            yield f"this is a file of {title}, not a recipe; a recipe has model, data, stage, train"
    if {"model", "data", "train"} <= found.keys():
        return
    if "stage" not in found and importer is not None:
        yield f"this is a file of {importer.title}; `surefoot recipe convert` prints it as a recipe"
    if sources := sources_of(found):
        titles = [SOURCES[name].title for name in sources]
        of = titles[0] if len(titles) == 1 else "TRL, of transformers' Trainer or of LLaMA-Factory"
        train = "" if len(titles) == 1 else "; for LLaMA-Factory's, add do_train: true"
        yield (
            f"these are settings of {of}; `surefoot recipe convert FILE --from "
            f"{'|'.join(sources)}` prints them as a recipe{train}"
        )
