"""The roles of SM100's forward run in Python in many orders: nobody waits forever, and nothing is overwritten.

No SM100 has run the kernel, so this is what stands for its barriers. The roles below wait and arrive as those of
kernel_forward_sm100.py do, a warp a task; copies and products take as long as they like. What is in shared and in
tensor memory has a name, and whoever reads it says which name it must have.

A wait on an mbarrier tells adjacent phases apart, no others: every wait must come when the phase before the awaited one
is known to be over, and every arrival when its phase has begun.
"""

import random
from collections import Counter, deque

import pytest

from cute_kernels.attention.config import FORWARD_SM100_CONFIGS

WARPS = 4  # of a warpgroup
OF_WARPS = ("p_full", "row_full", "row_empty", "o_empty", "meet")  # barriers that the warps of a warpgroup arrive at
WAITS = (
    *("q_full", "q_empty", "k_full", "k_empty", "v_full", "v_empty", "s_full", "p_full"),
    *("row_full", "row_empty", "o_full", "o_empty", "meet", "stored"),
)


class Machine:
    """Barriers by (name, slot), memory by (name, slot), roles, and a tensor core that works in order.

    ``items``: (first block, end) of the tiles of each turn; no block: there is no tile. ``split``: blocks of a split.
    """

    def __init__(
        self, tiles: int, stages: int, split: int, items: list[tuple[int, int]], without: str, rng: random.Random
    ):
        self.tiles, self.stages, self.split, self.items = tiles, stages, split, items
        self.without, self.rng = without, rng
        self.arrived: Counter = Counter()
        self.memory: dict = {}
        self.issued: deque = deque()  # products and the arrivals behind them
        self.products = 0  # of them
        self.stored: list = []

    # ---- barriers

    def over(self, name: str, slot: int) -> int:
        """How many phases are."""
        return self.arrived[name, slot] // (WARPS if name in OF_WARPS else 1)

    def arrive(self, name: str, slot: int, use: int) -> None:
        assert self.over(name, slot) == use, f"an arrival for use {use} of {name}[{slot}] came too early"
        self.arrived[name, slot] += 1

    def wait(self, name: str, slot: int, use: int):
        """Wait for a use to be over; ``use`` is -1 for a first use that needs nobody."""
        if use >= 0 and name != self.without:
            yield name, slot, use

    def is_over(self, wait) -> bool:
        """Whether the phase under way has the other parity, as the instruction tells."""
        return wait is None or self.over(*wait[:2]) % 2 != wait[2] % 2

    # ---- memory

    def expect(self, name: str, slot, content) -> None:
        found = self.memory.get((name, slot))
        assert found == content, f"{name}[{slot}] holds {found}, wanted {content}"

    def copy(self, name: str, slot: int, content, barrier: str, use: int) -> None:
        """A copy into shared memory, which arrives some time later."""
        self.memory[name, slot] = None

        def task():
            yield None
            self.memory[name, slot] = content
            self.arrive(barrier, slot, use)

        self.tasks.append(task())

    # ---- roles

    def place(self, count: int) -> tuple[int, int]:
        return count % self.stages, count // self.stages

    def loader(self):
        count = tiles = 0
        for first, end in self.items:
            for n in range(first, end):
                slot, use = self.place(count)
                yield from self.wait("k_empty", slot, use - 1)
                self.copy("k", slot, count, "k_full", use)
                for t in range(self.tiles if n == first else 0):
                    yield from self.wait("q_empty", t, tiles - 1)
                    self.copy("q", t, tiles, "q_full", tiles)
                yield from self.wait("v_empty", slot, use - 1)
                self.copy("v", slot, count, "v_full", use)
                count += 1
            tiles += end > first
        for i in range(self.stages):
            slot, use = self.place(count + i)
            yield from self.wait("k_empty", slot, use - 1)
            yield from self.wait("v_empty", slot, use - 1)

    def multiplier(self):
        accumulates = False
        count = tiles = 0
        for first, end in self.items:
            for n in range(first, end):
                for t in range(self.tiles):
                    if count > 0:
                        yield from self.add_values(t, accumulates, count - 1)
                    yield from self.score(t, n == end - 1, count, tiles)
                accumulates = n > first and n % self.split != 0
                count += 1
            tiles += end > first
        if count > 0:
            for t in range(self.tiles):
                yield from self.add_values(t, accumulates, count - 1)

    def score(self, t: int, last: bool, count: int, tiles: int):
        slot, use = self.place(count)
        yield from self.wait("q_full", t, tiles)
        yield from self.wait("k_full", slot, use)

        def product():
            for step in range(2):  # its beginning and its end
                self.expect("q", t, tiles)
                self.expect("k", slot, count)
                for w in range(WARPS):
                    self.expect("s", (t, w), ("read", count - 1) if count else None)
                if step == 0:
                    yield
            for w in range(WARPS):
                self.memory["s", (t, w)] = "scores", count

        self.issue(product())
        self.commit("s_full", t, count)
        if t == self.tiles - 1:
            self.commit("k_empty", slot, use)
        if last:
            self.commit("q_empty", t, tiles)

    def add_values(self, t: int, accumulates: bool, count: int):
        slot, use = self.place(count)
        yield from self.wait("v_full", slot, use)
        yield from self.wait("o_empty", t, count - 1)
        yield from self.wait("p_full", t, count)

        def product():
            for step in range(2):
                self.expect("v", slot, count)
                for w in range(WARPS):
                    self.expect("s", (t, w), ("p", count))
                    self.expect("o", (t, w), ("rescaled" if accumulates else "taken", count - 1) if count else None)
                if step == 0:
                    yield
            for w in range(WARPS):
                self.memory["s", (t, w)], self.memory["o", (t, w)] = ("read", count), ("sum", count)

        self.issue(product())
        self.commit("o_full", t, count)
        if t == self.tiles - 1:
            self.commit("v_empty", slot, use)

    def issue(self, product) -> None:
        def task():
            yield from product
            self.products -= 1

        self.products += 1
        self.issued.append(task())

    def commit(self, name: str, slot: int, use: int) -> None:
        """An arrival once all products so far are done."""

        def task():
            self.arrive(name, slot, use)
            return
            yield

        self.issued.append(task())

    def softmax(self, t: int, w: int):
        count = 0
        for first, end in self.items:
            for n in range(first, end):
                begins = n == first or n % self.split == 0
                if begins and n > first:
                    yield from self.tell(t, w, "split", count - 1)
                yield from self.wait("s_full", t, count)
                self.expect("s", (t, w), ("scores", count))
                if not begins:
                    yield from self.tell(t, w, "factor", count - 1)
                self.expect("s", (t, w), ("scores", count))
                self.memory["s", (t, w)] = "p", count
                self.arrive("p_full", t, count)
                count += 1
            if end > first:
                yield from self.tell(t, w, "last", count - 1)

    def tell(self, t: int, w: int, message: str, count: int):
        yield from self.wait("row_empty", t, count - 1)
        self.memory["row", (t, w)] = message, count
        self.arrive("row_full", t, count)

    def correction(self, w: int):
        count = meetings = stores = 0
        for first, end in self.items:
            if end == first:
                continue
            for n in range(first + 1, end):
                for t in range(self.tiles):
                    message, becomes = ("factor", "rescaled") if n % self.split else ("split", "taken")
                    yield from self.listen(t, w, message, count)
                    self.memory["o", (t, w)] = becomes, count
                    self.arrive("o_empty", t, count)
                count += 1
            for t in range(self.tiles):
                yield from self.listen(t, w, "last", count)
                if w == 0:
                    yield from self.wait("stored", 0, stores - 1)
                yield from self.meet(meetings)
                self.expect("o", (t, w), ("sum", count))
                self.memory["out", w] = count, t
                self.memory["o", (t, w)] = "taken", count
                self.arrive("o_empty", t, count)
                yield from self.meet(meetings + 1)
                if w == 0:
                    self.store((count, t), stores)
                stores, meetings = stores + 1, meetings + 2
            count += 1
        if w == 0:
            yield from self.wait("stored", 0, stores - 1)
        yield from self.meet(meetings)
        if w == 0:
            assert not self.products, "tensor memory is given back before its last product"

    def listen(self, t: int, w: int, message: str, count: int):
        yield from self.wait("row_full", t, count)
        self.expect("row", (t, w), (message, count))
        self.arrive("row_empty", t, count)
        yield from self.wait("o_full", t, count)
        self.expect("o", (t, w), ("sum", count))

    def meet(self, use: int):
        self.arrive("meet", 0, use)
        yield from self.wait("meet", 0, use)

    def store(self, content, use: int) -> None:
        def task():
            for step in range(2):
                for w in range(WARPS):
                    self.expect("out", w, content)
                if step == 0:
                    yield None
            self.stored.append(content)
            self.arrive("stored", 0, use)

        self.tasks.append(task())

    # ---- time

    def run(self) -> None:
        """In an order of priorities, changed now and then; the tensor core is one of those who may go on."""
        self.tasks = [self.loader(), self.multiplier(), *(self.correction(w) for w in range(WARPS))]
        self.tasks += [self.softmax(t, w) for t in range(self.tiles) for w in range(WARPS)]
        awaited: dict = {}
        priorities: dict = {}
        while self.tasks:
            ready = [task for task in self.tasks if self.is_over(awaited.get(task))]
            if self.issued:
                ready.append(None)
            assert ready, "all wait"
            task = min(ready, key=lambda task: priorities.setdefault(task, self.rng.random()))
            if self.rng.random() < 0.05:
                priorities[task] = self.rng.random()
            if task is None:
                try:
                    next(self.issued[0])
                except StopIteration:
                    self.issued.popleft()
                continue
            if awaited.get(task) is not None:
                name, slot, use = awaited[task]
                assert self.over(name, slot) == use + 1, f"a wait for use {use} of {name}[{slot}] came too early"
            try:
                awaited[task] = next(task)
            except StopIteration:
                self.tasks.remove(task)
        assert not self.issued and len(self.stored) == self.tiles * sum(end > first for first, end in self.items)


# Splits of 3 blocks: tiles in one of them, of several, from the middle of one, with turns that have none
ITEMS = [
    [(0, 1)],
    [(0, 0)],
    [(0, 2), (0, 1), (0, 1)],
    [(0, 0), (2, 4), (0, 0), (0, 3), (0, 7)],
    [(0, 7), (3, 5), (2, 3), (1, 9)],
]
CONFIGS = sorted({(config.tiles, config.stages) for config in FORWARD_SM100_CONFIGS.values()})


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("items", ITEMS, ids=str)
def test_no_wait_is_early_and_nothing_is_overwritten(items, config):
    rng = random.Random(str(config))
    for _ in range(40):
        Machine(*config, 3, items, "", rng).run()


@pytest.mark.parametrize("without", WAITS)
def test_the_model_misses_each_barrier(without):
    """Without any one kind of wait something goes wrong in some order."""
    rng = random.Random(0)
    with pytest.raises(AssertionError):
        for _ in range(300):
            Machine(2, 2, 3, ITEMS[-1], without, rng).run()
