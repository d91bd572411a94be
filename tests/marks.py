"""Which parameters of a test `make test` runs, and of which kernels for SM100 there is a test."""

from collections.abc import Sequence

import pytest


def first_of(values: Sequence, count: int = 1) -> list:
    """The first ``count`` stand for all, the others are marked ``exhaustive``. A tuple is a value for each argument."""
    return [
        pytest.param(*(value if type(value) is tuple else (value,)), marks=[pytest.mark.exhaustive] * (i >= count))
        for i, value in enumerate(values)
    ]


def sample_for(arch: str, jobs: Sequence) -> list:
    """All of SM90, for whose GPUs kernels are tuned; of SM100, where none has run yet, every fourth.

    Each is a second or more of a core. test_classes.py compiles one of each builder.
    """
    return list(jobs)[:: 4 if arch == "sm_100a" else 1]
