"""The roles of the kernel over a cache run in Python in many orders: nobody waits forever, nothing is overwritten.

The roles below wait and arrive as those of kernel_decode_*.py do, a warp or a warpgroup a task; copies and products
take as long as they like. A value in shared memory has a name, and whoever reads it says which name it must have. CTAs
take tickets from one counter, and count the splits of the same tiles.

A wait on an mbarrier tells adjacent phases apart, no others: see test_roles_backward.py.
"""

import random
from collections import Counter, defaultdict, deque
from typing import NamedTuple

import pytest

from cute_kernels.attention.config import QUERY_STAGES
from cute_kernels.attention.kernel_decode_items import ITEM_SLOTS
from tests.attention.test_roles_backward import World, always, nothing

WAITS = "item_full", "item_empty", "q_full", "q_empty", "full", "empty", "kept", "products"


class Work(NamedTuple):
    """An item: which split of how many a tile has, and its blocks."""

    tile: int
    split: int
    splits: int
    blocks: int


class Cta:
    def __init__(self, world: World, number: int, slots: int, way: str):
        self.world, self.number, self.slots, self.way = world, number, slots, way
        self.arrivals: Counter = Counter()
        self.expected = {"item_empty": 2 if way == "sequential" else 3}
        self.memory: dict = {}
        self.pending: deque = deque()
        self.working = True
        world.tasks += [self.loader(), self.queries(), self.computes(), self.tensor_core()]
        if way != "sequential":
            world.tasks.append(self.merges())

    def over(self, name: str, slot: int) -> int:
        return self.arrivals[name, slot] // self.expected.get(name, 1)

    def arrive(self, name: str, slot: int, use: int) -> None:
        assert self.over(name, slot) == use, f"an arrival for use {use} of {name}[{slot}] came too early"
        self.arrivals[name, slot] += 1

    def wait(self, name: str, slot: int, use: int):
        """Wait for a use to be over; -1: a first use, which needs nobody."""
        if use < 0 or name == self.world.without:
            return

        def on_time():
            assert self.over(name, slot) == use + 1, f"a wait for use {use} of {name}[{slot}] came too early"

        yield lambda: self.over(name, slot) % 2 != use % 2, on_time

    def expect(self, name: str, slot: int, content) -> None:
        found = self.memory.get((name, slot))
        assert found == content, f"{name}[{slot}] holds {found}, wanted {content}"

    def item(self, number: int):
        yield from self.wait("item_full", number % ITEM_SLOTS, number // ITEM_SLOTS)
        found = self.memory.get(("item", number % ITEM_SLOTS))
        assert found and found[0] == number, f"item {number} is {found}"
        return found[1]

    def release(self, number: int) -> None:
        self.arrive("item_empty", number % ITEM_SLOTS, number // ITEM_SLOTS)

    def load(self, count: int, content):
        slot, use = count % self.slots, count // self.slots
        yield from self.wait("empty", slot, use - 1)
        self.memory["ring", slot] = None

        def copy():
            yield always, nothing
            self.memory["ring", slot] = content
            self.arrive("full", slot, use)

        self.world.tasks.append(copy())

    # ---- roles

    def publish(self, number: int, item):
        yield from self.wait("item_empty", number % ITEM_SLOTS, number // ITEM_SLOTS - 1)
        self.memory["item", number % ITEM_SLOTS] = number, item
        self.arrive("item_full", number % ITEM_SLOTS, number // ITEM_SLOTS)

    def loader(self):
        items, count, number, place = self.world.blocks, 0, 0, self.number
        if self.way == "late":
            place = self.draw()
            yield always, nothing
        while place < len(items):
            item = items[place]
            if item.blocks:
                yield from self.publish(number, item)
                yield from self.load(count, (number, "k", 0))
                for n in range(1, item.blocks):
                    yield from self.load(count + 2 * n - 1, (number, "k", n))
                    yield from self.load(count + 2 * n, (number, "v", n - 1))
                number, count = number + 1, count + 2 * item.blocks
            place = self.draw()
            if item.blocks:
                yield from self.load(count - 1, (number - 1, "v", item.blocks - 1))
            yield always, nothing
        yield from self.publish(number, None)

    def draw(self) -> int:
        """The item of a ticket, which is 0 again after the last one: of a late merge the first item has one, too."""
        world, late = self.world, self.way == "late"
        ticket = world.tickets
        world.tickets += 1
        tickets = len(world.blocks) + (world.ctas if late else 0)
        world.drawn += 1
        assert world.drawn <= tickets, "a ticket was drawn after the last one"
        if ticket == tickets - 1:
            world.tickets = 0
        return ticket if late else world.ctas + ticket

    def queries(self):
        number = 0
        while (yield from self.item(number)):
            self.release(number)
            stage, use = number % QUERY_STAGES, number // QUERY_STAGES
            yield from self.wait("q_empty", stage, use - 1)
            self.memory["q", stage] = None
            yield always, nothing
            self.memory["q", stage] = number
            self.arrive("q_full", stage, use)
            number += 1

    def computes(self):
        number = count = 0
        while item := (yield from self.item(number)):
            self.release(number)
            stage, use = number % QUERY_STAGES, number // QUERY_STAGES
            yield from self.wait("q_full", stage, use)
            yield from self.full(count)
            yield from self.products([("q", stage, number), ("ring", count % self.slots, (number, "k", 0))], 0)
            self.arrive("empty", count % self.slots, count // self.slots)
            for n in range(1, item.blocks):
                k, v = count + 2 * n - 1, count + 2 * n
                yield from self.full(k)
                self.pending.append([("q", stage, number), ("ring", k % self.slots, (number, "k", n))])
                yield from self.full(v)
                yield from self.products([("ring", v % self.slots, (number, "v", n - 1))], 1)
                self.arrive("empty", k % self.slots, k // self.slots)
                yield from self.products([], 0)
                self.arrive("empty", v % self.slots, v // self.slots)
            count += 2 * item.blocks
            self.arrive("q_empty", stage, use)
            last = count - 1
            yield from self.full(last)
            yield from self.products([("ring", last % self.slots, (number, "v", item.blocks - 1))], 0)
            self.arrive("empty", last % self.slots, last // self.slots)
            self.world.done[item] += 1
            if self.way != "sequential":
                if item.splits > 1:
                    self.world.sums[item.tile].append(item.split)
                self.arrive("kept", number % ITEM_SLOTS, number // ITEM_SLOTS)
            number += 1
        self.working = False

    def full(self, count: int):
        yield from self.wait("full", count % self.slots, count // self.slots)

    def products(self, reads: list, left: int):
        """Issue a product, if it reads something, and wait until so many are left."""
        if reads:
            self.pending.append(reads)
        if self.world.without != "products":
            yield lambda: len(self.pending) <= left, nothing

    def tensor_core(self):
        while True:
            yield lambda: self.pending or not self.working, nothing
            if not self.pending:
                return
            for _ in range(2):
                for name, slot, content in self.pending[0]:
                    self.expect(name, slot, content)
                yield always, nothing
            self.pending.popleft()

    def merges(self):
        number, world = 0, self.world
        while item := (yield from self.item(number)):
            yield from self.wait("kept", number % ITEM_SLOTS, number // ITEM_SLOTS)
            self.release(number)
            if item.splits > 1:
                assert item.split in world.sums[item.tile], "a partial is counted before it is kept"
                yield always, nothing
                world.counted[item.tile] += 1
                if self.way == "parallel" and world.counted[item.tile] == item.splits:
                    world.counted[item.tile] = 0
                    assert sorted(world.sums[item.tile]) == list(range(item.splits))
                    world.merged[item.tile] += 1
            number += 1
        if self.way == "late":
            yield from self.merges_late()

    def merges_late(self):
        """Rows of all tiles, every so many one: a tile's counter counts its splits, then the rows."""
        world = self.world
        for tile, splits in world.rows[self.number :: world.ctas]:
            yield lambda tile=tile, splits=splits: world.counted[tile] >= splits, nothing
            assert sorted(world.sums[tile]) == list(range(splits))
            world.counted[tile] += 1
            last = world.counted[tile] == splits + world.rows.count((tile, splits))
            yield always, nothing
            if last:
                world.counted[tile] = 0
                world.merged[tile] += 1


def work(rng: random.Random, sequential: bool) -> list[Work]:
    """Items in the order of their numbers, some without blocks: a tile has as many splits as items with blocks."""
    items = []
    for tile in range(rng.randint(1, 12)):
        splits = 1 if sequential else rng.randint(1, 4)
        found = [Work(tile, split, splits, rng.randint(1, 4)) for split in range(splits)]
        items += [Work(tile, -1, splits, 0)] * rng.randint(0, 2) + found
    return items


def run(seed: int, way: str, without: str = "") -> None:
    rng, sequential = random.Random(seed), way == "sequential"
    items = work(rng, sequential)
    world = World(items, without, rng)
    world.ctas, world.done, world.merged = rng.randint(1, 6), Counter(), Counter()
    world.sums, world.counted, world.drawn = defaultdict(list), Counter(), 0
    tiles = dict.fromkeys((item.tile, item.splits) for item in items if item.splits > 1)
    world.rows = [tile for tile in tiles for _ in range(rng.randint(1, 5))]
    slots = rng.randint(3, 6)
    for number in range(world.ctas):
        Cta(world, number, slots, way)
    world.run()
    assert world.done == Counter(item for item in items if item.blocks)
    assert world.tickets == 0 and not any(world.counted.values())
    wanted = {item.tile for item in items if item.splits > 1} if not sequential else set()
    assert world.merged == Counter(wanted)


@pytest.mark.parametrize("way", ["parallel", "late", "sequential"])
def test_roles(way):
    for seed in range(60):
        run(seed, way)


@pytest.mark.parametrize("way", ["parallel", "late"])
@pytest.mark.parametrize("without", WAITS)
def test_each_wait_is_needed(without, way):
    with pytest.raises(AssertionError):
        for seed in range(200):
            run(seed, way, without)
