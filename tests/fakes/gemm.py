"""Fakes of the matrix products: ``serial_k16`` in plain torch."""

import torch

from cute_kernels import dequantize
from cute_kernels.gemm.config_grouped import GroupedSpec
from cute_kernels.gemm.reference import activate


def gemm(static, a, b, d, z, bias, valid_k, num_ctas) -> None:
    """d = act(a b^T + bias): one fp32 accumulator an element, 16 products a step, ascending."""
    spec, config, transposed = static["spec"], static["config"], static["transposed"]
    assert num_ctas >= 1 and a.dim() == b.dim() == d.dim() == (3 if spec.batched else 2)
    if transposed:
        a, b = b, a  # d lies as the call gave it
    a, b = a if spec.a_major in ("k", None) else a.mT, b if spec.b_major in ("k", None) else b.mT
    assert a.shape[-1] == b.shape[-1] and d.shape[-2:] == (a.shape[-2], b.shape[-2])
    if spec.batched:  # TMA is given one entry where there is but one
        assert all(len(t) == len(d) or (len(t) == 1 and config is not None) for t in (a, b))
    for dtype, tensor in ((spec.dtype, a), (spec.dtype, b), (spec.out, d), (spec.bias, bias)):
        assert dtype is (None if tensor is None else tensor.dtype)
    assert spec.save_preact == (z is not None) and spec.has_valid_k == (valid_k is not None)
    assert (config is None) == (None in spec.majors) and (config is not None or not spec.out_aligned)
    if config is not None:
        for operand, major in zip((a, b), spec.majors, strict=True):
            assert operand.stride(-1 if major == "k" else -2) == 1 and operand.data_ptr() % 16 == 0
            assert all(stride % 8 == 0 for stride in operand.stride()[:-2])
            assert operand.dim() == 2 or len(d) == 1 or operand.stride(0) > 0
    if static["multi_block_tma"]:
        assert a.shape[-1] % 64 == 0 and "k" in spec.majors
    assert d.stride(-1) == 1 or d.shape[-1] == 1
    assert d.dtype is torch.float32 or not spec.accumulate
    k = a.shape[-1] if valid_k is None else max(0, min(a.shape[-1], valid_k.item()))
    total = d.clone() if spec.accumulate else torch.zeros(d.shape)
    total = serial_k16(a[..., :k], b[..., :k], total)
    if bias is not None:
        total = total + bias.float()
    if z is not None:
        z.copy_(total)
    d.copy_(activate(total, spec.activation))


def grouped(static, a, b, d, offs, num_ctas) -> None:
    """Rows of groups times their matrices, or groups' columns times their rows; ends clamped as on the device."""
    spec, config, transposed = static["spec"], static["config"], static["transposed"]
    if transposed:
        a, b = b, a
    a, b = a if spec.a_major in ("k", None) else a.mT, b if spec.b_major in ("k", None) else b.mT
    rows = a.shape[0] if spec.ragged == "rows" else a.shape[1]
    assert (
        num_ctas >= 1 and d.is_contiguous() and offs.dtype is torch.int32 and (config is None) == (None in spec.majors)
    )
    for dtype, tensor in ((spec.dtype, a), (spec.dtype, b), (spec.out, d)):
        assert dtype is tensor.dtype
    if config is not None:
        for operand, major in zip((a, b), spec.majors, strict=True):
            assert operand.stride(-1 if major == "k" else -2) == 1 and operand.data_ptr() % 16 == 0
            assert all(stride % 8 == 0 for stride in operand.stride()[:-2])
    if static["multi_block_tma"]:
        assert a.shape[-1] % 64 == 0 and "k" in spec.majors and spec.ragged == "rows"
    ends, end = [], 0
    for value in offs.tolist():
        end = min(max(value, end), rows)
        ends.append(end)
    if spec.ragged == "rows":
        assert d.shape == (rows, b.shape[1]) and len(offs) == len(b) and not spec.accumulate
        d.zero_()
    else:
        assert d.shape == (len(offs), a.shape[0], b.shape[0])
    for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if spec.ragged == "rows":
            d[start:end] = serial_k16(a[start:end], b[e], torch.zeros(end - start, b.shape[1])).to(d.dtype)
        elif end > start or not spec.accumulate:
            total = d[e].clone() if spec.accumulate else torch.zeros(d.shape[1:])
            d[e] = serial_k16(a[:, start:end], b[:, start:end], total).to(d.dtype)


def grouped_mxfp8(static, a, q, scale, d, offs, num_ctas) -> None:
    """``grouped`` of rows, of the values that q and its scales stand for."""
    spec, config = static["spec"], static["config"]
    assert num_ctas >= 1 and d.is_contiguous() and (a.dtype, d.dtype) == (torch.bfloat16, spec.out)
    assert q.dtype is torch.float8_e4m3fn and scale.dtype is torch.float8_e8m0fnu and config.cluster == (1, 1)
    values = dequantize(q, scale, backend="reference")
    product = {"spec": GroupedSpec(torch.bfloat16, spec.out, "rows"), "config": config, "transposed": False}
    grouped({**product, "multi_block_tma": False}, a, values, d, offs, num_ctas)


def serial_k16(a, b, total):
    """total + a b^T, 16 products a step, ascending."""
    for first in range(0, a.shape[-1], 16):
        last = min(a.shape[-1], first + 16)
        total = (total.double() + a[..., first:last].double() @ b[..., first:last].double().mT).float()
    return total
