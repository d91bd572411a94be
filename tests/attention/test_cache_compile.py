"""The kernels of attention over a cache compile for SM90 without a GPU, and what came out."""

import re

import pytest

from cute_kernels.attention.config import HEAD_SIZES, AppendSpec, DecodeConfig, DecodeSpec, decode_config, decode_slots
from tests.attention.cases import BF16, FP16
from tests.marks import first_of
from tests.norm.test_compile import check_record
from tests.ptx import compile_in, kernels_in, left_to_ptxas

PARALLEL, SEQUENTIAL, FEW = DecodeConfig(), DecodeConfig(sequential=True), DecodeConfig(few_rows=True)
LATE = DecodeConfig(merges_late=True)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "config", [PARALLEL, SEQUENTIAL, FEW, LATE], ids=["parallel", "sequential", "few rows", "late"]
)
@pytest.mark.parametrize(
    "spec",
    [
        *(DecodeSpec(BF16, d, dv, True, 16) for d, dv in HEAD_SIZES),
        DecodeSpec(FP16, 64, 64, False, 0),
        DecodeSpec(BF16, 80, 72, True, 32),
        DecodeSpec(BF16, 128, 128, True, 128, True, BF16),
        DecodeSpec(BF16, 256, 256, False, 64, True, BF16),
    ],
    ids=str,
)
def test_no_spills(spec, config):
    from cute_kernels.attention.kernel_decode_sm90 import decode_sm90

    if config.sequential and not decode_config(spec.head_size_v, 64, 64, 1000, 2, 1).sequential:
        pytest.skip("not used")
    check_record(decode_sm90.obtain("sm_90a", spec, config).record)


def test_slots():
    """A block of k and one of v are in use at once; the next is on its way."""
    assert all(decode_slots(d, dv) >= 3 for d in range(8, 257, 8) for dv in range(8, 257, 8))


@pytest.mark.exhaustive  # test_classes.py compiles one
@pytest.mark.parametrize(
    "spec", [AppendSpec(BF16, 192, 128, False, False), AppendSpec(FP16, 64, 64, True, True)], ids=str
)
def test_append(spec):
    from cute_kernels.attention.kernel_append import append

    check_record(append.obtain("sm_90a", AppendSpec(*spec)).record)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sequential", first_of([False, True]), ids=["parallel", "sequential"])
def test_instructions(sequential, tmp_path):
    """Every step outside of the products has a rounding of its own; counters alone are atomic, and are integers."""
    program = f"""
import torch
from cute_kernels.attention.config import DecodeConfig, DecodeSpec
from cute_kernels.attention.kernel_decode_sm90 import decode_sm90
spec = DecodeSpec(torch.bfloat16, 64, 64, True, 64)
assert decode_sm90.obtain("sm_90a", spec, DecodeConfig(sequential={sequential})).origin == "compiled"
"""
    compile_in(tmp_path, program)
    (kernel,) = kernels_in(tmp_path)
    assert not re.search(r"\b(add|sub|mul|fma|mad)(\.ftz)?\.f32\b", kernel) and left_to_ptxas(kernel) == []
    assert {m for m in re.findall(r"\b(?:ex2|lg2|rcp)\.[\w.]+", kernel)} == {
        "ex2.approx.ftz.f32",
        "lg2.approx.ftz.f32",
        "rcp.approx.ftz.f32",
    }
    found = set(re.findall(r"\b(?:atom|red)\.[\w.]+", kernel))
    of_tickets, of_tiles = "atom.global.add.u32", "atom.global.acq_rel.add.u32"
    assert found == ({of_tickets} if sequential else {of_tickets, of_tiles}) and ".local" not in kernel
