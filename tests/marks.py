"""Which parameters of a test `make test` runs; `make test-all` runs all."""

from collections.abc import Sequence

import pytest


def first_of(values: Sequence, count: int = 1) -> list:
    """The first ``count`` stand for all, the others are marked ``exhaustive``. A tuple is a value for each argument."""
    return [
        pytest.param(*(value if type(value) is tuple else (value,)), marks=[pytest.mark.exhaustive] * (i >= count))
        for i, value in enumerate(values)
    ]
