"""Activation recompute with discarded outputs: what a backward needs again is made again, block by block.

A block is a part of the forward that ends in one tensor, the hook tensor. Outputs given to a ``RecomputeManager`` in
between lose their memory at the end of the block; one hook on the hook tensor makes them again, all of them, in the
order of the forward, before the block's backward begins.

Invariants, which the backward of every operator in the block relies on:
- An output keeps its storage object: what others saved of it, views included, finds its data again.
- It is restored in place, and no version counter moves: nothing was modified in autograd's sense.
- It is restored before a later replay reads it, since replays run in the order in which they were registered.
- The hook tensor itself, and what shares its memory, is never released.
- Nobody outside of the block reads an output after its end, and no backward but the block's own: its memory is gone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.compiler import is_compiling
from torch.utils._pytree import tree_leaves

from cute_kernels.runtime.autograd import first_derivative_only, needs_gradient
from cute_kernels.runtime.checks import expect, expect_tensor

Replay = Callable[[], None]


class RecomputeManager:
    """The discarded outputs of one block, and how each is made again. A new block takes a new manager.

    No graph of torch.compile can have one: a ``TransformerLayer`` that gets one runs in eager mode.

    Raises:
        RuntimeError: inside of torch.utils.checkpoint with use_reentrant=False, which would replay the block, too; its
            methods raise it as well.

    Example:
        >>> import torch
        >>> from cute_kernels.nn import RecomputeManager
        >>> x, recompute = torch.ones(2, 4, requires_grad=True), RecomputeManager()
        >>> h = recompute.checkpoint(torch.square, x)
        >>> y = h * h
        >>> recompute.end_block(y)
        >>> h.untyped_storage().nbytes()  # discarded; the backward makes it again
        0
        >>> y.sum().backward()
        >>> x.grad[0, 0].item()
        4.0
    """

    def __init__(self) -> None:
        self._discarded: list[_Discarded] = []
        self._ended = False
        self._check_open("the constructor")

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, of which the inputs alone are kept: run without a graph, its outputs discarded.

        The replay runs it again, with a graph, the same random numbers (the CPU's, and those of the tensors' devices)
        and the same autocast. Gradients go to the tensors in ``args`` and to parameters that ``function`` reaches by
        itself; to these not from torch.autograd.grad or backward(inputs=...), which cannot ask for them: the backward
        raises RuntimeError. Where no tensor in ``args`` requires grad it runs as it is, and nothing is discarded.

        Args:
            function: returns a tensor or a tuple of tensors, all of them in memory of their own: none is a view of an
                argument, of a tensor that an argument holds, or of one that ``function`` reaches by itself.
            `*args`: tensors and any other objects, in any order; the gradient of an object that is no tensor is None:
                the tensors that a list, tuple or dict holds may not require grad.

        Returns:
            The results of ``function``.

        Raises:
            RuntimeError: the block has ended; in a CUDA graph's capture.
            TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        """
        self._check_open("checkpoint")
        expect(callable(function), "checkpoint", "function", "be callable", type(function).__name__, TypeError)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "RecomputeManager: checkpoint cannot run in a CUDA graph's capture, where the state of the random "
                "numbers is out of reach. The kernels' hyper-connections recompute without it"
            )
        if not any(t.requires_grad for t in _Call.tensors(args)):
            return function(*args)
        held = _Call.read(tuple(a for a in args if not isinstance(a, Tensor)))
        expected = "hold no tensor that requires grad in a list, tuple or dict: its gradient would be lost"
        expect(not any(t.requires_grad for t in held), "checkpoint", "args", expected, "one that does")
        call = _Call(function, args)
        inputs = _Inputs({f"checkpoint: tensor argument {i}": t for i, t in enumerate(call.read(args))})
        results = _Checkpoint.apply(call, *call.tensors(args))
        outputs = results if isinstance(results, tuple) else (results,)
        storages = {_storage(t) for t in call.read(args)}
        for output in outputs:
            expected, kind = "return a tensor or a tuple of tensors", type(output).__name__
            expect(isinstance(output, Tensor), "checkpoint", "function", expected, kind, TypeError)
            expected = "return tensors in memory of their own"
            expect(_storage(output) not in storages, "checkpoint", "function", expected, "a view of an argument")
            good = output.untyped_storage().nbytes() >= output.nbytes
            expect(good, "checkpoint", "function", expected, "elements that share their memory")
            good = not (output.is_conj() or output.is_neg())
            expect(good, "checkpoint", "function", expected, "numbers that torch negates when it reads them")
        if any(output.requires_grad for output in outputs):
            self._discarded.append(_Discarded(outputs, call.replay, inputs, always=True))
        return results

    def discard(
        self,
        outputs: tuple[Tensor, ...],
        refill: Callable[..., None],
        inputs: Mapping[str, Tensor | None] | None = None,
    ) -> None:
        """Discard outputs of an operator that has a graph of its own.

        Args:
            outputs: tensors whose memory is released at the end of the block.
            refill: called with a tensor for each output, of its place in memory but with a version counter of its own;
                writes there the output's old numbers. Not called where the block ends in these outputs alone.
            inputs: the tensors that ``refill`` reads, by the names that errors have.

        Raises:
            RuntimeError: the block has ended; in the backward, an input was modified in place, or has no memory.
            TypeError: outputs is no tuple.
        """
        self._check_open("discard")
        if not isinstance(outputs, tuple):
            expect(False, "discard", "outputs", "be a tuple of tensors", type(outputs).__name__, TypeError)
        read = _Inputs({name: t for name, t in (inputs or {}).items() if t is not None})
        self._discarded.append(_Discarded(outputs, refill, read, always=False))

    def entry_of(self, output: Tensor) -> _Discarded | None:
        """As what ``output`` was discarded in this block, and others may ``join`` it; None of any other tensor."""
        found = [d for d in self._discarded if any(t is output for t in d.outputs)]
        return found[0] if found else None

    def end_block(self, hook_tensor: Tensor) -> None:
        """Release the memory of all outputs and leave the one hook that brings them back on ``hook_tensor``.

        Args:
            hook_tensor: the tensor that the block ends in; requires grad.

        Raises:
            TypeError: hook_tensor is no tensor.
            ValueError: it does not require grad: its hook would never run, and the data would be lost.
            RuntimeError: the block has ended before; an output was modified in place, which a replay would undo.
        """
        self._check_open("end_block")
        expect_tensor("end_block", "hook_tensor", hook_tensor)
        expect(
            hook_tensor.requires_grad,
            "end_block",
            "hook_tensor",
            "require grad, or the discarded outputs would be lost",
            "one that does not (in evaluation, do without a manager)",
        )
        if any(d.was_modified() for d in self._discarded):
            raise RuntimeError("RecomputeManager: a discarded output was modified in place; its replay would undo that")
        self._ended = True
        kept = _storage(hook_tensor)
        storages, replays = {}, []
        for discarded in self._discarded:
            made = discarded.outputs + discarded.joined
            released = {_storage(t): t.untyped_storage() for t in made if _storage(t) != kept}
            storages.update(released)
            if released or discarded.always:
                replays.append(discarded.replay(kept))
        self._discarded = []
        if replays:
            hook_tensor.register_hook(_Block(list(storages.values()), replays))

    def _check_open(self, method: str) -> None:
        expect_no_checkpoint("RecomputeManager: recompute")
        if self._ended:
            raise RuntimeError(f"RecomputeManager: {method} after end_block; a new block takes a new manager")


def expect_manager(op: str, recompute: object) -> None:
    """Raise TypeError unless ``recompute`` is a manager or None."""
    good = recompute is None or isinstance(recompute, RecomputeManager)
    expect(good, op, "recompute", "be a RecomputeManager or None", type(recompute).__name__, TypeError)


def expect_no_checkpoint(what: str) -> None:
    """Raise RuntimeError inside of a checkpoint, whose replay would read what is not there (any more, or yet)."""
    if not is_compiling() and any(pack.__module__ == "torch.utils.checkpoint" for pack, _ in _saved_tensors_hooks()):
        raise RuntimeError(f"{what} inside of torch.utils.checkpoint: use one of them")


def _saved_tensors_hooks() -> list[tuple[Callable, Callable]]:
    """All of this thread, the topmost first, of which torch shows that one alone."""
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(hooks):
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
    return hooks


class _Inputs:
    """The tensors that a replay reads, by name, and how often each had been modified in place."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = [(name, t, _version(t)) for name, t in tensors.items()]

    def check(self) -> None:
        """Raise RuntimeError where one is not what it was."""
        for name, t, version in self.tensors:
            if _version(t) != version:
                raise RuntimeError(f"{name} was modified in place after the forward")
            if t.numel() and not t.untyped_storage().nbytes():
                raise RuntimeError(
                    f"{name} has no memory when the block is replayed. Of a parameter of fully_shard: pass "
                    "reshard_after_forward=False, with a backward before the next forward, or recompute in blocks of "
                    "one layer (recompute_layers=1)"
                )


def _refill(inputs: _Inputs, refill: Callable[..., None], *outputs: Tensor | None) -> None:
    inputs.check()
    refill(*outputs)


class _Discarded:
    """Outputs and what makes them again; ``always``: also where the block ends in them, which it gets None for."""

    def __init__(
        self, outputs: tuple[Tensor, ...], refill: Callable[..., None], inputs: _Inputs, *, always: bool
    ) -> None:
        self.outputs = outputs
        self.inputs = inputs
        self.joined: tuple[Tensor, ...] = ()
        self.versions = tuple(t._version for t in outputs)
        self.refill = refill
        self.always = always

    def join(self, outputs: tuple[Tensor, ...]) -> None:
        """Discard more outputs, before the block's end, which the refill makes, too.

        It gets their tensors after those of ``discard``, None for one that the block ends in.
        """
        self.joined += outputs
        self.versions += tuple(t._version for t in outputs)

    def was_modified(self) -> bool:
        return self.versions != tuple(t._version for t in self.outputs + self.joined)

    def replay(self, kept: int) -> Replay:
        """Holds no output, only their memory's objects; ``kept``: the storage that the block ends in."""

        def place(t: Tensor) -> Tensor | None:
            return None if _storage(t) == kept else _alias(t)

        own = map(place if self.always else _alias, self.outputs)
        return functools.partial(_refill, self.inputs, self.refill, *own, *map(place, self.joined))


class _Block:
    """The hook: allocates what was released and runs the replays, once."""

    def __init__(self, storages: list[torch.UntypedStorage], replays: list[Replay]) -> None:
        self.replays = replays
        self.released = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)

    def __call__(self, gradient: Tensor) -> None:
        while self.released:  # forgotten one by one: where one fails, a second backward goes on from there
            storage, size = self.released[0]
            storage.resize_(size)
            del self.released[0]
        with torch.no_grad():
            while self.replays:
                self.replays[0]()
                del self.replays[0]


class _Call:
    """A function, its arguments, and the random numbers and autocast that it began with."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function = function
        self.args: tuple[Any, ...] = args
        self.devices = sorted({t.get_device() for t in self.tensors(args) if t.is_cuda})
        self.cpu_state = torch.get_rng_state()
        self.cuda_states = [torch.cuda.get_rng_state(device) for device in self.devices]
        types = {"cpu", *(t.device.type for t in self.tensors(args))}
        types = sorted(filter(torch.amp.is_autocast_available, types))
        self.autocast = [(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types]
        self.graph: tuple[tuple[Tensor, ...], list[Tensor]] | None = None

    @staticmethod
    def tensors(args: tuple[Any, ...]) -> list[Tensor]:
        return [a for a in args if isinstance(a, Tensor)]

    @staticmethod
    def read(args: tuple[Any, ...]) -> list[Tensor]:
        """Those, and what lists, tuples and dicts among the arguments hold."""
        return [a for a in tree_leaves(args) if isinstance(a, Tensor)]

    def replay(self, *aliases: Tensor | None) -> None:
        """Run the function with a graph and fill ``aliases`` with its outputs, but for those of None."""
        args = tuple(_leaf(a) if isinstance(a, Tensor) else a for a in self.args)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(self.devices))
            stack.enter_context(torch.enable_grad())
            for device_type, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=enabled))
            torch.set_rng_state(self.cpu_state)
            for device, state in zip(self.devices, self.cuda_states, strict=True):
                torch.cuda.set_rng_state(state, device)
            results = self.function(*args)
        outputs = results if isinstance(results, tuple) else (results,)
        for alias, output in zip(aliases, outputs, strict=True):
            if alias is not None:
                alias.copy_(output.detach())
        self.graph = outputs, self.tensors(args)


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, *tensors):
        ctx.call = call
        ctx.set_materialize_grads(False)
        return call.function(*call.args)

    @staticmethod
    @first_derivative_only
    def backward(ctx, *gradients):
        call = ctx.call
        if call.graph is None:
            raise RuntimeError(
                "checkpoint: nothing to differentiate: end_block was not called before the backward, or this is a "
                "second backward of one forward, which recompute does not support"
            )
        outputs, leaves = call.graph
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
        inputs = None  # of the backward in here: all that there are
        if not torch.autograd._is_checkpoint_valid():
            if not {id(leaf) for leaf in leaves}.issuperset(map(id, _reached(o for o, _ in pairs))):
                raise RuntimeError(
                    "checkpoint: the function reaches parameters by itself, whose gradients torch.autograd.grad and "
                    "backward(inputs=...) cannot ask for: pass them as arguments"
                )
            given = zip(leaves, call.tensors(call.args), strict=True)
            inputs = [s for s, t in given if needs_gradient(s.requires_grad, t, getattr(t, "main_grad", None))]
        call.graph, call.args = None, ()
        found: list[Tensor | None] = [None] * len(leaves)
        for i, leaf in enumerate(leaves):
            if leaf.requires_grad:  # a hook sees a gradient in the layout that it came in; ``grad`` may be a copy of it
                node = get_gradient_edge(leaf).node  # whose hooks main_grad admits
                node.register_prehook(lambda gradients, i=i: found.__setitem__(i, gradients[0]))
        if pairs and (inputs is None or inputs):
            torch.autograd.backward(*zip(*pairs, strict=True), inputs=inputs)
        return None, *found


def _reached(outputs: Iterable[Tensor]) -> list[Tensor]:
    """The leaves that a backward from there adds gradients to."""
    leaves, nodes, seen = [], [output.grad_fn for output in outputs], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [function for function, _ in node.next_functions]
            leaves += [node.variable] if type(node).__name__ == "AccumulateGrad" else []
    return leaves


def _storage(t: Tensor) -> int:
    """Which storage object a tensor has."""
    return t.untyped_storage()._cdata


def _version(t: Tensor) -> int | None:
    """How often it was modified in place; None of an inference tensor, which does not count."""
    return None if t.is_inference() else t._version


def _alias(t: Tensor) -> Tensor:
    """The same memory under a version counter of its own."""
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(
        t.untyped_storage(), t.storage_offset(), t.size(), t.stride()
    )


def _leaf(t: Tensor) -> Tensor:
    """A leaf for the replay's graph, which delivers to the parameter's ``main_grad`` where it has one."""
    leaf = t.detach().requires_grad_(t.requires_grad)
    if getattr(t, "main_grad", None) is not None:
        leaf.main_grad = t.main_grad
        if t._backward_hooks:  # what adds to main_grad then refuses the leaf as it would the parameter
            leaf.register_hook(lambda gradient: None)
    return leaf
