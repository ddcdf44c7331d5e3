"""Commands as a user types them, in this process.

``run``, ``ok`` and ``refused`` of a test module are those of its command:
``run, ok, refused = commands.of("ckpt", "convert")``.
"""

from functools import partial

from click.testing import CliRunner

from surefoot.cli.main import main


def run(*words, stdin=None, **options):
    """What click's runner says of it."""
    return CliRunner().invoke(main, [*map(str, words)], input=stdin, **options)


def ok(*words, code=0, **options):
    """The standard output of a command that works; 1 is the code of those that find something."""
    done = run(*words, **options)
    assert done.exit_code == code, done.output
    return done.stdout


def refused(*words, code=2, **options):
    """What a command that must fail says on standard error, which is no traceback."""
    done = run(*words, **options)
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return done.stderr


def of(*command):
    """The three, for one command."""
    return tuple(partial(each, *command) for each in (run, ok, refused))
