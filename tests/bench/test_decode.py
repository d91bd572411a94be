"""bench_decode on the CPU: providers against its own truth, what is counted."""

import pytest

from bench import bench_decode
from bench.bench_decode import Decode
from tests.bench.test_harness import FakeDevice


def test_cases():
    cases = bench_decode.decodes()
    names = [case.case.name for case in cases]
    assert len(set(names)) == len(names) and {case.case.direction for case in cases} == {"decode", "prefill"}
    assert max(case.cached_bytes for case in cases) <= 40e9
    assert {case.case.name for case in bench_decode.decodes(quick=True)} <= set(names)


def test_what_is_counted():
    case = Decode(2, 100, 4, 2, 64).case
    assert case.bytes == 2 * (2 * 100 * 2 * 64) * 2 + 2 * 2 * 4 * 64 * 2
    assert case.flops == 4 * 2 * 100 * 4 * 64
    assert sum(Decode(8, 1600, 4, 2, 64, "ragged").lengths) < 8 * 1600


@pytest.mark.parametrize("variant", ["contiguous", "paged16", "paged128", "ragged"])
@pytest.mark.parametrize("queries", [1, 7])
def test_providers_are_right(queries, variant):
    if variant == "ragged" and queries > 1:
        return
    case, providers = Decode(2, 256, 4, 2, 64, variant, queries), ["cute_kernels", "torch"]
    (found,) = bench_decode.measure_decode(case, [case.case], providers, FakeDevice(), repetitions=3, breakdown=False)
    assert found.failures == {} and set(found.results) == set(providers)
