"""layer_norm and rms_norm inside torch: torch.compile, opcheck, CUDA graphs, streams, devices, autocast, modules."""

import threading

import pytest
import torch

from cute_kernels import layer_norm, nn, rms_norm
from cute_kernels.norm import launch
from jit_cache import stats
from tests.norm.cases import BF16, FP16, FP32, KINDS, Case, call_and_differentiate, make_inputs

TRACED = [
    Case("rms", 1024, residual=BF16, dh=True),
    Case("layer", 1024, weight=FP32, bias=FP32),
    Case("rms", 4096, weight=FP32, save="output"),
]


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, result in wanted.items():
        assert torch.equal(found[name], result), name


@pytest.mark.parametrize("case", TRACED, ids=str)
def test_compile(case, norm, generator, compile_backend):
    """One graph, forward and backward; the same bits as in eager mode, also for another number of rows."""
    torch._dynamo.reset()
    compiled = torch.compile(norm, fullgraph=True, backend=compile_backend)
    for rows in (65, 33, 130):
        inputs = make_inputs(case, generator, rows * case.n)
        wanted = call_and_differentiate(norm, case, inputs)
        before = stats().compiles
        assert_same(call_and_differentiate(compiled, case, inputs), wanted)
        assert stats().compiles == before


def test_compile_in_a_model(norm, generator, device, compile_backend):
    """Between other operators, in three dimensions, an x that requires no grad."""
    torch._dynamo.reset()
    weight = torch.ones(1024, device=device, requires_grad=True)
    projection = (torch.randn(1024, 1024, generator=generator, device=device) / 32).to(BF16).requires_grad_()

    def model(x, residual):
        y, h = norm("rms", x * 2, weight, residual=residual, return_residual=True)
        z = norm("layer", (y @ projection).relu(), weight)
        return (z * h.to(z.dtype)).float().square().mean()

    x = torch.randn(2, 33, 1024, generator=generator, device=device).to(BF16)
    residual = torch.randn(2, 33, 1024, generator=generator, device=device)
    eager = torch.autograd.grad(model(x, residual), (weight, projection))
    compiled = torch.autograd.grad(
        torch.compile(model, fullgraph=True, backend=compile_backend)(x, residual), (weight, projection)
    )
    for one, two in zip(compiled, eager, strict=True):
        assert torch.allclose(one, two, rtol=2e-2, atol=2e-2 * two.abs().max().item())


def test_a_residual_that_is_x(norm, generator, compile_backend):
    """Dynamo gives a tensor to an autograd function once."""
    torch._dynamo.reset()
    x = torch.randn(65, 1024, generator=generator, device=generator.device).requires_grad_()
    weight = torch.ones(1024, device=generator.device, requires_grad=True)
    found = []
    for function in (norm, torch.compile(norm, fullgraph=True, backend=compile_backend)):
        y, h = function("rms", x, weight, residual=x, return_residual=True)
        found.append((y, h, *torch.autograd.grad((y * y).sum() + h.sum(), (x, weight))))
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


def test_a_compiled_backward_adds_to_every_main_grad(norm, generator, compile_backend):
    """Which gradients it is asked for is not known in a graph: eager mode leaves those of others alone."""
    torch._dynamo.reset()
    inputs = make_inputs(TRACED[1], generator, 65 * 1024)
    parameters = inputs.weight, inputs.bias
    for parameter in parameters:
        parameter.main_grad = torch.zeros_like(parameter)
    for function, is_added_to in ((norm, False), (torch.compile(norm, fullgraph=True, backend=compile_backend), True)):
        torch.autograd.grad(function("layer", inputs.x, *parameters), inputs.x, inputs.dy)
        for parameter in parameters:
            assert parameter.main_grad.any() == is_added_to and parameter.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind, generator, device):
    """The registered operators: their schema names what they change; the fakes agree; they may be functionalised."""

    def randn(*shape, dtype=BF16):
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    def empty(*shape, dtype=BF16):
        return torch.zeros(*shape, dtype=dtype, device=device)

    x, residual, weight, bias = randn(8, 1024), randn(8, 1024), randn(1024), randn(1024)
    statistics = empty(2 if kind == "layer" else 1, 8, dtype=FP32)
    forward = (x, residual, weight, bias, empty(8, 1024), empty(8, 1024), statistics, kind, 1e-5, 0.0)
    torch.library.opcheck(launch.norm_forward.registered, forward)
    torch.library.opcheck(
        launch.norm_forward.registered, (x, None, None, None, empty(8, 1024), None, None, kind, 1e-5, 0.0)
    )
    launch.norm_forward(*forward)
    outputs = (empty(8, 1024), None, empty(1024), empty(1024))
    torch.library.opcheck(
        launch.norm_backward.registered,
        (x, randn(8, 1024), randn(8, 1024), weight, None, statistics, *outputs, kind, "input", 1e-5, 0.0, False, False),
    )
    outputs = (empty(8, 1024), None, empty(1024, dtype=FP32), empty(1024, dtype=FP32))
    torch.library.opcheck(
        launch.norm_backward.registered,
        (x, randn(8, 1024), None, weight, bias, statistics[:1], *outputs, kind, "output", 1e-5, 0.0, True, True),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_changes_nothing(kind, norm, generator, device):
    x = torch.randn(9, 1024, generator=generator, device=device, requires_grad=True)
    weight = torch.ones(1024, device=device, requires_grad=True)
    wanted = norm(kind, x, weight)
    with torch.autocast(device, dtype=BF16):
        y = norm(kind, x, weight)
        half = norm(kind, x.detach().to(FP16), weight.detach())
    assert y.dtype is FP32 and torch.equal(y, wanted) and half.dtype is FP16
    y.sum().backward()
    assert x.grad.dtype is FP32 and weight.grad.dtype is FP32


@pytest.mark.parametrize("case", [Case("rms", 1024), Case("layer", 1024, weight=FP32, bias=FP32)], ids=str)
def test_another_number_of_rows_compiles_nothing(case, norm, generator):
    call_and_differentiate(norm, case, make_inputs(case, generator, 64 * 1024))
    before = stats()
    for rows in (1, 2, 33, 100, 1001, 8191):
        call_and_differentiate(norm, case, make_inputs(case, generator, rows * 1024))
    after = stats()
    assert (after.compiles, after.misses, after.disk_loads) == (before.compiles, before.misses, before.disk_loads)


# Below: on a GPU only


def capture(function):
    """A graph of ``function``, captured without a run before, and what it returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


# Widths that no other test uses: the first call, and so the load of the GPU's module, happens inside the capture
@pytest.mark.parametrize(
    "case",
    [Case("rms", 1328, residual=BF16, dh=True, rows=65), Case("layer", 20496, weight=FP32, bias=FP32, rows=65)],
    ids=str,
)
def test_first_call_inside_a_graph_capture(case, norm, generator):
    captured = make_inputs(case, generator)

    def call():
        return call_and_differentiate(norm, case, captured)

    graph, results = capture(call)
    for _ in range(2):
        fresh = make_inputs(case, generator)
        with torch.no_grad():
            for name in ("x", "residual", "weight", "bias", "dy", "dh"):
                if getattr(captured, name) is not None:
                    getattr(captured, name).copy_(getattr(fresh, name))
        for result in results.values():
            result.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        replayed = {name: result.clone() for name, result in results.items()}
        assert_same(replayed, call())


def test_main_grad_in_a_graph(generator):
    """Each replay adds."""
    case = Case("rms", 1024)
    inputs = make_inputs(case, generator, 65 * 1024)
    inputs.weight.main_grad = torch.zeros(1024, device="cuda")

    def step():
        rms_norm(inputs.x.detach().requires_grad_(), inputs.weight).backward(inputs.dy)

    step()
    torch.cuda.synchronize()
    once = inputs.weight.main_grad.clone()
    graph, _ = capture(step)
    inputs.weight.main_grad.zero_()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(inputs.weight.main_grad, 2 * once)


@pytest.mark.parametrize("case", TRACED, ids=str)
def test_side_stream(case, norm, generator):
    """Work goes to the caller's stream: behind a long kernel there, the inputs are not yet what they will be."""
    wanted_inputs = make_inputs(case, generator, 65 * case.n)
    wanted = call_and_differentiate(norm, case, wanted_inputs)
    late = make_inputs(case, generator, 65 * case.n)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        torch.cuda._sleep(400_000_000)  # 0.2 s
        for name in ("x", "residual", "weight", "bias", "dy", "dh"):
            if getattr(late, name) is not None:
                getattr(late, name).copy_(getattr(wanted_inputs, name))
        with torch.enable_grad():
            found = call_and_differentiate(norm, case, late)
    assert not stream.query(), "the long kernel is over: nothing was shown"
    stream.synchronize()
    assert_same(found, wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("case", TRACED, ids=str)
def test_second_device(case, norm, generator):
    """Tensors of a device that is not the current one."""
    inputs = make_inputs(case, generator, 65 * case.n)
    wanted = call_and_differentiate(norm, case, inputs)
    for name in ("x", "residual", "weight", "bias", "dy", "dh"):
        if getattr(inputs, name) is not None:
            moved = getattr(inputs, name).detach().to("cuda:1")
            setattr(inputs, name, moved.requires_grad_(name not in ("dy", "dh")))
    assert torch.cuda.current_device() == 0
    found = call_and_differentiate(norm, case, inputs)
    assert all(result.device == torch.device("cuda:1") for result in found.values())
    for name in ("y", "dx"):  # dw may be summed in another order where the number of SMs differs
        assert torch.equal(found[name].to("cuda:0"), wanted[name])
    with pytest.raises(ValueError, match="weight must be on cuda:1, got cuda:0"):
        norm(case.kind, inputs.x, inputs.weight.detach().to("cuda:0"))


def test_many_threads(norm, generator):
    """Threads of one process call at the same time, each on a stream of its own."""
    case = TRACED[0]
    inputs = make_inputs(case, generator, 65 * case.n)
    wanted = call_and_differentiate(norm, case, inputs)
    results = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            found = call_and_differentiate(norm, case, inputs)
            torch.cuda.current_stream().synchronize()
            results.append(all(torch.equal(found[name], value) for name, value in wanted.items()))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 8


def test_modules(generator):
    """nn.RMSNorm and nn.LayerNorm give the functions' bits, with and without a residual."""
    x, residual = torch.randn(2, 9, 1024, generator=generator, device="cuda").to(BF16).unbind()
    rms = nn.RMSNorm(1024, eps=1e-5, device="cuda", dtype=BF16)
    layer = nn.LayerNorm(1024, device="cuda")
    assert torch.equal(rms(x), rms_norm(x, rms.weight, eps=1e-5))
    assert torch.equal(layer(x), layer_norm(x, layer.weight, layer.bias))
    y, h = rms(x, residual)
    assert torch.equal(h, x + residual) and torch.equal(y, rms(h))
    rms.weight.main_grad = torch.zeros(1024, device="cuda")
    rms(x).sum().backward()
    assert rms.weight.grad is None and rms.weight.main_grad.any()
