"""The reference of the quantizers against an independent definition, value by value, and the kernels' integer rule."""

import math
import struct

import pytest
import torch

from cute_kernels.mxfp8 import from_blocked, reference, to_blocked
from tests.fakes.mxfp8 import emulated_scales
from tests.mxfp8.cases import (
    BF16,
    DTYPES,
    E4M3,
    E5M2,
    FP16,
    FP32,
    MODES,
    NAMES,
    SCALE,
    SPECIAL_FP32,
    Case,
    amax_inputs,
    assert_same,
    call,
    every_variant,
    make_input,
    seeded_generator,
    wide,
)
from tests.mxfp8.test_kernel_bits import test_inputs_that_require_grad  # noqa: F401

LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def fp32(value: float) -> float:
    """Rounded to fp32 (what struct refuses is beyond its range)."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def fp8_values(dtype: torch.dtype) -> list[float]:
    """The format's non-negative finite numbers by their definition, ascending; their place is their byte."""
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if dtype is E4M3 else (5, 2, 15)
    values = []
    for byte in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = byte >> mantissa_bits, byte % 2**mantissa_bits / 2**mantissa_bits
        values.append(math.ldexp(mantissa, 1 - bias) if exponent == 0 else math.ldexp(1 + mantissa, exponent - bias))
    return values[: values.index(LARGEST[dtype]) + 1]


def rounded_byte(value: float, values: list[float]) -> int:
    """To nearest, ties to the even byte, saturating; NaN is 0x7F."""
    if math.isnan(value):
        return 0x7F
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    value = min(abs(value), values[-1])
    at = min(range(len(values)), key=lambda i: (abs(values[i] - value), i % 2))
    return sign | at


def defined_scale(amax: float, mode: str, dtype: torch.dtype) -> int:
    """The scale's byte by powers of two and logarithms of exact numbers."""
    if not math.isfinite(amax):
        return 255
    if mode == "rceil":
        target = fp32(amax * fp32(1 / LARGEST[dtype]))
        s = 0
        while math.ldexp(1.0, s - 127) < target:
            s += 1
        return s
    if mode == "even" and amax > 0:
        # To the element's mantissa, ties away from zero; of subnormal numbers in units of their last bit but a few
        bits = struct.unpack("<I", struct.pack("<f", amax))[0] + {E4M3: 1 << 19, E5M2: 1 << 20}[dtype]
        if bits >= 0x7F800000:
            return 255
        amax = struct.unpack("<f", struct.pack("<I", bits))[0]
    if amax == 0:
        return 0
    exponent = math.frexp(amax)[1] - 1
    if mode == "ceil" and amax != math.ldexp(1.0, exponent):
        exponent += 1
    return max(0, exponent + 127 - (8 if dtype is E4M3 else 15))


def defined_block(block: list[float], mode: str, dtype: torch.dtype) -> tuple[list[int], int]:
    amax = math.nan if any(map(math.isnan, block)) else max(map(abs, block))
    s = defined_scale(amax, mode, dtype)
    values = fp8_values(dtype)
    return [0x7F if s == 255 else rounded_byte(math.ldexp(x, 127 - s), values) for x in block], s


@pytest.mark.parametrize("out", [E4M3, E5M2], ids=NAMES.get)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_definition(dtype, mode, out):
    """Element by element, in plain Python."""
    x = wide((32, 320), dtype, seeded_generator(f"{dtype}{mode}{out}", "cpu"))
    q, s = reference.quantize_rowwise(x, mode=mode, dtype=out)
    for i, row in enumerate(x.double().tolist()):
        for j in range(0, 320, 32):
            q_bytes, s_byte = defined_block(row[j : j + 32], mode, out)
            assert s[i, j // 32].view(torch.uint8).item() == s_byte, (i, j)
            assert q[i, j : j + 32].view(torch.uint8).tolist() == q_bytes, (i, j)


@pytest.mark.parametrize("out", [E4M3, E5M2], ids=NAMES.get)
@pytest.mark.parametrize("mode", MODES)
def test_scales_of_chosen_values(mode, out):
    for bits in SPECIAL_FP32:
        amax = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
        assert reference.scales(amax, mode, out).item() == defined_scale(amax.item(), mode, out), hex(bits)


KNOWN = {  # of e4m3: amax's bits -> scale by rceil, floor, ceil, even
    0x7F7F0000: (247, 246, 247, 255),  # the largest bf16
    0x7F7FFFFF: (247, 246, 247, 255),
    0x43E00000: (127, 127, 128, 127),  # 448
    0x43E00001: (128, 127, 128, 127),
    0x43F00000: (128, 127, 128, 127),  # 480
    0x43F7FFFF: (128, 127, 128, 127),
    0x43F80000: (128, 127, 128, 128),  # 496
    0x44000000: (128, 128, 128, 128),  # 512
    0x00000000: (0, 0, 0, 0),
    0x00800000: (0, 0, 0, 0),
    0x04600001: (0, 0, 1, 0),
    0x047FFFFF: (1, 0, 1, 1),
    0x7F800000: (255, 255, 255, 255),
    0x7FC00000: (255, 255, 255, 255),
}


def test_known_scales():
    for bits, wanted in KNOWN.items():
        amax = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
        assert tuple(reference.scales(amax, mode, E4M3).item() for mode in MODES) == wanted, hex(bits)


@pytest.mark.parametrize("out", [E4M3, E5M2], ids=NAMES.get)
@pytest.mark.parametrize("mode", MODES)
def test_the_integer_rule_is_exact(mode, out):
    """The inputs of the kernels: all bf16 and fp16 values; all fp32 ones of the exponents where anything happens.

    In between the scale is the exponent minus a constant, plus what the mantissa alone decides (127 stands for all).
    """
    every_bf16 = torch.arange(2**15, dtype=torch.int32) << 16
    every_fp16 = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(FP16).float().abs().view(torch.int32)
    for bits in (every_bf16, every_fp16, torch.tensor(SPECIAL_FP32, dtype=torch.int32)):
        amax = bits.view(FP32)
        assert torch.equal(emulated_scales(amax, mode, out), reference.scales(amax, mode, out).int())
    mantissas = torch.arange(2**23, dtype=torch.int32)
    for exponent in (*((0, 6, 7, 8, 9, 10) if out is E4M3 else (0, 13, 14, 15, 16, 17)), 127, 253, 254):
        amax = (mantissas + (exponent << 23)).view(FP32)
        assert torch.equal(emulated_scales(amax, mode, out), reference.scales(amax, mode, out).int()), exponent


@pytest.mark.parametrize("out", [E4M3, E5M2])
def test_products_in_bf16(out):
    """The product of any finite bf16 number and any factor has the same fp8 from bf16 as from fp32."""
    x = torch.arange(2**16).to(torch.int16).view(BF16)
    x = x[x.isfinite()].float()
    for s in range(255):
        product = x * torch.tensor((254 - s) << 23, dtype=torch.int32).view(torch.float32)
        found, wanted = (p.clamp(-LARGEST[out], LARGEST[out]).to(out) for p in (product.to(BF16).float(), product))
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), s


def test_the_conversion_instruction_gives_the_same():
    """cvt.rp.ue8m0x2.f32 (SM100) of amax / largest: a value up to a power of two, without saturation."""
    mantissas = torch.arange(2**23, dtype=torch.int32)
    for exponent in (0, 7, 8, 9, 127, 254):
        amax = (mantissas + (exponent << 23)).view(FP32)
        d = amax * torch.tensor(0x3B124925, dtype=torch.int32).view(FP32)
        power = torch.where(d == 0, 0, torch.ceil(torch.log2(d.double())) + 127).clamp(min=0)
        assert torch.equal(emulated_scales(amax, "rceil", E4M3).double(), power), exponent


@pytest.mark.parametrize("mode", MODES)
def test_every_bf16_magnitude(mode):
    """In the two orientations the same scale meets the same block."""
    every = (torch.arange(2**15, dtype=torch.int32) << 16).view(FP32).to(BF16)
    x = amax_inputs(BF16, every, seeded_generator(mode, "cpu"))
    q_k, s_k, q_n, s_n = reference.quantize_dual(x, mode=mode)
    wanted = reference.scales(every.float(), mode, E4M3).to(torch.uint8).sort().values
    for s in (s_k, s_n):
        assert torch.equal(s.view(torch.uint8).flatten().sort().values, wanted)
    rows = x.float().unflatten(1, (32, 32)).abs().amax(-1)
    assert torch.equal(s_k.view(torch.uint8), reference.scales(rows, mode, E4M3).to(torch.uint8))


def test_orientations_agree():
    """Blocks along N are blocks along K of the transpose; squares have the scale of their largest magnitude."""
    x = wide((3, 96, 160), BF16, seeded_generator("orientations", "cpu"))
    q, s = reference.quantize_3d_colwise(x)
    for e in range(3):
        qt, st = reference.quantize_rowwise(x[e].mT.contiguous())
        assert torch.equal(q[e].mT.view(torch.uint8), qt.view(torch.uint8))
        assert torch.equal(s[e].mT.view(torch.uint8), st.view(torch.uint8))
        qc, sc = reference.quantize_colwise(x[e])
        assert torch.equal(qc.view(torch.uint8), q[e].view(torch.uint8))
        assert torch.equal(sc.view(torch.uint8), st.view(torch.uint8))
    q_k, s, q_n, same = reference.quantize_3d_dual(x, square=True)
    assert same is s and s.shape == (3, 3, 5)
    assert torch.equal(q_k.view(torch.uint8), q_n.view(torch.uint8))
    squares = x.float().view(3, 3, 32, 5, 32).abs().amax((2, 4))
    assert torch.equal(s.view(torch.uint8), reference.scales(squares, "rceil", E4M3).to(torch.uint8))


@pytest.mark.parametrize("case", every_variant((2, 96, 160)) + every_variant((2, 96, 160), transposed=True), ids=str)
def test_shapes_strides_and_the_way_back(case):
    x = make_input(case, seeded_generator(str(case), "cpu"))
    found = call(case, x, reference)
    assert_same(found, call(case, x))  # CPU tensors take the reference
    finite = torch.isfinite(x)
    for q, s in (found[:2], found[2:])[: len(found) // 2]:
        assert q.shape == x.shape and s.dtype is SCALE and s.is_contiguous()
        for dtype in DTYPES:
            y = reference.dequantize(q, s, dtype=dtype)
            assert y.dtype is dtype and y.shape == x.shape and y.stride() == q.stride()
        y = reference.dequantize(q, s, dtype=FP32).double()
        good = torch.isfinite(y)
        # Half a unit of the mantissa, or of the smallest element's, in a block whose largest is 448 2^(s - 127)
        bound = x.double().abs() / 16 + x.double().abs().nan_to_num(0, 0).amax() * 2**-17
        assert ((y - x.double()).abs() <= bound)[good].all()
        assert not (good & ~finite).any()


def test_dequantized_values_have_no_gradient():
    q, s = reference.quantize_rowwise(torch.ones(64, 96), scale_layout="blocked")
    assert not reference.dequantize(q.requires_grad_(), s.requires_grad_()).requires_grad


def test_dequantized_values():
    """q * 2^(s - 127), s = 0 and 255 too."""
    q = torch.arange(256, dtype=torch.uint8).view(E4M3).view(8, 32).repeat(4, 1)
    s = torch.tensor([0, 1, 100, 127, 128, 247, 254, 255] * 4, dtype=torch.uint8).view(SCALE).view(32, 1)
    y = reference.dequantize(q, s, dtype=FP32)
    for i in range(32):
        byte = int(s[i].view(torch.uint8))
        for j in range(32):
            value = q[i, j].float().item()
            wanted = math.nan if byte == 255 else fp32(math.ldexp(value, byte - 127)) if value == value else math.nan
            assert y[i, j].item() == wanted or math.isnan(wanted) and math.isnan(y[i, j].item())


@pytest.mark.parametrize("rows, columns", [(1, 1), (128, 4), (129, 5), (32, 90), (416, 13), (0, 4), (300, 0)])
@pytest.mark.parametrize("experts", [(), (3,)], ids=str)
def test_blocked_layout(rows, columns, experts):
    """Byte by byte where the formula says, zeros elsewhere; and back."""
    s = torch.randint(1, 255, (*experts, rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    blocked = to_blocked(s.view(SCALE))
    padded_columns = -(-columns // 4) * 4
    assert blocked.dtype is SCALE and blocked.shape == (*experts, -(-rows // 128) * 128 * padded_columns)
    for e in range(experts[0] if experts else 1):
        one, mine = (blocked[e], s[e]) if experts else (blocked, s)
        wanted = torch.zeros(len(one), dtype=torch.uint8)
        for i in range(rows):
            for j in range(columns):
                at = ((i // 128) * (padded_columns // 4) + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
                wanted[at] = mine[i, j]
        assert torch.equal(one.view(torch.uint8), wanted)
    assert torch.equal(from_blocked(blocked, rows, columns).view(torch.uint8), s)
    assert torch.equal(to_blocked(s.mT.contiguous().mT.view(SCALE)).view(torch.uint8), blocked.view(torch.uint8))


@pytest.mark.parametrize("shape", [(0, 64, 96), (2, 0, 96), (2, 64, 0)], ids=str)
@pytest.mark.parametrize("variant", ["3d_colwise", "3d_colwise_square", "3d_dual", "3d_dual_square"])
@pytest.mark.parametrize("layout", ["plain", "blocked"])
def test_empty(variant, shape, layout):
    found = call(Case(variant, shape, scale_layout=layout), torch.empty(shape, dtype=BF16))
    assert found[0].shape == shape
    for i in range(0, len(found), 2):
        assert reference.dequantize(found[i], found[i + 1]).shape == shape
