"""Bitwise: a row alone, among others, elsewhere, padded, in chunks (T1 to T5); sums over tokens (B0 to B3); cuBLAS.

Raw bits are compared: +0 is not -0. That another order of summation shows in the data at hand is what ``test_controls``
and ``test_wide_range_shows_the_order_of_summation`` (tests/gemm/test_reference.py) hold.
"""

import pytest
import torch

from cute_kernels import linear, mm
from cute_kernels.runtime.launches import observed
from tests.gemm.cases import (
    BF16,
    FP16,
    FP32,
    LAYOUTS,
    TARGETS,
    TOKENS,
    assert_same_bits,
    bits,
    kernel_name,
    kernels,
    laid_out,
    only_kernel,
    operands,
    randn,
    same_bits,
    wide_range,
)
from tests.gemm.every_kernel import of_any_layout, of_tokens, of_whole_blocks, products

pytestmark = pytest.mark.usefixtures("gemms_precompiled")


def product(a, b, layout, dy):
    """y = a b, and the gradient of a, from operands in memory of their own."""
    a, b = operands(a, b, layout)
    y = mm(a.requires_grad_(), b)
    return {"y": y.detach(), "da": torch.autograd.grad(y, a, dy.contiguous())[0]}


def assert_same(found, wanted, index, what):
    for name, result in wanted.items():
        assert_same_bits(found[name], result[index], f"{name}, {what}")


# T1 to T5


@pytest.mark.parametrize("layout", LAYOUTS, ids="".join)
@pytest.mark.parametrize(
    "n, k, dtype", [(4096, 4096, BF16), (1024, 2112, BF16), (1096, 200, BF16), (1096, 200, FP16), (33, 100, BF16)]
)
def test_a_row_does_not_know_its_batch(n, k, dtype, layout, generator):
    """T1, T2, T3: any number of rows drawn from 4096; the last of these stands first, 78th and last among them."""
    rows = max(TOKENS)
    a, b, dy = (randn(*shape, generator=generator).to(dtype) for shape in ((rows, k), (k, n), (rows, n)))
    whole = product(a, b, layout, dy)
    for m in TOKENS:
        for position in sorted({0, 77, m - 1}):
            if position < m:
                index = torch.randperm(rows, generator=generator, device=a.device)[:m]
                index[position] = rows - 1
                assert_same(product(a[index], b, layout, dy[index]), whole, index, f"{m} rows, {position}")


@pytest.mark.parametrize("n, k", [(4096, 4096), (1024, 8256), (1096, 200)], ids=str)
@pytest.mark.parametrize("m", [5, 64, 300])
def test_a_row_does_not_know_its_neighbours_values(m, n, k, generator):
    """T3: the others hold zeros, large numbers, infinities, NaN; they get what they must, their neighbour nothing."""
    a, b, dy = randn(m, k, generator=generator), randn(k, n, generator=generator), randn(m, n, generator=generator)
    a, b, dy = a.to(BF16), b.to(BF16), dy.to(BF16)
    layout = ("k", "k" if n == 1024 else "n")  # the former has kernels of its own for few tokens
    clean = product(a, b, layout, dy)
    for row in {0, 2, m - 1}:
        others = torch.arange(m, device=a.device) != row
        for value in (0.0, 3e38, float("inf"), float("nan")):
            for hit in (others, ~others):
                dirty_a, dirty_dy = a.clone(), dy.clone()
                dirty_a[hit], dirty_dy[hit] = value, value
                found = product(dirty_a, b, layout, dirty_dy)
                assert_same({name: result[~hit] for name, result in found.items()}, clean, ~hit, f"{value} in others")
                if value != value:
                    assert all(result[hit].isnan().all() for result in found.values())


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("n, k", [(4096, 4096), (1024, 2112), (1096, 200)], ids=str)
def test_padding_and_chunks(n, k, activation, generator):
    """T4, T5: rows of anything before and behind; the batch cut at any place. With bias and activation."""
    rows = 256
    x, weight = randn(rows, k, generator=generator).to(BF16), (randn(n, k, generator=generator) * k**-0.5).to(BF16)
    bias, dy = randn(n, generator=generator), randn(rows, n, generator=generator).to(BF16)

    def layer(x, dy):
        x = x.clone().requires_grad_()
        y = linear(x, weight, bias, activation=activation)
        return {"y": y.detach(), "dx": torch.autograd.grad(y, x, dy.clone())[0]}

    whole = layer(x, dy)
    for before, behind in ((0, 1), (0, 28), (1, 0), (16, 0), (3, 61), (77, 256)):
        for value in (0.0, 1e4, float("nan")):
            pad = [(before, behind), value]
            padded = layer(*(torch.nn.functional.pad(t, (0, 0, *pad[0]), value=pad[1]) for t in (x, dy)))
            rest = {name: result[before : before + rows] for name, result in padded.items()}
            assert_same(rest, whole, slice(None), f"padding {pad}")
    for sizes in ([100, 156], [1, 255], [128, 128], [64] * 4, [7] * 36 + [4], [255, 1]):
        parts = [layer(*part) for part in zip(x.split(sizes), dy.split(sizes), strict=True)]
        joined = {name: torch.cat([part[name] for part in parts]) for name in whole}
        assert_same(joined, whole, slice(None), f"chunks {sizes[:3]}")


@pytest.mark.parametrize("kernel", kernels()[1:], ids=kernel_name)
def test_every_kernel_has_the_same_bits(kernel, generator, device):
    """Each in all that a call can get it for against the one for any stride, hence each pair.

    With an SM for each tile, and with few, so that a CTA has several.
    """
    shapes = [(72, 136, 4096), (72, 136, 1088), (160, 2120, 1088), (1048, 72, 192)]
    shapes += [(33, 1048, 1088), (330, 264, 704), (100, 72, 64)] * (kernel in of_tokens())
    if kernel in of_any_layout():
        shapes += [(304, 264, 200), (8, 520, 1032), (520, 8, 16), (576, 72, 136), (1040, 776, 200), (776, 1040, 16)]
    for m, n, k in shapes:
        a, b = wide_range(m, k, generator=generator), wide_range(n, k, generator=generator)
        start, bias = wide_range(m, n, generator=generator).float(), randn(n, generator=generator)
        valid = torch.tensor([2 * k // 3], dtype=torch.int32, device=device)
        with only_kernel(None, False):
            wanted = products(kernel, a, b, start, bias, valid)
        for num_sms in (132, 8):
            with only_kernel(*kernel, num_sms), observed() as used:
                found = products(kernel, a, b, start, bias, valid)
            assert {(launch.config, launch.transposed) for launch, _, _ in used} == {kernel}
            assert all(launch.num_ctas <= num_sms for launch, _, _ in used)
            assert found.keys() == wanted.keys()
            for name, result in found.items():
                assert_same_bits(result, wanted[name], f"{name}, {m}x{n}x{k}, {num_sms} SMs")


@pytest.mark.parametrize("kernel", [(None, False), *of_any_layout(), *of_whole_blocks()], ids=kernel_name)
def test_main_grad_to_which_nothing_is_added(kernel, generator, device):
    """No tokens, by their number or by count: every bit stays, in every kernel; the sign of zeros, too."""
    start = torch.tensor([-0.0, 0.0, 1.0, float("nan")], device=device).repeat(72, 34)
    x, dy = wide_range(192, 136, generator=generator), wide_range(192, 72, generator=generator)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    for by_tokens in (False, True):
        if by_tokens and kernel in of_whole_blocks():
            continue  # those are for neighbours along what is summed
        for tokens, valid in ((192, none), (0, None)):
            weight = torch.ones(72, 136, dtype=BF16, device=device, requires_grad=True)
            weight.main_grad = start.clone()
            y = linear(laid_out(x[:tokens], by_tokens), weight, num_valid_tokens=valid)
            with only_kernel(*kernel), observed() as used:
                y.backward(laid_out(dy[:tokens], by_tokens))
            assert [(launch.config, launch.transposed) for launch, _, _ in used] == [kernel] * (tokens > 0)
            assert_same_bits(weight.main_grad, start, f"{tokens} tokens")


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("n, k", TARGETS, ids=str)
def test_the_cases_of_the_origin(n, k, backward, generator):
    """On its (K, N) weights: a row of 512 alone; 256 rows as 100 + 156; 100 rows padded to 128 by noise."""
    a, b = randn(512, k, generator=generator).to(BF16), randn(k, n, generator=generator).to(BF16)
    dy = randn(512, n, generator=generator).to(BF16)

    def run(begin, end):
        if not backward:
            return mm(a[begin:end].clone(), b)
        x = a[begin:end].clone().requires_grad_()
        return torch.autograd.grad(mm(x, b), x, dy[begin:end].clone())[0]

    whole = run(0, 512)
    for row in (0, 77, 511):
        assert_same_bits(run(row, row + 1), whole[row : row + 1], f"row {row}")
    assert_same_bits(torch.cat([run(0, 100), run(100, 256)]), run(0, 256), "100 + 156")
    assert_same_bits(run(0, 100), run(0, 128)[:100], "padding")


@pytest.mark.parametrize("out", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("n, k", TARGETS, ids=str)
def test_cublas_without_split_k(n, k, out, generator):
    """At 4096 tokens cuBLAS, too, sums all of K in order: the same bits, and so at every other number of tokens."""
    for wide in (False, True):
        if wide:
            x, weight = wide_range(4096, k, generator=generator), wide_range(n, k, generator=generator)
        else:
            x, weight = (randn(*shape, generator=generator).to(BF16) for shape in ((4096, k), (n, k)))
        assert_same_bits(linear(x, weight, out_dtype=out), torch.mm(x, weight.t(), out_dtype=out), "cuBLAS")


# Sums over tokens

T = 304
CHUNKS = [[128, 176], [160, 144], [176, 128], [16, 288], [288, 16], [16] * 19, [128, 32, 144]]
WIDTHS = [(264, 200), (33, 17), (4096, 1024)]


def tokens(n, k, generator):
    """x, dy and buffers to start from; normal numbers, whose sums differ most often when they are summed otherwise."""
    x, dy = (randn(T, size, generator=generator).to(BF16) for size in (k, n))
    return x, dy, 8 * randn(n, k, generator=generator), 8 * randn(n, generator=generator)


def sums(batches, start, bias_start, **options):
    """main_grad of weight and bias after a backward of each batch; and, of one batch alone, their bf16 gradients."""
    weight = torch.zeros_like(start, dtype=BF16).requires_grad_()
    bias = torch.zeros_like(bias_start, dtype=BF16).requires_grad_()
    found = {}
    if len(batches) == 1:
        x, dy = batches[0]
        linear(x, weight, bias, **options).backward(dy)
        found = {"dw": weight.grad, "db": bias.grad}
        weight.grad = bias.grad = None
    weight.main_grad, bias.main_grad = start.clone(), bias_start.clone()
    for x, dy in batches:
        linear(x, weight, bias, **options).backward(dy)
    assert weight.grad is bias.grad is None
    return {**found, "main_grad of weight": weight.main_grad, "main_grad of bias": bias.main_grad}


@pytest.mark.parametrize("n, k", WIDTHS, ids=str)
def test_gradients_of_parameters_are_reproducible(n, k, generator, device):
    """B0: again, at other addresses."""
    x, dy, *starts = tokens(n, k, generator)
    wanted = sums([(x, dy)], *starts)
    for shift in (1000, 77777):
        between = torch.empty(shift, device=device)
        assert_same(sums([(x.clone(), dy.clone())], *starts), wanted, slice(None), "again")
        del between


@pytest.mark.parametrize("n, k", WIDTHS, ids=str)
def test_tokens_of_zeros(n, k, generator):
    """B1, B2: any number of them behind, multiples of 16 before: their dy is zero, or x is; the other is anything."""
    x, dy, *starts = tokens(n, k, generator)
    wanted = sums([(x, dy)], *starts)
    for before, behind in ((0, 1), (0, 5), (0, 16), (0, 208), (0, 720), (16, 0), (64, 0), (208, 3), (32, 3792)):
        at = slice(before, before + T)
        for zero in ("x", "dy"):
            padded = {
                "x": randn(before + T + behind, k, generator=generator).to(BF16),
                "dy": randn(before + T + behind, n, generator=generator).to(BF16),
            }
            padded[zero].zero_()
            padded["x"][at], padded["dy"][at] = x, dy
            found = sums([(padded["x"], padded["dy"])], *starts)
            if zero == "x":  # the bias sums dy alone
                found = {name: found[name] for name in ("dw", "main_grad of weight")}
            for name, result in found.items():
                assert_same_bits(result, wanted[name], f"{name}, {before} before, {behind} behind, {zero} zero")


@pytest.mark.parametrize("n, k", WIDTHS, ids=str)
def test_micro_batches(n, k, generator):
    """B3: the accumulators start from main_grad, so chunks of multiples of 16 tokens give one batch's bits."""
    x, dy, *starts = tokens(n, k, generator)
    wanted = sums([(x, dy)], *starts)
    for sizes in CHUNKS:
        found = sums(list(zip(x.split(sizes), dy.split(sizes), strict=True)), *starts)
        for name, result in found.items():
            assert_same_bits(result, wanted[name], f"{name}, {sizes}")


def test_controls(generator):
    """Results that are not promised differ here: chunks of 100, adding products that were rounded, 8 zeros before."""
    x, dy, *starts = tokens(264, 200, generator)
    name = "main_grad of weight"
    wanted = sums([(x, dy)], *starts)[name]
    parts = list(zip(x.split([100, 204]), dy.split([100, 204]), strict=True))
    added = starts[0] + mm(dy.t(), x, out_dtype=FP32)
    shifted = sums([(torch.cat([0 * x[:8], x]), torch.cat([0 * dy[:8], dy]))], *starts)[name]
    for other in (sums(parts, *starts)[name], added, shifted):
        assert (bits(other) != bits(wanted)).float().mean() > 0.3


@pytest.mark.parametrize("n, k", WIDTHS[:2], ids=str)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_tokens_beyond_the_valid_ones(garbage, n, k, generator, device):
    """As if they were not there, whatever x and dy hold: the bits of a call without them."""
    x, dy, *starts = tokens(n, k, generator)
    for valid in (0, 1, 15, 16, 63, 64, 65, 100, T):
        wanted = sums([(x[:valid].clone(), dy[:valid].clone())], *starts)
        dirty_x, dirty_dy = x.clone(), dy.clone()
        dirty_x[valid:], dirty_dy[valid:] = garbage, garbage
        count = torch.tensor([valid], dtype=torch.int32, device=device)
        found = sums([(dirty_x, dirty_dy)], *starts, num_valid_tokens=count)
        assert_same(found, wanted, slice(None), f"{valid} valid")
    for valid, same_as in ((T + 1000, T), (-3, 0)):
        found = sums([(x, dy)], *starts, num_valid_tokens=torch.tensor([valid], dtype=torch.int32, device=device))
        assert_same(found, sums([(x[:same_as], dy[:same_as])], *starts), slice(None), f"{valid} valid")


def test_valid_tokens_change_neither_y_nor_dx(generator, device):
    x = randn(2, 152, 200, generator=generator).to(BF16).requires_grad_()
    weight, dy = randn(264, 200, generator=generator).to(BF16).requires_grad_(), randn(2, 152, 264, generator=generator)
    counted = linear(x, weight, num_valid_tokens=torch.tensor([100], dtype=torch.int32, device=device))
    plain = linear(x, weight)
    assert_same_bits(counted.detach(), plain.detach())
    (dx, dw), (plain_dx, plain_dw) = (torch.autograd.grad(y, (x, weight), dy.to(BF16)) for y in (counted, plain))
    assert_same_bits(dx, plain_dx)
    assert not same_bits(dw, plain_dw)


@pytest.mark.parametrize("by_rows", [True, False], ids=["x by rows", "dy by rows"])
def test_layouts_change_no_bit_of_the_sums(by_rows, generator):
    x, dy, *starts = tokens(264, 200, generator)
    wanted = sums([(x, dy)], *starts)
    assert_same(sums([(laid_out(x, by_rows), laid_out(dy, not by_rows))], *starts), wanted, slice(None), "layout")
