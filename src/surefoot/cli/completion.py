"""``surefoot completion``: the script that completes commands and options in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

VARIABLE = "_SUREFOOT_COMPLETE"  # with which click's scripts call the program


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes commands, options and paths in SHELL.

    \b
    bash: eval "$(surefoot completion bash)" in ~/.bashrc
    zsh:  eval "$(surefoot completion zsh)" in ~/.zshrc
    fish: surefoot completion fish > ~/.config/fish/completions/surefoot.fish
    """
    root = click.get_current_context().find_root().command
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(root, {}, "surefoot", VARIABLE).source())
