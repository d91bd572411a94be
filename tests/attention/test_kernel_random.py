"""2,400 random cases on a GPU: training forward, chunks of a prompt and decode over pages agree, row by row."""

import pytest
import torch

from cute_kernels.attention.config import (
    AppendSpec,
    DecodeConfig,
    DecodeSpec,
    ForwardSpec,
    configs_for,
    forward_config,
    prefill_spec,
)
from cute_kernels.runtime import launches
from tests.attention.cache_cases import choose_way
from tests.attention.on_gpu import HOPPER
from tests.attention.random_cases import KINDS, case_of, describe, differing, source_of
from tests.precompiled import precompile

pytestmark = HOPPER
SOURCES, CASES = 24, 100  # of each


def jobs_of_kinds() -> list[tuple]:
    """The kernels of all cases, which are few."""
    from cute_kernels.attention.kernel_append import append
    from cute_kernels.attention.kernel_decode_sm90 import decode_sm90
    from cute_kernels.attention.kernel_forward_sm90 import forward_sm90

    jobs, configs = [], (DecodeConfig(), DecodeConfig(few_rows=True), DecodeConfig(sequential=True))
    for (d, dtype), of_kind in KINDS.items():
        for is_packed, pages in of_kind.items():
            for rows in pages:
                spec = DecodeSpec(dtype, d, d, is_packed, rows)
                jobs += [(decode_sm90, ("sm_90a", spec, config)) for config in configs]
                forward = prefill_spec(spec)
                jobs.append((forward_sm90, ("sm_90a", forward, forward_config(forward))))
                jobs.append((append, ("sm_90a", AppendSpec(dtype, d, d, is_packed, rows > 0))))
        for options in ({}, {"packed_q": True, "packed_k": True}):
            spec = ForwardSpec(dtype, d, True, d, **options)
            jobs += [(forward_sm90, ("sm_90a", spec, config)) for config in configs_for("sm_90a", spec)]
    return jobs


@pytest.fixture(scope="module", autouse=True)
def precompiled():
    precompile(jobs_of_kinds())


@pytest.mark.parametrize("seed", range(SOURCES))
def test_rows_of_a_cache_are_the_forwards(seed, monkeypatch):
    """T9. The host waits once for all cases of a source."""
    source, found = source_of(seed, "cuda"), []
    for number in range(CASES):
        case = case_of(source, number)
        with monkeypatch.context() as patch:
            choose_way(patch, case.way)
            found.append(differing(source, case))
    launches.forget()
    counts = torch.stack([wrong.sum() for wrong in found]).tolist()
    bad = [describe(source, number, found[number]) for number, count in enumerate(counts) if count]
    assert not bad, f"{len(bad)} of {CASES} cases differ, first:\n" + "\n".join(bad[:5])
