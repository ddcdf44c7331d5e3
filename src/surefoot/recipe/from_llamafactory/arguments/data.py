"""Arguments of LLaMA-Factory's ``DataArguments``."""

from __future__ import annotations

from .argument import combined, no_effect, refused, same

_CACHE = "encoded datasets are cached by their content, and encoded again when it changes"
_ENCODING = "one process encodes as fast as training needs"

DATA = {
    "template": combined(
        "text",
        None,
        "data.template, data.default_system",
        "the template of the same name; unset, the model's own (auto)",
    ),
    "dataset": combined("list", None, "data.datasets, data.hub", "with ONLINE, hub ids"),
    "eval_dataset": combined("list", None, "data.eval_datasets", "with ONLINE, hub ids"),
    "dataset_dir": combined("text", "data", "data.dataset_dir", "unless it is ONLINE"),
    "media_dir": no_effect("text", None, "only text is trained"),
    "cutoff_len": same("int", 2048, "data.cutoff_len"),
    "train_on_prompt": same("bool", False, "data.train_on_prompt"),
    "mask_history": same("bool", False, "data.mask_history"),
    "streaming": same("bool", False, "data.streaming"),
    "buffer_size": same("int", 16384, "data.buffer_size"),
    "mix_strategy": combined(
        *("text", "concat", "data.mix_strategy", "the same rows in the same order"),
        *("concat", "interleave_under", "interleave_over", "interleave_once"),
    ),
    "interleave_probs": combined("list", None, "data.interleave_probs", "the same"),
    "overwrite_cache": no_effect("bool", False, _CACHE),
    "preprocessing_batch_size": no_effect("int", 1000, _ENCODING),
    "preprocessing_num_workers": no_effect("int", None, _ENCODING),
    "max_samples": same("int", None, "data.max_samples"),
    "eval_num_beams": refused("int", None, "there is no beam search; remove it", 1),
    "ignore_pad_token_for_loss": no_effect("bool", True, "padding is never trained on"),
    "val_size": same("float", 0.0, "data.val_size"),
    "eval_on_each_dataset": no_effect(
        "bool", False, "each of eval_datasets has metrics of its own, in any case"
    ),
    "packing": combined(
        "bool",
        None,
        "data.packing",
        "no setting, as rows are never padded to cutoff_len; if true, a batch counts packed rows "
        "of cutoff_len tokens there, and examples here",
    ),
    "neat_packing": combined("bool", False, "data.packing", "as packing; documents never mix"),
    "tool_format": same("text", None, "data.tool_format"),
    "default_system": same("text", None, "data.default_system"),
    "enable_thinking": combined(
        "bool",
        True,
        "data.enable_thinking, data.train_on_thoughts",
        "in templates with thoughts; null masks the empty ones",
    ),
    "preserve_thinking": combined(
        "bool",
        False,
        "data.preserve_thinking",
        "true without mask_history, as all thoughts are trained on there",
    ),
    "tokenized_path": combined(
        *("text", None, "data.cache_dir"),
        f"{_CACHE}; a dataset that LLaMA-Factory has tokenized there is not read",
    ),
    "data_shared_file_system": no_effect("bool", False, "each machine's first rank encodes"),
}
