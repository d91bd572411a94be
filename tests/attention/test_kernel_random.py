"""3,000 random cases on a GPU: training forward, chunks of a prompt and decode over pages agree, row by row."""

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
    window_bounds,
)
from cute_kernels.runtime import launches
from tests.attention.cache_cases import choose_way
from tests.attention.on_gpu import HOPPER
from tests.attention.random_cases import KINDS, OTHERS, SOURCES, case_of, describe, differing, source_of
from tests.precompiled import precompile

pytestmark = HOPPER
CASES = 100  # of each source


def jobs_of_kinds() -> list[tuple]:
    """The kernels of all cases, which are few."""
    from cute_kernels.attention.kernel_append import append
    from cute_kernels.attention.kernel_decode_sm90 import decode_sm90
    from cute_kernels.attention.kernel_forward_sm90 import forward_sm90

    jobs, configs = [], (DecodeConfig(), DecodeConfig(few_rows=True), DecodeConfig(sequential=True))
    for kind, of_kind in (KINDS | OTHERS).items():
        (d, dv), softcap = kind.sizes, kind.softcap > 0.0
        left, right = window_bounds(True, kind.window)
        for is_packed, pages in of_kind.items():
            for rows in pages:
                spec = DecodeSpec(
                    kind.dtype, d, dv, is_packed, rows, softcap, torch.float32 if kind.has_sinks else None
                )
                jobs += [(decode_sm90, ("sm_90a", spec, config)) for config in configs]
                if dv <= 192:
                    forward = prefill_spec(spec, left, right)
                    jobs.append((forward_sm90, ("sm_90a", forward, forward_config(forward))))
                jobs.append((append, ("sm_90a", AppendSpec(kind.dtype, d, dv, is_packed, rows > 0))))
        for packing in ({}, {"packed_q": True, "packed_k": True}):
            mask = kind.window is None, dv, kind.window is not None, softcap, kind.has_sinks
            spec = ForwardSpec(kind.dtype, d, *mask, **packing)
            jobs += [(forward_sm90, ("sm_90a", spec, config)) for config in configs_for("sm_90a", spec)]
    return jobs


@pytest.fixture(scope="module", autouse=True)
def precompiled():
    precompile(jobs_of_kinds())


@pytest.mark.parametrize("seed", range(SOURCES + len(OTHERS)))
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
