"""mm and linear inside torch: torch.compile, opcheck, fakes, CUDA graphs, streams, devices, threads, compile counts."""

import threading
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_kernels import linear, mm
from cute_kernels.gemm.launch import activation_backward, gemm
from jit_cache import stats
from tests.gemm.cases import BF16, FP16, FP32, Case, Recorder, assert_same_bits, make_inputs, randn, run

pytestmark = pytest.mark.usefixtures("gemms_precompiled")

TRACED = [
    Case(65, 96, 64),
    Case(65, 264, 200, bias=FP32, activation="gelu"),
    Case(300, 264, 200, FP16, bias=FP16, activation="relu", out=FP32),
    Case(9, 33, 17, bias=BF16, activation="silu"),
]


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, result in wanted.items():
        assert_same_bits(found[name], result, name)


@pytest.mark.parametrize("case", TRACED, ids=str)
def test_compile(case, generator, compile_backend):
    """One graph, forward and backward; eager mode's bits, also for numbers of tokens that take other kernels."""
    torch._dynamo.reset()
    compiled = torch.compile(linear, fullgraph=True, backend=compile_backend)
    for m in (case.m, 3, 130):
        inputs = make_inputs(replace(case, m=m), generator)
        wanted = run(linear, case, inputs)
        before = stats().compiles
        assert_same(run(compiled, case, inputs), wanted)
        assert stats().compiles == before


def test_compile_in_a_model(generator, compile_backend):
    """Between other operators, in three dimensions, with mm, without gradients of x."""
    torch._dynamo.reset()
    first = (randn(96, 64, generator=generator) / 8).to(BF16).requires_grad_()
    second = (randn(96, 40, generator=generator) / 10).to(BF16).requires_grad_()
    x = randn(2, 33, 64, generator=generator).to(BF16)

    def model(x):
        h = linear(x * 2, first, activation="silu") + 1
        return mm(h.flatten(0, 1), second).float().square().mean()

    eager = torch.autograd.grad(model(x), (first, second))
    compiled = torch.autograd.grad(torch.compile(model, fullgraph=True, backend=compile_backend)(x), (first, second))
    for one, two in zip(compiled, eager, strict=True):
        assert torch.allclose(one, two, rtol=2e-2, atol=2e-2 * two.abs().max().item())


def test_compile_without_gradients(generator, compile_backend):
    torch._dynamo.reset()
    inputs = make_inputs(TRACED[1], generator)
    with torch.no_grad():
        wanted = linear(inputs.x, inputs.weight, inputs.bias)
        compiled = torch.compile(linear, fullgraph=True, backend=compile_backend)
        assert_same_bits(compiled(inputs.x, inputs.weight, inputs.bias), wanted)


def test_compile_into_out(generator, compile_backend):
    torch._dynamo.reset()
    a, b = randn(65, 64, generator=generator).to(BF16), randn(64, 96, generator=generator).to(BF16)
    memory = torch.full((65, 104), -7.0, device=a.device)
    compiled = torch.compile(mm, fullgraph=True, backend=compile_backend)
    with torch.no_grad():
        compiled(a, b, out=memory[:, :96])
    assert_same_bits(memory[:, :96], mm(a, b, out_dtype=FP32))
    assert (memory[:, 96:] == -7.0).all()


def test_compile_into_an_operand(generator, device, compile_backend):
    """A compiler may give out the memory of an operand that has no other use: an error, not a wrong product."""
    torch._dynamo.reset()
    size = 4096 if device == "cuda" else 64  # tiles are written while others still read
    a, b = (randn(size, size, generator=generator).to(BF16) for _ in range(2))

    def function(a, b):
        a = a * 2
        return mm(a, b, out=a)

    with torch.no_grad():
        try:
            found = torch.compile(function, fullgraph=True, backend=compile_backend)(a, b)
        except ValueError as error:
            assert str(error).startswith("mm: out must not share memory with a, got address 0x")
        else:
            assert_same_bits(found, mm(a * 2, b))


def test_opcheck(generator, device):
    """Every call that a forward and a backward make: the schema names what is written, fakes and functionalisation."""
    case = Case(40, 24, 16, bias=FP32, activation="silu")
    inputs = make_inputs(case, generator)
    inputs.weight.main_grad = torch.zeros(24, 16, device=device)
    wanted = run(linear, case, inputs)
    inputs.weight.main_grad.zero_()
    with Recorder() as recorder:
        found = run(linear, case, inputs, num_valid_tokens=torch.tensor([40], dtype=torch.int32, device=device))
    assert_same(found, wanted)
    assert [function for function, _ in recorder.calls] == [
        launch.registered for launch in (gemm, activation_backward, gemm, gemm, gemm)
    ]
    for function, arguments in recorder.calls:
        torch.library.opcheck(function, arguments)


def test_the_schemas_name_what_is_written():
    for operator, outputs in ((gemm.registered, {"d", "z"}), (activation_backward.registered, {"dz"})):
        arguments = operator._schema.arguments
        written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        assert written == outputs and not operator._schema.returns
    assert gemm.registered.name() == "cute_kernels::gemm"


def test_fake_tensors(device):
    """Shapes and dtypes as on a GPU, and nothing runs."""
    before = stats()
    with FakeTensorMode(), torch.no_grad():
        x, weight = (torch.empty(*shape, dtype=BF16, device="cuda") for shape in ((2, 3, 64), (96, 64)))
        y = linear(x, weight, torch.empty(96, device="cuda"), out_dtype=FP32, activation="gelu")
        assert y.shape == (2, 3, 96) and y.dtype is FP32 and y.device.type == "cuda"
        assert mm(weight, torch.empty(64, 5, dtype=BF16, device="cuda"), out_dtype=FP16).shape == (96, 5)
        with pytest.raises(ValueError, match="weight must have 64 columns"):
            linear(x, torch.empty(96, 63, dtype=BF16, device="cuda"))
    assert stats() == before


def test_autocast_changes_nothing(generator, device):
    """Neither are fp32 inputs cast and let in, nor other dtypes changed."""
    inputs = make_inputs(TRACED[0], generator)
    wanted = linear(inputs.x, inputs.weight)
    with torch.autocast(device, dtype=FP16):
        y = linear(inputs.x, inputs.weight)
        with pytest.raises(TypeError, match="x must have dtype bfloat16, float16, got torch.float32"):
            linear(inputs.x.float(), inputs.weight)
    assert_same_bits(y.detach(), wanted.detach())


def test_another_number_of_tokens_compiles_nothing(generator):
    """Once each kernel has been chosen, no number of tokens brings another."""
    n, k = 264, 200

    def step(m):
        case = Case(m, n, k, bias=FP32, activation="gelu")
        run(linear, case, make_inputs(case, generator))

    for power in range(14):
        for m in (2**power, 3 * 2**power):  # in whole blocks of K (of dweight, dbias) or not
            step(m)
            step(m + 8)
    before = stats()
    for m in (6, 11, 31, 50, 90, 127, 200, 255, 300, 1001, 4000, 8191, 12000):
        step(m)
    after = stats()
    assert (after.compiles, after.misses, after.disk_loads) == (before.compiles, before.misses, before.disk_loads)


# Below: on a GPU only


def capture(function):
    """A graph of ``function``, captured without a run before, and what it returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


# Dtypes and options that no other test uses: the first call, and so the load of the GPU's module, is inside the capture
@pytest.mark.parametrize(
    "case",
    [
        Case(60, 104, 88, FP16, out=BF16, bias=FP16, activation="gelu"),
        Case(300, 520, 88, FP16, out=BF16, bias=FP16, activation="silu"),
        Case(33, 35, 13, FP16, out=BF16, bias=FP16, activation="relu"),
    ],
    ids=str,
)
def test_first_call_inside_a_graph_capture(case, generator):
    captured = make_inputs(case, generator)
    graph, results = capture(lambda: run(linear, case, captured))
    for _ in range(2):
        fresh = make_inputs(case, generator)
        with torch.no_grad():
            for name in ("x", "weight", "bias", "dy"):
                getattr(captured, name).copy_(getattr(fresh, name))
        for result in results.values():
            result.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        replayed = {name: result.clone() for name, result in results.items()}
        assert_same(replayed, run(linear, case, fresh))


def test_valid_tokens_in_a_graph(generator):
    """Their number is read on the device: a replay takes the new one; main_grad is added to at each replay."""
    case = Case(304, 264, 200)
    inputs = make_inputs(case, generator)
    x, dy = inputs.x.detach(), inputs.dy
    count = torch.tensor([304], dtype=torch.int32, device="cuda")
    inputs.weight.main_grad = torch.zeros(264, 200, device="cuda")

    def step():
        linear(x, inputs.weight, num_valid_tokens=count).backward(dy)

    step()
    torch.cuda.synchronize()
    graph, _ = capture(step)
    start = randn(264, 200, generator=generator)
    for valid in (100, 17):
        inputs.weight.main_grad.copy_(start)
        count.fill_(valid)
        graph.replay()
        graph.replay()
        replayed = inputs.weight.main_grad.clone()
        inputs.weight.main_grad.copy_(start)
        for _ in range(2):
            linear(x[:valid], inputs.weight).backward(dy[:valid])
        assert_same_bits(replayed, inputs.weight.main_grad)


@pytest.mark.parametrize("case", TRACED, ids=str)
def test_side_stream(case, generator):
    """Work goes to the caller's stream: behind a long kernel there, the inputs are not yet what they will be."""
    wanted_inputs = make_inputs(case, generator)
    wanted = run(linear, case, wanted_inputs)
    late = make_inputs(case, generator)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        torch.cuda._sleep(400_000_000)  # 0.2 s
        for name in ("x", "weight", "bias", "dy"):
            if getattr(late, name) is not None:
                getattr(late, name).copy_(getattr(wanted_inputs, name))
        with torch.enable_grad():
            found = run(linear, case, late)
    assert not stream.query(), "the long kernel is over: nothing was shown"
    stream.synchronize()
    assert_same(found, wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("case", TRACED, ids=str)
def test_second_device(case, generator):
    """Tensors of a device that is not the current one: the same bits; of two devices: an error."""
    inputs = make_inputs(case, generator)
    wanted = run(linear, case, inputs)
    here = inputs.weight.detach()
    for name in ("x", "weight", "bias", "dy"):
        if getattr(inputs, name) is not None:
            moved = getattr(inputs, name).detach().to("cuda:1")
            setattr(inputs, name, moved.requires_grad_(name != "dy"))
    assert torch.cuda.current_device() == 0
    found = run(linear, case, inputs)
    assert all(result.device == torch.device("cuda:1") for result in found.values())
    assert_same({name: result.to("cuda:0") for name, result in found.items()}, wanted)
    with pytest.raises(ValueError, match="weight must be on cuda:1, got cuda:0"):
        linear(inputs.x, here)
    with pytest.raises(ValueError, match="b must be on cuda:1, got cuda:0"):
        mm(inputs.x.detach(), here.t())


def test_many_threads(generator):
    """Threads of one process call at the same time, each on a stream of its own."""
    case = TRACED[1]
    inputs = make_inputs(case, generator)
    wanted = run(linear, case, inputs)
    results = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            found = run(linear, case, inputs)
            torch.cuda.current_stream().synchronize()
            results.append(all(torch.equal(found[name], value) for name, value in wanted.items()))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 8


def test_no_memory_but_the_output():
    """Nothing is padded, transposed or copied: a call allocates its output alone, in every layout."""
    a, b = torch.zeros(4096, 1024, dtype=BF16, device="cuda"), torch.zeros(1024, 2048, dtype=BF16, device="cuda")
    for left in (a, a.t().contiguous().t(), a[:5]):
        for right in (b, b.t().contiguous().t()):
            mm(left, right)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            y = mm(left, right)
            assert torch.cuda.memory_stats()["requested_bytes.all.peak"] - before == y.numel() * y.element_size()
            del y
