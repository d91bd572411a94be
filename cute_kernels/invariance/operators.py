"""The treatment of each operator of torch by ``batch_invariant``: one table, for eager calls, compiled graphs, audits.

An overload is of exactly one class:

- "exact": its results' values are arguments' values, or each is computed on its own: it may run as it is.
- "replaced": a function of this library computes it. In place and ``out`` forms run the function of the form that
  returns its results.
- "composite": torch makes it of other operators, each of which is of a class of its own.
- "refused": it may add up in an order that depends on the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch._ops import OpOverload

from cute_kernels.invariance import aten, fused_attention
from cute_kernels.runtime.checks import expect

Kind = Literal["exact", "replaced", "composite", "refused"]


class Treatment(NamedTuple):
    """The treatment of one overload.

    Attributes:
        kind: the class.
        function: of "replaced", takes the operator's arguments, and returns its results or, where it does not take the
            arguments, NotImplemented; it is below autograd.
        reason: of "refused", why, and what to use instead; empty if there is no more to say than the name does.
        unless: of "refused", the argument that makes it add up; it is exact where that one is not given, False or 0.
    """

    kind: Kind
    function: Callable[..., Any] | None = None
    reason: str = ""
    unless: str = ""


# Non-reducing. Where the name is that of one tensor's operator, so are its forms in place, with ``out``, of lists
# fmt: off
MOVED = frozenset([
    # Values of arguments, moved
    "_chunk_cat", "_copy_from", "_copy_from_and_resize", "_has_same_storage_numel", "_index_put_impl", "_lazy_clone",
    "_local_scalar_dense", "_pin_memory", "_reshape_alias", "_reshape_copy", "_resize_output", "_stack", "_to_copy",
    "_unsafe_index", "_unsafe_view", "as_strided_scatter", "block_diag", "cat", "channel_shuffle", "constant_pad_nd",
    "copy", "detach", "diag_embed", "diagonal_backward", "diagonal_scatter", "embedding", "flip", "from_file", "gather",
    "im2col", "index", "index_copy", "index_fill", "index_put", "index_select", "lift", "lift_fresh", "lift_fresh_copy",
    "masked_scatter", "masked_scatter_backward", "masked_select", "narrow_copy", "pixel_shuffle", "pixel_unshuffle",
    "record_stream", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "repeat", "repeat_interleave",
    "replication_pad1d", "replication_pad2d", "replication_pad3d", "resize", "resize_as", "roll", "rot90", "scatter",
    "select_backward", "select_scatter", "set", "slice_backward", "slice_scatter", "split_with_sizes_copy", "stack",
    "take", "tril", "triu", "unsafe_split", "unsafe_split_with_sizes", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_nearest3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
    # Factories
    "_efficientzerotensor", "_new_zeros_with_same_feature_meta", "arange", "empty", "empty_like", "empty_permuted",
    "empty_strided", "eye", "fill", "full", "full_like", "new_empty", "new_empty_strided", "new_full", "new_ones",
    "new_zeros", "ones", "ones_like", "scalar_tensor", "tril_indices", "triu_indices", "zero", "zeros", "zeros_like",
    # Questions and checks
    "_assert_async", "_assert_scalar", "_assert_tensor_metadata", "_functional_assert_async",
    "_functional_assert_scalar", "_functional_sym_constrain_range", "_functional_sym_constrain_range_for_size",
    "_fused_sdp_choice", "_make_dep_token", "_print", "dense_dim", "is_coalesced", "is_pinned", "is_same_size",
    "is_set_to", "sparse_dim", "sym_constrain_range", "sym_constrain_range_for_size",
])
COMPUTED = frozenset([
    # Factories
    "bartlett_window", "blackman_window", "fft_fftfreq", "fft_rfftfreq", "hamming_window", "hann_window",
    "kaiser_window", "linspace", "logspace", "range",
    # Random numbers, which depend on the place in a batch
    "bernoulli", "binomial", "cauchy", "exponential", "geometric", "log_normal", "normal", "normal_functional",
    "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random", "randperm", "uniform",
    # Maxima, order and counts
    "_aminmax", "_cummax_helper", "_cummin_helper", "_is_all_true", "_is_any_true", "_unique", "_unique2",
    "adaptive_max_pool2d", "adaptive_max_pool3d", "all", "allclose", "amax", "amin", "aminmax", "any", "argmax",
    "argmin", "argsort", "bincount", "bucketize", "count_nonzero", "cummax", "cummin", "equal", "histc", "isin",
    "kthvalue", "max", "max_pool2d_with_indices", "max_pool3d_with_indices", "median", "min", "mode", "nanmedian",
    "nonzero", "nonzero_static", "searchsorted", "sort", "topk", "unique_consecutive", "unique_dim",
    "unique_dim_consecutive",
    # Elementwise, without the tag
    "__ilshift__", "__irshift__", "__lshift__", "__rshift__", "_add_relu", "_amp_foreach_non_finite_check_and_unscale",
    "_amp_update_scale", "_conj_physical", "_fused_adagrad", "_fused_adam", "_fused_adamw", "_fused_sgd",
    "_masked_scale", "_prelu_kernel", "_prelu_kernel_backward", "binary_cross_entropy",
    "binary_cross_entropy_backward",
    "binary_cross_entropy_with_logits", "complex", "elu_backward", "floor_divide", "glu", "glu_backward",
    "glu_backward_jvp", "glu_jvp", "hardshrink_backward", "hardsigmoid_backward", "hardswish", "hardswish_backward",
    "hardtanh_backward", "huber_loss", "huber_loss_backward", "leaky_relu", "leaky_relu_backward", "linalg_cross",
    "log_sigmoid_backward", "log_sigmoid_forward", "mish_backward", "mse_loss", "mse_loss_backward",
    "nll_loss2d_backward", "nll_loss_backward", "polar", "rrelu_with_noise", "rrelu_with_noise_backward",
    "rrelu_with_noise_functional", "rsub", "smooth_l1_loss", "smooth_l1_loss_backward", "soft_margin_loss",
    "soft_margin_loss_backward", "softplus_backward", "softshrink_backward", "where",
])
EXACT = MOVED | COMPUTED
# fmt: on

# Where it is given, an operator that is exact without it adds up
SUMMING_ARGUMENTS = ("accumulate", "reduce", "weights", "reduction")

# Why, and what to use instead, by the beginning of the name: the first that fits
REASONS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("multinomial",),
        "it draws by the place in the batch: use cute_kernels.sample; for a model, models.generate",
    ),
    (("native_dropout", "_fused_dropout"), "dropout draws by the place in the batch: set p to 0"),
    (
        ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention", "_triton_"),
        "use cute_kernels.attention, in transformers attn_implementation='cute_kernels'",
    ),
    (("_varlen_attn",), "use cute_kernels.attention"),
    (
        ("_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
        "call torch.backends.mha.set_fastpath_enabled(False)",
    ),
    (("_grouped_mm",), "use cute_kernels.grouped_mm"),
    (("_scaled_mm", "_scaled_grouped_mm"), "products of fp8 are not covered: use cute_kernels.mxfp8"),
    (
        ("native_batch_norm", "_native_batch_norm", "_batch_norm", "batch_norm", "cudnn_batch_norm"),
        "batch norm takes statistics of the batch: use layer_norm or rms_norm",
    ),
    (("native_group_norm",), "use layer_norm or rms_norm"),
    (
        ("convolution", "_convolution", "cudnn_convolution", "_conv_depthwise", "conv_", "slow_conv"),
        "convolutions, and with them state-space models and linear attention, are not covered",
    ),
    (("linalg_vector_norm", "dist"), "orders 1, 2 and inf, of bf16, fp16 or fp32, are covered"),
    (("linalg_solve_triangular",), "linear attention, and what else solves linear equations, is not covered"),
    (("linalg_", "_linalg_"), "linear algebra is not covered, but for vector norms"),
    (("_fft_",), "Fourier transforms are not covered"),
    (("_cdist", "_pdist"), "distances are not covered: subtract, square and sum"),
    (("cumprod",), "use the exponential of a cumsum of logarithms"),
    (("logcumsumexp", "_logcumsumexp"), "use cumsum and logsumexp"),
    (("upsample_", "_upsample_", "grid_sampler"), "interpolation is not covered"),
    (("_embedding_bag",), "use embedding and sum"),
    (("embedding_dense_backward",), "scale_grad_by_freq is not covered"),
    (("_cudnn_rnn", "_thnn_fused"), "recurrent layers are not covered"),
    (("_sparse_", "sparse_"), "sparse tensors are not covered"),
    (("mm", "addmm", "bmm", "baddbmm"), "products are of bf16, fp16 or fp32, both sides of one dtype"),
    (("prod",), "multiply what unbind returns, one by one"),
    (("multi_margin_loss", "multilabel_margin_loss"), "make it of gather, clamp, and sum or mean"),
    (("scatter_reduce",), "of its reductions sum, amax and amin are covered"),
    (("index_reduce",), "use index_add, or scatter_reduce with amax or amin"),
)
# Operators of prims, a namespace of torch's own that compiled graphs hold, add up if they have these names
PRIMS_THAT_ADD_UP = frozenset(["sum", "prod", "xor_sum", "var", "svd", "fft_r2c", "fft_c2c", "fft_c2r"])
EXACT_ELSEWHERE = frozenset(
    [
        *("inductor::_alloc_from_pool", "inductor::_reinterpret_tensor", "inductor::accumulate_grad_"),
        "inductor::resize_storage_bytes_",
        *("fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy", "fsdp::chunk_cat"),  # FSDP2's copies
    ]
)
FOREIGN = "a foreign operator: cute_kernels.declare_invariant(op) lets it run, if its rows do not depend on the batch"
COLLECTIVE = (
    "it adds over ranks, in an order of the message's size: cute_kernels.install(collectives='ordered') runs "
    "all-reduces and reduce-scatters that are sums or means"
)
# Their operators that reduce add over ranks; the others move data
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")

_declared: set[str] = set()  # operators of others, namespace::name


def declare_invariant(op: str | torch._ops.OpOverload | torch._ops.OpOverloadPacket) -> None:
    """Say of an operator of another library that a row's bits do not depend on the batch.

    ``batch_invariant`` and ``install`` then let it run, all its overloads, forward and, where the backward is another
    operator, that one only if it is declared, too.

    Args:
        op: the operator, ``torch.ops.library.name``, or its name, "library::name".

    Returns:
        None.

    Raises:
        TypeError: it is none of these.
        ValueError: the name has no namespace, or it is one of torch's own operators, which this library classifies.

    Example:
        >>> from cute_kernels import declare_invariant
        >>> declare_invariant("my_library::rotate")
    """
    if isinstance(op, OpOverload):
        name = op._schema.name
    elif isinstance(op, torch._ops.OpOverloadPacket):
        name = op._qualified_op_name
    else:
        expect(isinstance(op, str), "declare_invariant", "op", "be an operator or its name", op, TypeError)
        name = op.partition(".")[0]
    namespace, _, rest = name.partition("::")
    expect(bool(namespace and rest), "declare_invariant", "op", "have a name like library::name", repr(name))
    expect(namespace != "aten", "declare_invariant", "op", "not be an operator of torch's own", repr(name))
    _declared.add(name)
    treatment_of.cache_clear()


@functools.cache
def treatment_of(op: OpOverload) -> Treatment:
    """The treatment of an overload of any namespace."""
    if op.namespace != "aten":
        return _of_another_namespace(op)
    name = op._schema.name.rpartition("::")[2]
    if (function := _replacement_of(op, name)) is not None:
        return Treatment("replaced", function, _reason(name))
    if _is_exact(op, name):
        summing = [a.name for a in op._schema.arguments if a.name in SUMMING_ARGUMENTS]
        if summing and not _is_elementwise(base_of(name)) and not name.endswith("_backward"):
            return Treatment("refused", None, _reason(name), summing[0])
        return Treatment("exact")
    if is_composite(op):
        return Treatment("composite")
    return Treatment("refused", None, _reason(name))


def _of_another_namespace(op: OpOverload) -> Treatment:
    function = fused_attention.OTHERS.get(f"{op._schema.name}.{op._overloadname}")
    if function is not None:
        return Treatment("replaced", function, _reason(op._schema.name.rpartition("::")[2]))
    if op.namespace in COLLECTIVES:
        return Treatment("refused", None, COLLECTIVE) if "reduce" in op._schema.name else Treatment("exact")
    name = op._schema.name
    if op.namespace == "prims":
        adds = name.partition("::")[2] in PRIMS_THAT_ADD_UP
        return Treatment("refused") if adds else Treatment("exact")
    exact = op.namespace == "cute_kernels" or name in _declared or name in EXACT_ELSEWHERE
    if exact or is_view(op) or _is_tagged(op):
        return Treatment("exact")
    if is_composite(op):
        return Treatment("composite")
    return Treatment("refused", None, FOREIGN)


def is_composite(op: OpOverload) -> bool:
    """Whether torch makes it of others on a backend without a kernel of its own."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def treatments() -> dict[OpOverload, Treatment]:
    """The treatments of all overloads of torch's own operators."""
    return {op: treatment_of(op) for op in overloads("aten")}


def overloads(namespace: str) -> list[OpOverload]:
    """All that are registered in a namespace."""
    found = []
    for whole in torch._C._dispatch_get_all_op_names():
        if whole.startswith(f"{namespace}::"):
            name, _, overload = whole.removeprefix(f"{namespace}::").partition(".")
            found.append(getattr(getattr(getattr(torch.ops, namespace), name), overload or "default"))
    return found


def adds_up(treatment: Treatment, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator that is refused adds up with these arguments."""
    if not treatment.unless:
        return True
    for i, argument in enumerate(op._schema.arguments):
        if argument.name == treatment.unless:
            value = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
            return value is not None and (isinstance(value, torch.Tensor) or bool(value))
    return True


def _reason(name: str) -> str:
    return next((reason for beginnings, reason in REASONS if name.startswith(beginnings)), "")


def _is_exact(op: OpOverload, name: str) -> bool:
    base = base_of(name)
    return base in EXACT or is_view(op) or _is_tagged(op) or _is_elementwise(base) or is_copied_view(base)


def base_of(name: str) -> str:
    """The name of the form that takes one tensor and returns its result."""
    return name if name.endswith("__") else name.removesuffix("_").removeprefix("_foreach_")


def is_view(op: OpOverload) -> bool:
    return op.is_view or torch.Tag.inplace_view in op.tags


def _is_tagged(op: OpOverload) -> bool:
    return torch.Tag.pointwise in op.tags


@functools.cache
def _is_elementwise(name: str) -> bool:
    """By the tag, which many overloads lack: those that work in place, write to ``out`` or take lists."""
    return any(map(_is_tagged, overloads_of(name)))


@functools.cache
def is_copied_view(name: str) -> bool:
    """As ``permute_copy``, of ``permute``."""
    return name.endswith("_copy") and any(overload.is_view for overload in overloads_of(name.removesuffix("_copy")))


def overloads_of(name: str) -> list[OpOverload]:
    """The overloads of one of torch's own operators; none if this torch lacks it."""
    packet = getattr(torch.ops.aten, name, None)
    found = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    return [op for op in found if op.name() in _dispatched()]


@functools.cache
def _dispatched() -> frozenset[str]:
    """The names that torch's dispatcher knows, without those of TorchScript alone."""
    return frozenset(torch._C._dispatch_get_all_op_names())


def _replacement_of(op: OpOverload, name: str) -> Callable[..., Any] | None:
    """By name, or of the form that returns what this one writes."""
    if (function := aten.REPLACEMENTS.get(f"{name}.{op._overloadname}")) is not None:
        return function
    results = [argument.name for argument in op._schema.arguments if argument.is_out]
    if any(str(argument.type) != "Tensor" for argument in op._schema.arguments if argument.is_out):
        return None  # lists of them
    if not results and not name.endswith("_"):
        return None
    taken = _taken(op)
    base = name if results else name.removesuffix("_")
    for other in overloads_of(base):
        function = aten.REPLACEMENTS.get(f"{base}.{other._overloadname}")
        if function is not None and other is not op and _taken(other) == taken:
            return (
                functools.partial(_into_out, function, results) if results else functools.partial(_in_place, function)
            )
    return None


def _taken(op: OpOverload) -> list[tuple[str, str]]:
    """(name, type) of an overload's arguments except ``out``; an overload in place writes to its first argument."""
    return [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]


def _in_place(functional: Callable[..., Any], target: Any, *args: Any, **kwargs: Any) -> Any:
    result = functional(target, *args, **kwargs)
    return result if result is NotImplemented else target.copy_(result)


def _into_out(functional: Callable[..., Any], names: list[str], *args: Any, **kwargs: Any) -> Any:
    """Results into the tensors that the arguments of these names are, of the same dtypes."""
    outs = [kwargs.pop(name) for name in names]
    found = functional(*args, **kwargs)
    if found is NotImplemented:
        return found
    found = found if isinstance(found, (tuple, list)) else (found,)
    for result, out in zip(found, outs, strict=True):
        if result is not None and out.dtype != result.dtype:
            return NotImplemented
    for result, out in zip(found, outs, strict=True):
        if result is not None:
            if out.shape != result.shape:
                out.resize_(result.shape)
            out.copy_(result)
    return tuple(outs) if len(outs) > 1 else outs[0]
