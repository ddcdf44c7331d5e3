"""The reference page of the settings of TRL and axolotl, written from the tables."""

from __future__ import annotations

from collections.abc import Mapping

from ..from_llamafactory.arguments import ARGUMENTS
from ..from_llamafactory.arguments.argument import Argument, Same
from ..from_llamafactory.reference_page import groups
from .arguments import DATA, SOURCES, TrainerSource

HEAD = """# Settings of TRL, axolotl and transformers

Every setting of TRL 1.16's configurations, and those of axolotl that have a counterpart, as
`surefoot recipe convert --from` reads them. [From TRL and axolotl](../how-to/from-trl.md) says how
to use it. What TRL's configurations have of transformers' `TrainingArguments` is converted as
[LLaMA-Factory's arguments](llamafactory.md#hugging-faces-training-arguments) are.

- A name with a dot is a setting of a recipe; one without is the argument of LLaMA-Factory with this
  meaning.
- *no effect*: nothing needs to be set, for the reason given.
- *refused*: any value but the default is an error, which says what to write instead.
"""


def settings_page() -> str:
    """All programs, with a table each."""
    shared = {"TRL's ModelConfig, ScriptArguments and DatasetMixtureConfig": DATA}
    own = {source.title: _own(source) for source in SOURCES.values()}
    tables = {title: one for title, one in {**own, **shared}.items() if one}
    return "\n".join([HEAD, *groups(tables)])


def _own(source: TrainerSource) -> Mapping[str, Argument]:
    """Without what is transformers', and what TRL's configurations share."""
    return {
        name: one
        for name, one in source.arguments.items()
        if ARGUMENTS.get(name) is not one and DATA.get(name) is not one and _differs(name, one)
    }


def _differs(name: str, argument: Argument) -> bool:
    """Whether there is anything to say: another name, or another default."""
    known, outcome = ARGUMENTS.get(name), argument.outcome
    is_same = isinstance(outcome, Same) and outcome.setting == name
    return not (is_same and known is not None and known.default == argument.default)
