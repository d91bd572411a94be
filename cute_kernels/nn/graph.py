"""A whole training step, forward, backward and optimizer, as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cute_kernels.runtime.checks import expect, expect_tensor

# Their state begins as something else, or the host computes their rate from it
REFUSED = (torch.optim.NAdam, torch.optim.ASGD, torch.optim.Rprop, torch.optim.Adafactor)


class CapturedStep:
    """``step(*inputs)``, captured once; a call copies its inputs to the graph's own, replays it, returns its outputs.

    The warm-up that a capture needs runs ``step`` several times on a side stream. All that it changes of the model, the
    optimizer and the GPU's random numbers is put back in place, so that the first call is the first step, with the bits
    of an eager one.

    Args:
        step: forward, backward and optimizer's step on ``inputs``, which begins with
            ``optimizer.zero_grad(set_to_none=True)``; returns a tensor or a tuple of tensors (a loss, say), which the
            next call overwrites. It may read nothing back to the host.
        inputs: CUDA tensors, of the shapes and dtypes of all inputs to come.
        model: the module that ``step`` trains.
        optimizer: with ``capturable=True`` where it has that option. A setting that is to change from step to step, its
            learning rate say, must be a tensor on the GPU, and be changed in place: the rest stays as it was captured,
            and a call raises ValueError where it has changed. Its state must begin as zeros (Adam's, momentum without
            dampening), and no count of steps on the host may tell its rate: NAdam, ASGD, Rprop, Adafactor, SGD with
            dampening and Adagrad with lr_decay are refused. Load its state, and the model's, before the capture, not
            after it: the graph goes on with the tensors of then.
        warmup: runs before the capture, from 1.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.

    Example:
        >>> import torch
        >>> from cute_kernels.nn import CapturedStep
        >>> x = torch.ones(4, 8, device="cuda" if torch.cuda.is_available() else "cpu")
        >>> model = torch.nn.Linear(8, 1, device=x.device)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def step(x):
        ...     optimizer.zero_grad(set_to_none=True)
        ...     loss = model(x).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss.detach()
        >>> train = CapturedStep(step, (x,), model, optimizer) if x.is_cuda else step
        >>> train(x).shape
        torch.Size([])
    """

    def __init__(
        self,
        step: Callable[..., Any],
        inputs: tuple[Tensor, ...],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        warmup: int = 3,
    ) -> None:
        name = "CapturedStep"
        expect(callable(step), name, "step", "be callable", type(step).__name__, TypeError)
        expect(isinstance(model, nn.Module), name, "model", "be a torch.nn.Module", type(model).__name__, TypeError)
        expect(isinstance(inputs, tuple), name, "inputs", "be a tuple of tensors", type(inputs).__name__, TypeError)
        expect(len(inputs) > 0, name, "inputs", "have at least one tensor", "none")
        for t in inputs:
            expect_tensor(name, "inputs", t)
            expect(t.is_cuda, name, "inputs", "be on a GPU", t.device)
        good = isinstance(optimizer, torch.optim.Optimizer)
        expect(good, name, "optimizer", "be a torch.optim.Optimizer", type(optimizer).__name__, TypeError)
        kind = type(optimizer).__name__
        for group in optimizer.param_groups:
            good = group.get("capturable", True)
            expect(good, name, "optimizer", "be made with capturable=True", f"{kind} without")
            good = not isinstance(optimizer, REFUSED) and not (group.get("momentum") and group.get("dampening"))
            expect(good, name, "optimizer", "have a state that begins as zeros, and no dampening", kind)
            decays = f"lr_decay of {group.get('lr_decay')}, which the host computes"
            expect(not group.get("lr_decay"), name, "optimizer", "have no lr_decay", decays)
        good = type(warmup) is int and warmup >= 1
        expect(good, name, "warmup", "be an int from 1", repr(warmup))
        device = inputs[0].device
        expect_on_device(optimizer, device)
        self._inputs = tuple(t.clone() for t in inputs)
        before = _State(model, optimizer, device)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(warmup):
                step(*self._inputs)
        torch.cuda.current_stream(device).wait_stream(side)
        before.restore(model, optimizer)
        optimizer.zero_grad(set_to_none=True)
        self._optimizer, self._settings = optimizer, settings(optimizer)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=side):  # torch's own would be of the first device that captured
            self._outputs = step(*self._inputs)

    def __call__(self, *inputs: Tensor) -> Any:
        """One step on these inputs.

        Args:
            `*inputs`: tensors of the captured shapes and dtypes, on any device.

        Returns:
            The results of ``step``; the next call overwrites them.

        Raises:
            TypeError, ValueError: inputs unlike the captured ones, or a setting of the optimizer that has changed.
        """
        expect(len(inputs) == len(self._inputs), "CapturedStep", "inputs", f"be {len(self._inputs)}", len(inputs))
        for mine, t in zip(self._inputs, inputs, strict=True):
            expect_tensor("CapturedStep", "inputs", t)
            good = t.shape == mine.shape and t.dtype == mine.dtype
            wanted = f"be {mine.dtype} of shape {tuple(mine.shape)}, as captured"
            expect(good, "CapturedStep", "inputs", wanted, f"{t.dtype} of shape {tuple(t.shape)}")
            mine.copy_(t, non_blocking=True)
        expect_settings(self._optimizer, self._settings)
        self._graph.replay()
        return self._outputs


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of each group that a capture keeps for good: a tensor as an object, its value may change."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def expect_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Raise ValueError for a setting in another memory: it is read when the step is captured, and never again."""
    for group in settings(optimizer):
        for name, value in group.items():
            good = not isinstance(value, Tensor) or value.device == device
            expect(good, "CapturedStep", f"the optimizer's {name}", f"be on {device}", good or value.device)


def expect_settings(optimizer: torch.optim.Optimizer, captured: list[dict[str, Any]]) -> None:
    """Raise ValueError where the optimizer's settings are not the captured ones."""
    if len(optimizer.param_groups) != len(captured):
        expected, got = f"have the {len(captured)} groups of the capture", len(optimizer.param_groups)
        expect(False, "CapturedStep", "optimizer", expected, got)
    for group, before in zip(optimizer.param_groups, captured, strict=True):
        for name, value in before.items():
            now = group[name]
            if now is not value and (isinstance(value, Tensor) or isinstance(now, Tensor) or now != value):
                raise ValueError(
                    f"CapturedStep: the optimizer's {name} must stay as captured, got {now} in place of {value}; "
                    "make it a tensor, and change that in place"
                )


class _State:
    """All that a step changes, copied to the host, without a graph: its nodes would remember this stream."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.device = device
        self.model = {name: t.detach().to("cpu", copy=True) for name, t in _tensors(model)}
        self.optimizer = {
            p: {key: t.to("cpu", copy=True) for key, t in state.items() if isinstance(t, Tensor)}
            for p, state in optimizer.state.items()
        }
        self.random = torch.cuda.get_rng_state(device)

    @torch.no_grad()
    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for name, t in _tensors(model):
            t.copy_(self.model[name]) if name in self.model else t.zero_()
        for p, state in optimizer.state.items():
            for key, t in state.items():
                if isinstance(t, Tensor):
                    old = self.optimizer.get(p, {}).get(key)
                    t.zero_() if old is None else t.copy_(old)
        torch.cuda.set_rng_state(self.random, self.device)


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters, what a backward adds to, and buffers. ``grad``: of those that are not the optimizer's, too."""
    kinds = ("grad", "main_grad")
    sums = [(f"{name}.{kind}", getattr(p, kind, None)) for name, p in model.named_parameters() for kind in kinds]
    return [*model.named_parameters(), *((name, t) for name, t in sums if t is not None), *model.named_buffers()]
