import errno
import os
import subprocess
import sys

import click
import pytest

import surefoot.cli
from commands import ok, refused, run
from surefoot import __version__
from surefoot.cli.main import listed
from surefoot.data.rows._row_sources import find_files
from surefoot.errors import DataError, explain

HEAVY = {"torch", "transformers", "peft", "pydantic", "numpy", "rich", "datasets", "asyncio"}
HEAVY |= {"ruamel", "pyarrow", "tokenizers", "importlib.metadata"}


@pytest.fixture
def failing(monkeypatch):
    """Let `surefoot train` raise an error."""

    def with_error(error):
        def body():
            raise error

        module = type(sys)("surefoot.cli.train")
        module.train = click.command("train")(body)
        monkeypatch.setitem(sys.modules, "surefoot.cli.train", module)
        monkeypatch.setattr(surefoot.cli, "train", module, raising=False)

    return with_error


def python(code):
    environment = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["version"], ["trian"], []])
def test_the_first_words_import_nothing_heavy(args):
    done = python(
        "import sys\n"
        "from surefoot.cli.main import main\n"
        f"try: main({args!r}, prog_name='surefoot')\n"
        "except SystemExit: pass\n"
        "print('MODULES', *sorted(sys.modules))"
    )
    modules = set(done.stdout.partition("MODULES")[2].split())
    # A word that is no command of Surefoot's may be a plugin's, which entry points say.
    looks_for_plugins = {"importlib.metadata"} if args == ["trian"] else set()
    assert not modules & (HEAVY - looks_for_plugins)
    most = 210 if looks_for_plugins else 160  # two of each bundled plugin
    assert len(modules) < most, "each module is a file to find and run"


def test_help_shows_every_command_without_importing_any():
    shown = ok("--help")
    for name, purpose in listed().items():
        assert name in shown
        assert purpose.split()[0] in shown


@pytest.mark.parametrize("name", listed())
def test_every_command_of_the_table_has_its_module_and_help(name):
    assert ok(name, "--help").startswith(f"Usage: main {name}")


def test_a_misspelt_command_gets_the_near_one():
    assert "No such command 'trian'. Did you mean 'train'?" in refused("trian", "x.yaml")


def test_a_command_by_the_name_of_another_program_gets_ours():
    assert "No such command 'finetune'. Did you mean train?" in run("finetune", "x.yaml").output


def test_a_misspelt_option_gets_the_near_one():
    assert "--docs" in refused("recipe", "show", "x.yaml", "--doc")


def test_the_version_is_told_in_both_ways():
    assert run("version").output == f"{__version__}\n"
    assert run("--version").output == f"surefoot {__version__}\n"


def test_a_users_mistake_is_one_line_and_exit_code_2(failing):
    failing(DataError("dataset x: no such file"))
    result = run("train")
    assert result.exit_code == 2
    assert result.stderr == "error: dataset x: no such file\n"
    assert result.stdout == ""


def test_several_problems_stand_below_each_other(failing):
    failing(DataError("first\nsecond"))
    assert run("train").stderr == "error:\n  first\n  second\n"


@pytest.mark.parametrize("args", [["--verbose", "train"], ["train", "--verbose"]])
def test_verbose_shows_the_traceback_wherever_it_stands(failing, args):
    failing(DataError("dataset x: no such file"))
    done = run(*args)
    assert done.exit_code == 2
    assert "Traceback (most recent call last)" in done.stderr
    assert "raise error" in done.stderr


def test_a_fault_of_ours_is_not_dressed_up_as_the_users(failing):
    failing(RuntimeError("bug"))
    result = run("train")
    assert isinstance(result.exception, RuntimeError)
    assert result.exit_code == 1


def test_what_the_disk_refuses_is_one_line_wherever_it_is_asked(failing):
    failing(PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/root/x"))
    assert run("train").stderr.startswith("error: /root/x: no permission; ")
    assert "raise error" in run("train", "--verbose").stderr


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.EFBIG, errno.ENOSPC])
def test_what_the_system_refuses_without_naming_a_file_is_one_line(failing, code):
    failing(OSError(code, os.strerror(code)))
    message = refused("train")
    assert len(message.splitlines()) == 1
    assert message.startswith(f"error: {explain(OSError(code, os.strerror(code)))}")
    assert os.strerror(code) not in message  # but what to do


def test_a_name_that_the_environment_cannot_write_is_one_line_with_the_cure(failing):
    """Of PYTHONUTF8=0 LC_ALL=C, or an old locale; half of a character stays a fault of ours."""
    failing(UnicodeEncodeError("ascii", "läufe", 1, 2, "ordinal not in range"))
    said = refused("train")
    assert said.startswith("error: 'läufe': names of files are written in ascii here")
    assert "unset PYTHONUTF8, and set LC_ALL=C.UTF-8" in said
    failing(UnicodeEncodeError("utf-8", "l\ud800", 1, 2, "surrogates not allowed"))
    assert isinstance(run("train").exception, UnicodeEncodeError)


def test_letters_that_a_terminal_lacks_are_shown_as_escapes():
    """Click does so by itself; what is printed by others ended a command."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from surefoot.cli.main import main; main(['version'], standalone_mode=False); "
            "print('l\\xe4ufe')",
        ],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert done.stdout.endswith(rb"l\xe4ufe" + b"\n"), done.stderr


def test_a_file_of_ours_that_is_missing_is_a_fault_of_ours(failing):
    failing(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "ours.jinja"))
    assert isinstance(run("train").exception, FileNotFoundError)


def test_ctrl_c_gives_130(failing):
    failing(KeyboardInterrupt)
    assert run("train").exit_code == 130


def test_the_exit_code_of_a_command_is_kept(failing):
    failing(SystemExit(143))
    assert run("train").exit_code == 143


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "surefoot", "version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{__version__}\n"


def test_a_name_that_is_too_long_for_the_disk_is_one_short_line(tmp_path):
    name = "x" * 5000
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{path: {name}}}\nmethod: full\nstage: sft\ndata: {{datasets: [a]}}\n"
        f"train: {{output_dir: {tmp_path}/run, max_steps: 1}}\noptim: adamw\n"
    )
    for words, said in (
        (["chat", name, "--prompt", "a"], "no folder 'xxx"),
        (["train", str(recipe)], "model.path: no folder 'xxx"),
        (["train", name + ".yaml"], "xxx"),
        (["export", name, str(tmp_path / "out")], "no folder 'xxx"),
        (["ckpt", "show", name], "the name is too long"),
        (["predict", name, "--prompts", str(recipe), "--output", name], "the name is too long"),
    ):
        message = refused(*words)
        assert said in message
        assert len(message) < 1000, words[0]
    with pytest.raises(DataError, match="no file or folder"):
        find_files(tmp_path / name)


def test_the_commands_of_llamafactory_are_answered_with_ours(tmp_path):
    (tmp_path / "infer.yaml").write_text("model_name_or_path: missing-model\n")
    message = refused("chat", str(tmp_path / "infer.yaml"))
    assert "type: surefoot chat missing-model --max-new" in message
    done = run("eval", str(tmp_path / "infer.yaml"), "task=mmlu_test")
    assert done.exit_code == 2 and "type: surefoot eval missing-model generate" in done.stderr
    assert "Did you mean serve?" in refused("api")
    for command in ("webui", "webchat"):
        done = run(command, "--help")
        assert f"{command}: starting `surefoot board`" in done.stderr
        assert done.stdout == ok("board", "--help")
