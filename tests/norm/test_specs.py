"""Which kernels a call asks for: another one where anything differs that a kernel is built for, else none."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad

from cute_kernels.norm import checks, prewarm
from cute_kernels.norm.op import CALLS
from cute_kernels.runtime import launches
from cute_kernels.runtime import rows as row_launches
from tests.fakes import fake_kernels
from tests.norm.cases import (
    BF16,
    FP16,
    FP32,
    Case,
    call_and_differentiate,
    make_inputs,
    public_norm,
    seeded_generator,
)

BASE = Case("rms", 64, residual=BF16, dh=True, rows=9)


@pytest.fixture
def jobs():
    with fake_kernels() as jobs:
        yield jobs


def run(case: Case) -> None:
    call_and_differentiate(public_norm, case, make_inputs(case, seeded_generator("specs", "cpu")))


def built(jobs: list, case: Case) -> list[str]:
    """Names of the builders that a call asked."""
    before = len(jobs)
    run(case)
    return [builder.__name__ for builder, _ in jobs[before:]]


BOTH = ["norm_forward", "norm_backward"]


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "layer"},
        {"n": 128},
        {"dtype": FP16, "residual": FP32},
        {"weight": FP32},
        {"weight": None},
        {"bias": BF16},
        {"residual": FP32},
        {"out": FP32},
        {"weight_offset": 1.0},
        {"gap": 8},
        {"gap": 1},
        {"offset": 1},
    ],
    ids=str,
)
def test_another_kernel(change, jobs):
    run(BASE)
    assert built(jobs, replace(BASE, **change)) == BOTH
    assert built(jobs, replace(BASE, **change)) == built(jobs, BASE) == []
    assert len({(builder, arguments) for builder, arguments in jobs}) == 4


def test_another_stride_of_the_same_shape(jobs):
    run(replace(BASE, gap=1))
    run(replace(BASE, gap=8))
    run(replace(BASE, gap=16))
    arguments = [arguments for builder, arguments in jobs if builder.__name__ == "norm_forward"]
    assert len(arguments) == 2 and arguments[0] != arguments[1]


def test_saved_output(jobs):
    case = Case("rms", 64, rows=9)
    run(case)
    assert "norm_backward" in built(jobs, replace(case, save="output"))


def test_accumulation(jobs):
    """fp32 as the gradient would be: adding to it is another kernel all the same."""
    case = replace(BASE, weight=FP32)
    run(case)
    inputs = make_inputs(case, seeded_generator("specs", "cpu"))
    inputs.weight.main_grad = torch.zeros(64)
    y, h = public_norm("rms", inputs.x, inputs.weight, residual=inputs.residual, return_residual=True)
    before = len(jobs)
    torch.autograd.backward([y, h], [inputs.dy, inputs.dh])
    assert [builder.__name__ for builder, _ in jobs[before:]] == ["norm_backward"]


def test_a_gradient_that_does_not_arrive_is_not_read(jobs):
    """h is returned but not used: the backward has no third stream."""
    run(replace(BASE, dh=False))
    assert built(jobs, BASE) == ["norm_backward"]


def test_another_number_of_rows_is_the_same_kernel(jobs):
    run(BASE)
    assert built(jobs, replace(BASE, rows=1)) == built(jobs, replace(BASE, rows=1000)) == []
    run(replace(BASE, gap=8))
    assert built(jobs, replace(BASE, gap=8, rows=1001)) == []


def test_no_rows_need_no_kernel(jobs):
    for _ in range(2):
        assert public_norm("rms", torch.zeros(0, 64)).shape == (0, 64)
    assert not jobs


def test_another_number_of_rows_of_a_strided_batch(jobs):
    """The leading dimensions of rows of one stride are no part of the Spec."""
    for rows in (3, 4, 1000):
        x, residual = torch.zeros(2, 2, rows, 80, dtype=BF16)[..., :64].unbind()
        public_norm("rms", x, residual=residual)
        public_norm("rms", x[0], residual=residual[0])
    assert len(jobs) == 1


@pytest.mark.parametrize("residual", [None, BF16, FP32], ids=str)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_prewarm_has_the_kernels_of_a_model(kind, residual, jobs):
    """In training and in inference; README's first program is among them."""
    case = Case(kind, 4096, bias=BF16 if kind == "layer" else None, residual=residual, dh=residual is not None, rows=3)
    run(case)
    inputs = make_inputs(case, seeded_generator("specs", "cpu"))
    with torch.no_grad():
        public_norm(
            kind, inputs.x, inputs.weight, inputs.bias, residual=inputs.residual, return_residual=residual is not None
        )
    table = {arguments for _, arguments in prewarm.specializations("sm_90a")}
    assert len(jobs) == 3 and {arguments for _, arguments in jobs} <= table


def test_inference_stores_no_statistics(jobs):
    inputs = make_inputs(Case("layer", 64, rows=9), seeded_generator("specs", "cpu"))
    public_norm("layer", inputs.x, inputs.weight)
    with torch.no_grad():
        public_norm("layer", inputs.x, inputs.weight)
    assert len(set(jobs)) == 2


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_tangent_is_refused_and_not_lost(kind, jobs):
    x = torch.zeros(9, 64)
    with forward_ad.dual_level():
        public_norm(kind, x)
        with pytest.raises(NotImplementedError, match="jvp"):
            public_norm(kind, forward_ad.make_dual(x, torch.ones_like(x)))


def test_so_many_rows_that_indices_of_tiles_would_overflow(monkeypatch):
    """A resident grid walks over them, and more than can be counted are refused, though the kernel is there."""
    x, grids = torch.zeros(200_000, 3, dtype=BF16), []
    configs = []

    def load(builder, *arguments):
        configs.append(arguments[-1])
        return lambda *values: grids.append(values[-1])

    with fake_kernels(), mock.patch.object(launches, "load", load):
        for part, last in ((x[:1], 2**29), (x, 2**29), (x, len(x)), (x[:-1], len(x))):
            monkeypatch.setattr(row_launches, "RESIDENT_ROWS", last)
            CALLS.guarded.clear()
            public_norm("rms", part)
        (config,) = configs
        most = config.max_clusters(132)
        assert grids == [1, -(-len(x) // config.rows_per_cluster), most, -(-(len(x) - 1) // config.rows_per_cluster)]
        assert grids[1] > config.persistent_clusters(132) > most
        monkeypatch.setattr(checks, "MAX_ROWS", len(x) - 1)
        CALLS.guarded.clear()
        with pytest.raises(ValueError, match="rms_norm: x must have at most 199999 rows, got 200000"):
            public_norm("rms", x)


def test_no_rows_of_a_wider_matrix_leave_the_kernel_of_contiguous_rows(jobs):
    """No rows are contiguous, whatever their stride."""
    public_norm("rms", torch.zeros(9, 64, dtype=BF16))
    built = set(jobs)
    public_norm("rms", torch.zeros(9, 80, dtype=BF16)[:0, :64])
    public_norm("rms", torch.zeros(9, 64, dtype=BF16))
    assert set(jobs) == built


def test_a_second_call_asks_for_no_kernel(jobs):
    """With and without autograd, the results of the first."""
    given = make_inputs(BASE, seeded_generator("specs", "cpu"))
    tensors = {"weight": given.weight, "residual": given.residual}
    for change in (
        {},
        {"weight": given.weight.detach()},
        {"weight": given.weight.float()},
        {"weight": None},
        {"residual": None},
        {"residual": given.residual.float()},
        {"bias": given.weight.detach().clone()},
        {"x": given.x[:5], "residual": given.residual[:5]},
        {"x": given.x[None], "residual": given.residual[None]},
        {"eps": 0.5},
        {"weight_offset": 1.0},
        {"out_dtype": FP32},
        {"return_residual": True},
    ):
        arguments = {"x": given.x, **tensors, **change}
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                results = [public_norm("rms", **arguments)]
                before = len(jobs)
                results += [public_norm("rms", **arguments) for _ in range(2)]
            assert len(jobs) == before
            first, *others = (result if isinstance(result, tuple) else (result,) for result in results)
            for other in others:
                for a, b in zip(first, other, strict=True):
                    assert torch.equal(a, b) and a.requires_grad == b.requires_grad == grad
                    assert (a.stride(), a.dtype) == (b.stride(), b.dtype)
                    assert a.data_ptr() != b.data_ptr()


def test_what_has_no_hash_may_still_be_true(jobs):
    """Not every option need be part of a key as it is."""
    x, weight = torch.zeros(9, 64), torch.zeros(64)
    with torch.no_grad():
        y, h = public_norm("rms", x, weight, residual=x.clone(), return_residual=[1])
    assert y.shape == h.shape == x.shape and torch.is_tensor(public_norm("rms", x, weight, return_residual=[]))


def test_a_row_of_a_wider_matrix_has_an_output_of_its_own_width(jobs):
    """A single row's stride says nothing."""
    x = torch.zeros(9, 80)[:1, :64]
    assert x.is_contiguous() and x.stride() == (80, 1)
    for _ in range(2):
        assert public_norm("rms", x).stride() == (64, 1)


def test_a_tangent_after_a_warm_call_is_refused(jobs):
    """In a dual level all calls go through autograd."""
    x, weight = torch.zeros(9, 64), torch.zeros(64)
    public_norm("rms", x, weight)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        public_norm("rms", forward_ad.make_dual(x, torch.ones_like(x)), weight)
