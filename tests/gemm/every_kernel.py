"""Which calls can get each kernel, and those calls: what the tests of every kernel compare and what is precompiled."""

import functools
import itertools

import torch
from torch import Tensor

from cute_kernels import bmm, linear, mm
from cute_kernels.common.gemm_config import BLOCK
from cute_kernels.gemm.config import choose
from cute_kernels.gemm.functional import gemm
from tests.gemm.cases import BF16, FP32, LAYOUTS, SIZES, here, kernels, laid_out, operands

ALONG_K = LAYOUTS[:1]
EPILOGUES = ("store", "activate", "accumulate")


@functools.cache
def _chosen(arch: str, epilogue: str, entries: int, along_k: bool) -> set[tuple]:
    calls = itertools.product(SIZES, SIZES, (64, 1024, 4096, 16384), (132,), (epilogue,), (entries,), (along_k,))
    return {choose(arch, *call) for call in calls}


def of_any_layout(arch: str = here()) -> list[tuple]:
    """(config, transposed) of kernels that products of any layout, K and epilogue get, and batches."""
    found = set().union(
        *(_chosen(arch, epilogue, 1, False) for epilogue in EPILOGUES), _chosen(arch, "store", 8, False)
    )
    return [kernel for kernel in kernels(arch) if kernel in found]


def of_whole_blocks(arch: str = here()) -> list[tuple]:
    """Those that need operands along k, and K in whole blocks: with any epilogue, and batches."""
    found = _chosen(arch, "accumulate", 1, True) | _chosen(arch, "store", 8, True)
    return [kernel for kernel in kernels(arch) if kernel in found and kernel not in of_any_layout(arch)]


def of_tokens(arch: str = here()) -> list[tuple]:
    """The others: 17 to 512 tokens get them, of such operands, whose sums are stored; see ``activates``."""
    others = {(None, False), *of_any_layout(arch), *of_whole_blocks(arch)}
    return [kernel for kernel in kernels(arch) if kernel not in others]


def activates(kernel: tuple, arch: str = here()) -> bool:
    return kernel in _chosen(arch, "activate", 1, True) | _chosen(arch, "activate", 1, False)


def _is_whole(kernel: tuple, k: int) -> bool:
    """Whether what comes by a copy of several blocks does; of a tile of one block each K makes the same kernel."""
    return k % BLOCK == 0 or kernel[0].tile[2] <= BLOCK


def products(kernel: tuple, a: Tensor, b: Tensor, start: Tensor, bias: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """Results of each load and each epilogue that a call can get of this kernel; a (M, K), b (N, K), start (M, N).

    A K that ends within a copy is tested for loads alone: what is done with the sums is the same.
    """
    k, in_any_layout = a.shape[1], kernel in of_any_layout()
    if k % BLOCK and not in_any_layout:
        return {}
    layouts = LAYOUTS if in_any_layout else ALONG_K
    if kernel in of_tokens():
        found = {"bias": linear(a, b, bias, out_dtype=FP32)}
    else:
        found = {"".join(layout): mm(*operands(a, b.mT, layout), out_dtype=FP32) for layout in layouts}
    if not _is_whole(kernel, k):
        return found
    found["bf16"] = mm(a, b.mT)
    found["rows off 16 bytes"] = mm(a, b.mT, out=torch.empty(len(a), len(b) + 3, dtype=BF16, device=a.device)[:, :-3])
    # An odd number of columns, in rows that are: a tile that ends with them begins at an odd one
    found["odd columns"] = torch.zeros(len(a), len(b), dtype=BF16, device=a.device)
    mm(a, b[:-1].mT, out=found["odd columns"][:, :-1])
    if activates(kernel):
        # Saves z
        found["gelu"] = linear(a.detach().requires_grad_(), b * k**-0.5, bias, activation="gelu").detach()
    if kernel in of_tokens():
        return found
    for layout, count in ((("m", "n"), None), (("m", "n"), valid), (("k", "k"), valid)):
        if layout in layouts:
            left, right = laid_out(a, layout[0] == "k"), laid_out(b, layout[1] == "k")
            added = found[f"{''.join(layout)} added to, {'all' if count is None else 'some'} k"] = start.clone()
            gemm(left, right, added, None, None, count, None, True)
    if 8 not in kernel[0].tile[:2]:
        return found
    # The gradient of a bias, of one column: tiles of 8 alone get it
    ones, sums = torch.ones(1, k, dtype=BF16, device=a.device), start[:, :1].contiguous()
    gemm(a, ones, sums, None, None, valid, None, True)
    return found | {"sums of rows": sums}


def batches(kernel: tuple, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """The same of a batch, a (L, M, K) and b (L, N, K): its entry is another coordinate of each load and store."""
    k, in_any_layout = a.shape[2], kernel in of_any_layout()
    if k % BLOCK and not in_any_layout:
        return {}
    found = {"kk, bf16": bmm(a, b.mT)}
    if not _is_whole(kernel, k):
        return found
    for a_major, b_major in (LAYOUTS if in_any_layout else ALONG_K)[1:]:
        left, right = (t if by_k else t.mT.contiguous().mT for t, by_k in ((a, a_major == "k"), (b, b_major == "k")))
        found[a_major + b_major] = bmm(left, right.mT, out_dtype=FP32)
    found["one a"] = bmm(a[:1].expand_as(a), b.mT)
    found["one b"] = bmm(a, b[:1].expand_as(b).mT)
    return found | {"rows off 16 bytes": bmm(a, b[:, :-1].mT)}
