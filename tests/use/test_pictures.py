"""Answers to prompts with pictures are those of transformers' own ``generate``."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from transformers import AutoModelForImageTextToText, GenerationConfig

import pictures
from each import some
from surefoot.cli.chat import _ask
from surefoot.cli.main import main
from surefoot.data.example import MEDIUM
from surefoot.data.text.prompts import read_prompts
from surefoot.errors import DataError, RunError
from surefoot.generate.responses import pictures_of
from surefoot.generate.section import GenerateSection
from surefoot.use.conversation import Conversation, with_typed_pictures
from surefoot.use.evaluation import measure
from surefoot.use.model_loading import open_model
from surefoot.use.prediction import Output, predict
from surefoot.use.run_evaluation import adopt, generations

SETTINGS = GenerateSection(max_new_tokens=8, batch_size=3)


@pytest.fixture(scope="module", params=some(pictures.KINDS, ["qwen2_vl", "gemma3"]))
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def base(kind, tmp_path_factory):
    return pictures.save_model(tmp_path_factory.mktemp(kind) / "base", kind)


@pytest.fixture
def opened(base, tmp_path):
    return open_model(base).reading_from(tmp_path)


def asked(folder, rows):
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return read_prompts(folder / "rows.jsonl")


def by_transformers(opened, base, folder, prompts, rows):
    """What transformers generates of each prompt alone, from all that its processor gives, and the
    log-probabilities of these tokens."""
    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    model.generation_config = GenerationConfig()
    processor, samples = opened.media.processor.processor, []
    for prompt, row in zip(prompts, rows, strict=True):
        images = [Image.open(folder / name) for name in row["images"]]
        messages, _, _ = opened.codec._template_inputs(prompt.messages, ())
        text = opened.codec._renderer.render(messages, None, prompt=True)
        given = processor(text=text, images=[images] if images else None, return_tensors="pt")
        ends = {"eos_token_id": list(opened.stop_token_ids), "pad_token_id": 256}
        told = {"max_new_tokens": 8, "output_logits": True, "return_dict_in_generate": True}
        made = model.generate(**given, **ends, **told)
        ids = made.sequences[0, given["input_ids"].shape[1] :]
        logps = torch.cat(made.logits).log_softmax(-1).gather(1, ids[:, None])[:, 0]
        samples.append((ids.tolist(), logps))
    return samples


def sampled(opened, prompts):
    ids = [opened.prompt(prompt.messages) for prompt in prompts]
    return opened.network.generate(ids, SETTINGS, seed=0, stop_token_ids=opened.stop_token_ids)


def test_responses_are_those_of_transformers_alone_and_beside_others(kind, base, opened, tmp_path):
    rows = pictures.rows(tmp_path)
    prompts = asked(tmp_path, rows)
    samples = sampled(opened, prompts)
    expected = by_transformers(opened, base, tmp_path, prompts, rows)
    assert [list(sample.ids) for sample in samples] == [ids for ids, _ in expected]
    for sample, (_, logps) in zip(samples, expected, strict=True):
        assert sample.logps == pytest.approx(logps.tolist(), abs=2e-6)
    assert [sampled(opened, [prompt])[0].ids for prompt in prompts] == [s.ids for s in samples]
    one = next(number for number, row in enumerate(rows) if len(row["images"]) == 1)
    Image.new("RGB", (64, 64), "blue").save(tmp_path / rows[one]["images"][0])
    (other,) = sampled(opened, prompts[one : one + 1])
    assert other.logps != pytest.approx(samples[one].logps, abs=2e-5), "the picture is seen"


only_gemma = pytest.mark.parametrize("kind", ["gemma3"], indirect=True)


@only_gemma
def test_an_evaluation_measures_and_answers_rows_with_pictures(kind, base, opened, tmp_path):
    rows = pictures.rows(tmp_path)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = pictures.recipe(tmp_path, base)
    recipe = replace(recipe, generate=SETTINGS)
    examples = [pictures.OpenAI().read(row) for row in rows]
    opened, parts = adopt(opened, recipe)
    packed = measure(opened, parts, examples)
    padded = replace(recipe, data=replace(recipe.data, packing=False))
    assert packed == pytest.approx(measure(*adopt(opened, padded), examples), rel=1e-5)
    found = generations(opened, parts, examples)
    prompts = asked(tmp_path, rows)
    assert [one.answer for one in found] == [a.text for a in predict(opened, prompts, SETTINGS)]
    assert found[1].prompt.count("<image_soft_token>") == 1


@only_gemma
def test_responses_so_far_belong_to_the_pictures_that_were_seen(kind, opened, tmp_path):
    rows = [{"prompt": "<image> what?", "images": [pictures.picture(tmp_path / "a.png")]}]
    prompts = asked(tmp_path, rows)
    output = Output(tmp_path / "answers.jsonl")
    (first,) = predict(opened, prompts, SETTINGS, output=output)
    assert predict(opened, prompts, SETTINGS, output=output) == [first]
    Image.new("RGB", (64, 64), "blue").save(tmp_path / "a.png")
    with pytest.raises(RunError, match="contains 1 answer to other prompts"):
        predict(opened, prompts, SETTINGS, output=output)


@only_gemma
def test_samples_of_equal_prompts_with_other_pictures_do_not_depend_on_each_other(
    kind, opened, tmp_path
):
    names = [pictures.picture(tmp_path / f"{seed}.png", seed=seed) for seed in range(2)]
    prompts = asked(tmp_path, [{"prompt": "<image> what?", "images": [name]} for name in names])
    sampling = replace(SETTINGS, do_sample=True, temperature=3.0)
    both = predict(opened, prompts, sampling)
    assert predict(opened, prompts[1:], sampling) == both[1:]
    assert both[0].text != both[1].text


@only_gemma
@pytest.mark.parametrize("name", ["none.png", "https://example.com/a.png", "../a.png"])
def test_a_picture_that_cannot_be_read_is_an_error_with_its_row(kind, name, opened, tmp_path):
    prompts = asked(tmp_path, [{"prompt": "hello"}, {"prompt": "<image>", "images": [name]}])
    with pytest.raises(DataError, match=rf"rows\.jsonl: line 2: picture {name}: "):
        predict(opened, prompts, SETTINGS)


@only_gemma
def test_a_model_without_a_processor_refuses_pictures(kind, opened, tmp_path):
    name = pictures.picture(tmp_path / "a.png")
    prompts = asked(tmp_path, [{"prompt": "<image>", "images": [name]}])
    opened = replace(opened, media=None)
    with pytest.raises(DataError, match="line 1: the conversation has pictures, and this model re"):
        predict(opened, prompts, SETTINGS)
    with pytest.raises(DataError, match="only its text would be read here"):
        opened.codec.encode_prompt(prompts[0].messages)


@only_gemma
def test_predict_finds_pictures_beside_the_prompts(kind, base, tmp_path, monkeypatch):
    (tmp_path / "shots").mkdir()
    name = pictures.picture(tmp_path / "shots" / "a.png")
    asked(tmp_path, [{"prompt": "<image> what?", "images": [name]}])
    monkeypatch.chdir(tmp_path)
    command = ["predict", str(base), "generate.max_new_tokens=4", "--prompts", "rows.jsonl"]
    result = CliRunner().invoke(main, [*command, "--output", "out.jsonl"])
    assert "rows.jsonl: line 1: picture a.png: no such file" in result.output
    assert result.exit_code == 2
    command += ["--output", "out.jsonl", "--media-folder", "shots"]
    assert CliRunner().invoke(main, command, catch_exceptions=False).exit_code == 0
    answer = json.loads((tmp_path / "out.jsonl").read_text())
    assert answer["images"] == ["a.png"]
    assert answer["answer"]


@only_gemma
def test_the_path_of_a_picture_in_a_question_is_that_picture(kind, base, opened, tmp_path):
    name = tmp_path / "a b.png"
    pictures.picture(name)
    escaped = str(name).replace(" ", "\\ ")
    said = []
    for question in (f"'{name}' what's it?", f"{escaped} what's it?"):
        result = CliRunner().invoke(
            main, ["chat", str(base), "--max-new-tokens", "5", "--prompt", question]
        )
        assert result.exit_code == 0, result.output
        assert result.stderr.startswith(f"picture: {name}\n")
        said.append(result.stdout)
    asked(tmp_path, [{"prompt": "<image> what's it?", "images": [name.name]}])
    (expected,) = predict(
        opened, read_prompts(tmp_path / "rows.jsonl"), replace(SETTINGS, max_new_tokens=5)
    )
    assert said == [f"{expected.text}\n"] * 2


@only_gemma
def test_a_picture_stays_in_the_conversation(kind, opened, tmp_path):
    name = pictures.picture(tmp_path / "a.png")
    chat = Conversation(opened, SETTINGS)
    chat.ask(f"{MEDIUM} what?", media=[(tmp_path / name).read_bytes()])
    first = chat.messages[-1]
    chat.retry()
    assert chat.messages[-1] == first
    answer = chat.ask("and now?")
    assert len(pictures_of(answer.prompt_ids).pictures) == 1


def test_paths_in_a_question(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.png", "b c.JPG", "notes.txt"):
        (tmp_path / name).touch()
    found = with_typed_pictures('a.png, "b c.JPG" b\\ c.JPG none.png notes.txt it\'s a.png?')
    expected = f"{MEDIUM}, {MEDIUM} {MEDIUM} none.png notes.txt it's {MEDIUM}?"
    assert found == (expected, [Path("a.png"), *[Path("b c.JPG")] * 2, Path("a.png")])


@only_gemma
def test_chat_says_so_where_a_picture_is_not_looked_at(kind, opened, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pictures.picture(tmp_path / "a.png")
    said = []
    _ask(Conversation(replace(opened, media=None), SETTINGS), "what is a.png?", said.append)
    assert said == ["a.png: not looked at, only the name is read: this model reads text alone"]


@pytest.mark.parametrize("kind", ["qwen2_vl"], indirect=True)
@pytest.mark.parametrize("stage", some(["dpo", "rm", "kto"], ["dpo"]))
def test_a_run_of_preferences_about_pictures_is_evaluated_and_answers(
    kind, stage, base, tmp_path, monkeypatch
):
    rows = []
    for number, row in enumerate(pictures.rows(tmp_path)):
        question, answer = row["messages"]
        other = {"role": "assistant", "content": "no"}
        pair = {"messages": [question], "chosen": answer, "rejected": other}
        row = {**row, "good": number % 2 == 0} if stage == "kto" else {**pair, **row, **pair}
        rows.append(row)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = {"messages": "messages", "images": "images"}
    columns |= {"kto_tag": "good"} if stage == "kto" else {}
    info = {"file_name": "rows.jsonl", "formatting": "openai", "columns": columns}
    info |= {} if stage == "kto" else {"ranking": True}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"rows": info}))
    data = {"datasets": ["rows"], "eval_datasets": ["rows"]}
    train = {"max_steps": 1, "global_batch_size": 3, "micro_batch_size": 1}
    more = {"generate": {"max_new_tokens": 4}, "checkpoint": {"async_save": False}}
    pictures.recipe(tmp_path, base, stage=stage, train=train, **data, **more)
    path = str(next(tmp_path.glob("recipe*.yaml")))
    monkeypatch.chdir(tmp_path)

    def surefoot(*command):
        result = CliRunner().invoke(main, [*command], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    surefoot("train", path)
    report = json.loads(surefoot("eval", path, "--json"))
    assert "rewards/chosen" in report
    prompts = [{"prompt": "<image> what?", "images": ["1_0.png"]}] if stage != "rm" else rows
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    surefoot("predict", "run", "--prompts", "asked.jsonl", "--output", "out.jsonl")
    said = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    if stage != "rm":
        assert said[0]["answer"]
        (samples,) = (tmp_path / "run").glob("generations-*.jsonl")
        shown = [json.loads(line).get("pictures", []) for line in samples.read_text().splitlines()]
        # of kto, the rows that are good
        assert [len(each) for each in shown] == ([0, 2, 1] if stage == "kto" else [0, 1, 2] * 2)
        assert shown[1][0].startswith("data:image/png;base64,")
        return
    Image.new("RGB", (64, 64), "blue").save(tmp_path / "1_0.png")
    surefoot("predict", "run", "--prompts", "asked.jsonl", "--output", "other.jsonl")
    other = [json.loads(line) for line in (tmp_path / "other.jsonl").read_text().splitlines()]
    changed = [a["reward_chosen"] != b["reward_chosen"] for a, b in zip(said, other, strict=True)]
    assert changed == [False, True, False, False, False, False]


@pytest.mark.parametrize("kind", ["idefics3"], indirect=True)
def test_a_preview_shows_a_picture_in_place_of_its_tokens(kind, base, tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, pictures.rows(tmp_path))))
    pictures.recipe(tmp_path, base)
    command = ["preview", str(next(tmp_path.glob("recipe*.yaml")))]
    shown = CliRunner().invoke(main, command, catch_exceptions=False).output
    assert "User:" in shown
    assert shown.count("[2_0.png: 96 x 40, ") == shown.count("[2_1.png: 56 x 84, ") == 1
    assert "[[ it is number 2" in shown
    assert "<image>" not in shown
    page = tmp_path / "page.html"
    CliRunner().invoke(main, [*command, "--html", str(page)], catch_exceptions=False)
    assert page.read_text().count('<img src="data:image/png;base64,') == 3
