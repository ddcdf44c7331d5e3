"""Write the reference pages from the code: ``python -m surefoot.cli.docs_pages docs/reference``.

Fields, defaults, docstrings and options are the only source, so the pages cannot differ from the
program; a test fails if the committed pages differ from the output.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import click

from ..data.text.families.reference_page import families_page
from ..inference.gguf.reference_page import gguf_page
from ..optim import OPTIMIZERS
from ..optim.optimizer import bytes_per_element, can_shard
from ..recipe.from_llamafactory.reference_page import arguments_page
from ..recipe.from_trainers.reference_page import settings_page
from ..recipe.prediction import Prediction
from ..recipe.recipe import Recipe
from ..recipe.yaml import emit
from ..schema import Setting, json_schema, markdown, settings, variant_name
from ..schema.reading import write_setting
from .main import COMMANDS, main

WIDTH = 88
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

`surefoot recipe show recipe.yaml` prints a recipe with every setting spelled out, and
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
DEVICES = """# What depends on the device

Surefoot uses other kernels and dtypes on a GPU than on a CPU. Each choice is a fixed rule, never a
timing: so a run does not round differently because a machine was busy. `surefoot env` shows what a
recipe with default settings uses on this machine, and `surefoot bench RECIPE` what a recipe uses.

Figures are those of [the results](../../benchmarks/RESULTS.md) or were measured when the code was
written; S and M are the models there. "not measured" means that no figure supports the choice:
nothing has been measured on a GPU yet. `make gpu` measures on a GPU; the last column of the second
table names the part and the case whose figure would justify the choice or change it.
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


def devices_page() -> str:
    """Every choice that depends on the device, with its figures."""
    return "\n".join([NOTE, DEVICES, *_choices()])


def optimizers_page() -> str:
    """The state of every optimizer, and what it can be sharded over."""
    return "\n".join([NOTE, OPTIMIZERS_PAGE, *_optimizers()])


def other_trainers_page() -> str:
    """The settings of TRL and axolotl."""
    return f"{NOTE}\n{settings_page()}"


def llamafactory_page() -> str:
    """Every argument of LLaMA-Factory, and its counterpart."""
    return f"{NOTE}\n{arguments_page()}"


def templates_page() -> str:
    """The chat template of every family."""
    return f"{NOTE}\n{families_page()}"


PAGES = {
    "recipe.md": recipe_page,
    "recipe.schema.json": schema_page,
    "cli.md": cli_page,
    "devices.md": devices_page,
    "optimizers.md": optimizers_page,
    "llamafactory.md": llamafactory_page,
    "other-trainers.md": other_trainers_page,
    "templates.md": templates_page,
    "gguf.md": gguf_page,
}


def _choices() -> Iterator[str]:
    from ..run.machine.device_choices import CHOICES, KINDS

    for kind, title in KINDS.items():
        yield f"## {title}\n"
        more = " which figure of `make gpu` decides |" if kind == "cuda" else ""
        yield f"| what | setting | what is used, in order | why | figure |{more}"
        yield "|---|---|---|---|---|" + ("---|" if more else "")
        for choice in CHOICES:
            on, setting = choice.on(kind), f"`{choice.setting}`" if choice.setting else ""
            last = f" {choice.decides} |" if more else ""
            yield f"| {choice.name} | {setting} | {on.used} | {on.why} | {on.figure} |{last}"
        yield ""


def _optimizers() -> Iterator[str]:
    yield "| `optim` | bytes: matrix | bytes: other | tensors of a matrix | sharded by | |"
    yield "|---|---|---|---|---|---|"
    for name, cls in OPTIMIZERS.items():
        optim = cls()
        of_matrix, keys = bytes_per_element(optim, is_matrix=True)
        of_other, _ = bytes_per_element(optim, is_matrix=False)
        axes = ", ".join(
            f"`{a}`" for a, dim in (("dp_shard", 0), ("tp", 1)) if can_shard(optim, dim)
        )
        tensors = ", ".join(f"`{key}`" for key in keys)
        about = markdown(inspect.getdoc(cls) or "")
        cells = [f"`{name}`", f"{of_matrix:.3g}", f"{of_other:.3g}", tensors, axes, about]
        yield "| " + " | ".join(cells) + " |"
    yield ""


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
        cells = [f"`{name}`", setting.expected, default, setting.doc]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""
    for name, setting in settings(cls).items():
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
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None
        yield from _tree(command, name, context)


def _tree(command: click.Command, name: str, parent: click.Context) -> Iterator[str]:
    """A command and, for a group, its commands."""
    context = click.Context(command, parent=parent, info_name=name, terminal_width=WIDTH)
    yield from _help(command, context)
    for inner in getattr(command, "commands", {}).values():
        yield from _tree(inner, str(inner.name), context)


def _help(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f"## `{context.command_path}`\n"
    yield f"```text\n{command.get_help(context)}\n```\n"


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
