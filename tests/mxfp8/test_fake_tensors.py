"""The quantizers as torch sees them: fakes as real for every combination of flags, opcheck, graphs, launches."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import cute_kernels
from cute_kernels.mxfp8 import launch
from tests.fakes import fake_kernels
from tests.mxfp8.cases import (
    BF16,
    DTYPES,
    E4M3,
    E5M2,
    FP16,
    FP32,
    LAYOUTS,
    MODES,
    NAMES,
    VARIANTS,
    Case,
    assert_same,
    call,
    every_variant,
    laid_out,
    make_input,
    opcheck,
    reference,
    seeded_generator,
)

SHAPE = (2, 160, 416)
EMPTY = ((0, 64, 96), (2, 0, 96), (2, 64, 0), (1, 32, 32))
CASES = [
    *(case for t in (False, True) for out in (E4M3, E5M2) for case in every_variant(SHAPE, transposed=t, out=out)),
    *(case for shape in EMPTY for case in every_variant(shape)),
    *(Case(variant, SHAPE if variant.startswith("3d") else SHAPE[1:], gap=8) for variant in VARIANTS),
]
# (rank, along_k, along_n, square)
OPERATORS = [(2, *flags, False) for flags in ((True, False), (False, True), (True, True))]
OPERATORS += [(3, *flags) for flags in itertools.product((False, True), repeat=3) if flags[0] or flags[1]]


QUANTIZE = {2: launch.quantize, 3: launch.quantize_squares, 4: launch.quantize_dual}
OPERATOR_OF = {2: "mxfp8_quantize", 3: "mxfp8_quantize_squares", 4: "mxfp8_quantize_dual"}
TRACED = [case for case in every_variant((2, 64, 96)) if case.scale_layout == "plain"]
TRACED += [Case("3d_dual_square", (2, 64, 96), scale_layout="blocked", transposed=True)]


def metadata(tensors):
    return [(t.dtype, t.shape, t.stride(), t.storage_offset(), t.device.type) for t in tensors]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fakes_are_as_real(case):
    """Shape, stride, dtype: the fake's, the kernels' path's, and where there are elements the reference's."""
    x = laid_out(case, torch.zeros(case.shape, dtype=case.dtype))
    wanted = call(case, x, reference)
    with fake_kernels():
        real = call(case, x)
        values = [cute_kernels.dequantize(*real[i : i + 2], dtype=FP32) for i in range(0, len(real), 2)]
    with FakeTensorMode() as mode:
        fake = call(case, mode.from_tensor(x))
        fake_values = [cute_kernels.dequantize(*fake[i : i + 2], dtype=FP32) for i in range(0, len(fake), 2)]
        on_gpu = call(case, torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda"))
    assert metadata(fake) == metadata(real) and metadata(fake_values) == metadata(values)
    assert [f[:4] for f in metadata(on_gpu)] == [f[:4] for f in metadata(real)]
    assert {t.device.type for t in on_gpu} == {"cuda"}
    for one, two in zip(real, wanted, strict=True):
        assert one.dtype is two.dtype and one.shape == two.shape
        assert one.numel() == 0 or one.stride() == two.stride()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_opcheck(operator, layout):
    """The registered operators: schema, autograd registration, fakes, functionalisation."""
    rank, along_k, along_n, square = operator
    x = torch.randn((64, 96) if rank == 2 else (2, 64, 96), generator=torch.Generator().manual_seed(0)).to(BF16)
    count = 2 * (along_k + along_n)
    count -= count == 4 and square and layout == "plain"
    quantize, arguments = QUANTIZE[count].registered, (x, E4M3, along_k, along_n, square, "rceil", layout)
    found = quantize(*arguments)
    assert isinstance(found, tuple) and len(found) == count
    opcheck(quantize, arguments)
    opcheck(launch.dequantize.registered, (found[0], found[1], BF16, not along_k))


def test_the_schemas_let_dtensor_tell_calls_apart():
    """DTensor's key of a sharding are the tensors and the arguments from the first integer on."""
    for operator in (quantize.registered for quantize in QUANTIZE.values()):
        first, second, *_ = operator._schema.arguments
        assert first.name == "x" and second.name == "dtype" and isinstance(second.type, torch.IntType)
        assert not any(a.alias_info is not None for a in operator._schema.arguments)
        assert operator.name().startswith("cute_kernels::mxfp8_quantize")


@pytest.mark.parametrize("case", TRACED, ids=str)
def test_one_graph(case):
    """fullgraph, by the registered operators as of CUDA tensors, also for another size."""
    torch._dynamo.reset()
    called = []

    def backend(graph, inputs):
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    with fake_kernels():
        compiled = torch.compile(lambda x: call(case, x), fullgraph=True, backend=backend)
        for shape in (case.shape, (*case.shape[:-2], 96, 160)):
            other = replace(case, shape=shape)
            x = make_input(other, seeded_generator(str(other), "cpu"))
            found = compiled(x.requires_grad_())
            assert_same(found, call(case, x.detach(), reference))
    operator = f"cute_kernels.{OPERATOR_OF[len({t.data_ptr() for t in found})]}.default"
    assert {name for name in called if name.startswith("cute_kernels")} == {operator}


def there_and_back(x):
    """Through every function of blocked scales, in plain torch."""
    q, scale = reference.quantize_rowwise(x, scale_layout="blocked")
    plain = cute_kernels.from_blocked(scale, x.shape[0], x.shape[1] // 32)
    return reference.dequantize(q, cute_kernels.to_blocked(plain), dtype=FP32)


def test_one_graph_for_every_size():
    """After the first, which torch traces with its own sizes; a symbolic trace is one for all from the start."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(there_and_back, fullgraph=True, backend=counter)
    xs = [torch.randn(32 * m, 32 * m + 64, generator=torch.Generator().manual_seed(m)) for m in (3, 5, 9, 11)]
    traced = make_fx(there_and_back, tracing_mode="symbolic")(xs[0])
    for x in xs:
        for function in (compiled, traced):
            assert torch.equal(function(x), there_and_back(x))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("case", every_variant((2, 64, 96)), ids=str)
def test_another_size_compiles_nothing(case):
    """Sizes, experts and strides are no part of a kernel; few tiles, all of them."""
    with fake_kernels() as jobs:
        found = call(case, laid_out(case, torch.zeros(case.shape, dtype=BF16)))
        cute_kernels.dequantize(found[0], found[1])
        first = set(jobs)
        sizes = [(1, 32, 32), (7, 416, 160), (32, 2880, 32)] if len(case.shape) == 3 else [(32, 32), (2880, 416)]
        for shape in sizes:
            for gap in (0, 8):
                other = Case(case.variant, shape, scale_layout=case.scale_layout, gap=gap)
                found = call(other, laid_out(other, torch.zeros(shape, dtype=BF16)))
                cute_kernels.dequantize(found[0], found[1])
        assert set(jobs) == first
        before = len(jobs)
        call(case, laid_out(case, torch.zeros(case.shape, dtype=BF16)))
        assert len(jobs) == before  # the launch is found


def test_what_is_another_kernel():
    base = Case("3d_dual", (2, 64, 96))
    others = [
        Case("3d_dual", (2, 64, 96), transposed=True),
        Case("3d_dual_square", (2, 64, 96)),
        Case("3d_colwise", (2, 64, 96)),
        Case("dual", (64, 96)),
        *(Case("3d_dual", (2, 64, 96), dtype=dtype) for dtype in DTYPES if dtype is not BF16),
        *(Case("3d_dual", (2, 64, 96), mode=mode) for mode in MODES[1:]),
        Case("3d_dual", (2, 64, 96), scale_layout="blocked"),
        Case("3d_dual", (2, 64, 96), out=E5M2),
    ]
    with fake_kernels() as jobs:
        for case in (base, *others):
            call(case, laid_out(case, torch.zeros(case.shape, dtype=case.dtype)))
        assert len(set(jobs)) == len(jobs) == 1 + len(others)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=NAMES.get)
def test_operators_on_cpu_tensors_are_the_reference(dtype):
    """A graph calls these for CPU tensors."""
    x = make_input(Case("dual", (64, 96), dtype), seeded_generator("cpu", "cpu"))
    found = launch.quantize_dual.registered(x, E5M2, True, True, False, "even", "blocked")
    wanted = reference.quantize_dual(x, mode="even", scale_layout="blocked", dtype=E5M2)
    assert_same(list(found), list(wanted))
