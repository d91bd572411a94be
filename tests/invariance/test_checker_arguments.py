"""check_invariance refuses bad arguments."""

import types

import pytest
import torch

from cute_kernels import check_invariance
from tests.invariance.cases import (
    ROWS,
    batch,
)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((3, torch.ones(4)), TypeError, "check_invariance: module_or_fn must be callable, got int"),
        ((torch.neg, "x"), TypeError, r"sample must be a tensor or tensors, got str"),
        ((torch.neg, ()), ValueError, "sample must have a tensor, got none"),
        ((torch.neg, (torch.ones(4), 3)), TypeError, r"sample\[1\] must be a torch.Tensor, got int"),
        ((torch.neg, torch.ones(())), ValueError, r"sample\[0\] must have dimension 0 as its batch, got a scalar"),
        ((torch.neg, torch.ones(1)), ValueError, "sample must have at least 2 rows, got 1"),
        ((torch.add, (torch.ones(4), torch.ones(5))), ValueError, r"sample\[1\] must have 4 rows, got 5"),
        ((torch.neg, torch.ones(4, dtype=torch.cfloat)), TypeError, r"sample\[0\] must be real, got torch.complex64"),
        (
            (torch.sum, torch.ones(4)),
            ValueError,
            r"return a tensor with dimension 0 as the batch, .* of such, got {'output': \(\)}",
        ),
        ((len, torch.ones(4)), ValueError, "module_or_fn must return a tensor .*, got int without a tensor$"),
        ((lambda x: {}, torch.ones(4)), ValueError, "module_or_fn must return a tensor .*, got dict without a tensor$"),
        (
            (lambda x: types.SimpleNamespace(y=x), torch.ones(4)),
            ValueError,
            "tuples, lists, mappings, dataclasses of such, got SimpleNamespace without a tensor",
        ),
        (
            (lambda x: types.MappingProxyType({"loss": x.sum()}), torch.ones(4)),
            ValueError,
            r"must return a tensor .*, got {\"output\['loss'\]\": \(\)}",
        ),
    ],
)
def test_bad_function_or_sample(arguments, error, message):
    with pytest.raises(error, match=message):
        check_invariance(*arguments)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"gradients": "no"}, TypeError, "gradients must be a bool, got str"),
        ({"transforms": "T1"}, TypeError, "transforms must be a tuple, got str"),
        ({"transforms": ("T7",)}, ValueError, "transforms must be of T1, T2, .*, B1, got 'T7'"),
        ({"transforms": [["T1"]]}, ValueError, r"transforms must be of T1, T2, .*, B1, got \['T1'\]"),
        ({"sizes": 3}, TypeError, "sizes must be a tuple, got int"),
        ({"sizes": ()}, ValueError, r"sizes must be integers from 1 to 129, got \(\)"),
        ({"sizes": (1, 130)}, ValueError, "sizes must be integers from 1 to 129"),
        ({"sizes": (1.5,)}, ValueError, "sizes must be integers"),
        ({"sizes": (True,)}, ValueError, "sizes must be integers"),
        ({"seed": None}, TypeError, "seed must be an integer, got NoneType"),
        ({"seed": True}, TypeError, "seed must be an integer, got bool"),
        ({"seed": 2**70}, ValueError, "seed must fit into 64 bits, got 1180591620717411303424"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        check_invariance(torch.neg, batch(), **options)


def test_sizes_of_the_caller():
    report = check_invariance(torch.neg, batch(), transforms=("T1", "T5"), sizes=(6, 50))
    cases = [result.case for result in report.results]
    assert f"6 of {ROWS} rows" in cases and "chunks of 50" in cases and "chunks of 7" not in cases
