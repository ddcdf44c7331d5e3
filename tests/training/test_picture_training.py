"""Batches with pictures: packed rows have the values of documents alone, on any number of ranks."""

import json
import math
import os
import shutil
import weakref
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

import pictures
import ranks
import spread
from each import some
from pictures import collation_of, picture_probes
from project import assert_same
from surefoot.batch import IGNORE_INDEX, SCORES, Batch
from surefoot.data.media.batch_media import ModelInputs, check_inputs
from surefoot.data.media.files import seen_in
from surefoot.data.order.loader import PictureReader, Prefetch
from surefoot.data.order.micro_batches import without_labels
from surefoot.data.rows.formats import TRL, OpenAI
from surefoot.data.text.collation import collate, split
from surefoot.errors import DataError, ModelError
from surefoot.model import isolation
from surefoot.model.isolation import PromptSharing, use_packed
from surefoot.model.outputs import compute, logprob_head_of
from surefoot.model.packed_attention import MASKS
from surefoot.network.heads import add_heads
from surefoot.parallel.world import ALONE
from surefoot.recipe.recipe_data import open_codec
from surefoot.run.assembly import build
from surefoot.stages._kto import log_probabilities, mismatched
from surefoot.training import losses


@pytest.fixture(scope="module", params=some(pictures.KINDS, ["qwen2_vl", "gemma3"]))
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def prepared(kind, tmp_path_factory):
    """The recipe, the codec, and items with no, one and two pictures at different offsets."""
    folder = tmp_path_factory.mktemp(kind)
    base = pictures.save_model(folder / "base", kind)
    made = pictures.recipe(folder, base)
    codec = open_codec(made, base)
    return made, codec, pictures.items(codec, folder)


def alone(model, collation, item):
    """The log-probabilities of an item, by transformers' own forward pass of it alone."""
    batch = collation.batch([item]).read()
    model.set_attn_implementation("sdpa")
    logits = model(input_ids=batch.input_ids, use_cache=False, **batch.media).logits[0]
    labels = batch.labels[0, 1:]
    at = (labels != IGNORE_INDEX).nonzero()[:, 0]
    return logits[at].log_softmax(-1).gather(1, labels[at][:, None])[:, 0]


def together(model, batch):
    head = logprob_head_of(model)
    assert head is not None, "full logits would be computed"
    return compute(model, batch, pictures.LOGPS, head=head).logps


def gradients(model):
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("packing", [True, False])
def test_a_batch_has_the_values_and_gradients_of_its_documents_alone(kind, prepared, packing):
    made, codec, items = prepared
    collation = collation_of(made, codec)
    model = pictures.model(kind)
    expected = torch.cat([alone(model, collation, item) for item in items])
    expected.mul(expected.detach().cos()).sum().backward()
    expected_gradients = gradients(model)
    if packing:
        use_packed(model, 200, pictures.probes(made, codec))
    batch = pictures.padded(collation, packing).batch(items).read().located()
    values = together(model, batch)
    assert (values - expected).abs().max() <= 2e-6 * expected.abs().max()
    values.mul(values.detach().cos()).sum().backward()
    found = gradients(model)
    assert found.keys() == expected_gradients.keys()
    for name, gradient in found.items():
        # softmax does not see a bias of keys: its gradient is rounding, of the size of its weight's
        of = name.replace("k_proj.bias", "k_proj.weight")
        bound = 1e-5 * expected_gradients[of].abs().max() + 1e-9
        assert (gradient - expected_gradients[name]).abs().max() <= bound, name


@pytest.mark.parametrize("kind", ["gemma3"], indirect=True)
def test_the_causal_kernel_is_refused_where_pictures_see_themselves(kind, prepared, monkeypatch):
    made, codec, items = prepared
    probes = pictures.probes(made, codec)
    model = pictures.model(kind)
    use_packed(model, 200)
    assert model.config._attn_implementation == "surefoot_packed_sdpa"
    batch = collation_of(made, codec).batch(items).read().located()
    expected = torch.cat([alone(pictures.model(kind), collation_of(made, codec), i) for i in items])
    error = (together(model, batch) - expected).abs().max() / expected.abs().max()
    assert error > 1e-5, "it is wrong, and a check with text alone does not see it"
    use_packed(model, 200, probes)
    assert model.config._attn_implementation == MASKS
    use_packed(half := pictures.model(kind).bfloat16(), 200, probes)
    assert half.config._attn_implementation == MASKS, "whatever the type rounds"
    monkeypatch.setattr(isolation, "MASKS", "surefoot_packed_sdpa")
    with pytest.raises(ModelError, match="other values than alone, if it has pictures"):
        use_packed(pictures.model(kind), 200, probes)


def test_a_spare_document_changes_nothing_and_its_gradients_in_the_tower_are_zero(kind, prepared):
    made, codec, items = prepared
    collation = collation_of(made, codec)
    text = [item for item in items if not len(item["media"])]
    model = pictures.model(kind)
    use_packed(model, 200, pictures.probes(made, codec))
    plain = together(model, collation.batch(text).read().located())
    assert collation.batch(text).pictures is None
    assert collation.among(text, 2) is collation, "there is no picture on any rank"
    assert collation.among(items, 1) is collation, "there is no other rank"
    batch = collation.among(items, 2).batch(text).read().located()
    assert "pixel_values" in batch.media
    values = together(model, batch)
    assert torch.equal(values, plain)
    values.sum().backward()
    reached = gradients(model)
    tower = [n for n in reached if "vision" in n or "visual" in n]
    assert tower
    assert all(not reached[name].any() for name in tower)
    assert len(collation.among(items, 2).batch(items).labels[0]) == len(
        collation.batch(items).labels[0]
    )


def test_a_masked_document_has_no_label(prepared):
    _, codec, _ = prepared
    assert set(without_labels(codec.picture_probe()[0])["labels"]) == {IGNORE_INDEX}


@pytest.fixture
def run(kind, tmp_path):
    """Build a trainer of a run with rows of text and of pictures, from another folder each time."""
    base = pictures.save_model(tmp_path / "base", kind)
    rows = pictures.rows(tmp_path, 9)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def made(world=ALONE, resume=None, **changes):
        changes = {"optim": {"adamw": {"learning_rate": 1e-2}}, **changes}
        recipe = pictures.recipe(tmp_path, base, cutoff_len=512, **changes)
        return build(recipe, world=world, resume=resume)

    return made


@pytest.mark.parametrize("kind", [pytest.param("qwen2_vl", marks=pytest.mark.proof), "gemma3"])
def test_two_ranks_with_and_without_pictures_train_as_one_does(kind, run):
    """Micro-batches of one row: most steps have a rank without a picture."""
    train = {"micro_batch_size": 1, "global_batch_size": 2}
    slow = {"optim": {"adamw": {"learning_rate": 1e-4}}, "train": train}
    sharded = {"parallel": {"dp_shard": 2}, **slow}
    one = spread.learn(run(**slow), 4)
    two, other = ranks.run(2, lambda world: spread.learn(run(world, **sharded), 4), dp_shard=2)
    assert two == other
    for (loss, norm), (expected_loss, expected_norm) in zip(two, one, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-4)
        assert norm == pytest.approx(expected_norm, rel=1e-3)


@pytest.mark.parametrize(
    ("has_cache", "kind"),
    some([*product((True, False), ("qwen2_vl", "gemma3"))], [(False, "qwen2_vl")]),
)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(kind, has_cache, run, tmp_path):
    train = {"max_steps": 4, "output_dir": str(tmp_path / "whole")}
    checkpoint = {"save_steps": 2, "async_save": False}
    run(train=train, checkpoint=checkpoint).fit()
    again = tmp_path / "again"
    if not has_cache:
        shutil.rmtree(tmp_path / "cache")
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", again / "checkpoint-2")
    train["output_dir"] = str(again)
    run(train=train, checkpoint=checkpoint, resume=again / "checkpoint-2").fit()
    for path in sorted((tmp_path / "whole" / "checkpoint-4").rglob("*.safetensors")):
        other = again / "checkpoint-4" / path.relative_to(tmp_path / "whole" / "checkpoint-4")
        values, expected = load_file(other), load_file(path)
        assert values.keys() == expected.keys()
        assert all(torch.equal(values[name], expected[name]) for name in expected), path.name


@pytest.mark.parametrize("kind", ["llava"])
def test_a_checkpoint_opens_with_its_processor_and_answers(kind, run, tmp_path):
    run(checkpoint={"save_steps": 4, "async_save": False}).fit()
    folder = tmp_path / "run" / "checkpoint-4"
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    image = Image.open(tmp_path / "1_0.png")
    inputs = processor(text="USER: <image>\nwhat ASSISTANT: ", images=image, return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=3).shape[1] == inputs["input_ids"].shape[1] + 3


@pytest.mark.parametrize("kind", [pytest.param("gemma3", marks=pytest.mark.proof), "qwen2_vl"])
def test_a_run_of_text_is_as_if_the_model_had_no_processor(kind, run, tmp_path):
    """Of the same rows, and of rows that have no column of pictures."""
    rows = [row for row in pictures.rows(tmp_path, 9) if not row["images"]]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train = {"global_batch_size": 2}
    with_processor = run(train=train)
    assert with_processor.policy.module.config._attn_implementation == "surefoot_packed_sdpa"
    found = spread.learn(with_processor, 3)
    for path in (tmp_path / "base").glob("*processor_config.json"):
        path.unlink()
    plain = [{"messages": row["messages"]} for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, plain)))
    without = run(train=train)
    assert spread.learn(without, 3) == found
    expected = with_processor.policy.module.state_dict()
    assert_same(without.policy.module.state_dict(), expected)


@pytest.mark.parametrize("kind", ["qwen2_vl"])
def test_a_processor_that_does_something_else_with_pixels_is_refused(kind, run, tmp_path):
    """The tokens are the same, so the examples do not show it."""
    options = {"checkpoint": {"save_steps": 2, "async_save": False}}
    run(train={"max_steps": 2}, **options).fit()
    for path in (tmp_path / "base").glob("*processor_config.json"):
        content = json.loads(path.read_text())
        settings = content.get("image_processor", content)
        settings["image_mean"] = [0.9, 0.1, 0.3]
        path.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"processor of the model does with pictures has changed"):
        run(train={"max_steps": 4}, resume=tmp_path / "run" / "checkpoint-2", **options)


@pytest.mark.parametrize("kind", ["llava"])
def test_a_picture_that_changes_while_a_run_waits_stops_it_by_name(kind, run, tmp_path):
    trainer = run()
    for number in range(9):
        for path in tmp_path.glob(f"{number}_*.png"):
            pictures.picture(path, (60, 60), seed=99)
    with pytest.raises(DataError, match=r"picture \d_\d\.png: it has changed since its row"):
        spread.learn(trainer, 4)


@pytest.mark.parametrize("kind", ["qwen2_vl"])
def test_rows_with_pictures_are_refused_where_ranks_share_their_tokens(kind, run):
    for parallel in ({"tp": 2, "sequence_parallel": True}, {"dp_shard": 2, "cp": 2}):
        where = rf"the row has pictures, and ranks of parallel\.{[*parallel][1]} cannot share them"
        with pytest.raises(DataError, match=where):
            run(parallel=parallel)


@pytest.mark.parametrize("kind", ["qwen2_vl"])
def test_noise_on_embeddings_is_that_of_each_document(kind, run):
    (loss, _), *_ = spread.learn(run(model={"neftune_noise_alpha": 5.0}), 1)
    assert loss != spread.learn(run(), 1)[0][0]


@pytest.mark.parametrize("kind", ["gemma3"], indirect=True)
def test_a_cap_that_the_model_does_not_apply_is_not_applied(kind, prepared):
    """Gemma 3 with pictures has the cap of Gemma 2 in its configuration alone."""
    made, codec, items = prepared
    model = pictures.model(kind)
    model.config.get_text_config().final_logit_softcapping = 0.1
    collation = collation_of(made, codec)
    expected = torch.cat([alone(model, collation, item) for item in items])
    values = together(model, pictures.padded(collation).batch(items).read().located())
    torch.testing.assert_close(values, expected)


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_vl"], indirect=True)
def test_inputs_that_the_processor_gives_otherwise_are_refused_by_name(kind, prepared, monkeypatch):
    processor = prepared[1].media.processor
    kinds = {"gemma3": "token_type_ids", "qwen2_vl": "mm_token_type_ids"}[kind]
    model = ModelInputs(frozenset({"pixel_values", kinds}))
    check_inputs(processor, model)
    monkeypatch.setattr(
        type(processor.processor), "create_mm_token_type_ids", lambda _, ids: [[0] * len(ids[0])]
    )
    with pytest.raises(ModelError, match=f"Processor gives its model {kinds} of a row with"):
        check_inputs(processor, model)


@pytest.mark.parametrize("kind", ["qwen2_vl"], indirect=True)
def test_positions_that_are_computed_otherwise_are_refused_by_name(kind, prepared):
    def without_kinds(input_ids, image_grid_thw): ...
    def by_sizes(input_ids, mm_token_type_ids, image_grid_thw, pixel_values): ...

    processor = prepared[1].media.processor
    for rope_index, what in ((without_kinds, "the grids"), (by_sizes, "pixel_values")):
        with pytest.raises(ModelError, match=f"computes positions from {what}"):
            check_inputs(processor, ModelInputs(frozenset(), rope_index))


@pytest.mark.parametrize("kind", ["llava"])
def test_a_processor_that_cannot_be_opened_stops_rows_with_pictures_alone(kind, run, tmp_path):
    unknown = json.dumps({"image_processor_type": "NoSuchImageProcessor"})
    (tmp_path / "base" / "preprocessor_config.json").write_text(unknown)
    with pytest.raises(DataError, match=r"the row has pictures, and .*cannot open its processor"):
        run()
    rows = [row for row in pictures.rows(tmp_path, 9) if not row["images"]]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run(train={"global_batch_size": 2})


def ranked(folder, count=6):
    """Rows of LLaMA-Factory's ranking form, and of TRL's, with none, one and two pictures."""
    made = []
    for row in pictures.rows(folder, count):
        question, answer = row["messages"]
        other = {"role": "assistant", "content": "no, it is another one"}
        both = {"chosen": answer, "rejected": other, "images": row["images"]}
        if len(made) % 2:
            both = {n: [v] if n != "images" else v for n, v in both.items()}
            made.append({"prompt": [question], **both})
        else:
            made.append({"messages": [question], **both})
    return made


@pytest.fixture
def pairs(kind, tmp_path):
    """The recipe of dpo, its codec, and its items."""
    base = pictures.save_model(tmp_path / "base", kind)
    made = pictures.recipe(tmp_path, base, stage="dpo")
    codec = open_codec(made, base)
    forms = (OpenAI(ranking=True), TRL(ranking=True))
    examples = [forms[i % 2].read(row) for i, row in enumerate(ranked(tmp_path))]
    return made, codec, [item for found in made.stage.encode(examples, codec) for item in found]


@pytest.mark.parametrize(
    "form", ["shared", pytest.param("apart", marks=pytest.mark.proof), "padded"]
)
def test_both_responses_to_a_picture_have_the_values_that_each_has_alone(kind, pairs, form):
    made, codec, items = pairs
    model = pictures.model(kind)
    single = replace(collation_of(made, codec), collate=collate)
    expected = torch.stack(
        [alone(model, single, each).sum() for item in items for each in split(item)]
    )
    collation = pictures.padded(collation_of(made, codec), form != "padded")
    if form != "padded":
        may_share = use_packed(model, 200, picture_probes(made, codec))
        if form == "shared" and not may_share:
            assert kind == "gemma3", "its pictures see each other"
            return
        collation = collation.for_model(PromptSharing(form == "shared"))
    batch = collation.batch(items).read().located()
    assert (batch.branches is not None) == (form == "shared")
    values = together(model, batch)
    found = losses.sums_of_answers(values, batch.extras["answer"], 2 * len(items))
    assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()
    counts = [sum(seen.tokens for seen in seen_in(item)) for item in items]
    places = sum(int((batch.input_ids == i).sum()) for i in codec.media.processor.token_ids)
    assert places == sum(counts) * (1 if form == "shared" else 2)


@pytest.mark.parametrize("kind", ["qwen2_vl"])
def test_a_masked_pair_with_a_picture_changes_no_other(kind, pairs):
    made, codec, items = pairs
    text = [{**item, "reference": [0.0, 0.0]} for item in items if not len(item["media"])]
    collation = collation_of(made, codec)
    model = pictures.model(kind)
    collation = collation.for_model(PromptSharing(use_packed(model, 200)))
    plain = collation.batch(text).read().located()
    spared = collation.among(items, 2).batch(text).read().located()
    assert "pixel_values" in spared.media
    assert torch.equal(together(model, spared), together(model, plain))
    assert spared.extras["answer_lengths"].tolist() == [
        *plain.extras["answer_lengths"].tolist(),
        0,
        0,
    ]


@pytest.mark.parametrize("kind", ["qwen2_vl", pytest.param("gemma3", marks=pytest.mark.proof)])
def test_preferences_about_pictures_are_learned_on_one_rank_and_on_two(kind, run, tmp_path):
    rows = [row for row in ranked(tmp_path, 12) if "messages" in row]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    info = {"rows": {"file_name": "rows.jsonl", "ranking": True, "formatting": "openai"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    asked = {"stage": "dpo", "datasets": ["rows"], "train": {"micro_batch_size": 1}}
    one = spread.learn(run(**asked), 4)
    assert one[0][0] == pytest.approx(math.log(2), rel=1e-5)
    assert one[-1][0] < one[0][0]
    both = ranks.run(2, lambda world: spread.learn(run(world, **asked), 4), dp_shard=2)
    for found in both:
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in one], rel=1e-4)


@pytest.mark.parametrize(
    "form", ["shared", pytest.param("apart", marks=pytest.mark.proof), "padded"]
)
@pytest.mark.parametrize("kind", some(["qwen2_vl", "gemma3"], ["gemma3"]))
def test_rewards_of_responses_to_a_picture_are_those_of_each_alone(kind, form, tmp_path):
    base = pictures.save_model(tmp_path / "base", kind)
    made = pictures.recipe(tmp_path, base, stage="rm")
    codec, row = open_codec(made, base), OpenAI(ranking=True)
    examples = [row.read(each) for each in ranked(tmp_path) if "messages" in each]
    items = [item for found in made.stage.encode(examples, codec) for item in found]
    assert any(seen_in(item) for item in items)
    model = pictures.model(kind)
    head = add_heads(model, {"values": 1}).values
    torch.nn.init.normal_(head.weight)
    expected = []
    for item in (conversation for pair in items for conversation in split(pair)):
        batch = replace(collation_of(made, codec), collate=collate).batch([item]).read()
        given = {"input_ids": batch.input_ids, "use_cache": False, **batch.media}
        hidden = model(**given, output_hidden_states=True).hidden_states[-1]
        expected.append(head(hidden[0, -1])[0])
    expected = torch.stack(expected)
    collation = pictures.padded(collation_of(made, codec), form != "padded")
    if form != "padded":
        may_share = use_packed(model, 200, picture_probes(made, codec))
        collation = collation.for_model(PromptSharing(form == "shared" and may_share))
    batch = collation.batch(items).read().located()
    found = compute(model, batch, SCORES, head=logprob_head_of(model), values=head).values
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", ["qwen2_vl", pytest.param("gemma3", marks=pytest.mark.proof)])
def test_marked_responses_to_pictures_are_compared_with_the_reference(kind, run, tmp_path):
    """Before the first update each ratio is 0, and so each loss 0.5, if both see the picture."""
    rows = [{**row, "good": n % 2 == 0} for n, row in enumerate(pictures.rows(tmp_path, 9))]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = {"messages": "messages", "images": "images", "kto_tag": "good"}
    info = {"rows": {"file_name": "rows.jsonl", "formatting": "openai", "columns": columns}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    settings = {"stage": "kto", "datasets": ["rows"], "train": {"global_batch_size": 6}}
    trainer = run(**settings)
    window = trainer.windows.next_turn().window
    assert any(batch.pictures is not None for batch in window)
    assert spread.learn(run(**settings), 1)[0][0] == pytest.approx(0.5, rel=1e-5)
    examples = [OpenAI(kto_tag="good").read(row) for row in rows]
    codec, stage = trainer.evaluation.context((0, 0)).codec, trainer.stage
    items = [item for found in stage.encode(examples, codec) for item in found]
    pairs = mismatched(items, 512)
    assert [seen_in(pair) for pair in pairs] == [seen_in(item) for item in items]
    collation = collation_of(pictures.recipe(tmp_path, tmp_path / "base", stage="kto"), codec)
    model = pictures.model(kind)
    alone_logps = [alone(model, replace(collation, collate=collate), pair).sum() for pair in pairs]
    probed = pictures.recipe(tmp_path, tmp_path / "base")
    use_packed(model, 200, pictures.probes(probed, codec))
    batch = collation.batch(pairs).read().located()
    outputs = compute(model, batch, pictures.LOGPS, head=logprob_head_of(model))
    torch.testing.assert_close(log_probabilities(outputs, batch), torch.stack(alone_logps))


@pytest.mark.parametrize("kind", ["llava"])
def test_other_stages_refuse_rows_with_pictures_by_name(kind, tmp_path):
    base = pictures.save_model(tmp_path / "base", kind)
    made = pictures.recipe(tmp_path, base, stage={"grpo": {"reward": "rewards.py:one"}})
    codec = open_codec(made, base)
    why = "the row has pictures, and only stage: sft, dpo, rm and kto read them"
    with pytest.raises(DataError, match=why):
        made.stage.encode([OpenAI().read(pictures.rows(tmp_path)[2])], codec)


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["idefics3"])
def test_memory_is_flat_over_many_pictures(kind, run, tmp_path):
    """Of 300 pictures in 75 steps, the pixels of one micro-batch are alive."""
    row = pictures.rows(tmp_path)[1]
    name = row["images"][0]
    rows = [{**row, "images": [f"{number}.png"]} for number in range(300)]
    for number in range(300):
        shutil.copy(tmp_path / name, tmp_path / f"{number}.png")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trainer, alive = run(), weakref.WeakSet()
    for _ in range(75):
        for batch in trainer.windows.next_turn().window:
            assert not alive, "of a micro-batch that has run"
            assert not batch.media
            here = batch.to(torch.device("cpu"))
            alive.add(here.media["pixel_values"])
            del here
        trainer.state.global_step += 1
    assert trainer.windows.loader.epoch == 1


@pytest.mark.parametrize("kind", ["qwen2_vl"])
def test_pictures_that_threads_read_ahead_change_no_bit(kind, run):
    train = {"global_batch_size": 6, "micro_batch_size": 2}
    expected, made = run(train=train), run(train=train)
    reader, read = PictureReader(Batch.located), []
    made.windows.loader.prefetch = Prefetch(lambda w: read.append(len(w)) or reader.queued(w))
    assert spread.learn(made, 5) == spread.learn(expected, 5)
    assert read == [3, 2] * 3, "one window more than was trained on"
    assert_same(made.policy.module.state_dict(), expected.policy.module.state_dict())


@pytest.mark.parametrize("kind", ["llava"], indirect=True)
def test_placeholders_without_their_pictures_are_not_run(kind, prepared):
    """A model would compute something of them, and say nothing."""
    made, codec, items = prepared
    with pytest.raises(AssertionError, match="the pictures of a batch were not read"):
        together(pictures.model(kind), collation_of(made, codec).batch(items).located())


def resident():
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.proof
@pytest.mark.parametrize("reads_ahead", [False, True], ids=["on the spot", "ahead"])
@pytest.mark.parametrize("kind", ["idefics3", "qwen2_vl"])
def test_proof_that_memory_is_flat_over_ten_thousand_pictures(kind, reads_ahead, run, tmp_path):
    """Of 10,000 sizes, in windows of 500, whose pixels are 94 MiB in Idefics 3; all are 1.9 GiB."""
    row = pictures.rows(tmp_path)[1]
    sizes = [(40 + number % 100, 40 + number // 100) for number in range(10_000)]
    for number, size in enumerate(sizes):
        Image.new("RGB", size, (number % 256, 0, 0)).save(tmp_path / f"{number}.png")
    rows = [{**row, "images": [f"{number}.png"]} for number in range(10_000)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trainer = run(train={"global_batch_size": 500, "micro_batch_size": 5})
    if reads_ahead:
        reader = PictureReader(Batch.located)
        trainer.windows.loader.prefetch = Prefetch(reader.queued)
    spread.learn(trainer, 2)
    start = resident()
    for _ in range(19):
        spread.learn(trainer, 1)
        assert resident() - start < 16 << 20
    assert trainer.windows.loader.epoch == 1
