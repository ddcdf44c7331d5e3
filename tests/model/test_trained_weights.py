"""The table of what is trained: every weight is in it once, with the reason if it is frozen."""

import pytest

import mixtures
import tiny
from surefoot.methods import Freeze, Full, LoRA
from surefoot.network._coverage import FULL, coverage, table


def rows_of(method, model):
    wrapped = method.apply(model)
    return coverage(wrapped, model)


@pytest.mark.parametrize(
    "method", [LoRA(), LoRA(targets=("o_proj",)), Freeze(), Full()], ids=lambda m: type(m).__name__
)
def test_shares_are_of_all_weights_of_the_model_without_its_adapter(method):
    model = mixtures.model("deepseek_v3")
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    rows = rows_of(method, model)
    assert sum(row.share for row in rows) == pytest.approx(1)
    found = sum(row.share for row in rows if "mlp.experts" in row.modules)
    assert found == pytest.approx(experts / total)


def test_what_is_frozen_says_why():
    method = LoRA(modules_to_save=("lm_head",))
    found = {row.modules: row.trained for row in rows_of(method, mixtures.model("jamba"))}
    assert found == {
        "embed_tokens": "no: an embedding",
        "mamba: A_log, conv1d": "no: not a linear map",
        "norms, biases and other vectors": "no: not a matrix",
        "mamba: in_proj, x_proj, out_proj": "yes, by an adapter",
        "mamba: dt_proj": "no: its layer reads the weight itself, past any adapter",
        "feed_forward: gate_proj, up_proj, down_proj": "yes, by an adapter",
        "self_attn: q_proj, k_proj, v_proj, o_proj": "yes, by an adapter",
        "feed_forward: router": "no: a router",
        "feed_forward.experts: gate_up_proj, down_proj": "yes, by an adapter",
        "lm_head": "yes",
    }
    found = {r.modules: r.trained for r in rows_of(LoRA(targets=("q_proj",)), tiny.model())}
    assert found["mlp: gate_proj, up_proj, down_proj"] == "no: not among the targets"
    assert found["lm_head"] == "no: the output head"


def test_full_tuning_trains_every_row():
    assert {row.trained for row in rows_of(Full(), tiny.model())} == {FULL}


def test_the_table_is_aligned():
    lines = table(rows_of(Freeze(num_layers=1), tiny.model())).splitlines()
    assert lines[0].split() == ["modules", "of", "all", "weights", "trained"]
    assert len({line.index(" % ") for line in lines[1:]}) == 1
