"""Our kernels under torch's operators: which are registered with its dispatcher, and what each does.

A kernel first asks who decides (``scopes``). Where nobody does, or the arguments are integers, it hands the call back
to the kernel that torch had there. No binary elementwise operator may get one: to Python torch gives a number that it
has wrapped in a tensor as a number, which its kernel then refuses.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack, is_batchedtensor
from torch._functorch.vmap import lazy_load_decompositions
from torch._ops import OpOverload

from cute_kernels.invariance import collectives, errors, operators, scopes
from cute_kernels.invariance.composites import COMPOSITES
from cute_kernels.invariance.operators import Treatment, treatment_of

NEEDED = "torch.library.get_kernel", "torch._C._stash_obj_in_tls"
# Their operators stand for Python, for graphs or for other kernels of torch's own, and are asked for beneath or above
SKIPPED = frozenset(["aten", "cute_kernels", "prim", "prims", "profiler", "inductor", "_native"])
VMAP = "FuncTorchBatched"
TRANSFORMS = "FuncTorchDynamicLayerFrontMode"  # where torch takes linear apart, in any transform of functions
SELECT = "BackendSelect"  # above the kernels of all backends

# Under vmap torch makes several operators of each, which round in between
SUMS = ("addmm", "addmv", "baddbmm", "addbmm", "addr")
LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss_forward", "nll_loss2d", "nll_loss2d_forward")
NORMS = ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")  # with weights of a batch
BACKWARDS = ("native_layer_norm_backward", "_fused_rms_norm_backward")
TAKEN_APART = (*SUMS, *(f"{name}_" for name in SUMS), *LOSSES, *NORMS, *BACKWARDS)

Kernel = Callable[..., Any]


class Owner(NamedTuple):
    """Another library's kernel, in Python, under an operator that ours replaces."""

    operator: str
    file: str

    def __str__(self) -> str:
        return f"{self.operator} ({self.file})"


class Registration:
    """The kernels put under torch's operators on one backend, and those that torch has there.

    Args:
        backend: the dispatch key of the tensors. Tests take "CPU" and "Meta".

    Raises:
        RuntimeError: this torch has not what a registration needs.
    """

    def __init__(self, backend: str = "CUDA") -> None:
        missing = [name for name in NEEDED if not _has(name)]
        if missing:
            raise RuntimeError(
                f"batch_invariant: torch {torch.__version__} lacks {' and '.join(missing)}; torch 2.11 has them"
            )
        lazy_load_decompositions()  # torch's own under vmap, which it would not register over ours later
        self.backend = backend
        self.owners: list[Owner] = []
        self._libraries: list[torch.library.Library] = []
        self._kernels = list(self._made())

    def _made(self) -> Iterator[tuple[OpOverload, str, Kernel]]:
        """(overload, dispatch key, kernel); before any is registered, since torch's are asked for."""
        has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key
        autograd = f"Autograd{self.backend}"
        for op in _concerned():
            treatment, name = treatment_of(op), op.name()
            composite = COMPOSITES.get(_local_name(op)) if op.namespace == "aten" else None
            if composite is not None:
                for key in (autograd, self.backend):
                    if key != "Meta":  # which takes no composites
                        yield op, key, _composite(composite, self._torchs(op, key))
            elif self.backend == "Meta" and operators.is_composite(op):
                continue
            elif treatment.kind == "replaced":
                torchs = self._torchs(op, self.backend) if has_kernel(name, self.backend) else _missing(op)
                yield op, self.backend, _replaced(op, treatment, torchs)
            elif treatment.kind == "refused" and has_kernel(name, self.backend):
                if op.namespace == "c10d":
                    yield op, SELECT, _collective(op, treatment, self.backend)
                else:
                    yield op, self.backend, _refused(op, treatment, self._torchs(op, self.backend))
        linear = torch.ops.aten.linear.default
        yield linear, TRANSFORMS, _transformed_linear(self.backend.lower(), self._torchs(linear, TRANSFORMS))
        for name in TAKEN_APART:
            for op in operators.overloads_of(name):
                if not any(a.is_out for a in op._schema.arguments) and has_kernel(op.name(), VMAP):
                    yield op, VMAP, _vmapped(op, self.backend.lower(), self._torchs(op, VMAP))

    def _torchs(self, op: OpOverload, key: str) -> Kernel:
        """The kernel that is there now, and a note of whose it is if it is another library's."""
        if f"{op.namespace}/{op.name().partition('::')[2]}/{key}" in torch.library._impls and op.namespace == "aten":
            owner = _owner(op, key)
            if owner is not None:
                self.owners.append(owner)
        return torch.library.get_kernel(op, key).call_boxed

    def register(self) -> None:
        """From here on torch's dispatcher calls our kernels."""
        libraries: dict[str, torch.library.Library] = {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for op, key, kernel in self._kernels:
                if op.namespace not in libraries:
                    libraries[op.namespace] = torch.library.Library(op.namespace, "IMPL")
                libraries[op.namespace].impl(op, kernel, key, with_keyset=True, allow_override=True)
        self._libraries = list(libraries.values())
        self._forget_dispatch()

    def remove(self) -> None:
        """Restore what was there before."""
        for library in self._libraries:
            library._destroy()
        self._libraries = []
        self._forget_dispatch()

    def _forget_dispatch(self) -> None:
        """An operator keeps which kernel each key led to in traced code: one that is gone would lose gradients."""
        for op, _, _ in self._kernels:
            op._dispatch_cache.clear()

    def overtaken(self) -> list[Owner]:
        """Those who have registered kernels over ours since."""
        found = (_owner(op, key) for op, key, _ in self._kernels if treatment_of(op).kind == "replaced")
        return [owner for owner in found if owner is not None]


def _has(name: str) -> bool:
    """Whether torch has this, by its dotted name."""
    thing: Any = torch
    for part in name.split(".")[1:]:
        thing = getattr(thing, part, None)
    return thing is not None


def _concerned() -> Iterator[OpOverload]:
    """The overloads of torch's own, and those of other libraries that are there by now."""
    import torch.nn.attention.varlen  # noqa: F401  its operators are replaced

    yield from operators.overloads("aten")
    names = {name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()}
    for namespace in sorted(names - SKIPPED):
        yield from operators.overloads(namespace)


def _local_name(op: OpOverload) -> str:
    return f"{op._schema.name.partition('::')[2]}.{op._overloadname}"


OURS = f"{Path(__file__).parent.parent}/"
TORCHS = f"{Path(torch.__file__).parent}/"


def _owner(op: OpOverload, key: str) -> Owner | None:
    """Who has registered the kernel that is there, in Python, unless it is torch or this package.

    torch registers from ``torch/library.py`` where its user does: the dump names the file that made the Library.
    """
    found = re.search(rf"^{key}: registered at (\S+\.py):\d+ ::", torch._C._dispatch_dump(op.name()), re.MULTILINE)
    if found is None or found[1].startswith((OURS, TORCHS)):
        return None
    return Owner(op.name(), found[1])


def _missing(op: OpOverload) -> Kernel:
    """Where torch has no kernel."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{op} has no kernel on this backend but the one of batch_invariant")

    return kernel


def _replaced(op: OpOverload, treatment: Treatment, torchs: Kernel) -> Kernel:
    """Below autograd: our function, or, of arguments that it does not take, what is said about what is not covered."""
    function, name, thread, deciding = treatment.function, str(op), scopes.thread, scopes.deciding

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        scope = deciding()
        if scope is None:
            return torchs(keyset, *args, **kwargs)
        thread.inside = True
        try:
            result = function(*args, **kwargs)
            if result is not NotImplemented:
                return result
            if computes_with_floats(args, kwargs):
                scope.count(name, (*args, *kwargs.values()), treatment.reason)
            return torchs(keyset, *args, **kwargs)
        finally:
            thread.inside = False

    return kernel


def _refused(op: OpOverload, treatment: Treatment, torchs: Kernel) -> Kernel:
    """An error or a warning; torch's kernel where the arguments are integers, or nothing is added up."""
    name, thread, deciding = str(op), scopes.thread, scopes.deciding
    collective = treatment.reason == operators.COLLECTIVE

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        scope = deciding()
        if scope is None or not computes_with_floats(args, kwargs):
            return torchs(keyset, *args, **kwargs)
        declared = op.namespace != "aten" and treatment_of(op).kind == "exact"  # since it was registered
        if declared or (collective and scopes.collectives == "pinned"):
            return torchs(keyset, *args, **kwargs)
        if collective and scopes.collectives == "ordered":
            if op.namespace != "c10d" or not collectives.adds_over_ranks(args):  # others arrive as those of c10d
                return torchs(keyset, *args, **kwargs)
            ordered = collectives.ORDERED.get(op._schema.name)
            result = NotImplemented if ordered is None else ordered(*args, **kwargs)
            if result is not NotImplemented:
                return result
        thread.inside = True
        try:
            if operators.adds_up(treatment, op, args, kwargs):
                scope.count(name, (*args, *kwargs.values()), treatment.reason)
            return torchs(keyset, *args, **kwargs)
        finally:
            thread.inside = False

    return kernel


def _collective(op: OpOverload, treatment: Treatment, backend: str) -> Kernel:
    """``_refused`` of a collective, above the backends, so that torch's kernel runs without Python's lock.

    A thread of the process group may drop a tensor, for which it wants that lock, while it holds the group's own, which
    the kernel wants.
    """
    key, select = (getattr(torch._C.DispatchKey, name) for name in (backend, SELECT))
    below = torch._C._dispatch_keyset_full_after(select)

    def torchs(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return op.redispatch(keyset & below, *args, **kwargs)

    refused = _refused(op, treatment, torchs)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return (refused if keyset.has(key) else torchs)(keyset, *args, **kwargs)

    return kernel


def _composite(function: Callable[..., Any], torchs: Kernel) -> Kernel:
    """Above autograd: our function, or torch's, whose operators come by themselves."""
    deciding = scopes.deciding

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if deciding() is not None:
            result = function(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return torchs(keyset, *args, **kwargs)

    return kernel


def _vmapped(op: OpOverload, device: str, torchs: Kernel) -> Kernel:
    """Where vmap makes other operators of one than torch does without it, it is not covered."""
    of_norms = op._schema.name.partition("::")[2] in NORMS

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        scope = scopes.deciding()
        given = list(errors.tensors(_values(args, kwargs)))
        if (
            scope is not None
            and _are_covered(given, device)
            and (not of_norms or any(map(is_batchedtensor, given[1:])))
        ):
            _count_under_vmap(scope, op, given)
        return torchs(keyset, *args, **kwargs)

    return kernel


def _transformed_linear(device: str, torchs: Kernel) -> Kernel:
    """With a bias not covered under vmap; in another transform as without one."""

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        scope = scopes.deciding()
        given = list(errors.tensors(_values(args, kwargs)))
        if scope is not None and len(given) == 3 and _are_covered(given, device):
            if any(layer.key() == TransformType.Vmap for layer in get_interpreter_stack()):
                _count_under_vmap(scope, torch.ops.aten.linear.default, given)
            elif (result := COMPOSITES["linear.default"](*given)) is not NotImplemented:
                return result
        return torchs(keyset, *args, **kwargs)

    return kernel


def _are_covered(given: list[Tensor], device: str) -> bool:
    return any(t.device.type == device and _is_float(t) for t in given)


def _count_under_vmap(scope: scopes.Scope, op: OpOverload, given: list[Tensor]) -> None:
    scope.count(f"{op} under vmap", tuple(given), "give it the batch as a dimension")


def computes_with_floats(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether floating-point numbers are computed with; integers may become such, by ``dtype``."""
    dtype = kwargs.get("dtype")
    converts = isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
    return any(converts or _is_float(t) for t in errors.tensors(_values(args, kwargs)))


def _values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Any]:
    return (*args, *kwargs.values()) if kwargs else args


def _is_float(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()
