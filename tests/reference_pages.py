"""Write the reference pages from the code: ``python tests/reference_pages.py docs/reference``.

Fields, defaults, docstrings and options are the only source, so the pages cannot differ from the
program; a test fails if the committed pages differ from the output.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import click
from gguf import GGML_QUANT_SIZES
from ruamel.yaml import YAML

from surefoot.cli.main import listed, main
from surefoot.data.text.families import TemplateFamily, families
from surefoot.errors import RecipeError
from surefoot.optim import OPTIMIZERS
from surefoot.optim.optimizer import Optimizer, declared_state
from surefoot.optim.state_tensor import ParameterKind
from surefoot.parallel.sharding import AxisShard
from surefoot.plugins.gguf.architectures import ARCHITECTURES, GGUFArchitecture
from surefoot.plugins.gguf.formats import FORMATS, Format
from surefoot.plugins.gguf.vocabulary import PRE_TOKENIZERS
from surefoot.plugins.migrate import importers
from surefoot.plugins.migrate.arguments import ARGUMENTS, FILES, GROUPS, TRAINERS, Argument, Rows
from surefoot.plugins.mindspore import recipe as mindspore
from surefoot.recipe.prediction import Prediction
from surefoot.recipe.recipe import Recipe
from surefoot.recipe.yaml import Document, emit
from surefoot.schema import Setting, json_schema, markdown, settings, variant_name
from surefoot.schema._reading import write_setting

WIDTH = 88
SIDE = 4096  # of the matrix in the reference
_SIZES = {"": 4, "float32": 4, "bfloat16": 2, "uint8": 1}
NOTE = "<!-- Written by `make docs` from the code. Do not edit. -->\n"
RECIPE = """# The recipe

One YAML file says everything about a run:

```yaml
model: {path: Qwen/Qwen3-0.6B}
data: {dataset_dir: data, datasets: [alpaca_en, identity]}
method: {lora: {rank: 16}}
stage: sft
train: {output_dir: runs/qwen, num_epochs: 3, global_batch_size: 64, micro_batch_size: 2}
optim: {adamw: {learning_rate: 1.0e-4, schedule: cosine}}
checkpoint: {save_steps: 200, keep: 3}
```

`method`, `stage` and `optim` hold one of several variants: its name alone, or its name with
settings below it. Where a list is expected, one item will do. Unknown keys are refused.

A path in the file is relative to the file if it exists there, otherwise to the current folder. A
path in an override is relative to the current folder, and so is `train.output_dir`.

On the command line `section.setting=value` overrides the file, as in
`surefoot train recipe.yaml optim.adamw.learning_rate=5e-5`; so does `method.lora.rank=8` when the
file names another method. A mapping changes only the settings it names. Where a setting holds text
(a path, a name, a prompt), the value is what the shell passed, ` #`, `: ` and leading zeros too;
`null` unsets it, and a text that is quoted as a whole is read without its quotes.

`surefoot recipe check recipes/*.yaml` says of each recipe whether it is valid, for a check of a
repository. `surefoot recipe show recipe.yaml` prints a recipe with every setting spelled out, and
[recipe.schema.json](recipe.schema.json) makes editors complete and check it: write
`# yaml-language-server: $schema=recipe.schema.json` in its first line.
"""
ANSWERS = """# Answers without training

`surefoot predict` also takes a file with these sections:

```yaml title="answers.yaml"
model: {path: runs/qwen}
generate: {max_new_tokens: 100}
parallel: {tp: 2}
```
"""
OPTIMIZERS_PAGE = """# Optimizers

The bytes of state for one weight of a matrix inside a layer, and for others (embeddings, head).
Settings are the defaults; matrices are 4096 x 4096, and updated in float32. The weight and its
gradient come on top; see [precision](../how-to/precision.md). `dp_replicate` and `pp` work with
every optimizer. Every optimizer resumes to the same bits on the same mesh.
[Which optimizer](../how-to/optimizers.md) says when to use which.
"""
CLI = """# The command line

A mistake that you can put right gives exit code 2 and a message without a traceback; `--verbose`,
anywhere on the line, adds the traceback. Ctrl-C gives 130.

Shells complete commands, options and paths by
[click's scripts](https://click.palletsprojects.com/en/stable/shell-completion/). Write
`eval "$(_SUREFOOT_COMPLETE=bash_source surefoot)"` into `~/.bashrc`, the same with `zsh_source`
into `~/.zshrc`, or call
`_SUREFOOT_COMPLETE=fish_source surefoot > ~/.config/fish/completions/surefoot.fish`.
"""


LLAMAFACTORY = """# LLaMA-Factory's arguments

Every argument of LLaMA-Factory 0.9.5, with those of transformers that it extends.
[From LLaMA-Factory](../how-to/from-llamafactory.md) says how to use them.

- A setting's name: the argument is this setting, with the same value or as noted.
- *no effect*: nothing needs to be set, for the reason given. A run lists these arguments once.
- *refused*: any value but the default is an error, which says what to write instead.
- *another command*: the argument is not of training.
"""
TRAINERS_PAGE = """# Settings of TRL, axolotl and transformers

Every setting of TRL 1.16's configurations, and those of axolotl that have a counterpart, as
`surefoot recipe convert --from` reads them. [From TRL and axolotl](../how-to/from-trl.md) says how
to use it. What TRL's configurations have of transformers' `TrainingArguments` is converted as
[LLaMA-Factory's arguments](llamafactory.md#hugging-faces-training-arguments) are.

- A name with a dot is a setting of a recipe; one without is the argument of LLaMA-Factory with this
  meaning.
- *no effect*: nothing needs to be set, for the reason given.
- *refused*: any value but the default is an error, which says what to write instead.
"""
NAMES_PAGE = """# Settings by the names of other programs

Look for a setting by the name that you know: of transformers' `TrainingArguments`, LLaMA-Factory,
TRL, axolotl, MindSpore Transformers, and of Unsloth, PEFT, Lightning and habit. The tables that
convert those programs' files are the only source of this page. There is no such table of
torchtitan: `surefoot recipe convert` does not read its files.

- A name with a dot is the setting of a recipe; [the recipe](recipe.md) says what it does. What
  follows a colon is what differs.
- *no effect*: nothing needs to be set, for the reason given.
- *refused*: a converted file must not have it, for the reason given, which says what to write.
- *another command*: the argument is not of training.
- A name of MindSpore Transformers has its section before the dot. *No effect of its own*: other
  keys of the file, or the files themselves, decide.

`surefoot recipe check` knows these names, too: of an unknown key it names the setting that is
meant. A file of LLaMA-Factory, TRL, axolotl, transformers or MindSpore Transformers needs no look
at this page: [`surefoot recipe convert`](../how-to/from-trl.md) writes the recipe.
"""
FAMILIES = """# Chat templates of families

`data.template: NAME` uses one of these. [Chat templates](../templates.md) says what all of them
share, and how they compare with LLaMA-Factory's.

- *end*: the tokens that end a response; *eos* is the tokenizer's own. *last turn* means that the
  end is written after the last response only. It is trained for every response all the same.
- *tools*: the syntax of tools and calls. `data.tool_format` chooses another one.
- *thoughts*: the words around a thought. `data.enable_thinking` switches them.
- *system message*: the one that LLaMA-Factory adds to conversations without one. Surefoot adds
  none; `surefoot recipe convert` writes it as `data.default_system`.
"""
GGUF = """# GGUF

What `surefoot export --to gguf` writes; [how to export](../how-to/export.md) says how it is used.

## Formats

Values of `--quantize`. A tensor with one dimension, a norm or a router stays in float32. In formats
of blocks, the output, or the embeddings that are tied to it, have 6 bits at least. Bits a weight
are those of the main type, scales included.

| `--quantize` | main type | bits a weight | |
|---|---|---|---|
{formats}

A row whose length is no multiple of a block is written as in llama.cpp: `Q4_K` as `Q5_0`, `Q5_K` as
`Q5_1`, `Q6_K` as `Q8_0`, and as `F16` where that does not fit either. The export reports it.

## Architectures

By `model_type` in `config.json`. Any other is refused, and so is a model that differs from what
llama.cpp takes for granted: it would load and give other answers.

| `model_type` | in the file | differs from the model in memory |
|---|---|---|
{architectures}

Rotary embeddings: `default`, `linear` and `yarn`; `llama3` for llama and mistral, `longrope` for
phi3.

## Tokenizers

Byte-level BPE and SentencePiece BPE, from `tokenizer.json`. llama.cpp knows the rule that splits a
text by a name:
{rules}.
A tokenizer with another rule gets the name of the rule that makes the same tokens of 20,000 random
texts. If up to one text in a thousand differs, the export says so; above that it is refused.
"""


def recipe_page() -> str:
    """Every section, variant and setting."""
    return "\n".join([NOTE, RECIPE, *_sections(), *_answers()])


def schema_page() -> str:
    """The JSON schema of recipes."""
    return json.dumps(json_schema(Recipe), indent=2, ensure_ascii=False) + "\n"


def cli_page() -> str:
    """Every command and option."""
    return "\n".join([NOTE, CLI, *_commands()])


def optimizers_page() -> str:
    """The state of every optimizer, and what it can be sharded over."""
    return "\n".join([NOTE, OPTIMIZERS_PAGE, *_optimizers()])


def _optimizers() -> Iterator[str]:
    yield "| `optim` | bytes: matrix | bytes: other | tensors of a matrix | sharded by | |"
    yield "|---|---|---|---|---|---|"
    for name, cls in OPTIMIZERS.items():
        optim = cls()
        of_matrix, keys = _bytes_per_element(optim, is_matrix=True)
        of_other, _ = _bytes_per_element(optim, is_matrix=False)
        axes = ", ".join(
            f"`{a}`" for a, dim in (("dp_shard", 0), ("tp", 1)) if _can_shard(optim, dim)
        )
        tensors = ", ".join(f"`{key}`" for key in keys)
        about = markdown(inspect.getdoc(cls) or "")
        cells = [f"`{name}`", f"{of_matrix:.3g}", f"{of_other:.3g}", tensors, axes, about]
        yield "| " + " | ".join(cells) + " |"
    yield ""


def _bytes_per_element(optim: Optimizer, *, is_matrix: bool) -> tuple[float, list[str]]:
    """The bytes of state of an element of a large matrix that is updated in float32, and the keys
    of the tensors that are not scalars."""
    shape, size = (SIDE, SIDE), 0
    declared = declared_state(optim, shape, ParameterKind(is_matrix))
    tensors = {key: tensor for key, tensor in declared.items() if tensor.shape(shape)}
    for tensor in tensors.values():
        size += prod(tensor.shape(shape)) * _SIZES[tensor.dtype]
    return size / SIDE**2, list(tensors)


def _can_shard(optim: Optimizer, dim: int) -> bool:
    """Whether the state of matrices can be sharded along ``dim``."""
    shape, cut = (SIDE, SIDE), (AxisShard("any", dim),)
    tensors = declared_state(optim, shape, ParameterKind(is_matrix=True)).values()
    return all(each.cuts is not None and each.cuts(shape, cut) is not None for each in tensors)


def _sections() -> Iterator[str]:
    for name, setting in settings(Recipe).items():
        if setting.section is not None:
            default = "" if setting.is_required else " (optional)"
            yield f"## `{name}`{default}\n"
            yield from _section(setting.section)
            continue
        default = "required"
        if not setting.is_required:
            default = f"default `{variant_name(setting.choices or {}, setting.default)}`"
        yield f"## `{name}` ({default})\n"
        yield f"{setting.doc} {setting.expected.capitalize()}.\n"
        for variant, cls in (setting.choices or {}).items():
            yield f"### `{name}: {variant}`\n"
            yield from _section(cls)


def _answers() -> Iterator[str]:
    """The settings that a recipe does not have."""
    yield ANSWERS
    known = {setting.section for setting in settings(Recipe).values()}
    for name, setting in settings(Prediction).items():
        if setting.section is not None and setting.section not in known:
            yield f"## `{name}` of answers\n"
            yield from _section(setting.section)
        else:
            yield f"`{name}`, as above: {setting.doc}\n"


def _section(cls: type) -> Iterator[str]:
    yield f"{markdown(inspect.getdoc(cls) or '')}\n"
    if not settings(cls):
        yield "It has no settings.\n"
        return
    yield "| setting | value | default | what it is |\n|---|---|---|---|"
    for name, setting in settings(cls).items():
        default = "**required**" if setting.is_required else f"`{_default(setting)}`"
        if setting.section is not None:
            default = "see below"
        cells = [f"`{name}`", setting.expected, default, setting.doc]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""
    for name, setting in settings(cls).items():
        if setting.section is not None:
            yield f"#### `{name}`\n"
            yield from _section(setting.section)
        for variant, one in setting.variants.items():
            yield f"#### `{name}: {variant}`\n"
            yield from _section(one)


def _default(setting: Setting) -> str:
    """The default as it would stand in the recipe."""
    return emit({"x": write_setting(setting, setting.default)}).removeprefix("x:").strip()


def _commands() -> Iterator[str]:
    context = click.Context(
        main, info_name="surefoot", terminal_width=WIDTH, **main.context_settings
    )
    yield from _help(main, context)
    for name in listed():
        command = main.get_command(context, name)
        assert command is not None
        yield from _tree(command, name, context)


def _tree(command: click.Command, name: str, parent: click.Context) -> Iterator[str]:
    """A command and, for a group, its commands."""
    context = click.Context(command, parent=parent, info_name=name, terminal_width=WIDTH)
    yield from _help(command, context)
    for inner in getattr(command, "commands", {}).values():
        if isinstance(command, click.Group):
            yield from _tree(inner, str(inner.name), context)
        else:  # it stands in the place of the command's arguments, as in `export verify OUT`
            yield from _tree(inner, f"{name} {inner.name}", parent)


def _help(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f"## `{context.command_path}`\n"
    yield f"```text\n{command.get_help(context)}\n```\n"


def arguments_page() -> str:
    """All groups, with a table each."""
    return "\n".join([NOTE, LLAMAFACTORY, *_groups(GROUPS), *_groups(FILES)])


def _groups(tables: Mapping[str, Rows]) -> Iterator[str]:
    """The lines of a table of arguments for each title."""
    for title, arguments in tables.items():
        yield f"## {title}\n"
        yield "| argument | default | here |"
        yield "|---|---|---|"
        for name, argument in arguments.items():
            cells = [f"`{name}`", f"`{_argument_default(argument)}`", _outcome(argument)]
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        yield ""


def _argument_default(argument: Argument) -> str:
    value = argument.default
    if argument.kind == "any" and argument.outcome in ("ignored", "refused"):
        return "any" if argument.outcome == "ignored" else "unset"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _outcome(argument: Argument) -> str:
    if argument.settings:
        named = ", ".join(f"`{setting}`" for setting in argument.settings)
        return f"{named}: {argument.says}" if argument.says else named
    words = {"ignored": "no effect", "command": "another command"}
    return f"*{words.get(argument.outcome, argument.outcome)}*: {argument.says}"


def settings_page() -> str:
    """All programs, with a table each."""
    own = {title: _own(rows) for title, rows in TRAINERS.items()}
    return "\n".join([NOTE, TRAINERS_PAGE, *_groups(own)])


def _own(rows: Rows) -> Rows:
    """Without those of which there is nothing to say: neither another name, nor another default."""
    return {name: one for name, one in rows.items() if _differs(name, one)}


def _differs(name: str, argument: Argument) -> bool:
    known = ARGUMENTS.get(name)
    if known is argument:
        return False
    is_same = argument.settings == (name,)
    return not (is_same and known is not None and known.default == argument.default)


def names_page() -> str:
    """Every name of every program, in the order of the alphabet."""
    found: dict[str, dict[str, list[str]]] = {}
    for program, name, meaning in _names_elsewhere():
        programs = found.setdefault(name, {}).setdefault(meaning, [])
        if program not in programs:
            programs.append(program)
    lines = ["| name | here | in |", "|---|---|---|"]
    for name in sorted(found, key=str.lower):
        for meaning, programs in found[name].items():
            cells = [f"`{name}`", meaning.replace("|", "\\|"), ", ".join(programs)]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([NOTE, NAMES_PAGE, *lines, ""])


def _names_elsewhere() -> Iterator[tuple[str, str, str]]:
    """The program, the name there, and what it is here."""
    for title, rows in {**GROUPS, **TRAINERS}.items():
        is_of_huggingface = title.startswith("Hugging Face")
        known = {"axolotl": "axolotl"} | {t: "TRL" for t in TRAINERS if t.startswith("TRL")}
        default = "transformers, LLaMA-Factory" if is_of_huggingface else "LLaMA-Factory"
        for name, argument in rows.items():
            yield known.get(title, default), name, _meaning(argument)
    for title, meanings in YAML(typ="safe").load(importers._HABITS).items():
        for meaning, names in meanings.items():
            text = re.sub(r"[\w.]+\.\w+|^\w+$", r"`\g<0>`", meaning)
            text = text if title == "settings" else meaning
            yield from (("Unsloth, PEFT, Lightning, habit", name, text) for name in names.split())
    for name in mindspore._RULES:
        yield "MindSpore Transformers", name, _of_mindspore(name)


MINDSPORE = {
    "run_mode": "finetune",
    "pretrained_model_dir": "model",
    "parallel_config.data_parallel": 2,
    "parallel_config.model_parallel": 2,
    "parallel_config.pipeline_stage": 2,
    "runner_config.batch_size": 2,
    "lr_schedule.type": "CosineWithWarmUpLR",
    "lr_schedule.learning_rate": 1e-4,
}
VALUES = (1, 3, 0.03, 60, True, "x", [0.9, 0.95], "train", "LinearWithWarmUpLR", 1e-5)


def _of_mindspore(name: str) -> str:
    """The settings that change with a key of MindSpore Transformers, alone or beside others; or
    why it may not be set, or that it sets nothing."""
    changed, reasons = set[str](), list[str]()
    for without in ("", "pretrained_model_dir", "lr_schedule.learning_rate"):
        file = {key: value for key, value in MINDSPORE.items() if key != without}
        before = _converted(file)
        for value in VALUES:
            try:
                after = _converted(file | {name: value})
            except RecipeError as error:
                reasons.append(str(error).partition(f"{value!r}: ")[2])
                continue
            changed |= {s for s in before | after if before.get(s) != after.get(s)}
    if changed:
        return ", ".join(f"`{setting}`" for setting in sorted(changed))
    return f"*refused*: {reasons[-1]}" if reasons else "*no effect* of its own"


def _converted(file: Mapping[str, object]) -> Mapping[str, object]:
    content: dict[str, Any] = {}
    for name, value in file.items():
        section, _, key = name.partition(".")
        if section == "callbacks":
            kind, _, key = key.partition(".")
            content[section] = [{"type": kind, key: value}]
        elif key:
            content.setdefault(section, {})[key] = value
        else:
            content[section] = value
    return mindspore.convert(Document(content, "x.yaml")).settings


def _meaning(argument: Argument) -> str:
    """As ``_outcome``, with the settings of LLaMA-Factory's argument where it is named."""
    settings, says = [], [argument.says] if argument.says else []
    for setting in argument.settings:
        known = ARGUMENTS.get(setting) if "." not in setting else None
        if known is None or known is argument:
            settings.append(setting)
            continue
        settings += known.settings
        says += [known.says] if known.says else []
    return _outcome(replace(argument, settings=tuple(settings), says="; ".join(says)))


def families_page() -> str:
    """One row for each family."""
    head = ["| name | end | tools | thoughts | system message |", "|---|---|---|---|---|"]
    return "\n".join([NOTE, FAMILIES, *head, *map(_family_row, families().values()), ""])


def _family_row(family: TemplateFamily) -> str:
    ends = [f"`{stop}`" for stop in family.stop] or ["eos"]
    cells = [
        f"`{family.name}`",
        ", ".join(ends) + (" (last turn)" if family.last_ends else ""),
        f"`{family.tools}`",
        " ".join(f"`{word.strip()}`" for word in family.thoughts[:2]),
        _one_line(family.default_system or ""),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _one_line(text: str) -> str:
    line = " ".join(text.replace("<", "&lt;").split())
    return line if len(line) <= 60 else line[:57] + "..."


def gguf_page() -> str:
    """The page."""
    formats = [_gguf_format(name, one) for name, one in FORMATS.items()]
    rows = [_gguf_row(name, one) for name, one in ARCHITECTURES.items()]
    rules = ", ".join(f"`{name}`" for name in PRE_TOKENIZERS.values())
    return GGUF.format(formats="\n".join(formats), architectures="\n".join(rows), rules=rules)


def _gguf_format(name: str, one: Format) -> str:
    weights, size = GGML_QUANT_SIZES[one.main]
    return f"| `{name}` | {one.main.name} | {size * 8 / weights:.4g} | {one.description} |"


def _gguf_row(name: str, one: GGUFArchitecture) -> str:
    notes = []
    if one.is_permuted:
        notes.append("rows of `q_proj` and `k_proj` change places")
    if one.norm_shift:
        notes.append("1 is added to norms")
    if name == "qwen3_moe":
        notes.append("experts are one tensor")
    return f"| `{name}` | `{one.name}` | {'; '.join(notes)} |"


PAGES = {
    "recipe.md": recipe_page,
    "recipe.schema.json": schema_page,
    "cli.md": cli_page,
    "optimizers.md": optimizers_page,
    "llamafactory.md": arguments_page,
    "other-trainers.md": settings_page,
    "settings-by-name.md": names_page,
    "templates.md": families_page,
    "gguf.md": gguf_page,
}


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def reference(folder: Path) -> None:
    """Write the reference pages into FOLDER."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")
        click.echo(f"wrote {folder / name}")


if __name__ == "__main__":
    reference()
