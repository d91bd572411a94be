"""The roles of the backward run in Python in many orders: nobody waits forever, and nothing is overwritten.

The roles below wait and arrive as those of kernel_backward_*.py do, a warpgroup a task; copies, products and sums in
memory take as long as they like. A value in shared memory has a name, and whoever reads it says which name it must
have. CTAs take tickets from one counter, and add to the same sums of dq.

A wait on an mbarrier tells adjacent phases apart, no others: every wait must come when the phase before the awaited one
is known to be over, and every arrival when its phase has begun.
"""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from cute_kernels.attention.config import BACKWARD_CONFIGS, BackwardConfig, backward_block
from cute_kernels.attention.kernel_backward_blocks import AHEAD, in_turn

WGS = 2
WAITS = (
    *("ticket_full", "ticket_empty", "k_full", "v_full", "kv_empty", "q_full", "q_empty", "dout_full", "dout_empty"),
    *("dq_full", "dq_empty", "meet", "turn", "products"),
)


class Block(NamedTuple):
    """A block of keys of a head.

    Attributes:
        turn_of: how many partials are added to a tile of dq before the block's.
        first, end: its tiles.
        head: whose dq it adds to.
        sums: of dk and dv, to which its group's heads add; None: it shares none.
        member: which of the group's heads.
    """

    turn_of: Callable[[int], int] | None
    first: int
    end: int
    head: int = 0
    sums: tuple | None = None
    member: int = 0


@dataclass
class World:
    """The state that CTAs share: tickets, sums by tile, or by block, and their counters; tasks, what each waits for."""

    blocks: list[Block]  # in the order of tickets
    without: str
    rng: random.Random
    tickets: int = 0
    sums: dict = field(default_factory=lambda: defaultdict(list))
    counted: Counter = field(default_factory=Counter)
    tasks: list = field(default_factory=list)

    def run(self) -> None:
        """In an order of priorities, changed now and then."""
        awaited: dict = {}
        priorities: dict = {}
        while self.tasks:
            ready = [task for task in self.tasks if task not in awaited or awaited[task][0]()]
            assert ready, "all wait"
            task = min(ready, key=lambda task: priorities.setdefault(task, self.rng.random()))
            if self.rng.random() < 0.05:
                priorities[task] = self.rng.random()
            if task in awaited:
                awaited.pop(task)[1]()
            try:
                awaited[task] = next(task)
            except StopIteration:
                self.tasks.remove(task)


def nothing():
    pass


def always():
    return True


class Cta:
    def __init__(self, world: World, sizes: tuple[int, int], config: BackwardConfig, grouped: bool):
        self.world, self.config, self.grouped = world, config, grouped
        self.by_channels = backward_block(sizes[0]) == 64
        self.dv_in_ds = not self.by_channels and config.tile_rows >= sizes[1]
        self.arrivals: Counter = Counter()
        self.memory: dict = {}
        self.ticket = None
        self.pending = [deque() for _ in range(WGS)]
        self.expected = defaultdict(lambda: 1) | {
            "ticket_empty": WGS + config.adders,
            "q_empty": WGS,
            "dout_empty": WGS,
            "meet": WGS,
        }
        self.meetings = [0] * WGS
        world.tasks += [self.loader(), *(self.adder(i) for i in range(config.adders))]
        world.tasks += [f for wg in range(WGS) for f in (self.warpgroup(wg), self.tensor_core(wg))]
        self.working = WGS

    # ---- barriers, memory, products

    def over(self, name: str, slot) -> int:
        return self.arrivals[name, slot] // self.expected.get(name, 1)

    def arrive(self, name: str, slot, use: int) -> None:
        assert self.over(name, slot) == use, f"an arrival for use {use} of {name}[{slot}] came too early"
        self.arrivals[name, slot] += 1

    def wait(self, name: str, slot, use: int):
        """Wait for a use to be over; ``use`` is -1 for a first use that needs nobody."""
        if use < 0 or name == self.world.without:
            return

        def on_time():
            assert self.over(name, slot) == use + 1, f"a wait for use {use} of {name}[{slot}] came too early"

        yield lambda: self.over(name, slot) % 2 != use % 2, on_time

    def expect(self, name: str, slot, content) -> None:
        found = self.memory.get((name, slot))
        assert found == content, f"{name}[{slot}] holds {found}, wanted {content}"

    def copy(self, name: str, slot, content, barrier: str, use: int) -> None:
        self.memory[name, slot] = None

        def task():
            yield always, nothing
            self.memory[name, slot] = content
            self.arrive(barrier, slot, use)

        self.world.tasks.append(task())

    def issue(self, wg: int, reads: list) -> None:
        """A product that reads shared memory, from its beginning to its end."""
        self.pending[wg].append(reads)

    def tensor_core(self, wg: int):
        while True:
            yield lambda: self.pending[wg] or not self.working, nothing
            if not self.pending[wg]:
                return
            for _ in range(2):
                for name, slot, content in self.pending[wg][0]:
                    self.expect(name, slot, content)
                yield always, nothing
            self.pending[wg].popleft()

    def products(self, wg: int, number: int):
        """wgmma.wait_group."""
        if self.world.without != "products":
            yield lambda: len(self.pending[wg]) <= number, nothing

    def meet(self, wg: int):
        use = self.meetings[wg]
        self.meetings[wg] += 1
        self.arrive("meet", 0, use)
        yield from self.wait("meet", 0, use)

    # ---- roles

    def take_ticket(self, turn: int):
        ticket = self.world.tickets
        self.world.tickets += 1
        yield from self.wait("ticket_empty", 0, turn - 1)
        self.memory["ticket", 0] = ticket, turn
        self.arrive("ticket_full", 0, turn)
        return ticket

    def read_ticket(self, turn: int):
        yield from self.wait("ticket_full", 0, turn)
        ticket, found = self.memory.get(("ticket", 0), (None, None))
        assert found == turn, f"ticket {found}, wanted {turn}"
        yield always, nothing
        assert self.memory["ticket", 0] == (ticket, turn)
        self.arrive("ticket_empty", 0, turn)
        return ticket

    def loader(self):
        count = blocks = turn = 0
        ticket = yield from self.take_ticket(turn)
        while ticket < len(self.world.blocks):
            _, first, end, *_ = self.world.blocks[ticket]
            if first < end:
                yield from self.load_tile("q", ticket, first, count, self.config.stages)
            yield from self.wait("kv_empty", 0, blocks - 1)
            self.copy("k", 0, ticket, "k_full", blocks)
            self.copy("v", 0, ticket, "v_full", blocks)
            for m in range(first, end):
                if m > first:
                    yield from self.load_tile("q", ticket, m, count + m - first, self.config.stages)
                yield from self.load_tile("dout", ticket, m, count + m - first, self.config.dout_stages)
            count, blocks, turn = count + end - first, blocks + 1, turn + 1
            ticket = yield from self.take_ticket(turn)

    def load_tile(self, name: str, ticket: int, m: int, count: int, stages: int):
        slot, use = count % stages, count // stages
        yield from self.wait(f"{name}_empty", slot, use - 1)
        self.copy(name, slot, (ticket, m), f"{name}_full", use)

    def adder(self, adder: int):
        adders, parts = self.config.adders, self.config.dq_parts
        count = turn = 0
        ticket = yield from self.read_ticket(turn)
        while ticket < len(self.world.blocks):
            turn_of, first, end, head, *_ = self.world.blocks[ticket]
            for m in range(first + (adder - count) % adders, end, adders):
                if self.world.without != "turn":
                    before = turn_of(m)
                    yield lambda place=(head, m), before=before: self.world.counted[place] == before, nothing
                use = (count + m - first) // adders
                for part in range(parts):
                    buffer = (count + m - first) % self.config.dq_buffers
                    for wg in range(WGS):
                        yield from self.wait("dq_full", adder * WGS + wg, use * parts + part)
                    for wg in range(WGS):
                        self.expect("dq", buffer * WGS + wg, (ticket, m, part))
                    yield always, nothing
                    for wg in range(WGS):
                        self.expect("dq", buffer * WGS + wg, (ticket, m, part))
                        self.arrive("dq_empty", adder * WGS + wg, use * parts + part)
                yield always, nothing
                self.world.sums[head, m].append(ticket)
                self.world.counted[head, m] += 1
            count, turn = count + end - first, turn + 1
            ticket = yield from self.read_ticket(turn)

    def warpgroup(self, wg: int):
        count = blocks = turn = 0
        ticket = yield from self.read_ticket(turn)
        while ticket < len(self.world.blocks):
            _, first, end, *_ = self.world.blocks[ticket]
            yield from self.wait("k_full", 0, blocks)
            if first < end:
                yield from self.walk(wg, ticket, first, end, count, blocks)
            else:
                yield from self.wait("v_full", 0, blocks)
            count, blocks = count + end - first, blocks + 1
            yield from self.finish(wg, ticket, blocks - 1)
            turn += 1
            ticket = yield from self.read_ticket(turn)
        self.working -= 1

    def walk(self, wg: int, ticket: int, first: int, end: int, count: int, blocks: int):
        if self.by_channels or self.config.scores_ahead:
            yield from self.score(wg, ticket, first, count)
            yield from self.products(wg, 0)
        for m in range(first, end):
            yield from self.step(wg, ticket, m, end, count + m - first, blocks)
        yield from self.products(wg, 0)

    def score(self, wg: int, ticket: int, m: int, count: int):
        slot, use = count % self.config.stages, count // self.config.stages
        yield from self.wait("q_full", slot, use)
        self.issue(wg, [("k", 0, ticket), ("q", slot, (ticket, m))])

    def step(self, wg: int, ticket: int, m: int, end: int, count: int, blocks: int):
        config, tile, place = self.config, (ticket, m), count % 2
        ahead, dv_first = self.by_channels or config.scores_ahead, config.dv_first and not self.by_channels
        slot, use = count % config.stages, count // config.stages
        of_dout, use_dout = count % config.dout_stages, count // config.dout_stages
        if not ahead:
            yield from self.score(wg, ticket, m, count)
        yield from self.wait("v_full", 0, blocks)
        yield from self.wait("dout_full", of_dout, use_dout)
        self.issue(wg, [("v", 0, ticket), ("dout", of_dout, tile)])
        if not ahead:
            yield from self.products(wg, 1)
        self.expect("q", slot, tile)  # lse
        if self.by_channels:
            self.memory["p", (place, wg)] = tile
        add_dv = [("dout", of_dout, tile)]
        if dv_first:
            self.issue(wg, add_dv)
            yield from self.products(wg, 1)
        else:
            yield from self.products(wg, 0)
        self.expect("dout", of_dout, tile)  # delta
        self.memory["ds", (place, wg)] = tile
        if not dv_first and not self.by_channels:
            self.issue(wg, add_dv)
        yield from self.meet(wg)
        of_both = {name: [(name, (place, i), tile) for i in range(WGS)] for name in ("p", "ds")}
        if self.by_channels:
            self.issue(wg, [*of_both["p"], *add_dv])
        self.issue(wg, [*of_both["ds"], ("k", 0, ticket)])
        self.issue(wg, [("q", slot, tile), *(of_both["ds"] if self.by_channels else ())])
        yield from self.products(wg, 2)
        self.arrive("dout_empty", of_dout, use_dout)
        if not config.scores_ahead:
            yield from self.products(wg, 1)
            yield from self.put_dq(wg, ticket, m, count)
        if ahead and m + 1 < end:
            yield from self.score(wg, ticket, m + 1, count + 1)
        elif ahead:
            self.issue(wg, [])
        if config.scores_ahead:
            yield from self.products(wg, 2)
            yield from self.put_dq(wg, ticket, m, count)
        yield from self.products(wg, 0)
        self.arrive("q_empty", slot, use)

    def put_dq(self, wg: int, ticket: int, m: int, count: int):
        adders, parts = self.config.adders, self.config.dq_parts
        for part in range(parts):
            before = count + (0 if part else adders - self.config.dq_buffers)
            yield from self.wait("dq_empty", before % adders * WGS + wg, before // adders * parts + part - 1)
            self.memory["dq", count % self.config.dq_buffers * WGS + wg] = ticket, m, part
            self.arrive("dq_full", count % adders * WGS + wg, count // adders * parts + part)

    def finish(self, wg: int, ticket: int, blocks: int):
        """dk and dv leave by way of k's and v's place; in fp32, beyond 128 channels, by that of p and ds, too. dv in
        fp32 goes by that of ds at the same time, where it has room.
        """
        *_, sums, member = self.world.blocks[ticket]
        yield from self.meet(wg)
        staged = [("k", 0), ("v", 0)]
        beside = [("ds", (i, j)) for i in range(2) for j in range(WGS)]
        turns = [staged, staged] if self.grouped else [staged]
        if self.grouped and self.by_channels:
            turns = [staged + [("p", place) for _, place in beside] + beside] * 2
        elif self.grouped and self.dv_in_ds:
            turns = [staged + beside]
        for turn, places in enumerate(turns):
            for name in places:
                self.memory[name] = "staged", ticket, turn
            yield from self.meet(wg)
            if wg == 0:
                if sums and turn == 0 and self.world.without != "turn":
                    yield lambda: self.world.counted[sums] == member, nothing
                for _ in range(2):
                    for name in places:
                        self.expect(*name, ("staged", ticket, turn))
                    yield always, nothing
            if turn + 1 < len(turns):
                yield from self.meet(wg)
        if wg == 0:
            self.arrive("kv_empty", 0, blocks)
            if sums:
                yield always, nothing
                self.world.sums[sums].append(ticket)
                self.world.counted[sums] += 1


def causal(tiles: int) -> list[Block]:
    """Blocks of one tile's rows, from the last one down."""
    return [Block(lambda m, n=n: m - n, n, tiles) for n in reversed(range(tiles))]


def full(tiles: int, blocks: int) -> list[Block]:
    return [Block(lambda m, n=n: n, 0, tiles) for n in range(blocks)]


def window(tiles: int) -> list[Block]:
    """A block sees its own tile and the next; the first ones taken see none."""
    found = [Block(lambda m, n=n: m - n, n, min(n + 2, tiles)) for n in reversed(range(tiles))]
    return [Block(None, 0, 0), Block(None, 0, 0), *found]


def groups(of_head: list[Block], heads: int, group: int) -> list[Block]:
    """These blocks of each of some heads, ``group`` of which share dk and dv, in the kernel's order."""
    turns = (in_turn(i, len(of_head), heads, group, min) for i in range(len(of_head) * heads))
    return [of_head[n]._replace(head=h, sums=("dkv", h // group, n), member=h % group) for n, h in turns]


BLOCKS = {"causal": causal(5), "full": full(3, 4), "one": full(1, 3), "window": window(6), "long": full(7, 2)}
CONFIGS = [(sizes, config) for sizes, found in BACKWARD_CONFIGS.items() for config in found]


def run(sizes, config, blocks, ctas: int, grouped: bool, rng: random.Random, without: str = "") -> World:
    world = World(blocks, without, rng)
    for _ in range(ctas):
        Cta(world, sizes, config, grouped)
    world.run()
    return world


def in_order(blocks: list[Block]) -> dict[tuple, list[int]]:
    """Which tickets add to each sum, in what order."""
    found = defaultdict(list)
    for ticket, block in enumerate(blocks):
        for m in range(block.first, block.end):
            found[block.head, m].append(ticket)
        if block.sums:
            found[block.sums].append(ticket)
    return found


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_no_wait_is_early_and_nothing_is_overwritten(config, blocks):
    """With any number of CTAs; each tile's partials are added in the order of its blocks."""
    rng = random.Random(f"{config} {blocks}")
    for i in range(8):
        world = run(*config, BLOCKS[blocks], (1, 2, 3, 7)[i % 4], i % 3 == 0, rng)
        assert world.sums == in_order(BLOCKS[blocks])


@pytest.mark.parametrize("blocks", [causal(2 * AHEAD + 2), full(3, 2 * AHEAD + 1)], ids=["causal", "full"])
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_heads_of_a_group_add_in_order(sizes, blocks):
    """With any number of CTAs, to dk and dv, too."""
    rng, heads = random.Random(f"{sizes} {len(blocks)}"), groups(blocks, 4, 2)
    for ctas in (1, 2, 5, 40):
        world = run(sizes, BACKWARD_CONFIGS[sizes][0], heads, ctas, True, rng)
        assert world.sums == in_order(heads)
        assert all(tickets == sorted(tickets) for tickets in world.sums.values())


@pytest.mark.parametrize("blocks", [1, 3, 4 * AHEAD, 4 * AHEAD + 1, 12 * AHEAD - 1])
@pytest.mark.parametrize(("heads", "group"), [(1, 1), (4, 4), (12, 4), (6, 2), (8, 1), (16, 8)])
def test_what_is_added_before_has_an_earlier_turn(blocks, heads, group):
    turns = {in_turn(i, blocks, heads, group, min): i for i in range(blocks * heads)}
    assert set(turns) == {(n, head) for n in range(blocks) for head in range(heads)}
    for (n, head), turn in turns.items():
        assert n == 0 or turns[n - 1, head] < turn
        assert head % group == 0 or turns[n, head - 1] < turn
        if head % group:  # farther away, but for the last blocks
            ahead = AHEAD * group
            assert turn - turns[n, head - 1] == min(ahead, blocks - n // ahead * ahead) * (heads // group)


# With as many tiles of dout in flight as of q, whose slot is empty later, no wait for dout_empty is needed
MISSED = [(without, sizes) for without in WAITS for sizes in ((128, 128), (256, 256))]
MISSED.remove(("dout_empty", (128, 128)))


@pytest.mark.parametrize(("without", "sizes"), MISSED, ids=str)
def test_the_model_misses_each_barrier(without, sizes):
    """Without any one kind of wait something goes wrong in some order."""
    rng = random.Random(0)
    with pytest.raises(AssertionError):
        for i in range(300):
            blocks = BLOCKS["causal" if i % 2 else "long"]
            world = run(sizes, BACKWARD_CONFIGS[sizes][0], blocks, 3, i % 3 == 0, rng, without)
            assert all(found == sorted(found) for found in world.sums.values())
