"""Which parameters of a test `make test` runs, and of which kernels of a table there is a test."""

from collections.abc import Iterable, Sequence

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


def half_of(jobs: Sequence) -> list:
    """Every second of kernels of one class that differ by sizes and by options that cross.

    Those with an even number of ones in their place (Thue and Morse's sequence): where options alternate, in runs of
    any length, each still meets each value of the others.
    """
    return [job for place, job in enumerate(jobs) if place.bit_count() % 2 == 0]


def sample_of_table(arch: str, jobs: Iterable) -> list:
    """Half of a shipped table's kernels for SM90, which tests on a GPU run as well; of SM100 every fourth."""
    jobs = list(jobs)
    return sample_for(arch, jobs) if arch == "sm_100a" else half_of(jobs)
