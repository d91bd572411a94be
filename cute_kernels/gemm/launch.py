"""Plans and launches of the matrix products: from a call's signature to a compiled kernel, then one dict lookup.

A call whose tensors are on 16 bytes finds what to allocate and launch in ``calls``, by a shorter key.

The registered operator ``cute_kernels::gemm`` runs the same function for traced graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.gemm.checks import check_bmm, check_linear, check_mm, check_separate, operand_major
from cute_kernels.gemm.config import GemmConfig, choose
from cute_kernels.gemm.reference import activate
from cute_kernels.runtime.operators import Calls, Plans, alias, allocator, contiguous_strides, mutating_op
from cute_kernels.runtime.targets import arch_of, cutlass_dtype, sm_count


@dataclass(frozen=True, slots=True)
class Plan:
    """A compiled kernel, how many CTAs of it to launch, whether it computes the transposed product, what allocates.

    ``kernel``: its name, for ``provenance``.
    """

    function: Callable[..., None]
    num_ctas: int
    transposed: bool
    config: GemmConfig | None
    allocate: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
    kernel: str = "gemm"


_plans = Plans()
calls = Calls()
_forced: list[tuple[GemmConfig | None, bool]] = []
_observers: dict[int, list] = {}  # by id: two that have seen nothing yet are equal


def plan_product(
    op: str,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype | None,
    keeps_z: bool,
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """``product(a, b, bias)`` of plain tensors of these sizes and strides: allocates, launches, returns (d, z).

    d (..., N) = act(a b^T + bias) from a (..., K) and b (N, K), z: before the activation. ``op``, "mm", whose b is
    (K, N), "bmm", whose b is (L, K, N), or "linear", says whose arguments are checked where none of this signature have
    been. a is a matrix, of "bmm" a batch; or contiguous and not empty. b's dtype and device are asked for by the
    kernel's entry at each call, which refuses others than a's in words of its own.

    Raises: as the op's check.
    """
    shape, dtype, shape_b = a.shape, a.dtype, b.shape
    key = (
        op,
        shape,
        a.stride(),
        dtype,
        a.get_device(),
        shape_b,
        b.stride(),
        (a.data_ptr() | b.data_ptr()) & 15,
        None if bias is None else (bias.dtype, bias.shape, bias.stride(), bias.get_device()),
        activation,
        out_dtype,
        keeps_z,
    )
    product = _plans.get(key)
    if product is None or _forced:
        if op == "mm":
            check_mm(a, b, out_dtype, None)
        elif op == "bmm":
            check_bmm(a, b, out_dtype)
        else:
            check_linear(a, b, bias, out_dtype, activation, None)
        product = _product(op, a, b, bias, activation, out_dtype or dtype, keeps_z)
        if not _forced and 0 not in (*shape, *shape_b):  # else no entry is asked
            _plans[key] = product
    return product


def _product(op, a, b, bias, activation, out_dtype, keeps_z) -> Callable[..., tuple[Tensor, Tensor | None]]:
    *batch, k = a.shape
    trans_b = op != "linear"
    m, n = math.prod(batch), b.shape[-1 if trans_b else 0]
    allocate, sizes, strides = allocator(a), (m, n), (n or 1, 1)
    matrix = outer = None
    if op == "bmm":
        sizes = (*batch, n)
        strides = contiguous_strides(sizes)
    elif len(batch) != 1:
        matrix = (m, k), (k, 1)
        outer = (*batch, n), contiguous_strides((*batch, n))
        a = alias(a, *matrix)
    d = allocate(sizes, strides, out_dtype)
    outputs = d, d if keeps_z else None
    plan = _plan_of(a, b, *outputs, bias, None, activation, False, False, trans_b)

    def product(a: Tensor, b: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if matrix is not None:
            a = alias(a, *matrix)
        d = allocate(sizes, strides, out_dtype)
        z = allocate(sizes, strides, out_dtype) if keeps_z else None
        if plan is None:
            _empty_sums(d, z, bias, activation, False)
        else:
            if _observers:
                observe(plan, a, b, False, trans_b)
            if plan.transposed:
                plan.function(b, a, d, z, bias, None, plan.num_ctas)
            else:
                plan.function(a, b, d, z, bias, None, plan.num_ctas)
        if outer is not None:
            d, z = alias(d, *outer), None if z is None else alias(z, *outer)
        return d, z

    return product


def run_gemm(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    z: Tensor | None = None,
    bias: Tensor | None = None,
    valid_k: Tensor | None = None,
    activation: str | None = None,
    accumulate: bool = False,
    trans_a: bool = False,
    trans_b: bool = False,
    check: tuple[Callable[..., None], tuple] | None = None,
) -> None:
    """d (M, N) = act(a b^T + bias) from a (M, K) and b (N, K) of any strides; z: before the activation.

    Or d (L, M, N) = a b^T of each entry of a (L, M, K) and b (L, N, K).
    ``accumulate``: the sums start from d (fp32). ``valid_k`` (int32, one element): how many k are summed. ``trans_*``:
    a is (..., K, M), b is (..., K, N). ``check``, a function and its arguments, is called where no call of this
    signature has been checked.
    """
    key = (
        a.shape,
        a.stride(),
        a.data_ptr() & 15,
        a.dtype,
        a.get_device(),
        b.shape,
        b.stride(),
        b.data_ptr() & 15,
        b.dtype,
        b.get_device(),
        d.shape,
        d.stride(),
        d.data_ptr() & 15,
        d.dtype,
        d.get_device(),
        None if z is None else (z.stride(), z.data_ptr() & 15),
        None if bias is None else (bias.dtype, bias.shape, bias.stride(), bias.get_device()),
        None if valid_k is None else (valid_k.dtype, valid_k.shape, valid_k.get_device()),
        activation,
        accumulate,
        trans_a,
        trans_b,
    )
    plan = _plans.get(key)
    if plan is None or _forced:
        if check is not None:
            check[0](*check[1])
        plan = _plan_of(a, b, d, z, bias, valid_k, activation, accumulate, trans_a, trans_b)
        if plan is None:
            return _empty_sums(d, z, bias, activation, accumulate)
        if not _forced:
            _plans[key] = plan
    if _observers:
        observe(plan, a, b, trans_a, trans_b)
    if plan.transposed:
        plan.function(b, a, d, z, bias, valid_k, plan.num_ctas)
    else:
        plan.function(a, b, d, z, bias, valid_k, plan.num_ctas)


def run_traced(a: Tensor, b: Tensor, d: Tensor, *rest: object) -> None:
    """``run_gemm`` as graphs call it, whose compiler may have given d the memory of an operand.

    Inductor does where ``mm``'s out holds the operand's values and nothing else needs them.
    """
    check_separate(d, a, b)
    run_gemm(a, b, d, *rest)


gemm_op = mutating_op(
    "gemm",
    "Tensor a, Tensor b, Tensor(a!) d, Tensor(b!)? z=None, Tensor? bias=None, Tensor? valid_k=None, "
    "str? activation=None, bool accumulate=False, bool trans_a=False, bool trans_b=False",
    run_traced,
)


def run_activation_backward(dy: Tensor, saved: Tensor, dz: Tensor, activation: str) -> None:
    """dz = dy act'(z), elementwise by torch; ``saved`` is z, of relu y."""
    if activation == "relu":
        torch.ops.aten.threshold_backward.grad_input(dy, saved, 0, grad_input=dz)
    elif activation == "silu":
        torch.ops.aten.silu_backward.grad_input(dy, saved, grad_input=dz)
    else:
        torch.ops.aten.gelu_backward.grad_input(dy, saved, grad_input=dz)


# An operator of its own, so that a compiler of graphs does not put its own arithmetic, and other bits, in its place
activation_backward_op = mutating_op(
    "activation_backward", "Tensor dy, Tensor saved, Tensor(a!) dz, str activation", run_activation_backward
)


@contextmanager
def forced(config: GemmConfig | None, transposed: bool) -> Iterator[None]:
    """Every product inside runs on this kernel: how the tests hold the candidates together."""
    entry = (config, transposed)
    _forced.append(entry)
    try:
        yield
    finally:
        _forced[:] = [other for other in _forced if other is not entry]


@contextmanager
def observed() -> Iterator[list[tuple[Plan, tuple[int, ...], int]]]:
    """The (plan, (M, N, K), device) of the products inside, in order; of batches (L, M, N, K)."""
    launches: list = []
    _observers[id(launches)] = launches
    try:
        yield launches
    finally:
        del _observers[id(launches)]


def observe(plan: Plan, a: Tensor, b: Tensor, trans_a: bool = False, trans_b: bool = False) -> None:
    """Tell ``observed`` of a launch."""
    a, b = a.mT if trans_a else a, b.mT if trans_b else b
    *rows, k = a.shape
    for launches in list(_observers.values()):
        launches.append((plan, (*rows, b.shape[-2], k), a.get_device()))


def _plan_of(a, b, d, z, bias, valid_k, activation, accumulate, trans_a, trans_b) -> Plan | None:
    """The plan of tensors that have been checked; None where there is nothing to sum."""
    a, b = a.mT if trans_a else a, b.mT if trans_b else b
    if 0 in (*a.shape, b.shape[-2]):
        return None
    return _plan(a, b, d, z, bias, valid_k, activation, accumulate, (trans_a, trans_b))


def _plan(a, b, d, z, bias, valid_k, activation, accumulate, trans: tuple[bool, bool]) -> Plan:
    """Of a (M, K) and b (N, K), or batches of them; ``trans``: which of them the calls give the other way round."""
    from cute_kernels.gemm.kernel import gemm

    index = a.get_device()
    arch, num_sms = arch_of(index), sm_count(index)
    epilogue = "accumulate" if accumulate else "store" if activation is None else "activate"
    *batch, m, k = a.shape
    n, entries = b.shape[-2], math.prod(batch)
    majors = operand_major(a), operand_major(b)
    config, transposed = choose(arch, m, n, k, num_sms, epilogue, entries, majors == ("k", "k"))
    if _forced:
        config, transposed = _forced[-1]
    if None in majors:
        config = None
    if config is None:
        transposed = False
        tile_m, tile_n, cluster, majors = 64, 64, 1, ("k", "k")
    else:
        tile_m, tile_n = config.tile[0] * config.cluster[0], config.tile[1] * config.cluster[1]
        cluster = config.cluster[0] * config.cluster[1]
    outputs = [t for t in (d, z) if t is not None]
    tma_store = config is not None and config.stores_by_tma(arch, transposed) and all(_rows_aligned(t) for t in outputs)
    turned = [(major == "rows") != given for major, given in zip(majors, trans, strict=True)]
    # A batch of stride 0 is given to the kernels for TMA as its one entry
    shared = [config is not None and t.dim() == 3 and t.stride(0) == 0 for t in (a, b)]
    if transposed:
        m, n = n, m
        majors, turned, shared = majors[::-1], turned[::-1], shared[::-1]
    in_blocks = config is not None and config.loads_blocks(arch, majors, k)
    function = gemm(
        arch,
        cutlass_dtype(a.dtype),
        cutlass_dtype(d.dtype),
        None if bias is None else cutlass_dtype(bias.dtype),
        None if activation is None else str.__str__(activation),  # a StrEnum's member would be another key
        z is not None,
        "k" if majors[0] == "k" else "m",
        "k" if majors[1] == "k" else "n",
        transposed,
        accumulate,
        valid_k is not None,
        bool(batch),
        tma_store,
        in_blocks,
        config,
    )
    clusters = min(entries * -(-m // tile_m) * -(-n // tile_n), num_sms // cluster)
    if config is None or (bias is not None and bias.numel() == 1):
        function = _resolved(function)
    if any(turned):
        function = _turned(function, *turned)
    if any(shared):
        function = _of_entries(function, *shared)
    return Plan(function, clusters * cluster, transposed, config, allocator(a))


def _resolved(function: Callable[..., None]) -> Callable[..., None]:
    """``function`` of what torch reads: a conjugate's imaginary part, of stride 2 or of one element, negated lazily.

    To ask takes 0.6 us of a call, to resolve without asking 1.7 (CPU).
    """

    def run(a: Tensor, b: Tensor, d: Tensor, z: Tensor | None, bias: Tensor | None, *rest: object) -> None:
        if a.is_neg() or b.is_neg():
            a, b = a.resolve_neg(), b.resolve_neg()
        if bias is not None and bias.is_neg():
            bias = bias.resolve_neg()
        function(a, b, d, z, bias, *rest)

    return run


def _turned(function: Callable[..., None], a_turned: bool, b_turned: bool) -> Callable[..., None]:
    """``function`` of operands that lie the other way round than it takes them: the contiguous dimension last."""

    def run(a: Tensor, b: Tensor, *rest: object) -> None:
        function(a.mT if a_turned else a, b.mT if b_turned else b, *rest)

    return run


def _of_entries(function: Callable[..., None], a_shared: bool, b_shared: bool) -> Callable[..., None]:
    """``function`` of batches that are one entry again and again: of that entry."""

    def run(a: Tensor, b: Tensor, *rest: object) -> None:
        function(_one_entry(a) if a_shared else a, _one_entry(b) if b_shared else b, *rest)

    return run


def _one_entry(t: Tensor) -> Tensor:
    """The first entry of a batch, as a batch; its stride, which leads nowhere, is on 16 bytes if the rows' is."""
    stride = max(size * stride for size, stride in zip(t.shape[1:], t.stride()[1:], strict=True))
    return alias(t, (1, *t.shape[1:]), (stride, *t.stride()[1:]))


def _rows_aligned(t: Tensor) -> bool:
    """Whether TMA can store to the rows of ``t``, a matrix or a batch."""
    *strides, _ = t.stride()
    aligned = all(stride * t.element_size() % 16 == 0 for stride in strides)
    return t.data_ptr() % 16 == 0 and aligned and t.stride(-2) >= t.shape[-1]


def _empty_sums(d: Tensor, z: Tensor | None, bias: Tensor | None, activation: str | None, accumulate: bool) -> None:
    """A product over no k, the bias alone; or of no rows or columns. What would be added to stays as it is, -0 too."""
    if accumulate or not d.numel():
        return
    sums = torch.zeros((), dtype=torch.float32, device=d.device) if bias is None else bias.float()
    if z is not None:
        z.copy_(sums.expand_as(z))
    d.copy_(activate(sums, activation).expand_as(d))
