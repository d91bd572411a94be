"""RowSum's own code, thread by thread in Python: what it makes of the messages of few and of many warps."""

import importlib.util
import operator
import threading
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from cute_kernels.common.row_layout import WARP_SIZE, RowLayout
from tests.marks import first_of

# A module of its own: the compiler rewrites functions of the imported one where they are, once a kernel is compiled
_SPEC = importlib.util.find_spec("cute_kernels.common.reduce")
reduce = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(reduce)


class Float32(np.float32):
    inf = np.float32(np.inf)


class Tensor:
    """As much of a tensor as RowSum takes: elements, and slices where an index is None."""

    def __init__(self, values: np.ndarray):
        self.values = values

    def __getitem__(self, index):
        found = self.values[tuple(slice(None) if i is None else i for i in index)]
        return Tensor(found) if isinstance(found, np.ndarray) else np.float32(found)

    def __setitem__(self, index, value):
        self.values[index] = value


class Threads:
    """A CTA of one team: each thread of it is a thread of Python."""

    def __init__(self, warps: int):
        self.local = threading.local()
        self.cta = threading.Barrier(warps * WARP_SIZE)
        self.warps = [threading.Barrier(WARP_SIZE) for _ in range(warps)]
        self.registers = np.zeros((warps, WARP_SIZE), np.float32)

    def warp_reduction(self, value, op, threads_in_group=WARP_SIZE):
        warp, lane = self.local.place
        offset = threads_in_group // 2
        while offset:
            self.registers[warp, lane] = value
            self.warps[warp].wait()
            other = self.registers[warp, lane ^ offset]
            self.warps[warp].wait()
            value = op(value, other)
            offset //= 2
        return np.float32(value)

    def run(self, function, values: np.ndarray) -> list:
        """Results of ``function(*values of a thread)``, one a thread."""
        results: list = [None] * len(values)

        def thread(i):
            self.local.place = divmod(i, WARP_SIZE)
            with np.errstate(invalid="ignore"):
                results[i] = function(*values[i])

        threads = [threading.Thread(target=thread, args=(i,)) for i in range(len(values))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return results

    def patched(self):
        fmax = lambda a, b: np.float32(np.fmax(a, b))  # noqa: E731
        arch = SimpleNamespace(
            warp_reduction=self.warp_reduction,
            fmax=fmax,
            lane_idx=lambda: self.local.place[1],
            warp_idx=lambda: self.local.place[0],
        )
        cute = SimpleNamespace(
            arch=arch,
            math=SimpleNamespace(
                exp=lambda v: np.exp(np.float32(v), dtype=np.float32),
                fma=lambda a, b, c: np.float32(np.float64(a) * np.float64(b) + np.float64(c)),
            ),
            make_rmem_tensor=lambda shape, dtype: Tensor(np.full(shape, np.nan, np.float32)),
            autovec_copy=lambda source, target: target.values.__setitem__(slice(None), source.values),
        )
        return mock.patch.multiple(
            reduce,
            cute=cute,
            cutlass=SimpleNamespace(range_constexpr=range),
            const_expr=lambda value: value,
            Float32=Float32,
            rounded_product=operator.mul,
            team_barrier=lambda layout, team: self.cta.wait(),
        )


METHODS = (
    *("sum", "within_warp", "send", "receive", "wait", "largest", "_exchange", "_gather", "_add"),
    *("scaled_sum", "scaled_within_warp", "scaled_of_warps"),
)
PLAIN = type(
    "PlainRowSum",
    (reduce.RowSum,),
    {m: getattr(reduce.RowSum, m).__wrapped__ for m in METHODS if hasattr(getattr(reduce.RowSum, m), "__wrapped__")},
)


@pytest.mark.parametrize("warps", first_of([1, 3, 16, 20, 33], 4))
def test_rows_of_few_and_of_many_warps(warps):
    threads = warps * WARP_SIZE
    layout = RowLayout(threads, 1, threads, 1, 1, 1, 1, True, False)
    rng = np.random.default_rng(warps)
    largest = rng.normal(size=threads).astype(np.float32) * 10
    total = rng.uniform(1, 2, threads).astype(np.float32)
    largest[5:17], total[5:17] = -3.4e38, 0.0  # threads whose elements are all -inf
    cta = Threads(warps)
    row_sum = PLAIN(layout, 2)
    messages = Tensor(np.full((2, max(warps, 1), 1, 2), np.nan, np.float32))

    def thread(m, s):
        one = row_sum.largest(m, messages, None, 0, 0)
        two = row_sum.scaled_sum(m, s, messages, None, 0, 1)
        three = row_sum.sum((s,), messages, None, 0, 2)
        # What is sent now is read a row later, all having met
        late = row_sum.scaled_within_warp(m, s)
        if warps > 1:
            row_sum.send(late, messages, None, 0, 3)
            cta.cta.wait()
            late = row_sum.scaled_of_warps(messages, 0, 3)
        assert tuple(late) == tuple(two)
        return (one, *two, *three)

    with cta.patched():
        results = cta.run(thread, np.stack((largest, total), 1))
    assert len({tuple(map(float, result)) for result in results}) == 1  # the same bits in all threads
    one, two, scaled, three = map(float, results[0])
    assert one == two == largest.max()
    exact = (total.astype(np.float64) * np.exp(largest.astype(np.float64) - two)).sum()
    assert scaled == pytest.approx(exact, rel=1e-6)
    assert three == pytest.approx(total.sum(dtype=np.float64), rel=1e-6)
