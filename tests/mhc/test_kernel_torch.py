"""The hyper-connections inside torch: torch.compile, opcheck, fakes, CUDA graphs, streams, devices, threads."""

import threading
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels import mhc
from cute_kernels.runtime.operators import OPERATORS
from jit_cache import stats
from tests.gemm.cases import same_bits
from tests.mhc.cases import (
    BF16,
    FP16,
    FP32,
    OPERATIONS,
    SEED,
    Case,
    call,
    differentiate,
    make_inputs,
    make_upstream,
    sublayer,
)

FULL = Case(4, 64, (130,), norm_weight=True, bias=True)
TRACED = [(op, FULL) for op in ("projection", "coefficients", "expand_combine", "pre", "hyper_connection")]
TRACED += [(op, Case(8, 64, (13,), BF16, FP32, "tilekernels", norm_weight=True)) for op in ("sinkhorn", "aggregate")]


def assert_same_bits(found, wanted):
    assert found.keys() == wanted.keys()
    for name, result in wanted.items():
        assert same_bits(found[name], result), name


@pytest.mark.parametrize("case", [FULL], ids=str)
@pytest.mark.parametrize("op", OPERATIONS)
def test_compile(op, case, generator, compile_backend):
    """One graph, forward and backward, without gradients, too; eager mode's values; no kernels of another's number."""
    torch._dynamo.reset()
    compiled = {}
    for tokens in ((130,), (7,)):
        of_tokens = replace(case, tokens=tokens)
        t, upstream = make_inputs(of_tokens, generator), make_upstream(op, of_tokens, generator)

        def run(leaves, of_tokens=of_tokens):
            return call(mhc, op, of_tokens, leaves)

        wanted = differentiate(mhc, op, of_tokens, t, upstream)
        step = compiled.setdefault("step", torch.compile(run, fullgraph=True, backend=compile_backend))
        outputs = step(t)
        names = OPERATIONS[op][0]
        gradients = torch.autograd.grad(outputs, [t[name] for name in names], list(upstream.values()))
        found = dict(zip(OPERATIONS[op][1], outputs, strict=True))
        found |= {f"d{name}": gradient for name, gradient in zip(names, gradients, strict=True)}
        with torch.no_grad():
            for one, two in zip(step(t), outputs, strict=True):
                torch.testing.assert_close(one, two)
        if op == "hyper_connection":  # the sublayer is the compiler's own, and rounds elsewhere
            for name, result in wanted.items():
                scale = result.float().abs().max().item()
                torch.testing.assert_close(found[name].detach(), result, rtol=2e-2, atol=2e-2 * scale)
        else:
            assert_same_bits({name: t.detach() for name, t in found.items()}, wanted)


def test_compile_draws_a_seed(generator, compile_backend):
    torch._dynamo.reset()
    t = make_inputs(FULL, generator)

    def run(x):
        return mhc.hyper_connection(x, sublayer, t["phi"], t["alpha"], t["beta"], dropout_p=0.5)

    compiled = torch.compile(run, fullgraph=True, backend=compile_backend)
    out = compiled(t["x"])
    (gradient,) = torch.autograd.grad(out, t["x"], torch.ones_like(out))
    assert gradient.isfinite().all() and not torch.equal(out, compiled(t["x"]))


def test_opcheck(generator):
    """Every registered operator, with arguments as a training step gives them."""
    calls, names = {}, {name for name in OPERATORS if name.startswith("mhc_")}

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.name().removeprefix("cute_kernels::")
            if name in names:
                copies = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
                calls.setdefault(name, tuple(copies))
            return function(*args, **(kwargs or {}))

    case = replace(FULL, dropout_p=0.3)
    t = make_inputs(case, generator)
    with Record():
        for op in OPERATIONS:
            differentiate(mhc, op, case, t, make_upstream(op, case, generator))
    assert calls.keys() == names
    for name, arguments in calls.items():
        zeroed = written(name)
        for argument, value in zip(operator_of(name)._schema.arguments, arguments, strict=True):
            if argument.name in zeroed and value is not None:
                value.zero_()
        torch.library.opcheck(operator_of(name), arguments)


def operator_of(name):
    return getattr(torch.ops.cute_kernels, name).default


def written(name):
    arguments = operator_of(name)._schema.arguments
    return {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}


@pytest.mark.parametrize("op", OPERATIONS)
def test_fake_tensors(op, generator, device):
    """Shapes, dtypes and strides as those of real tensors; nothing is compiled."""
    case = replace(FULL, dropout_p=0.3)
    t, upstream = make_inputs(case, generator), make_upstream(op, case, generator)
    wanted = differentiate(mhc, op, case, t, upstream)
    mode = FakeTensorMode()
    fakes = {name: mode.from_tensor(tensor.detach()).requires_grad_() for name, tensor in t.items()}
    incoming = {name: mode.from_tensor(tensor) for name, tensor in upstream.items()}
    before = stats()
    with mode:
        found = differentiate(mhc, op, case, fakes, incoming)
    assert stats() == before
    for name in wanted:
        assert found[name].shape == wanted[name].shape and found[name].dtype is wanted[name].dtype
        assert found[name].stride() == wanted[name].stride() and found[name].device.type == device


@pytest.mark.parametrize("op", OPERATIONS)
def test_another_number_of_tokens_compiles_nothing(op, generator):
    for first, tokens in ((True, 64), *((False, m) for m in (1, 2, 33, 129, 1001, 4100))):
        case = replace(FULL, tokens=(tokens,))
        t, upstream = make_inputs(case, generator), make_upstream(op, case, generator)
        before = stats()
        differentiate(mhc, op, case, t, upstream)
        after = stats()
        if not first:
            assert (after.compiles, after.misses, after.disk_loads) == (
                before.compiles,
                before.misses,
                before.disk_loads,
            )


# Below: on a GPU only


def test_autocast_changes_nothing(generator):
    t, upstream = make_inputs(FULL, generator), make_upstream("pre", FULL, generator)
    wanted = differentiate(mhc, "pre", FULL, t, upstream)
    with torch.autocast("cuda", dtype=FP16):
        found = differentiate(mhc, "pre", FULL, t, upstream)
    assert_same_bits(found, wanted)


def capture(function):
    """A graph of ``function``, captured without a run before, and what it returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


# Channels that no other test uses: the first call, and so the load of the GPU's module, is inside the capture
@pytest.mark.parametrize(
    "op, case",
    [
        ("hyper_connection", Case(4, 72, (130,), norm_weight=True, bias=True, dropout_p=0.3)),
        ("expand_combine", Case(2, 21, (33,), FP16, BF16, "transformer_engine", bias=True)),
        ("head", Case(4, 88, (130,))),
    ],
    ids=str,
)
def test_first_call_inside_a_graph_capture(op, case, generator):
    captured, incoming = make_inputs(case, generator), make_upstream(op, case, generator)
    graph, results = capture(lambda: differentiate(mhc, op, case, captured, incoming))
    for _ in range(2):
        fresh, upstream = make_inputs(case, generator), make_upstream(op, case, generator)
        with torch.no_grad():
            for name, t in captured.items():
                t.copy_(fresh[name])
            for name, t in incoming.items():
                t.copy_(upstream[name])
        for result in results.values():
            result.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        replayed = {name: result.clone() for name, result in results.items()}
        assert_same_bits(replayed, differentiate(mhc, op, case, fresh, upstream))


def test_main_grad_in_a_graph(generator):
    """Each replay adds."""
    t, upstream = make_inputs(FULL, generator), make_upstream("hyper_connection", FULL, generator)["out"]
    names = [name for name in OPERATIONS["hyper_connection"][0] if name != "x"]
    for name in names:
        t[name].main_grad = torch.zeros_like(t[name], dtype=FP32)

    def step():
        (out,) = call(mhc, "hyper_connection", FULL, t)
        torch.autograd.grad(out, t["x"], upstream, retain_graph=True)
        out.backward(upstream, inputs=[t[name] for name in names])

    step()
    torch.cuda.synchronize()
    for name in names:
        t[name].main_grad.zero_()
    step()
    once = {name: t[name].main_grad.clone() for name in names}
    graph, _ = capture(step)
    for name in names:
        t[name].main_grad.zero_()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    for name in names:
        torch.testing.assert_close(t[name].main_grad, 2 * once[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op, case", TRACED, ids=str)
def test_side_stream(op, case, generator):
    """Work goes to the caller's stream: behind a long kernel there, the inputs are not yet what they will be."""
    t, upstream = make_inputs(case, generator), make_upstream(op, case, generator)
    wanted = differentiate(mhc, op, case, t, upstream)
    late, incoming = make_inputs(case, generator), make_upstream(op, case, generator)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        torch.cuda._sleep(400_000_000)  # 0.2 s
        for target, source in ((late, t), (incoming, upstream)):
            for name, tensor in target.items():
                tensor.copy_(source[name])
        with torch.enable_grad():
            found = differentiate(mhc, op, case, late, incoming)
    assert not stream.query(), "the long kernel is over: nothing was shown"
    stream.synchronize()
    assert_same_bits(found, wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("op, case", TRACED, ids=str)
def test_second_device(op, case, generator):
    """Tensors of a device that is not the current one: the same bits; of two devices: an error."""
    t, upstream = make_inputs(case, generator), make_upstream(op, case, generator)
    wanted = differentiate(mhc, op, case, t, upstream)
    moved = {name: tensor.detach().to("cuda:1").requires_grad_() for name, tensor in t.items()}
    incoming = {name: tensor.to("cuda:1") for name, tensor in upstream.items()}
    assert torch.cuda.current_device() == 0
    found = differentiate(mhc, op, case, moved, incoming)
    assert all(result.device == torch.device("cuda:1") for result in found.values())
    assert_same_bits({name: result.to("cuda:0") for name, result in found.items()}, wanted)
    *others, last = OPERATIONS[op][0]
    if others:
        with pytest.raises(ValueError, match=f"{last} must be on cuda:1, got cuda:0"):
            call(mhc, op, case, moved | {last: t[last]})


def in_a_thread(function):
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    assert result, "the thread failed"
    return result[0]


# Channels of their own: the first call of a kernel is in the thread
@pytest.mark.parametrize("case", [Case(4, 168, (13,), norm_weight=True, bias=True, dropout_p=0.3)], ids=str)
@pytest.mark.parametrize("op", ["hyper_connection"])
def test_fresh_threads(op, case, generator):
    """A first call, and a backward, in threads that have not used the GPU yet."""
    t, upstream = make_inputs(case, generator), make_upstream(op, case, generator)
    leaves = [t[name] for name in OPERATIONS[op][0]]
    outputs = in_a_thread(lambda: call(mhc, op, case, t))
    found = in_a_thread(lambda: torch.autograd.grad(outputs, leaves, list(upstream.values())))
    wanted = differentiate(mhc, op, case, t, upstream)
    assert_same_bits(
        {f"d{name}": g for name, g in zip(OPERATIONS[op][0], found, strict=True)},
        {name: result for name, result in wanted.items() if name != "out"},
    )


def test_many_threads(generator):
    """Threads of one process call at the same time, each on a stream of its own."""
    t, upstream = make_inputs(FULL, generator), make_upstream("hyper_connection", FULL, generator)
    wanted = differentiate(mhc, "hyper_connection", FULL, t, upstream)
    results = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            found = differentiate(mhc, "hyper_connection", FULL, t, upstream)
            torch.cuda.current_stream().synchronize()
            results.append(all(same_bits(found[name], value) for name, value in wanted.items()))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 8


def test_integer_and_tensor_seeds(generator, device):
    t = make_inputs(FULL, generator)

    def run(seed):
        return mhc.expand_combine(t["f"], t["post"], t["x"], t["res"], dropout_p=0.5, seed=seed).detach()

    wanted = run(SEED)
    for seed in (torch.tensor(SEED, device=device), torch.tensor([[SEED]], device=device)):
        assert same_bits(run(seed), wanted)
    assert not same_bits(run(SEED + 1), wanted) and not same_bits(run(SEED + 2**32), wanted)
