"""Launches of the matrix products: a Spec of the call's tensors, the kernel for its sizes, the launch.

Each launch is also an operator, ``cute_kernels::<name>``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.gemm.checks import check_separate
from cute_kernels.gemm.config import CONTRACT, GemmConfig, GemmSpec, choose, gemm_arguments
from cute_kernels.gemm.config_tokens import resident_clusters
from cute_kernels.gemm.reference import activate
from cute_kernels.runtime import launches
from cute_kernels.runtime.autograd import as_rows
from cute_kernels.runtime.launches import LaunchCache, bounded, observe, observers
from cute_kernels.runtime.operators import Layout, alias, contiguous_strides, empty_strided, operator
from cute_kernels.runtime.rows import contiguous_dim
from cute_kernels.runtime.targets import Target

Shape = tuple[int, int, int, int]  # M, N, K, entries of the batch


class GemmLaunch(NamedTuple):
    """A kernel, how many CTAs of it to launch, whether it computes the transposed product.

    ``config``: None is the kernel for operands of any stride. ``kernel``: its name, for ``provenance``.
    """

    function: Callable[..., None]
    num_ctas: int
    transposed: bool
    config: GemmConfig | None
    kernel: str = "gemm"

    contract = CONTRACT

    @property
    def name(self) -> str:
        """The kernel and its configuration."""
        config = self.config
        geometry = "any stride" if config is None else f"tile {config.tile}, cluster {config.cluster}"
        turns = ", ping-pong" if config is not None and config.ping_pong else ""
        return f"{self.kernel} ({geometry}{turns}{', transposed' if self.transposed else ''})"


class GemmLaunches:
    """The launches of a Spec, by the products' sizes."""

    def __init__(self, target: Target, spec: GemmSpec) -> None:
        self._target, self._spec = target, spec
        self._launches: dict[Shape, GemmLaunch] = bounded()

    def of(self, shape: Shape) -> GemmLaunch:
        """The launch of the kernel that is chosen for these sizes."""
        launch = self._launches.get(shape)
        if launch is None:
            launch = self._launches[shape] = launch_of(self._target, self._spec, shape)
        return launch


_gemm = LaunchCache(GemmLaunches)


def launch_of(
    target: Target, spec: GemmSpec, shape: Shape, candidate: tuple[GemmConfig | None, bool] | None = None
) -> GemmLaunch:
    """The launch of one kernel, the one that is chosen or another ``candidate``: (config, transposed)."""
    from cute_kernels.gemm import kernel

    m, n, k, entries = shape
    arch, num_sms = target
    if candidate is None:
        along_k = spec.majors == ("k", "k")
        candidate = choose(arch, m, n, k, num_sms, spec.epilogue, entries, along_k)
    config, transposed = candidate
    if config is None or spec.a_major is None:
        config, transposed = None, False
        tile_m, tile_n, cluster = 64, 64, 1
    else:
        tile_m, tile_n = config.tile[0] * config.cluster[0], config.tile[1] * config.cluster[1]
        cluster = config.cluster[0] * config.cluster[1]
    if transposed:
        m, n = n, m
    function = launches.load(kernel.gemm, *gemm_arguments(arch, spec, k, config, transposed))
    # More would wait for the others' last tiles
    clusters = min(entries * -(-m // tile_m) * -(-n // tile_n), resident_clusters(cluster, num_sms))
    return GemmLaunch(function, clusters * cluster, transposed, config)


def _expect_separate(a: Tensor, b: Tensor, d: Tensor, *_: object, **__: object) -> None:
    """A compiler of graphs may have given d the memory of an operand.

    Inductor does where ``mm``'s out holds the operand's values and nothing else needs them.
    """
    check_separate(d, a, b)


@operator(
    "gemm",
    "Tensor a, Tensor b, Tensor(a!) d, Tensor(b!)? z=None, Tensor? bias=None, Tensor? valid_k=None, "
    "str? activation=None, bool accumulate=False, bool trans_a=False, bool trans_b=False",
    before=_expect_separate,
)
def gemm(
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
) -> None:
    """d (M, N) = act(a b^T + bias) from a (M, K) and b (N, K) of any strides; z: before the activation.

    Or d (L, M, N) = a b^T of each entry of a (L, M, K) and b (L, N, K).
    ``accumulate``: the sums start from d (fp32). ``valid_k`` (int32, one element): how many k are summed. ``trans_*``:
    a is (..., K, M), b is (..., K, N).
    """
    a_shape, b_shape = a.shape, b.shape
    m, k, n = a_shape[-2], a_shape[-1], b_shape[-1 if trans_b else -2]
    if trans_a:
        m, k = k, m
    batched = len(a_shape) == 3
    entries = a_shape[0] if batched else 1
    if not (m and n and k and entries):
        return _sum_nothing(d, z, bias, activation, accumulate)
    a_dim, b_dim = contiguous_dim(a, a_shape), contiguous_dim(b, b_shape)
    launch = _launch(
        a,
        b,
        bias,
        (m, n, k, entries),
        d.dtype,
        activation,
        (a_dim, b_dim),
        trans_b,
        _rows_aligned(d, n) and (z is None or _rows_aligned(z, n)),
        has_z=z is not None,
        accumulate=accumulate,
        has_valid_k=valid_k is not None,
        trans_a=trans_a,
    )
    if observers:
        observe(launch, (entries, m, n, k) if batched else (m, n, k), a.get_device())
    if launch.config is None:  # takes a (M, K) and b (N, K), read as torch reads them: a sign may be left to the reader
        a, b = a.mT if trans_a else a, b.mT if trans_b else b
        if a.is_neg() or b.is_neg():
            a, b = a.resolve_neg(), b.resolve_neg()
    else:  # takes each with its neighbours along the last dimension, and of a batch that is one entry again that one
        if a_dim == -2:
            a = a.mT
        if b_dim == -2:
            b = b.mT
        if batched:
            a, b = _entries(a), _entries(b)
    if bias is not None and n == 1:  # contiguous, whatever it is a part of
        bias = bias.resolve_neg()
    if launch.transposed:
        a, b = b, a
    launch.function(a, b, d, z, bias, valid_k, launch.num_ctas)


def _launch(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    shape: Shape,
    dtype: torch.dtype,
    activation: str | None,
    read_along: tuple[int, int],
    trans_b: bool,
    rows_aligned: bool,
    *,
    has_z: bool,
    accumulate: bool = False,
    has_valid_k: bool = False,
    trans_a: bool = False,
) -> GemmLaunch:
    """``read_along``: ``contiguous_dim`` of a and of b. ``dtype``, ``rows_aligned``: of what is written."""
    (a_dim, b_dim), a_major, b_major = read_along, None, None
    if a_dim and b_dim:
        a_major = "k" if (a_dim == -1) != trans_a else "m"
        b_major = "k" if (b_dim == -1) != trans_b else "n"
    spec = GemmSpec(
        a.dtype,
        dtype,
        None if bias is None else bias.dtype,
        activation,
        has_z,
        accumulate,
        has_valid_k,
        a.dim() == 3,
        a_major,
        b_major,
        rows_aligned,
    )
    return _gemm.get(a.get_device(), spec).of(shape)


class GemmCall(NamedTuple):
    """A product that is ready to be launched: the kernel, and the layout of each tensor. It allocates its result.

    Attributes:
        d_layout, d_dtype: of the result; z has them, too.
        a_matrix, b_matrix, d_matrix: layouts as the kernel takes them; None: as they are.
        shape: for ``observe``.
    """

    launch: GemmLaunch
    d_layout: Layout
    d_dtype: torch.dtype
    has_z: bool
    a_matrix: Layout | None
    b_matrix: Layout | None
    d_matrix: Layout | None
    shape: tuple[int, int, int]

    @staticmethod
    def of(
        a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype, activation: str | None, has_z: bool,
        trans_b: bool,
    ) -> GemmCall | None:  # fmt: skip
        """For plain tensors; a may have any number of dimensions, as linear's x.

        None: there is nothing to sum, TMA cannot read an operand, or the bias has a lazy sign.
        """
        rows = as_rows("linear", "x", a)
        (m, k), n = rows.shape, b.shape[1 if trans_b else 0]
        a_dim, b_dim = contiguous_dim(rows, rows.shape), contiguous_dim(b, b.shape)
        if not (m and n and k and a_dim and b_dim) or (bias is not None and bias.is_neg()):
            return None
        aligned = not n * dtype.itemsize & 15  # a new matrix starts on 16 bytes, and so do its rows then
        shape, read_along = (m, n, k, 1), (a_dim, b_dim)
        launch = _launch(rows, b, bias, shape, dtype, activation, read_along, trans_b, aligned, has_z=has_z)
        if launch.config is None:
            return None
        d, matrix = (*a.shape[:-1], n), (m, n)
        turned_a, turned_b = rows.mT if a_dim == -2 else rows, b.mT if b_dim == -2 else b
        return GemmCall(
            launch,
            (d, contiguous_strides(d)),
            dtype,
            has_z,
            None if turned_a is a else (tuple(turned_a.shape), turned_a.stride()),
            None if turned_b is b else (tuple(turned_b.shape), turned_b.stride()),
            None if d == matrix else (matrix, contiguous_strides(matrix)),
            (m, n, k),
        )

    def run(self, a: Tensor, b: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """d and, if it is saved, z."""
        launch = self.launch
        if observers:
            observe(launch, self.shape, a.get_device())
        d = empty_strided(a, *self.d_layout, self.d_dtype)
        z = empty_strided(a, *self.d_layout, self.d_dtype) if self.has_z else None
        d_rows, z_rows = d, z
        if self.d_matrix is not None:
            d_rows, z_rows = alias(d, *self.d_matrix), None if z is None else alias(z, *self.d_matrix)
        if self.a_matrix is not None:
            a = alias(a, *self.a_matrix)
        if self.b_matrix is not None:
            b = alias(b, *self.b_matrix)
        if launch.transposed:
            a, b = b, a
        launch.function(a, b, d_rows, z_rows, bias, None, launch.num_ctas)
        return d, z


# An operator of its own, so that a compiler of graphs does not put its own arithmetic, and other bits, in its place
@operator("activation_backward", "Tensor dy, Tensor saved, Tensor(a!) dz, str activation")
def activation_backward(dy: Tensor, saved: Tensor, dz: Tensor, activation: str) -> None:
    """dz = dy act'(z), elementwise by torch; ``saved`` is z, of relu y."""
    if activation == "relu":
        torch.ops.aten.threshold_backward.grad_input(dy, saved, 0, grad_input=dz)
    elif activation == "silu":
        torch.ops.aten.silu_backward.grad_input(dy, saved, grad_input=dz)
    else:
        torch.ops.aten.gelu_backward.grad_input(dy, saved, grad_input=dz)


def _entries(t: Tensor) -> Tensor:
    """A batch as TMA takes it: of stride 0 its one entry, whose stride leads nowhere, but on 16 bytes."""
    first, *strides = t.stride()
    if first:
        return t
    stride = max(size * stride for size, stride in zip(t.shape[1:], strides, strict=True))
    return alias(t, (1, *t.shape[1:]), (stride, *strides))


def _rows_aligned(t: Tensor, n: int) -> bool:
    """Whether TMA can store to the rows of ``t``, a matrix of ``n`` columns or a batch."""
    strides, size = t.stride(), t.itemsize
    pitch = strides[-2]
    if (pitch * size | t.data_ptr()) & 15 or pitch < n:
        return False
    return len(strides) == 2 or not strides[0] * size & 15


def _sum_nothing(d: Tensor, z: Tensor | None, bias: Tensor | None, activation: str | None, accumulate: bool) -> None:
    """A product over no k, the bias alone; or of no rows or columns. What would be added to stays as it is, -0 too."""
    if accumulate or not d.numel():
        return
    sums = torch.zeros((), dtype=torch.float32, device=d.device) if bias is None else bias.float()
    if z is not None:
        z.copy_(sums.expand_as(z))
    d.copy_(activate(sums, activation).expand_as(d))
