"""New keys and values into a cache.

The operator is ``cute_kernels::attention_append``, which writes to the cache.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from cute_kernels.attention.config import AppendSpec
from cute_kernels.attention.launch.forward import regular
from cute_kernels.runtime import launches
from cute_kernels.runtime.launches import LaunchCache
from cute_kernels.runtime.operators import operator
from cute_kernels.runtime.targets import Target, UnsupportedDeviceError


@operator(
    "attention_append",
    "Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor cache_seqlens, Tensor? page_table, "
    "Tensor? cu_seqlens_q, int max_seqlen",
)
def attention_append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    page_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    max_seqlen: int,
) -> None:
    """k and v behind the first ``cache_seqlens`` rows of each sequence's cache."""
    if not k.numel() or not max_seqlen:
        return
    packed = cu_seqlens_q is not None
    if packed:
        k, v = k.unsqueeze(0), v.unsqueeze(0)
    spec = AppendSpec(k.dtype, k.shape[3], v.shape[3], packed, page_table is not None)
    function = _append.get(k.get_device(), spec)
    k, v, k_cache, v_cache = regular(k), regular(v), regular(k_cache), regular(v_cache)
    function(k, v, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, max_seqlen)


def expect_hopper(target: Target) -> None:
    """Raise UnsupportedDeviceError for another GPU, before anything is written: the cache stays as it was."""
    if target.arch != "sm_90a":
        raise UnsupportedDeviceError(
            f"attention_with_kv_cache: has kernels for compute capability 9.0 alone yet, got {target.arch}. "
            "Pass backend='reference' to run plain torch"
        )


def _make_append(target: Target, spec: AppendSpec) -> Callable[..., None]:
    expect_hopper(target)
    from cute_kernels.attention import kernel_append

    return launches.load(kernel_append.append, target.arch, spec)


_append = LaunchCache(_make_append)
