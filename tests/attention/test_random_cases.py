"""The random cases of test_kernel_random.py over fake kernels, small: what they draw, and that they see a wrong row."""

import torch

from tests.attention.cache_cases import WAYS
from tests.attention.cases import BF16
from tests.attention.random_cases import (
    FAR,
    LARGE,
    OTHERS,
    SOURCES,
    TINY,
    Kind,
    case_of,
    describe,
    differing,
    rows_of,
    source_of,
)
from tests.fakes import fake_kernels


def test_small_cases_agree():
    with fake_kernels():
        for seed in (*range(4), *range(SOURCES, SOURCES + len(OTHERS))):
            source = source_of(seed, "cpu", TINY)
            for number in range(4 if seed < SOURCES else 1):
                wrong = differing(source, case_of(source, number))
                assert not wrong.any(), describe(source, number, wrong)


def test_a_wrong_row_is_found():
    with fake_kernels():
        source = source_of(1, "cpu", TINY)
        case = case_of(source, 3)
        row = case.lengths[0] - 1
        source.wanted[case.order[0]][0][row, 0, 0] += 1e-2
        wrong = differing(source, case)
        assert wrong[case.queries[0] - 1] and "check(1, 3): " in describe(source, 3, wrong)


class Drawn:
    """A source without tensors."""

    def __init__(self, seed, limits, kind, lengths):
        self.seed, self.limits, self.kind, self.lengths = seed, limits, kind, lengths


def test_cases_cover_what_they_are_for():
    """Every page size, dense and packed queries, decode and whole prompts, new keys, every way, borders of splits."""
    kinds = Kind(128, BF16), Kind(64, BF16)
    cases = [
        case_of(Drawn(seed, limits, kinds[seed % 2], [limits.longest, 4096, 2049, 130, 1]), number)
        for limits in (LARGE, FAR)
        for seed in range(4)
        for number in range(100)
    ]
    assert {c.page_size for c in cases} == {0, 16, 32, 64, 128, 256, 384}
    for name in ("appended", "is_packed"):
        assert {getattr(c, name) for c in cases} == {False, True}
    assert {c.way for c in cases} == set(WAYS)
    places = [place for c in cases for place in zip(c.lengths, c.queries, strict=True)]
    assert {1, 2, 5} <= {m for _, m in places} and any(m == n > 64 for n, m in places)
    assert all(1 <= m <= n for n, m in places) and max(n for n, _ in places) > 100_000
    assert sum(n % 2048 in (0, 1, 2047) for n, _ in places) > 50
    assert sum(sum(c.queries) <= LARGE.rows for c in cases) == len(cases)
    assert len({c.order for c in cases}) > 300 and max(len(c.order) for c in cases) == 12


def test_a_case_is_made_again():
    with fake_kernels():
        first, second = (source_of(5, "cpu", TINY) for _ in range(2))
        assert case_of(first, 2) == case_of(second, 2) and torch.equal(first.sequences.q[0], second.sequences.q[0])
        assert torch.equal(rows_of(first, case_of(first, 2))[0], rows_of(second, case_of(second, 2))[0])
