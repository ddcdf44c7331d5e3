"""Every command and every piece of Python on the pages about using a model does what it says."""

import shlex

import pages
import pytest
from click.testing import CliRunner

import surefoot
from each import some
from folders import save_data, save_model, save_recipe
from surefoot.cli.main import main

OTHERS = ("pip", "llama-server", "ollama", "vllm", "python")  # which are not here
NAMES = ("chat", "predict", "evaluate", "export")


def blocks(page, language):
    return pages.blocks(pages.ROOT / f"docs/how-to/{page}.md", language)


def commands(page):
    return [line for block in blocks(page, "sh") for line in block.text.splitlines()]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The folder the pages speak of, with a finished run in it."""
    folder = tmp_path_factory.mktemp("project")
    save_model(folder / "models" / "base", intermediate_size=64)
    save_data(folder / "data")
    save_data(folder / "data", "exam", [{"instruction": "1+1?", "output": "2"}])
    (folder / "questions.txt").write_text("1+1?\n2+2?\n")
    for page, language in (("predict", "yaml"), ("chat", "json")):
        for block in blocks(page, language):
            if block.title:
                (folder / block.title).write_text(block.text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        recipe = save_recipe(
            folder,
            model={"path": "models/base"},
            data={"dataset_dir": "data"},
            method={"lora": {"rank": 2}},
            train={"output_dir": "runs/demo"},
        )
        surefoot.train(recipe)
        yield folder


@pytest.mark.parametrize("page", some(NAMES, ["chat", "predict"]))
def test_commands_run_as_they_stand(project, page):
    assert commands(page)
    for command in commands(page):
        words = shlex.split(command)
        if words[0] in OTHERS:
            continue
        assert words[0] == "surefoot"
        stdin = (project / "questions.txt").read_text() if "<" in words else None
        words = words[1 : words.index("<") if "<" in words else None]
        done = CliRunner().invoke(main, words, input=stdin)
        assert done.exit_code == 0, f"{command}: {done.stderr}"
        assert stdin is None or len(done.stdout.splitlines()) == len(stdin.splitlines())


@pytest.mark.parametrize("page", ["chat", "predict", "export"])
def test_python_runs_as_it_stands(project, page, capsys):
    (code,) = blocks(page, "python")
    exec(compile(code.text, page, "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= (0 if page == "export" else 2)
