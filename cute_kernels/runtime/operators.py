"""From a torch call to a kernel's launch: which one runs, plain torch, the launch itself, or its registered operator.

A launch is a function that only writes to tensors it is given, registered as an operator of the same name. Eager calls
on plain tensors run the function. While a graph is traced, or for tensor subclasses, the operator is called; its fake
does nothing, since nothing is returned. No other module asks which of the two it is, but for ``guarded.py``, whose
guards find calls like earlier eager ones; and it is asked once:

- A forward or a backward begins with ``mode = mode_of(...)`` of its tensors. It checks layouts and addresses if
  ``mode.eager``, allocates with ``mode.empty`` and launches with ``mode.of(launch)(...)``.
- A launch that is called alone asks for itself: a quantizer's, or one that replaces an operator of torch's.
- Inside a launch, or a guarded call, all tensors are plain and nobody asks: ``empty``, ``empties`` and
  ``empty_strided`` allocate.

What launches nothing and compares memory calls ``same_memory``, or ``has_address`` of ``runtime/strict.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch._C._dynamo.guards import _empty_strided_cuda, _reinterpret_tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn import Parameter

from cute_kernels.runtime.checks import expect_backend

_library = torch.library.Library("cute_kernels", "DEF")
_EAGER_TENSORS = (Tensor, Parameter)
_ORDINARY = frozenset((Tensor, Parameter, type(None), bool, int, float, str, torch.dtype))
_ordinary = _ORDINARY.issuperset
Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides
OPERATORS: dict[str, Callable[..., None]] = {}  # name -> launch; all that ``operator`` registered
FUNCTIONAL_OPERATORS: dict[str, Callable[..., Any]] = {}  # and ``functional_operator``
_current_device = getattr(torch._C, "_cuda_getDevice", None)  # not in torch's CPU builds


def on_gpu(x: Tensor) -> bool:
    """Whether kernels compute what is asked of ``x``. Tests put fakes of the kernels beneath CPU tensors here."""
    return x.is_cuda


def uses_reference(op: str, x: object, backend: str | None, has_cpu_operator: bool = False) -> bool:
    """Whether plain torch computes: told so, or not on a GPU, or no tensor (which the reference refuses).

    Args:
        has_cpu_operator: the op's registered operator runs the reference on a CPU. Graphs and tensor subclasses then
            take the operator there, too: for dtypes that Inductor lacks on a CPU, and for DTensor's sharding rules.

    Raises:
        ValueError: no such backend.
    """
    if backend is None:
        if not isinstance(x, Tensor):
            return True
        return not on_gpu(x) and not (has_cpu_operator and (is_compiling() or type(x) not in _EAGER_TENSORS))
    expect_backend(op, backend)
    return True


def differentiates(
    a: Tensor | None, b: Tensor | None = None, c: Tensor | None = None, d: Tensor | None = None, *rest: Tensor | None
) -> bool:
    """Whether a gradient of one of them is wanted, or a tangent might be, which autograd refuses.

    The first four by name: a loop over them takes 0.1 us more (CPU).
    """
    if torch.is_grad_enabled() and (
        (a is not None and a.requires_grad)
        or (b is not None and b.requires_grad)
        or (c is not None and c.requires_grad)
        or (d is not None and d.requires_grad)
        or (rest and any([t is not None and t.requires_grad for t in rest]))
    ):
        return True
    return forward_ad._current_level >= 0


def is_eager(*arguments: object) -> bool:
    """Whether these are plain tensors (or no tensors) in eager mode, whose memory may be given to a kernel."""
    return (
        not is_dynamo_compiling()
        and _ordinary(map(type, arguments))
        and not _len_torch_dispatch_stack()
        and not _are_functorch_transforms_active()
    )


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same elements in memory. What has no memory yet, in a trace, counts as if."""
    return not is_eager(a, b) or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride())


def operator(
    name: str, schema: str, before: Callable[..., None] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a launch as ``cute_kernels::<name>``; calls run it where they are eager, else the operator.

    ``before`` is what the operator calls first: a check of memory, which a traced call does not have yet. The result's
    ``function`` is the launch itself, ``implementation`` what the operator runs, ``registered`` the operator, and
    ``dispatched`` what calls the operator.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def checked(*arguments: Any, **options: Any) -> None:
            before(*arguments, **options)
            function(*arguments, **options)

        implementation = function if before is None else checked
        _library.define(f"{name}({schema}) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, implementation, "CUDA")
        torch.library.register_fake(f"cute_kernels::{name}", lambda *arguments: None, lib=_library)
        registered = getattr(torch.ops.cute_kernels, name).default
        # A policy of selective checkpointing cannot keep what is not returned: it would leave the outputs as allocated
        torch.utils.checkpoint.SAC_IGNORED_OPS.add(registered)

        @functools.wraps(function)
        def launch(*arguments: Any) -> None:
            if (  # is_eager, without a call of it
                not is_dynamo_compiling()
                and _ordinary(map(type, arguments))
                and not _len_torch_dispatch_stack()
                and not _are_functorch_transforms_active()
            ):
                function(*arguments)
            else:
                registered(*arguments)

        launch.function, launch.implementation = function, implementation
        launch.registered = launch.dispatched = registered
        OPERATORS[name] = launch
        return launch

    return decorate


def functional_operator(
    name: str,
    schema: str,
    returns: str,
    *,
    fake: Callable[..., Any],
    cpu: Callable[..., Any],
    before_dispatch: Callable[[Tensor], None] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a launch that returns what it allocates, as ``operator`` does one that writes to what it is given.

    For what torch must see results of: sharding rules of DTensor, policies of selective checkpointing.

    Args:
        fake: the outputs without their values.
        cpu: what the operator does for CPU tensors.
        before_dispatch: called with the first argument before the operator is, to register a subclass' rules.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        _library.define(f"{name}({schema}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, function, "CUDA")
        _library.impl(name, cpu, "CPU")
        torch.library.register_fake(f"cute_kernels::{name}", fake, lib=_library)
        registered = dispatched = getattr(torch.ops.cute_kernels, name).default
        if before_dispatch is not None:

            def dispatched(*arguments: Any) -> Any:
                before_dispatch(arguments[0])
                return registered(*arguments)

        @functools.wraps(function)
        def launch(*arguments: Any) -> Any:
            if (  # is_eager, without a call of it
                not is_dynamo_compiling()
                and _ordinary(map(type, arguments))
                and not _len_torch_dispatch_stack()
                and not _are_functorch_transforms_active()
            ):
                return function(*arguments)
            return dispatched(*arguments)

        launch.function = launch.implementation = function
        launch.registered, launch.dispatched = registered, dispatched
        FUNCTIONAL_OPERATORS[name] = launch
        return launch

    return decorate


def detached(x: Tensor) -> Tensor:
    """``x`` without gradient or tangent: for an op that is not differentiable."""
    return x.detach() if x.requires_grad or forward_ad._current_level >= 0 else x


class Mode(NamedTuple):
    """How a forward or a backward goes on, decided once for what it allocates and launches.

    Attributes:
        eager: whether the tensors have memory to look at.
        empty: (like, shape, dtype) -> a contiguous tensor on ``like``'s device.
        of: what to call of a launch: its function, or what calls the registered operator.
    """

    eager: bool
    empty: Callable[[Tensor, tuple[int, ...], torch.dtype], Tensor]
    of: Callable[[Callable[..., Any]], Callable[..., Any]]


def mode_of(
    a: Tensor | None, b: Tensor | None = None, c: Tensor | None = None, d: Tensor | None = None, *rest: object
) -> Mode:
    """Eager if ``is_eager`` holds of all of them, which it asks by name (0.2 us less on a CPU), else traced."""
    if (
        not is_dynamo_compiling()
        and type(a) in _ORDINARY
        and (b is None or type(b) in _ORDINARY)
        and (c is None or type(c) in _ORDINARY)
        and (d is None or type(d) in _ORDINARY)
        and not _len_torch_dispatch_stack()
        and not _are_functorch_transforms_active()
        and (not rest or _ordinary(map(type, rest)))
    ):
        return _EAGER
    return _TRACED


def empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor on ``like``'s device, a plain tensor.

    On the current GPU as code that Inductor wrote allocates: past the dispatcher that takes 1.1 us where
    ``torch.empty_like`` takes 1.9 and ``Tensor.new_empty`` 2.0 to 2.2 (the host of an H200).
    """
    if 0 <= like.get_device() == _current_device():  # -1 where there is no GPU
        shape = tuple(shape)  # of a torch.Size
        return _empty_strided_cuda(shape, contiguous_strides(shape), dtype)
    return like.new_empty(shape, dtype=dtype)


def _empty_traced(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return like.new_empty(shape, dtype=dtype)


_EAGER = Mode(True, empty, attrgetter("function"))
_TRACED = Mode(False, _empty_traced, lambda launch: launch.dispatched)


def empties(like: Tensor, *wanted: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
    """``empty`` of each shape and dtype."""
    return [empty(like, shape, dtype) for shape, dtype in wanted]


def empty_strided(like: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """``empty`` of any strides."""
    if 0 <= like.get_device() == _current_device():
        return _empty_strided_cuda(tuple(shape), strides, dtype)
    return torch.empty_strided(shape, strides, dtype=dtype, device=like.device)


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
