"""The backend "cute_kernels" of torch.compile over torch's CPU kernels: compiled code has the bits of eager code.

Whole models are compared with their graphs run operator by operator, since a C++ compiler takes a minute for a model.
The exhaustive tests let Inductor write the code.
"""

import functools
import inspect
import os
import re
import subprocess
import sys
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends import registry
from torch._inductor.codegen import cpp

from cute_kernels import UncoveredOperatorError, batch_invariant
from cute_kernels.invariance import compiled
from cute_kernels.invariance.compiled_operators import opaque_operators
from tests.fakes import fake_gpu
from tests.invariance.compiled_models import FAMILIES, make_ids, make_model, step
from tests.runtime.bits import assert_same_bits

ROOT = Path(__file__).parents[2]
exhaustive = pytest.mark.exhaustive
# C++ kernels do not round between operators in torch 2.11, and do in 2.13; Triton kernels do in both
rounds = pytest.mark.skipif(
    "emulate_precision_casts" not in inspect.getsource(cpp),
    reason="C++ kernels of this torch do not round between operators",
)
FAMILY = pytest.mark.parametrize(
    "family", [name if name == "gemma3" else pytest.param(name, marks=exhaustive) for name in FAMILIES]
)


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs_alone(monkeypatch):
    """A graph runs as it is handed to Inductor's passes."""
    monkeypatch.setattr(compiled, "compile_fx_inner", lambda graph, inputs, **options: make_boxed_func(graph.forward))


def assert_equal(found, wanted):
    for f, w in zip(found, wanted, strict=True):
        assert_same_bits(f, w)


@FAMILY
def test_graphs_of_a_training_step(family, generator, graphs_alone):
    model = make_model(family, generator)
    ids = make_ids(3, 12, generator)
    run = torch.compile(model.loss, backend="cute_kernels", fullgraph=True)
    assert_equal(step(model, run, ids), step(model, model.loss, ids))


def assert_three_batches_agree(family, generator):
    """One graph of dynamic shapes agrees with eager mode on three batches."""
    model = make_model(family, generator)
    run = torch.compile(model.loss, backend="cute_kernels", fullgraph=True, dynamic=True)
    for batch, tokens in ((3, 12), (2, 12), (4, 17)):
        ids = make_ids(batch, tokens, generator)
        assert_equal(step(model, run, ids), step(model, model.loss, ids))


@exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_of_dynamic_shapes(family, generator, graphs_alone):
    assert_three_batches_agree(family, generator)


@rounds
@exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_inductor_compiles_a_training_step(family, generator):
    assert_three_batches_agree(family, generator)


@rounds
@exhaustive
@pytest.mark.parametrize("family", ["gemma3", "gpt2"])  # the most of a block; layer_norm
def test_graphs_of_one_model_agree(family, generator):
    """A row's logits by the graphs of training and of inference, of two batches."""
    model = make_model(family, generator)
    ids = make_ids(4, 12, generator)
    forward = torch.compile(model, backend="cute_kernels", fullgraph=True, dynamic=False)
    trained = forward(ids)
    assert trained.requires_grad
    with torch.no_grad():
        assert_same_bits(forward(ids), trained)
        assert_same_bits(forward(ids[2:]), model(ids[2:]))


def _a_layer(x, weight, table, ids):
    """A chain of roundings to bf16, around a norm, a product and a softmax."""
    x = x + F.embedding(ids, table)
    y = x.float()
    y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
    return x + F.silu(y @ weight) * torch.tanh(y * 0.3).softmax(-1)


def _compare(function, tensors, backend):
    found = []
    for run in (torch.compile(function, backend=backend, fullgraph=True), function):
        y = run(*tensors)
        inputs = [t for t in tensors if t.requires_grad]
        found.append([y, *torch.autograd.grad(y.float().square().sum(), inputs)])
    return found


@rounds
@exhaustive
@pytest.mark.parametrize("how", ["ours", "inductor", "without a setting"])
def test_inductor_rounds_as_eager_code(how, generator, monkeypatch):
    """The positive controls: the comparison sees Inductor alone, and one that rounds only what it stores."""
    shapes = ((5, 7, 32), (32, 32), (11, 32))
    x, weight, table = (torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes)
    ids = torch.randint(11, (5, 7), generator=generator)
    if how == "without a setting":
        monkeypatch.delitem(compiled.SETTINGS, "emulate_precision_casts")
    found, wanted = _compare(_a_layer, (x, weight, table, ids), "inductor" if how == "inductor" else "cute_kernels")
    if how == "ours":
        assert_equal(found, wanted)
    else:
        assert not all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True))


def test_numbers_of_python_are_constants(monkeypatch):
    """torch makes inputs of them, and products that are not rounded."""
    seen = []

    def inner(graph, inputs, **options):
        seen.extend(node.meta["val"] for node in graph.graph.find_nodes(op="placeholder"))
        return make_boxed_func(graph.forward)

    monkeypatch.setattr(compiled, "compile_fx_inner", inner)
    scaled = torch.compile(lambda x, scale: x * scale + 1, backend="cute_kernels", dynamic=True, fullgraph=True)
    x = torch.ones(3, 4, dtype=torch.bfloat16)
    for scale in (1.25, 0.75):
        assert torch.equal(scaled(x, scale), x * scale + 1)
    floats = [value.dtype for value in seen if isinstance(value, torch.Tensor)]
    assert floats == [torch.bfloat16] * 2 and not any(isinstance(value, torch.SymFloat) for value in seen)


def _moments(x):
    y = (x - x.mean(-1, keepdim=True)) / x.var(-1, keepdim=True).sqrt()
    return y.cumsum(-1) + x.logsumexp(-1, keepdim=True) + y[:, torch.tensor([3, 3, 0])].sum()


def test_moments_scans_and_indices(generator, graphs_alone):
    x = torch.randn(5, 24, generator=generator).bfloat16().requires_grad_()
    assert_equal(*_compare(_moments, (x,), "cute_kernels"))


def _losses(x, y):
    classes = torch.tensor([[1, 3, -100], [0, 2, 1]])
    images = x.view(2, 4, 3, 5)
    found = F.mse_loss(x, y) + F.huber_loss(x, y, reduction="sum") + F.smooth_l1_loss(x, y, reduction="none").sum()
    found = found + F.binary_cross_entropy_with_logits(x, y) + F.soft_margin_loss(x, y.detach().sign())
    found = found + F.cross_entropy(images.flatten(2)[..., :3], classes)
    found = found + F.nll_loss(images[..., 0], classes, weight=y[0, :4].detach(), reduction="sum")
    return found + x[:, :2].trace() + x.nansum() + torch.dist(x, y)


def test_losses(generator, gpu):
    """By the functions that a block runs; the elements of one alone by torch's kernel, of fp64, too."""
    x, y = (torch.rand(2, 60, generator=generator).bfloat16().requires_grad_() for _ in range(2))
    with batch_invariant("strict"):
        wanted = [_losses(x, y), *torch.autograd.grad(_losses(x, y), (x, y))]
    found = torch.compile(_losses, backend="cute_kernels", fullgraph=True)(x, y)
    assert_equal([found, *torch.autograd.grad(found, (x, y))], wanted)
    elements = torch.compile(functools.partial(F.mse_loss, reduction="none"), backend="cute_kernels", fullgraph=True)
    assert torch.equal(elements(x.double(), y.double()), F.mse_loss(x.double(), y.double(), reduction="none"))


def _products(x):
    h = x * 2
    return h.cumprod(-1)


def _batch_norm(x):
    return F.batch_norm(x, None, None, training=True)


def _convolution(x):
    return F.conv1d(x[None], x[:, None, :3], groups=len(x))


def _double(x):
    return x.double().sum(-1)


@pytest.mark.parametrize(
    ("function", "operator", "line"),
    [
        (_products, "aten.cumprod.default of bfloat16[5, 24]", "return h.cumprod(-1)"),
        (_batch_norm, "batch_norm", "return F.batch_norm(x, None, None, training=True)"),
        (_convolution, "aten.convolution.default", "return F.conv1d(x[None], x[:, None, :3], groups=len(x))"),
        (_double, "aten.sum.dim_IntList of float64[5, 24]", "return x.double().sum(-1)"),
    ],
)
def test_what_adds_up_is_refused_by_name_and_line(function, operator, line):
    lines, first = inspect.getsourcelines(function)
    number = first + [text.strip() for text in lines].index(line)
    with pytest.raises(UncoveredOperatorError) as error:
        torch.compile(function, backend="cute_kernels")(torch.ones(5, 24, dtype=torch.bfloat16))
    assert operator in str(error.value)
    assert f"is not covered in compiled code, at {__file__}:{number} in {function.__name__}: {line}" in str(error.value)


def test_a_backward_is_refused_too():
    """The forward of an index adds nothing up, its backward does."""
    x = torch.ones(6, 4, dtype=torch.float64, requires_grad=True)
    with pytest.raises(UncoveredOperatorError, match=r"aten\.index_put\.default of float64.* is not covered"):
        torch.compile(lambda x: x[torch.tensor([1, 1])] * 2, backend="cute_kernels")(x).sum().backward()


def test_a_higher_order_operator_is_refused():
    def function(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    with pytest.raises(
        UncoveredOperatorError, match="cond of .* it is a higher-order operator: what it runs is not seen"
    ):
        torch.compile(function, backend="cute_kernels")(torch.ones(4, requires_grad=True))


@pytest.fixture
def gpu(graphs_alone):
    with fake_gpu():
        yield


def test_graphs_run_what_a_block_runs(generator, graphs_alone, gpu):
    """Over fake kernels; also where a block, or ``install``, sends functions of another backend here.

    The model is gpt2. Some functions of gemma3 have formulas for a GPU, which have other bits on a CPU.
    """
    model = make_model("gpt2", generator)
    ids = make_ids(3, 12, generator)
    seen = []
    ours = torch.compile(model.loss, backend="cute_kernels", fullgraph=True)
    theirs = torch.compile(model.loss, backend=lambda graph, inputs: seen.append(graph) or graph)
    with batch_invariant("strict"):
        wanted = step(model, model.loss, ids)
        for _ in range(2):
            assert_equal(step(model, theirs, ids), wanted)
    assert_equal(step(model, ours, ids), wanted)
    assert not seen
    theirs(ids)
    assert len(seen) == 1


def test_each_result_begins_its_memory(generator, gpu):
    """Inductor asserts that results lie on 16 bytes; of 7 rows, mean lies 28 bytes behind rstd in the norm's own."""
    x = torch.randn(7, 64, generator=generator)
    results = torch.ops.cute_kernels.aten_native_layer_norm(x, [64], None, None, 1e-5)
    assert [t.storage_offset() for t in results] == [0, 0, 0]
    assert len({t.untyped_storage().data_ptr() for t in results}) == 3
    torch.testing.assert_close(results[1].flatten(), x.mean(-1))


def test_a_graph_after_a_block_has_its_gradients(generator, graphs_alone):
    """Torch had kept for traced code that linear has a kernel under AutogradCPU, which ended with the block."""
    model, ids = make_model("gpt2", generator), make_ids(3, 12, generator)
    with fake_gpu(), batch_invariant("strict"):
        step(model, torch.compile(model.loss, backend="eager"), ids)
    torch._dynamo.reset()
    found = step(model, torch.compile(model.loss, backend="cute_kernels", fullgraph=True), ids)
    assert_equal(found, step(model, model.loss, ids))


def test_a_block_refuses_or_warns(gpu, graphs_alone):
    x = torch.ones(5, 24, dtype=torch.bfloat16)
    function = torch.compile(_products, backend="eager")
    with (
        batch_invariant("warn"),
        pytest.warns(UserWarning, match="aten.cumprod.default of .* is not covered in compiled"),
    ):
        assert torch.equal(function(x), _products(x))
    with batch_invariant("warn") as uncovered, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for runs in (1, 2):  # of the graph that is there
            function(x)
            assert uncovered == {"aten.cumprod.default": runs}
    with batch_invariant("strict"), pytest.raises(UncoveredOperatorError, match="in _products: return h.cumprod"):
        function(x)


def test_functions_of_the_cpu_run_as_they_are(recwarn):
    with batch_invariant("strict"):
        assert torch.compile(_products)(torch.ones(2, 3))[0, 2] == 8


def test_integers_may_be_summed(graphs_alone):
    x = torch.arange(6).view(2, 3)
    function = torch.compile(lambda x: x.cumprod(-1) + x.sum() + x.float().argmax(), backend="cute_kernels")
    assert torch.equal(function(x), x.cumprod(-1) + x.sum() + 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_autotune": True},
            r"compile: options\['max_autotune'\] must be False, since bits depend on it, got True",
        ),
        ({"emulate_precision_casts": False}, r"options\['emulate_precision_casts'\] must be True"),
        ({"post_grad_custom_post_pass": len}, r"options\['post_grad_custom_post_pass'\] must be left out, got a pass"),
    ],
)
def test_options_that_bits_depend_on(options, message):
    with pytest.raises(Exception, match=message):
        torch.compile(lambda x: x + 1, backend="cute_kernels", options=options)(torch.ones(2))


def test_modes(monkeypatch):
    seen = []
    monkeypatch.setattr(compiled, "compile_fx", lambda graph, inputs, **kw: seen.append(kw["config_patches"]) or graph)
    torch.compile(lambda x: x + 1, backend="cute_kernels", mode="reduce-overhead")(torch.ones(2))
    assert seen[0]["triton.cudagraphs"] and seen[0]["emulate_precision_casts"]
    with pytest.raises(Exception, match="mode must be None, 'default' or 'reduce-overhead', got 'max-autotune'"):
        torch.compile(lambda x: x + 2, backend="cute_kernels", mode="max-autotune")(torch.ones(2))


def test_settings_are_of_this_torch():
    for name, value in compiled.SETTINGS.items():
        assert compiled._is_setting(name), name
        with inductor_config.patch({name: value}):
            pass
    assert not compiled._is_setting("eager_numerics.no_such_setting")


def test_opaque_operators_have_torchs_schemas():
    def types(values):
        return [(a.name, str(a.type), str(a.default_value)) for a in values]

    for op, opaque in opaque_operators().items():
        assert types(opaque._schema.arguments) == types(op._schema.arguments)
        assert [str(r.type) for r in opaque._schema.returns] == [str(r.type) for r in op._schema.returns]
    names = {op._schema.name for op in opaque_operators()}
    assert {"aten::mm", "aten::sum", "aten::embedding_dense_backward", "aten::index_put", "aten::var"} <= names


def test_the_entry_point_names_the_backend():
    section = (ROOT / "pyproject.toml").read_text().partition("[project.entry-points.torch_dynamo_backends]\n")[2]
    name, value = re.match(r'(\w+) = "(.*)"', section).groups()
    assert EntryPoint(name, value, "torch_dynamo_backends").load() is compiled.backend
    assert registry.lookup_backend(name) is compiled.backend


CACHED = """
import torch
import cute_kernels.invariance.compiled
from tests.fakes import fake_gpu
from tests.invariance.compiled_models import make_ids, make_model, step
generator = torch.Generator().manual_seed(0)
model = make_model("gemma3", generator)
ids = make_ids(3, 12, generator)
for backend in ("inductor", "cute_kernels"):
    torch._dynamo.reset()
    found = step(model, torch.compile(model.loss, backend=backend), ids)
assert all(map(torch.equal, found, step(model, model.loss, ids)))
print("hits", torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])
"""


@rounds
@exhaustive
def test_cold_and_warm_cache(tmp_path):
    """Plain Inductor's graphs of the same model lie in the same cache."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    for warm in (False, True):
        command = [sys.executable, "-c", CACHED]
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
        assert run.returncode == 0, run.stderr[-3000:]
        assert ("hits 0" in run.stdout) is not warm
