"""Options of all commands that open a model: the type of its weights, and its own code."""

import click

dtype_option = click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="Type of the weights.",
)
trust_remote_code_option = click.option(
    "--trust-remote-code", is_flag=True, help="Run code that comes with the model."
)
