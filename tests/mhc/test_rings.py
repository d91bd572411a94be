"""The rings of the projection by warpgroups, there and back: their roles run in Python in many orders.

A wait on an mbarrier tells adjacent phases apart, no others. So every wait must come when the phase before the awaited
one is known to be over, however late a role or a copy is. And an arrival must come when its phase has begun: before, it
would count for the one before.
"""

import itertools
import random
from collections import Counter

import pytest

from cute_kernels.mhc.config import ProjectionBackwardSpec, warpgroup_backward_config
from cute_kernels.mhc.kernel.wgmma_products import CLUSTER, loaders
from tests.mhc.cases import BF16, FP32

FLAGS = [flags for flags in itertools.product((False, True), repeat=3) if flags[0] or flags[1]]  # where they take turns
CASES = [(columns, phi, *flags) for columns in (8, 80) for phi in (BF16, FP32) for flags in FLAGS]
ITEMS = [3, 3, 3], [3, 5, 4, 1], [1, 1, 1, 1, 1, 1, 1], [16, 5, 16, 3], [5, 3, 5, 3]  # tiles of each


class Rings:
    """Barriers by (name, slot), and tasks that run between their waits; each says which use of a slot it means."""

    def __init__(self, counts: dict[str, int]):
        self.counts = counts
        self.arrived: Counter = Counter()
        self.tasks: list = []

    def arrive(self, name: str, slot: int, use: int) -> None:
        assert self.over(name, slot) == use, f"an arrival for use {use} of {name}[{slot}] came too early"
        self.arrived[name, slot] += 1

    def send(self, name: str, slot: int, use: int) -> None:
        """A copy, or an arrival at another CTA's barrier, comes sooner or later."""

        def task():
            yield None
            self.arrive(name, slot, use)

        self.tasks.append(task())

    def over(self, name: str, slot: int) -> int:
        """How many phases are."""
        return self.arrived[name, slot] // self.counts[name]

    def run(self, roles, rng) -> None:
        """In an order of priorities, changed now and then."""
        self.tasks = list(roles)
        awaited: dict = {}
        priorities: dict = {}
        while self.tasks:
            ready = []
            for task in self.tasks:
                wait = awaited.get(task)
                # The instruction tells whether the phase under way has the other parity
                if wait is None or self.over(*wait[:2]) % 2 != wait[2] % 2:
                    ready.append(task)
            assert ready, "all wait"
            task = min(ready, key=lambda task: priorities.setdefault(task, rng.random()))
            if rng.random() < 0.05:
                priorities[task] = rng.random()
            if awaited.get(task) is not None:
                name, slot, use = awaited[task]
                assert self.over(name, slot) == use + 1, f"a wait for use {use} of {name}[{slot}] came too early"
            try:
                awaited[task] = next(task)
            except StopIteration:
                self.tasks.remove(task)


def roles_of(rings: Rings, stages: int, x_stages: int, items: list[int], needs_dphi: bool, has_residual_grad: bool):
    """As in ProjectionWgmmaBackward of one CTA whose warpgroups take turns."""
    total = sum(items)

    def loader():
        for c in range(total):
            slot, use = c % stages, c // stages
            if use:
                yield "empty", slot, use - 1
            rings.send("split", slot, use)
            if has_residual_grad:
                if use:
                    yield "res_empty", slot, use - 1
                rings.send("res_full", slot, use)

    def mover():
        for count in range(total + x_stages - 1):
            if count < total:
                rings.send("x_full", count % x_stages, count // x_stages)
            if count >= x_stages - 1:
                done = count - (x_stages - 1)
                yield "done", done % x_stages, done // x_stages

    def adder():
        for c in range(total):
            yield "split", c % stages, c // stages
            yield "x_full", c % x_stages, c // x_stages
            rings.arrive("empty", c % stages, c // stages)
            rings.arrive("read", c % x_stages, c // x_stages)

    def group(turn):
        before, c = 0, turn
        for tiles in items:
            while c < before + tiles:
                yield "split", c % stages, c // stages
                rings.arrive("empty", c % stages, c // stages)
                yield "x_full", c % x_stages, c // x_stages
                if has_residual_grad:
                    yield "res_full", c % stages, c // stages
                if needs_dphi:
                    yield "read", c % x_stages, c // x_stages
                if has_residual_grad:
                    rings.arrive("res_empty", c % stages, c // stages)
                rings.arrive("done", c % x_stages, c // x_stages)
                c += 2
            before += tiles

    return [loader(), mover(), *([adder()] if needs_dphi else []), group(0), group(1)]


@pytest.mark.parametrize("columns, phi, has_residual_grad, has_layer_grad, needs_dphi", CASES)
def test_no_wait_is_early(columns, phi, has_residual_grad, has_layer_grad, needs_dphi):
    options = "io" if has_residual_grad else None, has_layer_grad, True, True
    spec = ProjectionBackwardSpec(8, 4096, "streams", columns, "tf32", BF16, phi, None, True, True, *options)
    config = warpgroup_backward_config(spec)
    assert config.x_stages >= 3 and config.stages == 2 and config.sharers == 1
    if not needs_dphi and not has_residual_grad:
        assert config.x_stages % 2 == 0
    counts = {"empty": 1 + needs_dphi, "res_empty": 1, "split": 1, "res_full": 1, "x_full": 1, "read": 1, "done": 1}
    rng = random.Random(columns)
    for _ in range(30):
        for items in ITEMS:
            rings = Rings(counts)
            rings.run(roles_of(rings, config.stages, config.x_stages, items, needs_dphi, has_residual_grad), rng)


def roles_of_pair(rings: Rings, stages: int, total: int, boxes: int):
    """As in ProjectionWgmmaForward, of both CTAs: what they bring, two warps that multiply, one that squares x."""

    def loader(rank):
        for c in range(total):
            slot, use = c % stages, c // stages
            if use:
                yield f"empty{rank}", slot, use - 1
            rings.send(f"full{rank}", slot, use)  # its own bytes of x
            if loaders(boxes) > 1:
                rings.send(f"full{1 - rank}", slot, use)
            if rank < boxes:
                for peer in range(CLUSTER):
                    rings.send(f"full{peer}", slot, use)

    def multiplier(rank):
        for c in range(total):
            slot, use = c % stages, c // stages
            yield f"full{rank}", slot, use
            for peer in range(CLUSTER):
                rings.send(f"empty{peer}", slot, use)

    def squarer(rank):
        for c in range(total):
            slot, use = c % stages, c // stages
            yield f"full{rank}", slot, use
            rings.arrive(f"empty{rank}", slot, use)

    ranks = range(CLUSTER)
    return [role(rank) for rank in ranks for role in (loader, multiplier, multiplier, squarer)]


@pytest.mark.parametrize("boxes", [1, 2, 4])
def test_no_arrival_of_a_pair_is_early(boxes):
    arrivals = 1 + min(boxes, CLUSTER) + (loaders(boxes) - 1)
    counts = {f"{name}{rank}": count for rank in range(CLUSTER) for name, count in (("full", arrivals), ("empty", 5))}
    rng = random.Random(boxes)
    for _ in range(300):
        rings = Rings(counts)
        rings.run(roles_of_pair(rings, 2, 8, boxes), rng)
