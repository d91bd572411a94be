"""compute-sanitizer finds no bad access, race, wrong barrier or unwritten memory in small calls of each kernel."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from cute_kernels import attention, attention_with_kv_cache
from cute_kernels.runtime import launches
from tests.attention.cache_cases import LATE, WAYS, Layout, Sequences, cached, choose_way, packed
from tests.attention.cases import BF16, Case, make_inputs, make_packed
from tests.attention.on_gpu import HOPPER
from tests.fakes import fake_kernels
from tests.precompiled import precompile
from tests.sanitizer import assert_clean, needs_sanitizer

pytestmark = HOPPER
LENGTHS = [2100, 70, 1]  # two splits, a part of a block, a single key
PROGRAM = """
import sys
import torch
from tests.attention.test_kernel_sanitizer import RUNS

for result in RUNS[sys.argv[1]]("cuda"):
    assert result.isfinite().all()
torch.cuda.synchronize()
print("done")
"""


@contextmanager
def few_ctas(way: str = "parallel") -> Iterator[None]:
    """Two SMs, so that a CTA has several tiles; ``way``: over a cache, one of WAYS, or LATE."""
    whole = launches.target_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches, "target_of", lambda index: whole(index)._replace(num_sms=2))
        choose_way(patch, way)
        yield
    launches.forget()


def on(device: str, tensors) -> list[Tensor]:
    """Made on the CPU: the sanitizer makes each kernel slow."""
    return [t.to(device) for t in tensors]


def unwritten(like: Tensor) -> Tensor:
    """An output full of NaN: initcheck sees no write of TMA, and would report what out holds."""
    return torch.full_like(like, float("nan"))


def dense(device: str) -> list[Tensor]:
    """Two splits, tiles in shared memory and in a workspace, a padded head size."""
    found = []
    for length, head_size in ((2100, 128), (200, 64), (4200, 256), (130, 80)):
        inputs = make_inputs(Case(1, 70, length, 2, 1, head_size), torch.Generator().manual_seed(0))
        q, k, v = on(device, inputs)
        with few_ctas():
            found += attention(q, k, v, causal=True, return_lse=True, out=unwritten(q))
    return found


def packs(device: str) -> list[Tensor]:
    """Sequences, a window, sinks and a softcap; used keys."""
    generator, lengths = torch.Generator().manual_seed(0), (300, 1, 65)
    tensors, places = make_packed(Case(1, 1, 1, 4, 2, 128), lengths, lengths, generator)
    places = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in places.items()}
    q, k, v = on(device, tensors)
    with few_ctas():
        found = attention(q, k, v, window=(100, 0), softcap=5.0, return_lse=True, out=unwritten(q), **places)
        first = [t[None, :300] for t in (q, k, v)]
        options = {"seqused_k": places["cu_seqlens_q"][1:2] - 9, "sinks": torch.zeros(4).to(device)}
        found += attention(*first, **options, return_lse=True, out=unwritten(first[0]))
    return list(found)


def over_a_cache(way: str):
    """New keys, contiguous and in pages; a window; another head size of the values."""
    calls = [(128, 128, 0, None), (128, 128, 16, None), (128, 128, 16, (500, 0)), (192, 128, 0, None)]

    def results(device: str) -> list[Tensor]:
        found = []
        for d, dv, page_size, window in calls:
            sequences = Sequences.make(LENGTHS, 8, 2, d, BF16, torch.Generator().manual_seed(0), dv)
            layout, before = Layout(page_size, fill=0.0), [n - 1 for n in LENGTHS]
            cache = cached(sequences, before, layout, room=max(LENGTHS))
            rows, new_k, new_v = (
                packed([t[-1:] for t in tensors]) for tensors in (sequences.q, sequences.k, sequences.v)
            )
            arguments = {**rows, **cache, "k": new_k["q"], "v": new_v["q"]}
            arguments = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in arguments.items()}
            options = {"window": window, "out": unwritten(arguments["q"][..., :dv])}
            with few_ctas(way):
                found += attention_with_kv_cache(**arguments, **options, return_lse=True)
        return found

    return results


RUNS = {"dense": dense, "packed": packs, **{f"cache, {way}": over_a_cache(way) for way in (*WAYS, LATE)}}


@pytest.fixture(scope="module")
def compiled_for_the_sanitizer():
    with fake_kernels(computes=False) as jobs:
        for run in RUNS.values():
            run("cpu")
    precompile(jobs)


@pytest.mark.slow
@needs_sanitizer
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_sanitizer(tool, name, compiled_for_the_sanitizer):
    assert_clean(tool, PROGRAM, name)
