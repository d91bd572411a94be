"""The kernel's path on the CPU, plain torch in place of the kernel; the tests are the GPU's own."""

import pytest
import torch

from cute_kernels import sample
from cute_kernels.sampling import prewarm
from cute_kernels.sampling.config import HELD_BYTES, MAX_COLUMNS, cluster_for
from tests.fakes import fake_kernels
from tests.sampling.cases import BF16, FP32, Case, make_inputs
from tests.sampling.test_kernel import *  # noqa: F403


@pytest.fixture(autouse=True)
def jobs():
    with fake_kernels() as jobs:
        yield jobs


def test_another_batch_or_number_compiles_nothing(jobs, generator):
    for rows, options in ((1, {"top_k": 3}), (40, {"top_p": 0.5}), (7, {"top_k": 9, "min_p": 0.2})):
        sample(**make_inputs(Case(rows, 64), generator), **options)
    assert len({repr(job) for job in jobs}) == 1


def test_a_model_finds_its_kernels_precompiled(jobs, generator):
    for dtype in (BF16, FP32):
        for columns in (151936, 202048):
            for options in ({}, {"top_p": 0.5}):
                sample(**make_inputs(Case(1, columns, dtype), generator), **options)
    assert set(jobs) == set(prewarm.specializations("sm_90a"))


@pytest.mark.parametrize("bytes_", [2, 4])
def test_a_cluster_holds_the_row(bytes_):
    for columns in (1, 76792, 76793, 128256, 151936, MAX_COLUMNS):
        cluster, wide = cluster_for(columns, bytes_, True), 16 // bytes_
        assert -(-columns // (cluster * wide)) * 16 <= HELD_BYTES


BAD = [
    (lambda a: a | {"logits": torch.zeros(2)}, ValueError, "sample: logits must be a matrix"),
    (lambda a: a | {"logits": torch.zeros(2, 8).double()}, TypeError, "sample: logits must have dtype bfloat16"),
    (lambda a: a | {"logits": torch.zeros(8, 2).t()}, ValueError, "sample: logits must have a contiguous last"),
    (lambda a: a | {"logits": torch.zeros(2, 0)}, ValueError, "sample: logits must have from 1 to 262144 columns"),
    (lambda a: a | {"seeds": torch.zeros(3).long()}, ValueError, r"sample: seeds must have shape \(2,\), got \(3,\)"),
    (lambda a: a | {"seeds": torch.zeros(2)}, TypeError, "sample: seeds must have dtype int64, got torch.float32"),
    (lambda a: a | {"positions": [0, 1]}, TypeError, "sample: positions must be a torch.Tensor, got list"),
    (lambda a: a | {"temperature": -1}, ValueError, "sample: temperature must be at least 0"),
    (lambda a: a | {"temperature": 1e-40}, ValueError, "sample: temperature must be 0, or from 2"),
    (lambda a: a | {"temperature": None}, TypeError, "sample: temperature must be at least 0"),
    (lambda a: a | {"top_k": 0}, ValueError, "sample: top_k must be None or at least 1, got 0"),
    (lambda a: a | {"top_k": 1.0}, TypeError, "sample: top_k must be an int"),
    (lambda a: a | {"top_p": 0}, ValueError, r"sample: top_p must be None or in \(0, 1\], got 0.0"),
    (lambda a: a | {"top_p": 1.5}, ValueError, r"sample: top_p must be None or in \(0, 1\], got 1.5"),
    (lambda a: a | {"min_p": "x"}, TypeError, r"sample: min_p must be None or in \[0, 1\], got 'x'"),
    (lambda a: a | {"backend": "cuda"}, ValueError, "sample: backend must be None or 'reference'"),
]


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_arguments(change, error, message, backend, generator):
    arguments = {**make_inputs(Case(2, 8), generator), "backend": backend}
    with pytest.raises(error, match=message):
        sample(**change(arguments))
