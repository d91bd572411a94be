"""The checks of a compiled kernel's entry, without compiling it; a tensor that none may get."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from jit_cache import Program


def check_entry(program: Program, values: Sequence[Any]) -> None:
    """Fails where the entry would refuse a call: fixed sizes and strides, divisors, addresses, devices, presence.

    And where it would read other values: a kernel sees the memory, without the sign that torch adds when it reads.
    Strides of dimensions of size 1 are not looked at, as by the entry itself.
    """
    sizes: dict[int, int] = {}
    devices = {t.device for t in values if isinstance(t, Tensor)}
    assert len(devices) == 1, f"arguments are on {devices}"
    *arguments, _ = program.arguments  # the last is the stream
    for position, (fake, t) in enumerate(zip(arguments, values, strict=True)):
        if not isinstance(t, Tensor):
            assert fake is None or t is not None, f"argument {position} is missing"
            continue
        assert fake is not None and len(fake.shape) == t.dim(), f"argument {position}: {fake}, {tuple(t.shape)}"
        for wanted, size in zip(fake.shape, t.shape, strict=True):
            if not isinstance(wanted, int):
                assert size % wanted.divisibility == 0
                wanted = sizes.setdefault(id(wanted), size)
            assert size == wanted, f"argument {position}: shape {tuple(t.shape)} for {fake}"
        for wanted, stride, size in zip(fake.stride, t.stride(), t.shape, strict=True):
            if size != 1:
                good = stride == wanted if isinstance(wanted, int) else stride % wanted.divisibility == 0
                assert good, f"argument {position}: strides {t.stride()} for {fake}"
        assert not t.is_neg(), f"argument {position} is not what its memory holds"
        assert t.data_ptr() % fake._assumed_align == 0, f"argument {position} is not aligned for {fake}"


class Wrapped(Tensor):
    """A tensor without memory of its own, as distributed ones are."""

    @staticmethod
    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"dispatched: {function.name()}")
