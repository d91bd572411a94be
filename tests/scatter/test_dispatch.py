"""The kernels' path on the CPU, plain torch in place of the kernels; the tests are the GPU's own."""

import pytest
import torch

from cute_kernels import scatter
from cute_kernels.scatter import prewarm
from cute_kernels.scatter.config import RowsSpec, lanes_for
from tests.fakes import fake_kernels
from tests.scatter.cases import BF16, FP32, Case, make_inputs
from tests.scatter.test_kernel import *  # noqa: F403


@pytest.fixture(autouse=True)
def jobs():
    with fake_kernels() as jobs:
        yield jobs


def test_another_number_of_tokens_or_rows_compiles_nothing(jobs, generator):
    for tokens, rows in ((1, 5), (300, 5), (2000, 900)):
        scatter.embedding_backward(*make_inputs(Case(tokens, rows, 64), generator), rows)
        x = torch.zeros(rows, 8)
        scatter.index_sum(x, torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens, 8))
    assert len({repr(job) for job in jobs}) == 4


def test_a_model_finds_its_kernels_precompiled(jobs):
    ids = torch.zeros(3, dtype=torch.int64)
    for dtype in (BF16, FP32):
        weight = torch.zeros(4, 2048, dtype=dtype, requires_grad=True)
        for accumulate in (False, True):
            if accumulate:
                weight.main_grad = torch.zeros(4, 2048)
            scatter.embedding(ids, weight).sum().backward()
        scatter.index_sum(weight.detach(), ids, weight.detach()[:3])
        scatter.index_sum(weight.detach(), ids.view(3, 1).repeat(2, 1)[:4], weight.detach()[:, :1], dim=1)
    assert set(jobs) == set(prewarm.specializations("sm_90a"))


def test_threads_of_a_row():
    assert [lanes_for(columns, 8) for columns in (1, 8, 16, 24, 2048, 4096)] == [1, 1, 2, 4, 256, 256]
    assert RowsSpec(BF16, BF16, torch.int32, 8, 256, "write").groups == 8
