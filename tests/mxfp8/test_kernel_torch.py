"""The quantizers inside torch: opcheck, torch.compile, CUDA graphs, streams, threads, devices, compile counts."""

import gc
import threading
from dataclasses import replace

import pytest
import torch

import cute_kernels
from cute_kernels.mxfp8 import launch
from jit_cache import stats
from tests.mxfp8.cases import (
    BF16,
    E4M3,
    FP16,
    FP32,
    LAYOUTS,
    Case,
    assert_same,
    call,
    every_variant,
    make_input,
    opcheck,
    poisoned,
    reference,
)

SHAPE = (2, 160, 416)
TRACED = every_variant(SHAPE) + [
    Case("3d_dual", SHAPE, FP32, transposed=True),
    Case("dual", SHAPE[1:], FP16, gap=8),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("square", [False, True])
def test_opcheck(square, layout, generator):
    """The registered operators: schemas, fakes, functionalisation; CUDA and CPU give the same."""
    x = torch.randn(2, 64, 96, generator=generator, device="cuda").to(BF16)
    for along_k, along_n in ((True, False), (False, True), (True, True)):
        flags = (along_k, along_n, square, "rceil", layout)
        quantize = launch.quantize_dual if along_k and along_n else launch.quantize
        if quantize is launch.quantize_dual and square and layout == "plain":
            quantize = launch.quantize_squares
        found = quantize(x, E4M3, *flags)
        opcheck(quantize.registered, (x, E4M3, *flags))
        assert_same(list(found), list(quantize.registered(x.cpu(), E4M3, *flags)))
        opcheck(launch.dequantize.registered, (found[0], found[1], BF16, not along_k))


@pytest.mark.parametrize("case", TRACED, ids=str)
def test_compile(case, generator):
    """One graph, there and back; eager mode's bytes, also for other sizes, without another kernel."""
    torch._dynamo.reset()

    def there_and_back(x):
        found = call(case, x)
        return found, cute_kernels.dequantize(found[0], found[1])

    compiled = torch.compile(there_and_back, fullgraph=True)
    for rows in (case.shape[-2], 32, 288):
        x = make_input(replace(case, shape=(*case.shape[:-2], rows, case.shape[-1])), generator)
        wanted, values = there_and_back(x)
        before = stats().compiles
        found, traced_values = compiled(x)
        assert_same(found, wanted)
        assert torch.equal(traced_values.nan_to_num(7.0), values.nan_to_num(7.0))
        assert stats().compiles == before


def test_compile_in_a_model(generator):
    """Between other operators, of a parameter that requires grad."""
    torch._dynamo.reset()
    w = torch.randn(2, 160, 416, generator=generator, device="cuda").to(BF16).requires_grad_()

    def model(w):
        q_k, s_k, q_n, s_n = cute_kernels.quantize_3d_dual(w.detach() * 2)
        difference = cute_kernels.dequantize(q_k, s_k) - cute_kernels.dequantize(q_n, s_n)
        return (w * difference).float().sum(), q_k

    eager, q = model(w)
    compiled, q_compiled = torch.compile(model, fullgraph=True)(w)
    assert_same([q_compiled], [q])
    assert torch.allclose(compiled, eager, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("case", every_variant(SHAPE), ids=str)
def test_another_size_compiles_nothing(case, generator):
    def there_and_back(case):
        found = call(case, make_input(case, generator))
        cute_kernels.dequantize(found[0], found[1])

    there_and_back(case)
    before = stats()
    sizes = [(1, 32, 32), (5, 416, 160), (3, 2880, 96)]
    for shape in sizes if len(case.shape) == 3 else [shape[1:] for shape in sizes]:
        there_and_back(replace(case, shape=shape))
    after = stats()
    assert (after.compiles, after.misses, after.disk_loads) == (before.compiles, before.misses, before.disk_loads)


# Modes that no other test of this process takes with this input: the first call, and so the load of the GPU's module,
# is inside the capture
FIRST = [
    Case("3d_dual", (2, 96, 288), FP16, mode="ceil", scale_layout="blocked", transposed=True),
    Case("3d_dual_square", (2, 96, 288), FP16, mode="even", transposed=True),
    Case("rowwise", (96, 288), FP32, mode="floor", transposed=True),
]


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_first_call_inside_a_graph_capture(case, generator):
    x = make_input(case, generator)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call(case, x)
        y = cute_kernels.dequantize(found[0], found[1], dtype=FP32)
    for _ in range(3):
        x.copy_(make_input(case, generator))
        for t in found:
            t.view(torch.uint8).fill_(0xA5)
        y.fill_(7.0)
        graph.replay()
        torch.cuda.synchronize()
        wanted = call(case, x, reference)
        assert_same(found, wanted)
        values = reference.dequantize(wanted[0], wanted[1], dtype=FP32)
        assert torch.equal(y.nan_to_num(7.0), values.nan_to_num(7.0))


@pytest.mark.parametrize("case", TRACED, ids=str)
def test_side_stream(case, generator):
    """Work goes to the caller's stream: behind a long kernel there, the input is not yet what it will be."""
    x = make_input(case, generator)
    wanted = call(case, x, reference)
    late = torch.full_like(x, 3.0)
    call(case, late)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)  # 0.2 s
        late.copy_(x)
        with poisoned():
            found = call(case, late)
    assert not stream.query(), "the long kernel is over: nothing was shown"
    stream.synchronize()
    assert_same(found, wanted)


def in_a_thread(function):
    """The result of ``function`` in a thread that has not used CUDA before."""
    results = []

    def work():
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


@pytest.mark.parametrize("case", [TRACED[0], *every_variant(SHAPE)[-2:]], ids=str)
def test_first_cuda_call_of_a_fresh_thread(case, generator):
    """The descriptors of the bulk copies are made in a thread without a current context."""
    x = make_input(case, generator)
    wanted = call(case, x, reference)
    torch.cuda.synchronize()
    found = in_a_thread(lambda: call(case, x))
    torch.cuda.synchronize()
    assert_same(found, wanted)


def test_in_a_thread_of_autograd(generator):
    """A backward runs in a thread of its own: a first call there."""
    case = Case("3d_dual", (3, 96, 352), FP16, mode="ceil")
    x = make_input(case, generator)
    wanted = call(case, x, reference)
    found = []

    class Quantizes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            found.extend(call(case, x))
            return dy

    Quantizes.apply(torch.ones(1, device="cuda", requires_grad=True)).backward()
    torch.cuda.synchronize()
    assert_same(found, wanted)


def test_many_threads(generator):
    """Threads of one process call at the same time, each on a stream of its own."""
    case = Case("3d_dual", SHAPE)
    x = make_input(case, generator)
    wanted = call(case, x, reference)
    results = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            found = call(case, x)
            torch.cuda.current_stream().synchronize()
            pairs = zip(found, wanted, strict=True)
            results.append(all(torch.equal(one.view(torch.uint8), two.view(torch.uint8)) for one, two in pairs))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 8


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("case", TRACED, ids=str)
def test_second_device(case, generator):
    """Tensors of a device that is not the current one: the same bytes there; of two devices: an error."""
    x = make_input(case, generator)
    wanted = call(case, x, reference)
    moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda:1").copy_(x)
    assert torch.cuda.current_device() == 0
    found = call(case, moved)
    assert torch.cuda.current_device() == 0
    assert {t.device for t in found} == {torch.device("cuda:1")}
    assert_same([t.to("cuda:0") for t in found], wanted)
    y = cute_kernels.dequantize(found[0], found[1])
    z = reference.dequantize(wanted[0], wanted[1])
    assert y.device == found[0].device and torch.equal(y.to("cuda:0").nan_to_num(7.0), z.nan_to_num(7.0))
    with pytest.raises(ValueError, match="dequantize: scale must be on cuda:1, got cuda:0"):
        cute_kernels.dequantize(found[0], wanted[1])


@pytest.mark.parametrize("case", TRACED, ids=str)
def test_no_memory_but_the_outputs(case, generator):
    """Nothing is padded, transposed or copied, and no descriptor lies in device memory."""
    x = make_input(case, generator)
    call(case, x)
    gc.collect()  # what earlier tests left in cycles, or it is freed while we count
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    found = call(case, x)
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert peak == sum({t.data_ptr(): t.numel() for t in found}.values())
