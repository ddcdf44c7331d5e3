"""The kit for one GPU: its plan, resume and page; and a tiny case of each part on the CPU."""

import json
import re
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

import warm
from surefoot.model.numerics import seed_everything

FOLDER = Path(__file__).parent.parent / "benchmarks" / "gpu"
sys.path.append(str(FOLDER))

bundle, cases, correct, kit, page, profile_case, results, sizes = map(
    import_module, ("bundle", "cases", "correct", "kit", "page", "profile_case", "results", "sizes")
)
LOSSES = {"wall": 2.0, "tokens": 4000, "examples": 16, "peak_mb": 2048, "losses": [11.9, 11.8]}


class Programs:
    """Stands for the programs that are run: writes their reports, and what was run."""

    def __init__(self, *, code=0, output=""):
        self.code, self.output, self.ran = code, output, []

    def __call__(self, command, env, cwd, log, seconds):
        program, task = Path(command[1]), json.loads(Path(command[2]).read_text())
        log.write_text(self.output)
        if program.name == "shapes.py":
            target = Path(task["target"])
            target.mkdir(parents=True)
            (target / "lengths.json").write_text('{"weighted_mean": 200.0}')
            (target / "ready").touch()
            return 0
        self.ran.append(program.name)
        if self.code == 0:
            Path(task["report"]).write_text(json.dumps(LOSSES))
        return self.code


def a_kit(folder, run, *, minutes=8.0, tiny=False, tests=None):
    """A kit on the CPU, in a folder of its own."""
    found = kit.Kit(folder / "out", folder / "work", "cpu", minutes, tiny, tests or folder, run)
    found.deadline = time.monotonic() + 60 * minutes
    return found


def case_of(part, *, name="", subject=""):
    found = cases.CASES[part]()
    return next(case for case in found if name in case.name and subject in case.subject)


def statuses(folder):
    return [record["status"] for record in results.read(folder / "out" / "results.jsonl")]


def test_a_case_whose_result_stands_is_not_run_again(tmp_path):
    case, run = case_of("speed", subject="surefoot"), Programs()
    for _ in range(2):
        a_kit(tmp_path, run).case(case)
    assert run.ran == ["with_surefoot.py"]
    (record,) = results.read(tmp_path / "out" / "results.jsonl")
    assert record["versions"]["torch"]
    assert record["commit"]
    assert "CPU" in record["device"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d", record["date"])


def test_results_of_an_earlier_call_stand_though_its_folder_is_another(tmp_path):
    case, run = case_of("speed", subject="surefoot"), Programs()
    first = a_kit(tmp_path, run)
    first.case(case)
    first.publish()
    carried = tmp_path / "carried"
    (tmp_path / "out").rename(carried)
    found = kit.Kit(
        tmp_path / "here", tmp_path / "other", "cpu", 8.0, False, tmp_path, run, [carried]
    )
    found.case(case)
    assert run.ran == ["with_surefoot.py"]
    assert len(results.read(tmp_path / "here" / "results.jsonl")) == 1
    again = a_kit(tmp_path, run)  # the same machine, with an empty folder for what comes back
    again.case(case)
    assert run.ran == ["with_surefoot.py"]


def test_cases_that_failed_come_after_those_that_were_never_tried(tmp_path):
    a_kit(tmp_path, Programs(code=1)).part("save", "full 1.7B, surefoot")
    run = Programs()
    a_kit(tmp_path, run).part("save")
    found = results.read(tmp_path / "out" / "results.jsonl")
    assert [(r["case"], r["status"]) for r in found[-2:]] == [("full 1.7B", "ok")] * 2
    assert found[-1]["subject"] == "surefoot"
    assert "full 1.7B, surefoot" in (tmp_path / "out" / "failures.log").read_text()


def test_a_report_that_cannot_be_read_does_not_hide_the_other_cases(tmp_path):
    class Torn(Programs):
        def __call__(self, *given):
            code = super().__call__(*given)
            if self.ran == ["gemm_case.py"]:
                Path(json.loads(Path(given[0][2]).read_text())["report"]).write_text("{")
            return code

    a_kit(tmp_path, Torn()).part("speed", "limits, limits")
    assert statuses(tmp_path) == ["failed"]
    assert (tmp_path / "out" / "page.md").exists()


def test_every_row_of_a_program_that_was_stopped_is_a_result(tmp_path):
    class Stopped(Programs):
        def __call__(self, command, env, cwd, log, seconds):
            report = json.loads(Path(command[2]).read_text())["report"]
            row = {"case": "head 8 x 4, frozen, 1,024 tokens", "subject": "head-logits"}
            figures = {"ms": 1.25, "peak_mb": 512.0, "tflops": 3.0, "loss_error": 1e-5}
            row |= {"status": "ok", "figures": figures, "error": ""}
            Path(report).write_text(json.dumps({"rows": [row]}))

    found = a_kit(tmp_path, Stopped())
    found.case(case_of("speed", name="head "))
    assert statuses(tmp_path) == ["ok", "timeout"]
    text = page.render(found.stored.records)
    assert "**head 8 x 4, frozen matrix**" in text
    assert "| full logits, then cross entropy | 1.2 | 0.50 | 3 | 1.0e-05 |" in text


def test_a_failure_is_tried_again_and_out_of_memory_is_a_result(tmp_path):
    case = case_of("speed", subject="surefoot")
    a_kit(tmp_path, Programs(code=1, output="Traceback\nValueError: no")).case(case)
    a_kit(tmp_path, Programs(code=None)).case(case)
    full = Programs(code=1, output="torch.OutOfMemoryError: CUDA out of memory.")
    a_kit(tmp_path, full).case(case)
    a_kit(tmp_path, full).case(case)
    assert statuses(tmp_path) == ["failed", "timeout", "out of memory"]


def test_a_result_of_another_size_or_of_other_code_does_not_stand(tmp_path, monkeypatch):
    case, run = case_of("speed", subject="surefoot"), Programs()
    a_kit(tmp_path, run, tiny=True).case(case)
    a_kit(tmp_path, run).case(case)
    assert len(run.ran) == 2
    monkeypatch.setattr(results, "code", lambda: "changed")
    a_kit(tmp_path, run).case(case)
    assert len(run.ran) == 3


def test_no_case_is_started_that_would_not_fit(tmp_path):
    run = Programs()
    short = a_kit(tmp_path, run, minutes=1.0)
    short.case(case_of("speed", name="8B", subject="surefoot"))  # its model takes longer to make
    short.case(case_of("speed", name="limits"))
    assert run.ran == ["gemm_case.py"]


def test_a_torn_line_loses_one_record_only(tmp_path):
    case, path = case_of("speed", subject="surefoot"), tmp_path / "out" / "results.jsonl"
    a_kit(tmp_path, Programs()).case(case)
    path.write_text(path.read_text() + '{"part": "spe')
    a_kit(tmp_path, Programs()).case(case_of("speed", name="limits"))
    assert statuses(tmp_path) == ["ok", "ok"]


def has_ended(process):
    """Whether a process that was killed is gone within a minute, or waits to be reaped."""
    status, until = Path(f"/proc/{process}/status"), time.monotonic() + 60
    while time.monotonic() < until:
        try:
            if "zombie" in status.read_text():
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_a_program_is_killed_with_all_that_it_started(tmp_path):
    command = ["sh", "-c", f"sleep 600 & echo $! > {tmp_path}/child; wait"]
    assert kit.run_program(command, {}, tmp_path, tmp_path / "log", 1.0) is None
    assert has_ended((tmp_path / "child").read_text().strip())


KILLED = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import kit
out = Path(sys.argv[2])
kit.run_program(["sh", "-c", f"echo $$ > {out}/child; sleep 600"], {}, out, out / "log", 60)
"""


def test_a_program_ends_when_the_kit_is_killed(tmp_path):
    command, child = [sys.executable, "-c", KILLED, FOLDER, tmp_path], tmp_path / "child"
    process = subprocess.Popen(command)
    until = time.monotonic() + 60
    while not (child.exists() and child.read_text()) and time.monotonic() < until:
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert has_ended(child.read_text().strip())


def test_parts_fit_into_their_minutes_by_their_first_cases():
    for part, make in cases.CASES.items():
        found = make()
        assert len({case.key for case in found}) == len(found), part
        assert all(case.program.exists() for case in found)
        assert all(case.shape in ("", *sizes.SHAPES) for case in found)
        assert found[0].seconds + found[1].seconds < 480


def test_tiny_cases_differ_in_more_than_their_names():
    for part, make in cases.CASES.items():
        found = cases.tiny(make())
        assert {case.program for case in found} == {case.program for case in make()}
        assert {case.subject for case in found} == {case.subject for case in make()}
        assert len(found) < len(make()), part


def test_operations_count_every_matrix_of_the_model():
    shape = sizes.SHAPES["tiny"]
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_width,
        tie_word_embeddings=True,
    )
    seed_everything(0)
    matrices = [p for p in Qwen3ForCausalLM(config).parameters() if p.dim() == 2]
    assert shape.num_weights == sum(p.numel() for p in matrices)
    assert shape.operations("lora", 0) == 4 * shape.num_weights
    # two products of width x length^2 / 2 a layer, 2 operations each, forward and twice backward
    length, width = 100, shape.heads * shape.head_width
    attention = shape.layers * 2 * 2 * width * length**2 / 2 * 3
    assert length * shape.operations("full", length) == pytest.approx(
        6 * shape.num_weights * length + attention
    )


def record(part, case, subject, status="ok", **figures):
    found = {"part": part, "case": case, "subject": subject, "status": status, "figures": figures}
    where = {"device": "GPU X", "kind": "cuda", "tiny": False, "commit": "abc", "error": ""}
    return {**found, **where, "date": "2026-11-22 10:00:00", "versions": {"torch": "2.11"}}


def test_the_page_has_ratios_utilization_and_unequal_losses():
    work = "full 1.7B, chats"
    slow = {**LOSSES, "wall": 4.0, "losses": [12.5], "operations": 1e10}
    records = [
        record("speed", "limits", "limits", tflops=100.0, copy_gb_s=3000.0),
        record("speed", work, "surefoot", **LOSSES, operations=1e10),
        record("speed", work, "trainer-padded", **slow),
        record("speed", work, "trainer-liger", status="out of memory"),
        record("speed", "dpo 1.7B, prompts of 16k", "surefoot", **LOSSES),
    ]
    text = page.render(records)
    assert "| Surefoot | 2,000 | 1.00 | 20 |  | 20.0 | 2.0 | 11.9000 |" in text
    assert "padded (default) | 1,000 | 0.50 | 10 |  | 10.0 | 2.0 | 12.5000 |" in text
    assert "Liger's kernels | out of memory |" in text
    assert "**First losses differ**: Hugging Face Trainer, padded (default)." in text
    assert "Longest prompts that ran, dpo 1.7B: Surefoot 16k tokens." in text
    assert "#### GPU X" in text


def test_the_page_is_written_between_its_markers_without_tiny_runs(tmp_path):
    path = tmp_path / "RESULTS.md"
    path.write_text(f"before\n{page.START}\nold\n{page.END}\nafter\n")
    page.write([{**record("speed", "limits", "limits"), "tiny": True}], path)
    assert page.NOTHING in path.read_text()
    page.write([record("correct", "tests/gpu/test_a.py::test_b", "pytest", "failed")], path)
    text = path.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "Tests marked `gpu`: 1 failed." in text


def test_the_page_of_partial_results_has_no_figure_of_what_is_missing():
    fast = {**LOSSES, "operations": 1e12}
    h100 = {**record("speed", "full 1.7B, chats", "surefoot", **fast), "device": "NVIDIA H100"}
    failed = {**record("save", "full 1.7B", "surefoot", "timeout"), "device": "NVIDIA H100"}
    text = page.render([h100, failed])
    assert "MFU is the share of 989.4 TFLOP/s" in text
    assert "| Surefoot | 2,000 | 1.00 | 2,000 | 202.1 |  | 2.0 | 11.9000 |" in text
    assert "| full 1.7B, Surefoot | timeout |" in text
    stopped = record("speed", "head 32,768 x 2,048", "heads", "timeout")
    assert "head 32,768 x 2,048: timeout" in page.render([stopped])


def test_the_page_says_where_the_time_of_a_step_goes():
    figures = {"plain_step_ms": 40.0, "step_ms": 50.0, "tokens_a_step": 1000, "operations": 2e9}
    figures |= {"gemm_tflops": 100.0, "kinds_ms": {"products": 25.0, "optimizer": 5.0}}
    figures |= {"idle_ms": 3.0, "idle_percent": 6.0, "gaps_a_step": 2, "host_ms": {"optimizer": 1}}
    figures |= {"kernels_a_step": 9, "kernels": [], "longest_gaps": [], "formula": sizes.FORMULA}
    figures["waits"] = [{"name": "aten::nonzero", "calls_a_step": 2.0, "ms_a_step": 1.0}]
    text = page.render([record("profile", "full 1.7B, chats", "surefoot", **figures)])
    assert "reaches 50 TFLOP/s, 50.0 % of the 100 of a product" in text
    assert "would take 20.0 ms at that rate; products and attention take 5.0 ms more" in text
    assert "Other kernels, ms: optimizer 5.0. Idle, ms: 3.0." in text
    assert "`aten::nonzero` 2.0, 1.0 ms" in text


def test_what_the_project_requires_is_here():
    assert results.unmet() == []


def test_results_have_the_place_of_the_page():
    text = page.RESULTS.read_text(encoding="utf-8")
    assert text.index(page.START) < text.index(page.END)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm_bf16>", "products"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop<cutlass::half_t>", "attention"),
        ("void multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::_scatter_gather_elementwise_kernel", "gather, scatter, embedding"),
        ("Memcpy DtoD (Device -> Device)", "copies and casts"),
        ("void at::native::vectorized_elementwise_kernel<4, MulFunctor>", "elementwise and others"),
    ],
)
def test_a_kernel_has_a_kind(name, kind):
    assert profile_case.kind_of(name) == kind


def test_idle_gaps_are_those_between_all_kernels():
    work = [("a", 0, 100), ("b", 10, 20), ("c", 103, 110), ("d", 150, 200)]
    found = [profile_case.Work(name, start, end, end - start) for name, start, end in work]
    assert profile_case.gaps(found) == [(40, "c", "d")]
    (first, *_) = profile_case.costliest(found, 2)
    share = pytest.approx(100 * 100 / 167)
    assert first == {"name": "a", "ms_a_step": 0.05, "percent": share, "calls_a_step": 0.5}


OWN_MARK = '[tool.pytest.ini_options]\nmarkers = ["gpu: needs a GPU"]\n'
TESTS = """
import pytest
pytestmark = pytest.mark.gpu
def test_right(): pass
def test_wrong(): assert False, "seen"
def test_later(): pytest.skip("no such GPU")
"""
ENDING = """
import os, pytest, time
pytestmark = pytest.mark.gpu
def test_first(): pass
def test_crash(): os._exit(11)
def test_hang(): time.sleep(600)
def test_after(): pass
"""


def in_a_warm_process(command, env, cwd, log, seconds):
    """Like ``kit.run_program``."""
    with log.open("wb") as output:
        options = {"env": env, "cwd": cwd, "stdout": output, "stderr": output}
        return warm.run(command, **options, timeout=seconds).returncode


def test_tests_of_gpus_are_found_in_every_folder():
    found = {Path(file).name for file in correct.marked(results.ROOT / "tests")}
    assert {"test_attention.py", "test_trainer.py", "test_qlora.py"} <= found
    assert "test_step.py" not in found


def test_every_test_is_a_result_and_only_those_that_passed_stand(tmp_path):
    (tmp_path / "pyproject.toml").write_text(OWN_MARK)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_unknown.py").write_text("import no_such_module\n" + TESTS)
    for _ in range(2):
        a_kit(tmp_path, in_a_warm_process, tiny=True, tests=tmp_path).part("correct")
    found = results.read(tmp_path / "out" / "results.jsonl")
    ended = [(r["case"].rpartition("::")[2], r["status"]) for r in found]
    again = [("test_later", "skipped"), ("test_unknown.py", "failed"), ("test_wrong", "failed")]
    assert sorted(ended[:4]) == sorted([("test_right", "ok"), *again])
    assert sorted(ended[4:]) == again
    errors = {r["case"].rpartition("::")[2]: r["error"] for r in found}
    assert "seen" in errors["test_wrong"]
    assert "no_such_module" in errors["test_unknown.py"]


@pytest.mark.proof
def test_the_suite_leaves_a_result_of_each_test_that_failed_and_the_count_of_all(tmp_path):
    (tmp_path / "pyproject.toml").write_text(OWN_MARK)
    (tmp_path / "test_some.py").write_text(TESTS.replace("pytestmark = pytest.mark.gpu", ""))
    (tmp_path / "test_marked.py").write_text(TESTS)
    (tmp_path / "test_unknown.py").write_text("import no_such_module\n")
    made = a_kit(tmp_path, kit.run_program, tiny=True, tests=tmp_path)
    made.part("suite")
    found = {r["case"].rpartition("::")[2]: r for r in made.stored.records}
    assert {name: r["status"] for name, r in found.items()} == {
        "test_wrong": "failed",
        "test_unknown.py": "failed",
        correct.ALL: "ok",
    }
    assert found[correct.ALL]["figures"] == {"ok": 1, "skipped": 1, "failed": 2}
    assert "1 ok" in page.render(made.stored.records)


def test_a_test_that_hangs_or_ends_the_process_hides_no_other(tmp_path, monkeypatch):
    monkeypatch.setenv("SUREFOOT_PATIENCE", "3")
    (tmp_path / "pyproject.toml").write_text(OWN_MARK)
    (tmp_path / "test_some.py").write_text(ENDING)
    a_kit(tmp_path, in_a_warm_process, tests=tmp_path).part("correct")
    found = results.read(tmp_path / "out" / "results.jsonl")
    ended = {r["case"].rpartition("::")[2]: r["status"] for r in found}
    lost = {"test_crash": "timeout", "test_hang": "timeout"}
    assert ended == {"test_first": "ok", **lost, "test_after": "ok"}
    assert "test_hang" in (tmp_path / "out" / "failures.log").read_text()  # its traceback


def test_outcomes_that_a_killed_kit_left_are_results_of_its_device_only(tmp_path):
    lines = [{"test": "t.py::test_a", "outcome": "passed", "seconds": 1.0, "message": ""}]
    for device, count in (("another", 0), (None, 1)):
        found = a_kit(tmp_path, Programs())
        head = {**found.stored.surroundings}
        head |= {"device": device} if device else {}
        text = "".join(json.dumps(line) + "\n" for line in (head, *lines))
        left = tmp_path / "out" / correct.outcomes_of("correct")
        left.write_text(text)
        for _ in range(2):  # it stays, as another kit may write it
            assert len(a_kit(tmp_path, Programs()).stored.records) == count
            assert left.read_text() == text


@pytest.fixture(scope="module")
def tiny_work(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


@pytest.mark.parametrize(
    ("part", "only", "figure"),
    [
        ("speed", "head 151,936 x 2,048, heads", ""),
        pytest.param("save", "full 1.7B, surefoot", "first_step_after_s", marks=pytest.mark.proof),
        pytest.param("profile", "full 1.7B, chats, surefoot", "kernels", marks=pytest.mark.proof),
        pytest.param("speed", "full 1.7B, chats, surefoot", "operations", marks=pytest.mark.proof),
    ],
)
def test_a_tiny_case_of_each_part_runs_on_the_cpu(part, only, figure, tiny_work):
    found = a_kit(tiny_work, in_a_warm_process, tiny=True)
    case = next(c for c in cases.tiny(cases.CASES[part]()) if f"{c.name}, {c.subject}" == only)
    if part == "save":  # the resume in a process that has imported already
        case = replace(case, settings={**case.settings, "fresh": False})
    found.case(case)
    record = found.stored.records[-1]
    assert record["status"] == "ok", record["error"]
    if figure:
        assert record["figures"][figure]
    else:
        rows = {r["subject"]: r for r in found.stored.records if r["subject"] != "heads"}
        ours, full = rows["head-surefoot"]["figures"], rows["head-logits"]["figures"]
        assert ours["hidden_error"] == pytest.approx(full["hidden_error"], rel=0.2)
        assert ours["loss_error"] < 1e-3
    assert "Not measured" not in page.render(found.stored.records)


def test_what_is_carried_is_pinned():
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in bundle.pins())
    assert not bundle.present() & {line.partition("==")[0] for line in bundle.pins()}
    installed = (FOLDER / "requirements.txt").read_text().splitlines()[1:]
    assert set(installed) <= set(bundle.pins())


def a_wheel(folder, name, *requires):
    path = folder / f"{name}-1.0-py3-none-any.whl"
    text = "\n".join(["Metadata-Version: 2.1", *(f"Requires-Dist: {line}" for line in requires)])
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-1.0.dist-info/METADATA", text)
    return path


def carried(folder):
    return [a_wheel(folder, line.partition("==")[0].replace("-", "_")) for line in bundle.pins()]


def test_a_bundle_that_lacks_something_is_refused(tmp_path):
    wheels = carried(tmp_path)
    assert "wheels" in bundle.check(wheels, [], 64, "3.12")
    more = a_wheel(tmp_path, "more", "absent>=2", "other; python_version < '3'", "x; extra == 'y'")
    with pytest.raises(SystemExit, match=r"more requires absent>=2\nAdd it to carried\.txt"):
        bundle.check([*wheels, more], [], 64, "3.12")
    some = [wheel for wheel in wheels if not wheel.name.startswith("pydantic-")]
    with pytest.raises(SystemExit, match="Surefoot requires pydantic"):
        bundle.check(some, [], 64, "3.12")


def test_libraries_of_other_gpus_are_left_out_of_a_wheel_that_still_installs(tmp_path):
    names = ["cpu", "cuda118", "cuda130", "rocm72"]
    files = {f"bitsandbytes/libbitsandbytes_{name}.so": name for name in names}
    files |= {
        "bitsandbytes/__init__.py": "",
        "bitsandbytes-1.0.dist-info/WHEEL": "Wheel-Version: 1.0",
    }
    files["bitsandbytes-1.0.dist-info/METADATA"] = (
        "Metadata-Version: 2.1\nName: bitsandbytes\nVersion: 1.0"
    )
    record = "bitsandbytes-1.0.dist-info/RECORD"
    files[record] = "".join(f"{name},,\n" for name in [*files, record])
    wheel = tmp_path / "bitsandbytes-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    bundle.slim(wheel)
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target"]
    subprocess.run([*command, site, wheel], check=True, capture_output=True)
    libraries = sorted(file.name for file in (site / "bitsandbytes").glob("*.so"))
    assert libraries == ["libbitsandbytes_cpu.so", "libbitsandbytes_cuda130.so"]
    assert [path.name for path in tmp_path.glob("*.part")] == []


def test_a_bundle_that_is_too_large_names_its_largest_wheel(tmp_path):
    wheels = carried(tmp_path)
    with zipfile.ZipFile(tmp_path / "datasets-1.0-py3-none-any.whl", "a") as archive:
        archive.writestr("large", b"0" * 2**20)
    with pytest.raises(SystemExit, match=r"expected at most 1\. .* --without datasets"):
        bundle.check(wheels, [], 1, "3.12")


def test_a_copy_without_wheels_is_told_so(tmp_path):
    environment = {"PATH": "/usr/bin:/bin", "WHEELS": str(tmp_path), "SITE": str(tmp_path / "site")}
    command = ["sh", FOLDER / "bare.sh", "page"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "bundle.py" in done.stderr


def test_the_script_for_a_bare_machine_is_valid_shell():
    done = subprocess.run(["sh", "-n", FOLDER / "bare.sh"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
