"""batch_invariant on tensors that are not its concern, and by its tables."""

import torch

from cute_kernels import _aten, batch_invariant


def test_cpu_tensors_are_left_alone():
    x = torch.randn(8, 8)
    with batch_invariant() as uncovered:
        assert torch.equal(x.cumsum(0), torch.cumsum(x, 0)) and (x @ x).dtype is x.dtype
    assert not uncovered


def test_names_are_those_of_operators():
    """A name that is misspelt would let nothing through, and replace nothing."""
    names = {name.rpartition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    overloads = {name if "." in name else f"{name}.default" for name in names}
    assert _aten.REPLACEMENTS.keys() <= overloads
    bases = {name.partition(".")[0].removesuffix("_") for name in names}
    assert bases >= _aten.EXACT
    # What sums is not among those that are let through
    tagged = {
        packet
        for packet in _aten.EXACT
        if (op := getattr(torch.ops.aten, packet, None)) is not None
        and any("reduction" in str(tag) for overload in op.overloads() for tag in getattr(op, overload).tags)
    }
    assert tagged <= {"all", "amax", "amin", "aminmax", "any", "argmax", "argmin", "max", "min", "median", "mode"}
