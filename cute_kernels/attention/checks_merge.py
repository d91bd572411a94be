"""The argument contract of the merge of partial results."""

from __future__ import annotations

import torch

from cute_kernels.attention.checks import REFERENCE_DTYPES
from cute_kernels.runtime.checks import expect_floats, fail

OP = "merge_attention"


def check_merge(outs: object, lses: object) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    for name, tensors in (("outs", outs), ("lses", lses)):
        if not isinstance(tensors, (tuple, list)):
            fail(OP, name, "be a list or tuple of tensors", type(tensors).__name__, TypeError)
    if not outs:
        fail(OP, "outs", "hold at least one tensor", "none")
    if len(lses) != len(outs):
        fail(OP, "lses", f"be as many as outs, {len(outs)}", len(lses))
    first = None
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        expect_floats(OP, f"outs[{i}]", out, REFERENCE_DTYPES)
        first = out if first is None else first
        if out.dim() not in (3, 4):
            fail(OP, f"outs[{i}]", "have shape (batch, queries, heads, head size) or without a batch", tuple(out.shape))
        if out.shape != first.shape:
            fail(OP, f"outs[{i}]", f"have the first one's shape {tuple(first.shape)}", tuple(out.shape))
        if out.dtype is not first.dtype:
            fail(OP, f"outs[{i}]", f"have the first one's dtype {first.dtype}", out.dtype, TypeError)
        wide = torch.promote_types(torch.float32, first.dtype)
        expect_floats(OP, f"lses[{i}]", lse, (wide,))
        shape = (*first.shape[:-3], first.shape[-2], first.shape[-3])
        if lse.shape != shape:
            fail(OP, f"lses[{i}]", f"have shape {tuple(shape)}", tuple(lse.shape))
        for name, t in (("outs", out), ("lses", lse)):
            if t.device != first.device:
                fail(OP, f"{name}[{i}]", f"be on {first.device}", t.device)
