"""Blocks of batch_invariant that do not end in the order in which they began: each keeps its promise until it ends."""

import asyncio
import contextlib
import functools
import threading

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from cute_kernels import UncoveredOperatorError, batch_invariant
from cute_kernels.invariance import scopes
from tests.fakes import covered

pytestmark = pytest.mark.filterwarnings("ignore:batch_invariant")


@pytest.fixture(autouse=True)
def tensors_as_of_a_gpu():
    with covered():
        yield
    assert stance() == "default"


def stance() -> str:
    """torch.compile's: "default", what a user set, or that which sends functions to our backend."""
    found = torch._dynamo.eval_frame._stance
    return "ours" if found.backend in (scopes._refusing_backend, scopes._warning_backend) else found.stance


def call() -> str:
    """How an operator runs that no block covers."""
    try:
        torch.ones(2).cumprod(0)
    except UncoveredOperatorError:
        return "refused"
    return "runs"


class Seen(TorchDispatchMode):
    """A mode that is not of this library: it counts operators."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func is torch.ops.aten.cumprod.default
        return func(*args, **kwargs or {})


class SeenFunctions(TorchFunctionMode):
    def __init__(self):
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += func is torch.Tensor.cumprod
        return func(*args, **kwargs or {})


def steps(mode, counters=None):
    """A generator that is in a block between its first step and its second."""
    with batch_invariant(mode) as uncovered:
        if counters is not None:
            counters.append(uncovered)
        yield


def end(generator):
    assert next(generator, "ended") == "ended"


@pytest.mark.parametrize("first", ["warn", "strict", "off"])
def test_generators_in_turn(first):
    """The second block is strict until it ends, though the first one ends before."""
    a, b = steps(first), steps("strict")
    next(a), next(b)
    assert call() == "refused"
    end(a)
    assert call() == "refused" and stance() == "ours"
    end(b)
    assert call() == "runs"


def test_counters_of_their_own():
    """Each counts what ran while its block was live."""
    counters = []
    a, b = steps("warn", counters), steps("warn", counters)
    next(a), call(), next(b), call(), end(a), call(), call(), end(b), call()
    assert [c.total() for c in counters] == [2, 3]


def test_a_stronger_block_that_ends_before_a_weaker_one():
    """The operators that ran since the other began were not held to it."""
    a, b = steps("strict"), steps("warn")
    next(a), next(b)
    with pytest.raises(RuntimeError, match="'strict' ends before one of mode 'warn'"):
        next(a)
    assert call() == "runs"
    end(b)


def test_an_exception_is_not_replaced():
    a, b = steps("strict"), steps("warn")
    next(a), next(b)
    with pytest.raises(KeyError):
        a.throw(KeyError())
    end(b)


def test_tasks_in_turn():
    async def first(begun, ended):
        with batch_invariant("strict"):
            begun.set()
            await asyncio.sleep(0)
            assert call() == "refused"
        ended.set()

    async def second(begun, ended):
        await begun.wait()
        with batch_invariant("strict"):
            await ended.wait()
            assert call() == "refused"
        assert call() == "runs"

    async def main():
        events = asyncio.Event(), asyncio.Event()
        await asyncio.gather(first(*events), second(*events))

    asyncio.run(main())


def test_tasks_of_two_modes():
    """One would decide for the other: it is refused when it begins. In a task of the block's own it is nested."""

    async def block(mode, inside):
        with batch_invariant(mode):
            await inside()

    async def main():
        begun, done = asyncio.Event(), asyncio.Event()

        async def wait():
            begun.set()
            await done.wait()

        task = asyncio.create_task(block("strict", wait))
        await begun.wait()
        with pytest.raises(RuntimeError, match="of mode 'off' cannot begin: one of mode 'strict' is live"):
            await block("off", wait)
        assert call() == "refused"
        done.set()
        await task

        async def nested():
            await asyncio.create_task(block("off", functools.partial(asyncio.sleep, 0)))

        await block("strict", nested)
        await block("off", functools.partial(asyncio.sleep, 0))

    asyncio.run(main())


def test_a_block_that_ends_in_another_thread():
    a = steps("strict")
    next(a)
    errors = []

    def run():
        try:
            next(a, None)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(errors) == 1 and "must end in the thread that it began in" in errors[0]
    assert call() == "runs" and stance() == "default"
    with batch_invariant():  # takes what the other one left with it
        assert call() == "refused"


def test_a_block_twice():
    block = batch_invariant()
    with block:
        with pytest.raises(RuntimeError, match="cannot begin again"):
            block.__enter__()
        assert call() == "refused"
    assert call() == "runs"
    with block:
        assert call() == "refused"
    with pytest.raises(RuntimeError, match="that has not begun"):
        block.__exit__(None, None, None)


def test_functions_that_run_after_their_block():
    """A decorator that called them would cover nothing."""

    def generator():
        yield

    async def coroutine():
        pass

    async def both():
        yield

    for function in (generator, coroutine, both, functools.partial(generator)):
        with pytest.raises(TypeError, match="the decorated function must be no generator function and not async"):
            batch_invariant()(function)


def test_a_decorated_function_that_calls_itself():
    @batch_invariant()
    def function(depth):
        """Its own."""
        assert call() == "refused"
        return depth and function(depth - 1)

    assert function(2) == 0 and function.__doc__ == "Its own."
    assert call() == "runs"


@pytest.mark.parametrize("kind", [Seen, SeenFunctions])
def test_modes_of_others_begin_and_end_when_they_like(kind):
    """One that began before the block, or in it, ends before it or after it."""
    for order in ("before, in", "before, after", "in, in", "in, after"):
        began, ended = order.split(", ")
        block, other = batch_invariant(), kind()
        enter = [block, other] if began == "in" else [other, block]
        leave = [block, other] if ended == "after" else [other, block]
        for manager in enter:
            manager.__enter__()
        assert call() == "refused" and other.calls == 1, order
        leave[0].__exit__(None, None, None)
        assert (call() == "refused") == (leave[0] is other), order
        assert other.calls == 1 + (leave[0] is block), order
        leave[1].__exit__(None, None, None)
        assert call() == "runs", order


def test_what_counts_flops_sees_torchs_operators():
    a = torch.ones(4, 8, dtype=torch.float64)
    for order in ("outside", "inside"):
        with contextlib.ExitStack() as stack:
            flops = FlopCounterMode(display=False)
            for manager in (flops, batch_invariant("warn")) if order == "outside" else (batch_invariant("warn"), flops):
                stack.enter_context(manager)
            a @ a.T
        assert flops.get_total_flops() == 2 * 4 * 8 * 4, order


def test_the_stance_that_others_set():
    """One that ends inside of a block is not brought back by the block's end; one that is set inside stays."""
    block = batch_invariant()
    with torch.compiler.set_stance("eager_on_recompile"):
        block.__enter__()
    block.__exit__(None, None, None)
    assert stance() == "default"
    try:
        with batch_invariant():
            torch.compiler.set_stance("eager_on_recompile")
        assert stance() == "eager_on_recompile"
    finally:
        torch.compiler.set_stance("default")


@pytest.mark.parametrize("seed", range(20))
def test_any_order(seed):
    """Against a model: the live block that began last decides, all that are live count."""
    draw = torch.Generator().manual_seed(seed)

    def chosen(choices):
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    live, others, expected, counters = [], [], {}, {}
    for _ in range(60):
        action = chosen(["begin", "begin", "end", "end", "call", "call", "other begins", "other ends"])
        if action == "begin" and len(live) < 5:
            mode = chosen(["strict", "warn", "off"])
            block = batch_invariant(mode)
            counters[block], expected[block] = block.__enter__(), 0
            live.append((block, mode))
        elif action == "end" and live:
            ended = chosen(live)
            later = [mode for _, mode in live[live.index(ended) + 1 :]]
            live.remove(ended)
            weaker = {"strict": {"warn", "off"}, "warn": {"off"}, "off": set()}[ended[1]]
            good = weaker.isdisjoint(later)
            with contextlib.nullcontext() if good else pytest.raises(RuntimeError, match="ends before one of mode"):
                ended[0].__exit__(None, None, None)
        elif action == "call":
            deciding = live[-1][1] if live else "off"
            seen = [other.calls for other, _ in others]
            assert call() == ("refused" if deciding == "strict" else "runs")
            assert [other.calls for other, _ in others] == [calls + 1 for calls in seen]
            for block, _ in live if deciding == "warn" else ():
                expected[block] += 1
        elif action == "other begins" and len(others) < 3:
            others.append((Seen(), SeenFunctions()))
            for other in others[-1]:
                other.__enter__()
        elif action == "other ends" and others:
            for other in others.pop():
                other.__exit__(None, None, None)
        assert stance() == ("ours" if live and live[-1][1] != "off" else "default")
    for block, _ in reversed(live):
        block.__exit__(None, None, None)
    for other in sum(reversed(others), ()):
        other.__exit__(None, None, None)
    assert {block: counters[block].total() for block in counters} == expected
