"""oneDNN's products in place of torch's, beside float64 and torch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

import surefoot
from project import Project, assert_same, final_weights, losses
from surefoot.model import products

AMD, INTEL = "vendor_id\t: AuthenticAMD\n", "vendor_id\t: GenuineIntel\n"
LEFT = {  # [M, K]
    "contiguous": lambda m, k: torch.randn(m, k),
    "transposed": lambda m, k: torch.randn(k, m).t(),
    "sliced": lambda m, k: torch.randn(m, k + 3)[:, 2 : k + 2],
    "expanded": lambda m, k: torch.randn(1, k).expand(m, k),
}


@pytest.fixture
def onednn():
    library = products.register()
    yield
    library._destroy()
    products.register.cache_clear()


def num_onednn(run):
    """How many products of oneDNN ``run`` has."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run()
    return sum(e.name == "mkldnn::_linear_pointwise" for e in found.events())


def near(found, exact):
    return torch.allclose(found.double(), exact, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("m, k, n", [(257, 129, 301), (2048, 64, 128), (1025, 256, 33)])
def test_products_in_any_layout_are_those_of_float64(m, k, n, is_transposed, left, onednn):
    a_MK = LEFT[left](m, k)
    b_KN = torch.randn(n, k).t() if is_transposed else torch.randn(k, n)
    copies = not a_MK.is_contiguous()
    assert num_onednn(lambda: a_MK @ b_KN) == (n >= 128 or not copies)
    exact = a_MK.double() @ b_KN.double()
    added_MN, bias_N = torch.randn(m, n), torch.randn(n)
    assert near(a_MK @ b_KN, exact)
    for added in (bias_N, bias_N[:1].expand(n), added_MN):
        for beta, alpha in ((1, 1), (0.5, -2), (0, 3)):
            found = torch.addmm(added, a_MK, b_KN, beta=beta, alpha=alpha)
            assert near(found, beta * added.double() + alpha * exact)
            place = added.expand(m, n).clone()
            place.addmm_(a_MK, b_KN, beta=beta, alpha=alpha)
            assert near(place, beta * added.double() + alpha * exact)


def test_a_sum_of_which_nothing_is_kept_may_be_nan_before(onednn):
    a, b, nan = torch.randn(256, 256), torch.randn(256, 256), torch.full((256, 256), torch.nan)
    assert near(torch.addmm(nan, a, b, beta=0), a.double() @ b.double())
    assert near(nan.addmm_(a, b, beta=0), a.double() @ b.double())


def test_both_directions_of_a_layer_are_onednns(onednn):
    x_BTK = torch.randn(2, 512, 128, requires_grad=True)
    w_NK, bias_N = torch.randn(192, 128, requires_grad=True), torch.randn(192, requires_grad=True)
    g_BTN = torch.randn(2, 512, 192)
    assert num_onednn(lambda: F.linear(x_BTK, w_NK, bias_N).backward(g_BTN)) == 3
    exact = [t.detach().double().requires_grad_() for t in (x_BTK, w_NK, bias_N)]
    F.linear(*exact).backward(g_BTN.double())
    for found, wanted in zip((x_BTK, w_NK, bias_N), exact, strict=True):
        assert near(found.grad, wanted.grad)


SQUARE = torch.randn(256, 256)


@pytest.mark.parametrize(
    "a, b",
    [
        (SQUARE.double(), SQUARE.double()),
        (SQUARE.bfloat16(), SQUARE.bfloat16()),
        (SQUARE[:64, :64], SQUARE[:64]),  # small
        (torch.randn(2048, 8), torch.randn(8, 1024)),  # the ranks of adapters
        (SQUARE, torch.randn(256, 512)[:, ::2]),  # oneDNN has no fast kernel for these
        (SQUARE, torch.randn(256, 512)[:, 9:265]),
        (SQUARE, torch.randn(1, 256).expand(256, 256)),
        (SQUARE[:0], SQUARE),
        (SQUARE[:, :0], SQUARE[:0]),
        (SQUARE, SQUARE[:, :0]),
    ],
)
def test_all_other_products_are_torchs_to_the_bit(a, b, onednn):
    assert num_onednn(lambda: a @ b) == 0
    found = [
        a @ b,
        torch.addmm(b.new_ones(b.shape[1]), a, b),
        torch.ones_like(a @ b).addmm_(a, b, beta=2),
    ]
    products.register()._destroy()
    wanted = [
        a @ b,
        torch.addmm(b.new_ones(b.shape[1]), a, b),
        torch.ones_like(a @ b).addmm_(a, b, beta=2),
    ]
    assert all(map(torch.equal, found, wanted))


def test_shapes_and_types_that_torch_refuses_are_refused_in_its_words(onednn):
    for call in (
        lambda: torch.mm(SQUARE, torch.randn(255, 256)),
        lambda: torch.mm(SQUARE[None], SQUARE),
        lambda: torch.mm(SQUARE, SQUARE[0]),
        lambda: torch.mm(SQUARE, SQUARE.double()),
        lambda: torch.randn(2, 256, 256).addmm_(SQUARE, SQUARE),
        lambda: torch.randn(256).addmm_(SQUARE, SQUARE),
    ):
        with pytest.raises(RuntimeError, match=r"matrix|matrices|shapes|match|2D|dtype|size"):
            call()
    with FakeTensorMode():
        assert torch.mm(torch.empty(256, 256), torch.empty(256, 512)).shape == (256, 512)
    assert torch.mm(SQUARE.to("meta"), SQUARE.to("meta")).is_meta


@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_product_has_the_same_bits(threads, onednn):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a, b = torch.randn(512, 2048), torch.randn(2048, 256)
        assert len({(a @ b).numpy().tobytes() for _ in range(5)}) == 1
    finally:
        torch.set_num_threads(before)


def test_the_processor_decides():
    assert products.choose(AMD, "AVX512") == "oneDNN"
    assert products.choose("AMD64 Family 25 Model 97, AuthenticAMD", "AVX512") == "oneDNN"
    assert products.choose(AMD, "AVX2") == "torch"  # MKL's take as long
    assert products.choose(INTEL, "AVX512") == "torch"


@pytest.mark.parametrize("vendor", [AMD, INTEL])
def test_a_process_has_the_products_that_are_faster_on_its_processor(vendor, monkeypatch):
    monkeypatch.setattr(products, "_processor", lambda: vendor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    try:
        products.use_chosen()
        products.use_chosen()  # the next run of a process
        assert num_onednn(lambda: SQUARE @ SQUARE) == (vendor == AMD)
    finally:
        products.register()._destroy()
        products.register.cache_clear()
    assert num_onednn(lambda: SQUARE @ SQUARE) == 0


@pytest.mark.parametrize(
    "method", ["full", pytest.param({"lora": {"rank": 4}}, marks=pytest.mark.proof)]
)
def test_a_run_resumes_to_the_bit_and_learns_what_torchs_products_learn(
    method, tmp_path, monkeypatch, onednn
):
    for name in ("_LEAST_WORK", "_LEAST_SIZE", "_LEAST_COLUMNS_FOR_COPY"):
        monkeypatch.setattr(products, name, 1)
    train = {"max_steps": 4}
    project = Project(tmp_path, method=method, train=train, checkpoint={"save_steps": 2})
    surefoot.train(project.recipe)
    whole = losses(project.run)
    resumed, torchs = tmp_path / "resumed", tmp_path / "torchs"
    start = {
        "checkpoint.resume": str(project.run / "checkpoint-2"),
        "train.output_dir": str(resumed),
    }
    made, product = [], products._product
    monkeypatch.setattr(products, "_product", lambda *of: made.append(of) or product(*of))
    surefoot.train(project.recipe, **start)
    assert len(made) > 50
    assert losses(resumed) == whole
    assert_same(final_weights(resumed), final_weights(project.run))
    products.register()._destroy()
    surefoot.train(project.recipe, **{"train.output_dir": str(torchs)})
    assert losses(torchs) == pytest.approx(whole, rel=1e-4)
