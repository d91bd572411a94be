"""From a torch call to a kernel's launch: which one runs, plain torch, the launch itself, or its registered operator.

A launch is a function that only writes to tensors it is given, registered as an operator of the same name. Eager calls
on plain tensors run the function. While a graph is traced, or for tensor subclasses, the operator is called; its fake
does nothing, since nothing is returned. No other module asks which of the two it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch._C._dynamo.guards import TensorGuards, _empty_strided_cuda, _reinterpret_tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from cute_kernels.runtime.checks import expect_backend

_library = torch.library.Library("cute_kernels", "DEF")
_ORDINARY = frozenset((Tensor, Parameter, type(None), bool, int, float, str, torch.dtype))
OPERATORS: dict[str, Callable[..., None]] = {}  # name -> launch; all that ``operator`` registered
_current_device = getattr(torch._C, "_cuda_getDevice", None)  # not in torch's CPU builds


def on_gpu(x: Tensor) -> bool:
    """Whether kernels compute what is asked of ``x``. Tests put fakes of the kernels beneath CPU tensors here."""
    return x.is_cuda


def uses_reference(op: str, x: object, backend: str | None) -> bool:
    """Whether plain torch computes: told so, or not on a GPU, or no tensor (which the reference refuses).

    Raises:
        ValueError: no such backend.
    """
    if backend is None:
        return not (isinstance(x, Tensor) and on_gpu(x))
    expect_backend(op, backend)
    return True


def differentiates(*tensors: Tensor | None) -> bool:
    """Whether a gradient of one of them is wanted, or a tangent might be, which autograd refuses."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return forward_ad._current_level >= 0


def is_eager(*arguments: object) -> bool:
    """Whether these are plain tensors (or no tensors) in eager mode, whose memory may be given to a kernel."""
    return (
        not is_dynamo_compiling()
        and _ORDINARY.issuperset(map(type, arguments))
        and not _len_torch_dispatch_stack()
        and not _are_functorch_transforms_active()
    )


def operator(name: str, schema: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a launch as ``cute_kernels::<name>``; calls run it where they are eager, else the operator.

    The result's ``function`` is the launch itself, ``registered`` the operator.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        _library.define(f"{name}({schema}) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, function, "CUDA")
        torch.library.register_fake(f"cute_kernels::{name}", lambda *arguments: None, lib=_library)
        registered = getattr(torch.ops.cute_kernels, name).default
        # A policy of selective checkpointing cannot keep what is not returned: it would leave the outputs as allocated
        torch.utils.checkpoint.SAC_IGNORED_OPS.add(registered)

        @functools.wraps(function)
        def launch(*arguments: Any) -> None:
            if is_eager(*arguments):
                function(*arguments)
            else:
                registered(*arguments)

        launch.function, launch.registered = function, registered
        OPERATORS[name] = launch
        return launch

    return decorate


def functional_operator(
    name: str, schema: str, returns: str, functions: dict[str, Callable], fake: Callable
) -> Callable[..., Any]:
    """Register ``functions`` by device as ``cute_kernels::<name>``, which returns its outputs as ``fake`` says."""
    _library.define(f"{name}({schema}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
    for key, function in functions.items():
        _library.impl(name, function, key)
    torch.library.register_fake(f"cute_kernels::{name}", fake, lib=_library)
    return getattr(torch.ops.cute_kernels, name).default


def empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor on ``like``'s device; eager ones on the current GPU as code that Inductor wrote allocates.

    Past the dispatcher it takes 1.1 us where ``torch.empty_like`` takes 1.9 and ``Tensor.new_empty`` 2.0 to 2.2 (the
    host of an H200).
    """
    if is_eager(like) and like.is_cuda and like.get_device() == _current_device():
        shape = tuple(shape)
        return _empty_strided_cuda(shape, contiguous_strides(shape), dtype)
    return like.new_empty(shape, dtype=dtype)


def empties(like: Tensor, *wanted: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
    """``empty`` of each shape and dtype: what ``like`` is, is asked once."""
    if is_eager(like) and like.is_cuda and like.get_device() == _current_device():
        return [_empty_strided_cuda(tuple(shape), contiguous_strides(shape), dtype) for shape, dtype in wanted]
    return [like.new_empty(shape, dtype=dtype) for shape, dtype in wanted]


def workspace(like: Tensor, *wanted: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
    """``empties`` inside of a launch, whose tensors are plain ones."""
    if like.is_cuda and like.get_device() == _current_device():
        return [_empty_strided_cuda(shape, contiguous_strides(shape), dtype) for shape, dtype in wanted]
    return [like.new_empty(shape, dtype=dtype) for shape, dtype in wanted]


@functools.lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """As torch allocates a tensor of this shape."""
    return torch.empty(shape, device="meta").stride()


def alias(t: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """A plain tensor's memory in another shape; no view of it to autograd, as code that Inductor wrote has it.

    A sign that torch adds when it reads (of a conjugate's imaginary part) stays. 0.45 us where ``Tensor.view`` takes
    0.7 (CPU).
    """
    return _reinterpret_tensor(t, shape, strides, 0)


# ---- what the families that do not use LaunchCache yet need

_PLAIN = frozenset((Tensor, Parameter, type(None)))
_all_plans: list = []
MAX_PLANS = 4096
MAX_GUARDS = 8  # of calls with one key; the first ones stay, or nine layouts in turn would find none


class Plans(dict[tuple, Any]):
    """A family's plans by the signature of a call; at MAX_PLANS all are forgotten, those of old batches' sizes, too."""

    def __init__(self) -> None:
        super().__init__()
        _all_plans.append(self)

    def __setitem__(self, key: tuple, plan: Any) -> None:
        if len(self) >= MAX_PLANS and key not in self:
            self.clear()
        super().__setitem__(key, plan)


def forget_plans() -> None:
    """Forget the plans of all families: another call finds each anew."""
    for plans in _all_plans:
        plans.clear()


class Calls(Plans):
    """What a call found out, for the next one alike: by a short key and by a guard, as Dynamo has them for its graphs.

    A guard compares type, dispatch keys (so lazy signs, functorch's wrappers, autocast, inference mode), dtype, device,
    requires_grad, sizes and strides of all tensors in 0.12 us; asked one by one they add up to 0.5 (CPU). It holds none
    of them. The key says all else: is_grad_enabled(), and which tensors there are, by their shapes: a tensor that has
    none (nested, say) would end the process in a guard, so it is asked in Python before.
    """

    def find(
        self,
        key: tuple,
        a: Tensor,
        b: Tensor | None = None,
        c: Tensor | None = None,
        d: Tensor | None = None,
        *rest: Tensor,
    ) -> Any:
        """What was remembered of a call alike in eager mode, all tensors on 16 bytes; None if nothing was."""
        if _len_torch_dispatch_stack() or forward_ad._current_level >= 0:
            return None
        try:
            guarded = self.get(key, ())
        except TypeError:  # a symbolic size has no hash
            return None
        for check, found in guarded:
            if b is None:
                good = check(a) and not a.data_ptr() & 15
            elif c is None:
                good = check(a, b) and not (a.data_ptr() | b.data_ptr()) & 15
            elif d is None:
                good = check(a, b, c) and not (a.data_ptr() | b.data_ptr() | c.data_ptr()) & 15
            elif not rest:
                good = check(a, b, c, d) and not (a.data_ptr() | b.data_ptr() | c.data_ptr() | d.data_ptr()) & 15
            else:
                good = check(a, b, c, d, *rest) and not any(t.data_ptr() & 15 for t in (a, b, c, d, *rest))
            if good:
                return found
        return None

    def takes(self, key: tuple, *tensors: Tensor | None) -> bool:
        """Whether ``remember`` would keep what such a call finds out; if not, finding it out is wasted."""
        return _takes(self.get(key), tensors)

    def remember(self, key: tuple, found: Any, *tensors: Tensor | None) -> None:
        """Keep what a call on plain tensors that succeeded found out: all that launches it, or None if it is not made.

        A key that is met for the first time is kept alone: a batch's size may not come again, and a guard with what it
        leads to takes 3 us and 21 objects. Threads may do this together: an entry is whole when it is stored, and one
        that another thread's takes the place of is found out again.
        """
        guarded = self.get(key)
        if guarded is None:
            self[key] = ()
            return
        if found is None or not _takes(guarded, tensors):
            return
        given = [t for t in tensors if t is not None]
        sizes, strides = [list(t.shape) for t in given], [list(t.stride()) for t in given]
        check = TensorGuards(*given, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        if check(*given):
            self[key] = (*guarded, (check, found))


def _takes(guarded: tuple | None, tensors: tuple[Tensor | None, ...]) -> bool:
    if guarded is None or len(guarded) >= MAX_GUARDS or forward_ad._current_level >= 0:
        return False
    given = [t for t in tensors if t is not None]
    # A guard refuses a tensor given twice
    return len({*map(id, given)}) == len(given) and not any(t.data_ptr() & 15 for t in given)


def is_plain(
    a: Tensor | None, b: Tensor | None = None, c: Tensor | None = None, d: Tensor | None = None, *rest: Tensor | None
) -> bool:
    """Whether these are ordinary tensors (or None) in eager mode, whose memory may be given to a kernel.

    The first four by name: through a tuple they take 0.6 us, so 0.3 (CPU).
    """
    return (
        type(a) in _PLAIN
        and (b is None or type(b) in _PLAIN)
        and (c is None or type(c) in _PLAIN)
        and (d is None or type(d) in _PLAIN)
        and not (rest and not _PLAIN.issuperset(map(type, rest)))
        and not is_dynamo_compiling()
        and not _len_torch_dispatch_stack()
        and not _are_functorch_transforms_active()
    )


def allocator(like: Tensor) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """``like.new_empty_strided`` for plain calls: on the current CUDA device as code that Inductor wrote allocates.

    Past the dispatcher it takes 1.1 us where ``torch.empty_like`` takes 1.9 and ``Tensor.new_empty`` 2.0 to 2.2 (the
    host of an H200). Where there is one device it is the current one, and nobody asks (0.3 less).
    """
    device, index = like.device, like.get_device()
    if device.type == "cuda" and torch.cuda.device_count() == 1:
        return _empty_strided_cuda

    def allocate(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if device.type == "cuda" and index == _current_device():
            return _empty_strided_cuda(shape, strides, dtype)
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return allocate


def mutating_op(name: str, schema: str, function: Callable[..., None]) -> Callable[..., None]:
    """Register ``function`` for CUDA as ``cute_kernels::name`` with these arguments; return the operator."""
    _library.define(f"{name}({schema}) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, function, "CUDA")
    torch.library.register_fake(f"cute_kernels::{name}", lambda *args: None, lib=_library)
    operator = getattr(torch.ops.cute_kernels, name).default
    # A policy of selective checkpointing cannot keep what is not returned: it would leave the outputs as allocated
    torch.utils.checkpoint.SAC_IGNORED_OPS.add(operator)
    return operator


def functional_op(
    name: str, schema: str, returns: str, functions: dict[str, Callable], fake: Callable
) -> Callable[..., Tensor]:
    """Register ``functions`` by device as ``cute_kernels::name``, which returns its outputs as ``fake`` says."""
    _library.define(f"{name}({schema}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
    for key, function in functions.items():
        _library.impl(name, function, key)
    torch.library.register_fake(f"cute_kernels::{name}", fake, lib=_library)
    return getattr(torch.ops.cute_kernels, name).default
