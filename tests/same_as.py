"""Whether this tree computes what another commit computes, to the bit; for moves and deletions.

    make same BASE=0a139fad

The commit is checked out beside, and both train, resume, export and convert the same small project:
every stage, method and optimizer, two ranks, and a run that the commit began and this tree ends.
Losses, weights, exported bytes and the token cache must be equal. Options of commands and the
recipe's schema are compared, too; these differences are printed and decided by a reader.
"""

import difflib
import hashlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent
PROJECT = TESTS.parent
RANKS = {"fsdp": {"dp_shard": 2}, "tp": {"tp": 2}}
REWARD = f"{TESTS}/stage_rewards.py:varied"
STAGES = {
    "pt": "pt",
    "sft": "sft",
    "dpo": "dpo",
    "rm": "rm",
    "kto": "kto",
    "distill": {"distill": {"teacher": "model", "on_policy": 0.5, "max_new_tokens": 5}},
    "grpo": {"grpo": {"reward": REWARD, "group_size": 2, "passes": 2, "max_new_tokens": 5}},
    "ppo": {"ppo": {"reward": REWARD, "passes": 2, "max_new_tokens": 5}},
}
DATASETS = {"dpo": "pairs", "rm": "pairs", "kto": "marked"}
METHODS = {
    **{name: name for name in ("full", "lora", "badam_ratio")},
    "freeze": {"freeze": {"num_layers": 1}},
    "oft": {"oft": {"block_size": 8}},
    "badam": {"badam": {"switch_interval": 2}},
    "lisa": {"lisa": {"num_layers": 1, "switch_interval": 2}},
    "llama_pro": {"llama_pro": {"num_new_layers": 1}},
}
OPTIMIZERS = ("adamw", "adamw_bf16", "adamw_8bit", "adamw_4bit", "muon", "lion", "ademamix")
OPTIMIZERS += ("adafactor", "adam_mini", "apollo", "galore", "schedule_free")
EXPORTS = {
    "hf": (),
    "fp8": ("--to", "compressed-tensors"),
    "w8a8": ("--to", "compressed-tensors", "--quantize", "w8a8"),
    "w4a16": ("--to", "compressed-tensors", "--quantize", "w4a16", "--group-size", "32"),
    "gptq": ("--to", "compressed-tensors", "--quantize", "w4a16", "--group-size", "32",
             "--algorithm", "gptq"),
    "gguf": ("--to", "gguf"),
    "q8_0": ("--to", "gguf", "--quantize", "q8_0"),
    "q5_0": ("--to", "gguf", "--quantize", "q5_0"),
    "gguf-adapter": ("--to", "gguf-adapter"),
}  # fmt: skip
CONVERSIONS = {
    "distributed": ("--mesh", "dp_shard=2"),
    "huggingface": ("--to", "huggingface"),
    "peft": ("--to", "peft"),
    "dcp": ("--to", "dcp"),
    "mindspore": ("--to", "mindspore"),
    "trainer": ("--to", "trainer"),
}
CACHE = "token cache"
# Names, times and versions of the run itself.
OF_THE_RUN = {"receipt.json", "receipts.json", "recipe.yaml", "launches.jsonl", "README.md"}


def main(base):
    work = Path(tempfile.mkdtemp(prefix="same-as-"))
    tree = work / "tree"
    subprocess.run(["git", "worktree", "add", "--detach", tree, base], cwd=PROJECT, check=True)
    try:
        _collected(work, "base", tree / "src")
        _collected(work, "here", PROJECT / "src")
        expected, found = (json.loads((work / f"{n}.json").read_text()) for n in ("base", "here"))
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=PROJECT, check=True)
    wrong = [key for key, value in expected["bits"].items() if found["bits"].get(key) != value]
    for key, text in expected["texts"].items():
        lines = (text.splitlines(), found["texts"].get(key, "").splitlines())
        print(*difflib.unified_diff(*lines, f"base {key}", "here", n=0, lineterm=""), sep="\n")
    print(f"{len(expected['bits']) - len(wrong)} of {len(expected['bits'])} are equal to the bit")
    for key in wrong:
        before, here = expected["bits"][key], found["bits"].get(key)
        if key == CACHE:
            before, here = "none more", sorted(set(here) - set(before))
        print(f"  {key}: {before} before, {here} here")
    shutil.rmtree(work)
    return 1 if wrong else 0


def _collected(work, name, source):
    command = [sys.executable, "-P", __file__, "collect", str(work), name]
    tests = source.parent / "tests"  # whose helpers import what this source has
    path = os.pathsep.join(map(str, (source, tests, tests / "journey")))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    subprocess.run(command, env=environment | {"XDG_CACHE_HOME": f"{work}/cache"}, check=True)


class Collected:
    """What one tree computes, in ``work/NAME``; ``work/base`` was made by the commit."""

    def __init__(self, work, name):
        self.work, self.name, self.out = work, name, work / name
        self.bits, self.texts = {}, {}
        self.out.mkdir()

    def all(self):
        project = self._project()
        for stage, settings in STAGES.items():
            dataset = DATASETS.get(stage, "sums")
            self.train(f"stage {stage}", stage=settings, data={"datasets": [dataset]})
        for method, settings in METHODS.items():
            self.train(f"method {method}", method=settings)
        for optimizer in OPTIMIZERS:
            self.train(f"optimizer {optimizer}", method="full", optim={optimizer: {}})
        for ranks, parallel in RANKS.items():
            self.run("train", project.recipe, "parallel.num_processes=2",
                     *(f"parallel.{axis}={n}" for axis, n in parallel.items()),
                     f"train.output_dir={self.out / ranks}", is_forked=False)  # fmt: skip
            self._note(ranks, self.out / ranks)
        self._resumed(project)
        source = self.work / "base" / "method lora" / "checkpoint-6"
        for kind, options in EXPORTS.items():
            target = self.out / f"export-{kind}{'.gguf' if 'gguf' in str(options) else ''}"
            self.run("export", source, target, *options)
            self._hash(f"export {kind}", target)
        for kind, options in CONVERSIONS.items():
            self.run("ckpt", "convert", source, self.out / kind, *options)
            self._hash(f"convert {kind}", self.out / kind)
        cached = sorted(str(p.relative_to(self.work)) for p in self.work.rglob("*.tokens*"))
        self.bits[CACHE] = cached
        self._commands(())
        self.texts["schema"] = json.dumps(json.loads(self.run("recipe", "schema")), indent=1)

    def train(self, key, **sections):
        train = {"output_dir": str(self.out / key), **sections.pop("train", {})}
        recipe = self._project().recipe
        content = json.loads(recipe.read_text())
        for name, fields in {**sections, "train": train}.items():
            both = isinstance(fields, dict) and isinstance(content.get(name), dict)
            is_variant = name in ("stage", "method", "optim")
            content[name] = {**content[name], **fields} if both and not is_variant else fields
        path = recipe.with_name(f"{self.name}.yaml")
        path.write_text(json.dumps(content))
        self.run("train", path)
        self._note(key, self.out / key)

    def _project(self):
        # Torch is imported by the process that collects, only.
        from project import Project, model_folder

        folder = self.work / "project"
        if folder.exists():
            made = Project.__new__(Project)
            made.folder = folder
            return made
        project = Project(folder, train={"max_steps": 6})
        model_folder(folder / "model", intermediate_size=64)  # in which groups of 32 fit
        return project

    def _resumed(self, project):
        """A run that the commit began: its copy without the later checkpoint goes to the end."""
        copy = self.out / "resumed"
        shutil.copytree(self.work / "base" / "stage sft", copy)
        shutil.rmtree(copy / "checkpoint-6")
        self.run("train", project.recipe, f"train.output_dir={copy}")
        self._hash("resumed", copy / "checkpoint-6", only="*.safetensors")

    def _note(self, key, run):
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        self.bits[f"{key}: losses"] = [line["loss"] for line in lines if "loss" in line]
        self._hash(key, run / "checkpoint-6", only="*.safetensors")

    def _hash(self, key, path, only="*"):
        digest = hashlib.sha256()
        files = sorted(path.rglob(only)) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and file.name not in OF_THE_RUN:
                text = file.read_bytes().replace(str(self.out).encode(), b"OUT")
                if file.name == "manifest.json":  # when it was made, and the hash of that
                    text = re.sub(rb'"(created|seal)": ?"[^"]*"', b"", text)
                digest.update(file.name.encode() + hashlib.sha256(text).digest())
        self.bits[f"{key}: bytes"] = digest.hexdigest()[:16]

    def _commands(self, words):
        text = self.run(*words, "--help")
        self.texts[" ".join((*words, "--help"))] = text
        listed = text.split("\nCommands:\n")[1].splitlines() if "\nCommands:\n" in text else []
        for line in listed:
            if found := re.match(r"  ([a-z][a-z-]*)  ", line):
                self._commands((*words, found[1]))

    def run(self, *arguments, is_forked=True):
        """The command's output, of a fork: torch is imported once."""
        log = self.out / "log"
        argv = ["surefoot", *map(str, arguments)]
        if not is_forked:
            command = [sys.executable, "-P", "-m", *argv]
            with log.open("w") as file:
                code = subprocess.run(command, stdout=file, stderr=file, check=False).returncode
        elif (pid := os.fork()) == 0:
            code = _as_command(argv, log)
            os._exit(code)
        else:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code:
            raise SystemExit(f"{self.name}: {argv} ended with {code}:\n{log.read_text()[-3000:]}")
        return log.read_text()


def _as_command(argv, log):
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = argv
    try:
        runpy.run_module("surefoot", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        sys.stdout.flush()
        return end.code if isinstance(end.code, int) else bool(end.code)
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "collect":
        collected = Collected(Path(sys.argv[2]), sys.argv[3])
        collected.all()
        content = {"bits": collected.bits, "texts": collected.texts}
        (collected.work / f"{collected.name}.json").write_text(json.dumps(content))
    else:
        sys.exit(main(sys.argv[1]))
