"""The kernels of attention over a cache compile for SM90 without a GPU, and what came out."""

import re

import pytest

from cute_kernels.attention.config import DECODE_CONFIGS, AppendSpec, DecodeSpec
from tests.attention.cases import BF16, FP16, HEAD_SIZES
from tests.norm.test_compile import check_record
from tests.ptx import compile_in, kernels_in, left_to_ptxas

SM_SHARED_MEMORY = 228 * 1024
RESERVED = 1024  # of a CTA, by the system


@pytest.mark.slow
@pytest.mark.parametrize("sequential", [False, True], ids=["parallel", "sequential"])
@pytest.mark.parametrize(
    "spec",
    [
        *(DecodeSpec(BF16, d, packed, rows) for d in HEAD_SIZES for packed, rows in ((False, 0), (True, 16))),
        DecodeSpec(FP16, 64, True, 32),
        DecodeSpec(BF16, 128, True, 64),
        DecodeSpec(BF16, 128, True, 128, True, BF16),
    ],
    ids=str,
)
def test_two_ctas_fit_on_an_sm(spec, sequential):
    from cute_kernels.attention.kernel_decode_sm90 import decode_sm90

    record = decode_sm90.obtain("sm_90a", spec, DECODE_CONFIGS[spec.head_size][sequential]).record
    check_record(record)
    (kernel,) = record["kernels"]
    assert kernel["registers"] * kernel["threads"] <= 32768
    assert 2 * (kernel["static_smem_bytes"] + kernel["dynamic_smem_bytes"] + RESERVED) <= SM_SHARED_MEMORY


@pytest.mark.parametrize("spec", [AppendSpec(BF16, 128, False, False), AppendSpec(FP16, 64, True, True)], ids=str)
def test_append(spec):
    from cute_kernels.attention.kernel_append import append

    check_record(append.obtain("sm_90a", spec).record)


@pytest.mark.parametrize("sequential", [False, True], ids=["parallel", "sequential"])
def test_instructions(sequential, tmp_path):
    """Every step outside of the products has a rounding of its own; counters alone are atomic, and are integers."""
    program = f"""
import torch
from cute_kernels.attention.config import DECODE_CONFIGS, DecodeSpec
from cute_kernels.attention.kernel_decode_sm90 import decode_sm90
spec = DecodeSpec(torch.bfloat16, 64, True, 64)
assert decode_sm90.obtain("sm_90a", spec, DECODE_CONFIGS[64][{sequential}]).origin == "compiled"
"""
    compile_in(tmp_path, program)
    (kernel,) = kernels_in(tmp_path)
    assert not re.search(r"\b(add|sub|mul|fma|mad)(\.ftz)?\.f32\b", kernel) and left_to_ptxas(kernel) == []
    assert {m for m in re.findall(r"\b(?:ex2|lg2|rcp)\.[\w.]+", kernel)} == {
        "ex2.approx.ftz.f32",
        "lg2.approx.ftz.f32",
        "rcp.approx.ftz.f32",
    }
    found = re.findall(r"\b(?:atom|red)\.[\w.]+", kernel)
    assert found == ([] if sequential else ["atom.global.acq_rel.add.u32"]) and ".local" not in kernel
