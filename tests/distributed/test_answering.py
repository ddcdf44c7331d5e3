"""Several processes write what one writes, each from its part of the weights."""

import json
import shutil
from contextlib import nullcontext
from functools import cache

import pytest
import torch

import folders
import ranks
from counting import Counting
from each import some
from project import Project, model_folder
from spread import save
from surefoot.data.text.prompts import Prompt, read_prompts
from surefoot.errors import RecipeError
from surefoot.generate.section import GenerateSection
from surefoot.parallel.section import ParallelSection
from surefoot.parallel.sharded_model import with_replicas
from surefoot.parallel.world import ALONE
from surefoot.plugins.mindspore.target import MindSporeFolder
from surefoot.plugins.mindspore.tensor_layout import ParallelConfig
from surefoot.recipe.recipe import load
from surefoot.run.parts import RunParts
from surefoot.storage import files
from surefoot.use import open_model, predict
from surefoot.use.evaluation import held_out, measure
from surefoot.use.exporting.conversion import convert
from surefoot.use.model_loading import PLAINLY, open_start
from surefoot.use.run_evaluation import adopt, evaluate_run, generations
from test_startup import begun, head

LIVELY = {"initializer_range": 0.3, "num_hidden_layers": 2}  # prompts matter to what is said
UNEVEN = {"intermediate_size": 130, **LIVELY}
TEXTS = ["Hi", "What is one plus one?", "", "A long, long story of the hen, told twice", "1 + 1"]
GREEDY = GenerateSection(
    max_new_tokens=9, batch_size=2, repetition_penalty=1.2, batch_invariant=True
)
SAMPLED = GenerateSection(
    max_new_tokens=9, batch_size=2, do_sample=True, top_k=40, top_p=0.9, batch_invariant=True
)
MESHES = [{"tp": 2}, {"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 1}]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "q.jsonl"
    rows = [{"prompt": text or "?"} for text in TEXTS]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return read_prompts(path)


def answers(world, folders_of, prompts, *sections, **options):
    """Of every model, by every section, with the probabilities of none too close to call."""
    found = []
    for folder in folders_of:
        opened = open_model(folder, world=world, **options)
        found += [predict(opened, prompts, section, seed=5) for section in sections]
    return found


@pytest.fixture(scope="module")
def alike(prompts):
    """A comparison with what one process says, which is computed once for all meshes."""

    @cache
    def alone(model, sections):
        return answers(ALONE, [model], prompts, *sections)

    def check(parallel, models, *, count=2, sections=(GREEDY, SAMPLED)):
        expected = [answer for model in models for answer in alone(model, sections)]
        found = ranks.run(count, lambda w: answers(w, models, prompts, *sections), **parallel)
        assert all(len({a.text for a in one}) > 3 for one in expected), "prompts must matter"
        for one in found:
            assert one == expected

    return check


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Tied and not, with grouped queries, with biases, with windows; an adapter; a mixture."""
    folder = tmp_path_factory.mktemp("models")
    kinds = {"llama": {}, "qwen2": {}, "qwen3": {}, "tied": {"tie_word_embeddings": True}}
    made = [
        folders.save_model(folder / n, "llama" if n == "tied" else n, **changes, **UNEVEN)
        for n, changes in kinds.items()
    ]
    folders.save_model(folder / "mixture", "mixtral", **LIVELY)
    folders.save_adapter(made[1], folder / "adapter")
    folders.save_adapter(made[0], folder / "grown", template=folders.CHATML, extra=("<a>",))
    return [*made, folder / "mixture", folder / "adapter", folder / "grown"]


@pytest.mark.parametrize("parallel", some(MESHES, MESHES[:2]), ids=str)
def test_two_processes_say_what_one_says(parallel, models, alike):
    some = (1, 3, 4, 6) if "tp" in parallel else (1, 5)  # below, four processes have all of them
    alike(parallel, [models[i] for i in some])


@pytest.mark.proof
@pytest.mark.parametrize(
    "parallel",
    [{"tp": 4}, {"tp": 2, "dp_shard": 2}, {"tp": 2, "dp_replicate": 2}],
    ids=str,
)
def test_four_processes_say_what_one_says(parallel, models, alike, tmp_path):
    alike(parallel, models, count=4)
    sizes = {"sliding_window": 64, **LIVELY}
    more = [folders.save_model(tmp_path / k, k, **sizes) for k in ("gemma2", "mistral", "phi3")]
    alike(parallel, more, count=4)


def test_bfloat16_is_read_and_multiplied_as_it_is(models, prompts):
    """Sums in another order round otherwise, so that only the types can be compared."""

    def work(world):
        opened = open_model(models[1], world=world, dtype="bfloat16")
        return {p.dtype for p in opened.model.parameters()}, len(predict(opened, prompts, GREEDY))

    assert ranks.run(2, work, tp=2) == [({torch.bfloat16}, len(TEXTS))] * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One model as everybody keeps it."""
    folder = tmp_path_factory.mktemp("forms")
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, **LIVELY}
    base = folders.save_model(folder / "base", "qwen2", **sizes)
    wanted = {
        "full": MindSporeFolder(names="legacy-fused"),
        "ranks": MindSporeFolder(
            layout="distributed", parallel_config=ParallelConfig(2, 2), names="legacy-fused"
        ),
        "iteration": MindSporeFolder(
            layout="distributed", parallel_config=ParallelConfig(1, 4), iteration=True
        ),
    }
    for name, form in wanted.items():
        convert(base, folder / name, form)
    bare = folder / "bare"  # the weights without anything beside them
    shutil.copytree(folder / "ranks", bare, ignore=shutil.ignore_patterns("*.json", "*.jinja"))
    return folder


@pytest.mark.proof
@pytest.mark.parametrize(
    "parallel", [{"tp": 2}, pytest.param({"dp_shard": 2}, marks=pytest.mark.proof)], ids=str
)
def test_weights_of_mindspores_ranks_are_read_without_a_merge(parallel, folder, prompts):
    expected = answers(ALONE, [folder / "base"], prompts, GREEDY)

    def work(world):
        found = answers(
            world, [folder / n for n in ("full", "ranks", "iteration")], prompts, GREEDY
        )
        beside = answers(world, [folder / "base"], prompts, GREEDY, weights=folder / "bare")
        return [*found, *beside]

    for found in ranks.run(2, work, **parallel):
        assert found == expected * 4


def test_one_process_takes_weights_from_elsewhere_too(folder, prompts):
    assert not (folder / "bare" / "config.json").exists()
    expected = answers(ALONE, [folder / "base"], prompts, GREEDY)
    found = answers(ALONE, [folder / "base"], prompts, GREEDY, weights=folder / "bare")
    assert found == expected


def test_a_checkpoint_of_two_ranks_answers_in_two_of_another_mesh(folder, alike):
    ranks.run(2, lambda w: save(begun(w, folder / "base"), folder, "distributed").name, tp=2)
    assert (folder / "checkpoint-0" / "rank_00001").is_dir()
    for file in (folder / "base").iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder / "checkpoint-0")
    for parallel in MESHES[:2]:
        alike(parallel, [folder / "checkpoint-0"], sections=(GREEDY,))


@pytest.mark.proof
@pytest.mark.parametrize("parallel", some(MESHES[:2], MESHES[1:2]), ids=str)
def test_a_process_reads_what_it_holds_and_no_more(parallel, tmp_path, monkeypatch):
    folders.save_model(tmp_path, "qwen2", dtype=torch.bfloat16, **UNEVEN)
    whole = sum(p.numel() for p in open_model(tmp_path).model.parameters())

    def work(world):
        monkeypatch.setattr(files, "os", counting := Counting(tmp_path / "model.safetensors"))
        opened = open_model(tmp_path, world=world)
        held = sum(p.to_local().numel() for p in opened.model.parameters())
        return held, counting.count

    found = ranks.run(2, work, **parallel)
    for held, count in found:  # bytes of bfloat16; the head of the file is looked at more than once
        assert count - 2 * held < 3 * head(tmp_path)
    assert max(held for held, _ in found) <= 1.05 * whole / 2


def test_the_cache_holds_the_heads_that_are_here(models):
    def work(world):
        model = open_model(models[2], world=world).model
        found = model(torch.tensor([[5, 6, 7]]), use_cache=True)
        return found.past_key_values.layers[0].keys.shape[1], found.logits.shape[-1]

    assert ranks.run(2, work, tp=2) == [(1, 259), (1, 259)]


def test_processes_beyond_a_model_are_copies():
    found = [with_replicas(ParallelSection(tp=2, num_processes=8), n) for n in (2, 8)]
    assert [(s.tp, s.dp_shard, s.dp_replicate) for s in found] == [(2, 1, 1), (2, 1, 4)]
    assert [*with_replicas(ParallelSection()).axes(1).values()] == [1, 1, 1, 1]
    assert [*with_replicas(ParallelSection(dp_shard=2), 4).axes(4).values()] == [1, 2, 2, 1]


def test_an_answer_of_nothing_is_kept(models, prompts):
    """A copy that was not asked has the empty answer; so has a model that stops at once."""
    stops = [Prompt("x", prompts[0].messages)]

    def work(world):
        opened = open_model(models[0], world=world)
        first = predict(opened, stops, GenerateSection(max_new_tokens=1))
        return [answer.text for answer in first]

    one, two = ranks.run(2, work, dp_replicate=2)
    assert one == two


def quiet(_title, _count):
    return nullcontext(lambda _: None)


def figures(world, recipe):
    """Loss and answers on what the recipe holds out, of what its training begins with."""
    start = RunParts.to_measure(recipe)
    opened, parts = adopt(open_start(start, world), recipe)
    (source,) = held_out(start)
    found = generations(opened, parts, source.examples)
    return measure(opened, parts, source.examples), [answer.answer for answer in found]


@pytest.mark.proof
@pytest.mark.parametrize("packing", [pytest.param(False, marks=pytest.mark.proof), True])
def test_an_evaluation_of_two_processes_is_that_of_one(packing, models, tmp_path):
    recipe = load(
        folders.save_recipe(
            tmp_path,
            model={"path": str(models[1]), "adapter": str(models[5])},
            data={"dataset_dir": str(folders.save_data(tmp_path / "data")), "packing": packing},
            method={"lora": {}},
        )
    )
    expected, answered = figures(ALONE, recipe)
    assert len(set(answered)) > 1
    for parallel in MESHES:
        for found, answers in ranks.run(2, lambda w: figures(w, recipe), **parallel):
            assert found == pytest.approx(expected, abs=1e-5, rel=1e-5)
            assert answers == answered


@pytest.mark.parametrize("packing", [pytest.param(False, marks=pytest.mark.proof), True])
def test_a_reference_on_two_ranks_computes_what_it_does_on_one(packing, tmp_path):
    reference = model_folder(tmp_path / "reference", **LIVELY)
    made = Project(
        tmp_path / "project",
        stage={"dpo": {"reference": str(reference)}},
        data={"datasets": ["pairs"], "val_size": 4, "packing": packing},
        generate={"max_new_tokens": 2},
    )

    def work(world, cache, parallel=PLAINLY):
        recipe = load(made.recipe, [f"data.cache_dir={tmp_path / cache}"])
        report = evaluate_run(recipe, world, parallel, progress=quiet, model="base")
        return report.overall.metrics

    expected = work(ALONE, "one")
    assert expected["rewards/margins"] != 0, "the reference is another model"
    for number, parallel in enumerate(MESHES):
        section = with_replicas(ParallelSection(num_processes=2, **parallel), 2)
        for found in ranks.run(2, lambda w: work(w, f"two{number}", section), **parallel):  # noqa: B023
            assert found == pytest.approx(expected, abs=1e-4, rel=1e-4)


def test_a_quantized_model_is_for_one_process(models, tmp_path):
    recipe = folders.save_recipe(tmp_path, method={"lora": {}})
    quantized = load(recipe, ["model.quantization_bit=8"])

    def work(world):
        with pytest.raises(
            RecipeError, match="a quantized model can be opened on one rank only, not on 2"
        ):
            open_start(RunParts.to_measure(quantized), world)

    ranks.run(2, work, tp=2)
