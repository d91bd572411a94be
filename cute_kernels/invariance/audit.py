"""audit: one call of a function, and what becomes of each operator in it; also kernels that no operator launches."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels.invariance.blocks import batch_invariant
from cute_kernels.invariance.composites import COMPOSITES
from cute_kernels.invariance.operators import COLLECTIVES, FOREIGN, Treatment, adds_up, treatment_of
from cute_kernels.invariance.registration import computes_with_floats
from cute_kernels.runtime.checks import expect

_PLAIN = frozenset((Tensor, torch.nn.Parameter))
OURS = re.compile(r"cute_kernels")
# Where torch's own kernels live: another library may call its own by any name, "gather_gemm" or "topk_softmax"
TORCHS = re.compile(
    r"(void )?(at::native::|(at_cuda_detail::)?cub::|\(anonymous namespace\)::elementwise_kernel_with_index)|"
    r"Mem(cpy|set)|triton_poi_"
)
# They compute each value on its own, move values, order or compare them, or count
NON_REDUCING = re.compile(
    r"elementwise_kernel|^Mem(cpy|set)|CatArrayBatchedCopy|FillFunctor|[Rr]adix|[Ss]ort|bitonic|[Ii]ndexSelect|gather|"
    r"index_(copy|fill|put)_|arange|distribution_|tri[lu]|M(ax|in)Ops|Arg(Max|Min)|(or|and)_kernel|nonzero|DeviceSelect|"
    r"searchsorted|topk|unroll|multi_tensor_apply_kernel.*(Functor|Adam|SGD)|"
    r"triton_poi_(?!.*(sum|mean|dot|mm|norm|softmax|scatter|index_put|prod|var|convolution|attention))"
)
# Such kernels that sum: scatters with a sum, norms of a list of tensors
REDUCING = re.compile(r"Reduce(Add|Mul|Mean)|LpNorm")


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """The findings of ``audit``; true if nothing was refused, foreign, or a kernel of others that may sum.

    Args:
        exact: operator -> calls that reduce nothing.
        replaced: operator -> calls that a kernel of this library computes.
        refused: operator -> calls that ``batch_invariant("strict")`` refuses.
        foreign: operator of another library -> calls; not declared by ``declare_invariant``.
        ours: operator of this library -> calls.
        kernels: names of CUDA kernels that are not this library's and may sum; None without ``profile``.
    """

    exact: dict[str, int]
    replaced: dict[str, int]
    refused: dict[str, int]
    foreign: dict[str, int]
    ours: dict[str, int]
    kernels: tuple[str, ...] | None = None

    def __bool__(self) -> bool:
        return not (self.refused or self.foreign or self.kernels)

    def __str__(self) -> str:
        lines = []
        for name in ("refused", "foreign", "replaced", "ours", "exact"):
            calls = getattr(self, name)
            listed = ", ".join(f"{operator} ({count})" for operator, count in sorted(calls.items()))
            lines.append(f"{name}: {sum(calls.values())} calls" + (f": {listed}" if listed else ""))
        if self.kernels is not None:
            lines.append(f"kernels that may sum and are not ours: {', '.join(self.kernels) or 'none'}")
        return "\n".join(lines)


def audit(function: Callable[..., Any], *args: Any, profile: bool = False) -> AuditReport:
    """Call ``function`` once, as in ``batch_invariant("warn")``, and say what becomes of each operator.

    Backward passes that it starts count, too. Operators on CPU tensors are classified as if they were on a GPU, by
    their names.

    Args:
        function: called once, with ``args``.
        `*args`: its arguments.
        profile: also look at the CUDA kernels that run, by torch's profiler: at those, too, that no operator launches,
            such as Triton's, or that an extension calls. Listed are all that are not this library's and whose names do
            not say that they move, compare or compute values one by one.

    Returns:
        An ``AuditReport``.

    Raises:
        TypeError: ``function`` cannot be called. Errors of ``function`` pass through.
        ValueError: ``profile``, and there is no CUDA device.

    Example:
        >>> import torch
        >>> from cute_kernels import audit
        >>> report = audit(lambda x: (x @ x).relu().cumprod(0), torch.ones(4, 4))
        >>> report.replaced, report.exact, report.refused
        ({'aten.mm.default': 1}, {'aten.relu.default': 1}, {'aten.cumprod.default': 1})
    """
    expect(callable(function), "audit", "function", "be callable", type(function).__name__, TypeError)
    good = not profile or torch.cuda.device_count() > 0
    expect(good, "audit", "profile", "be False where there is no CUDA device", profile)
    seen = _Seen()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "batch_invariant: ")
        profiler = None
        if profile:
            activities = [torch.profiler.ProfilerActivity.CUDA]
            profiler = stack.enter_context(torch.profiler.profile(activities=activities))
        uncovered = stack.enter_context(batch_invariant("warn"))
        stack.enter_context(seen)
        function(*args)
        if profile:
            torch.cuda.synchronize()
    for name in uncovered.keys() & seen.calls["replaced"].keys():  # arguments that no kernel takes
        refused = min(uncovered[name], seen.calls["replaced"][name])
        seen.calls["refused"][name] += refused
        seen.calls["replaced"][name] -= refused
    calls = {name: dict(+counter) for name, counter in seen.calls.items()}
    return AuditReport(**calls, kernels=None if profiler is None else _summing(_names(profiler)))


class _Seen(TorchDispatchMode):
    """Counts operators by class."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = {name: Counter[str]() for name in ("exact", "replaced", "refused", "foreign", "ours")}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not _PLAIN.issuperset(types):  # tensors that wrap others: what is inside comes by itself
            return NotImplemented
        kwargs = kwargs or {}
        treatment = treatment_of(func)
        if treatment.kind == "composite" or str(func).removeprefix("aten.") in COMPOSITES:
            with self:  # they come whole under inference_mode
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        self.calls[_class(func, treatment, args, kwargs)][str(func)] += 1
        return func(*args, **kwargs)


def _class(func: OpOverload, treatment: Treatment, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if func.namespace == "cute_kernels":
        return "ours"
    if treatment.kind == "composite":
        return "foreign" if func.namespace not in ("aten", "prims", *COLLECTIVES) else "exact"
    if treatment.kind == "exact" or not computes_with_floats(args, kwargs):
        return "exact"
    if treatment.kind == "refused" and not adds_up(treatment, func, args, kwargs):
        return "exact"
    return "foreign" if treatment.reason == FOREIGN else treatment.kind


def _names(profiler: torch.profiler.profile) -> Iterable[str]:
    """The names of the CUDA kernels that ran."""
    for event in profiler.key_averages():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            yield event.key


def _summing(names: Iterable[str]) -> tuple[str, ...]:
    """Those that are not ours and may sum."""
    return tuple(sorted({name for name in names if not (OURS.search(name) or _is_harmless(name))}))


def _is_harmless(name: str) -> bool:
    return bool(TORCHS.match(name) and NON_REDUCING.search(name) and not REDUCING.search(name))
