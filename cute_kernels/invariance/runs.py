"""Runs a function on chosen rows of a sample, and records its outputs, its submodules' and all gradients."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cute_kernels.runtime.checks import expect, expect_tensor

FILLER = -1  # in a list of rows: a row that the sample does not have, and that is not compared
Rows = list[int]


@dataclasses.dataclass(frozen=True)
class Run:
    rows: dict[str, Tensor]  # in order of execution; dimension 0 may be the batch
    sums: dict[str, Tensor]  # gradients of parameters


class Runner:
    """Runs the function on given rows of the sample, and records all that can be compared."""

    def __init__(self, function, sample: tuple[Tensor, ...], gradients: bool, seed: int) -> None:
        self.function, self.gradients, self.seed = function, gradients, seed
        self.sample = [tensor.detach() for tensor in sample]
        self.notes: dict[str, None] = {}  # an ordered set
        self.compared: list[str] = []
        self.returned = ""  # by the function, in words
        self.incoming: dict[str, Tensor] | None = None  # gradients of the outputs
        self.entered: dict[str, Tensor] = {}  # inputs of submodules, in the order of the calls
        self.left: dict[str, Tensor] = {}  # their outputs, in the order of the returns
        self.parameters: dict[str, nn.Parameter] = {}
        if isinstance(function, nn.Module) and gradients:
            self.parameters = {name: p for name, p in function.named_parameters() if p.requires_grad}
        for name, p in self.parameters.items():
            if _main_grad(p) is not None:
                expect_tensor("check_invariance", f"parameter {name}.main_grad", _main_grad(p))

    def survey(self, rows: Rows) -> None:
        """Finds which tensors have the batch as dimension 0: their length follows the number of rows."""
        runs = [(len(rows), self.run(rows).rows)]
        for fewer in dict.fromkeys((len(rows) - 1, max(1, len(rows) - 2), len(rows) // 2)):
            try:
                runs.append((fewer, self.run(rows[:fewer]).rows))
                break
            except Exception as error:  # the cases will tell
                self.note(f"fails on {fewer} rows: {summary(error)}")
        for name, tensor in runs[0][1].items():
            if all(has_rows(run.get(name), count) for count, run in runs):
                self.compared.append(name)
            else:
                self.note(f"{name} of shape {tuple(tensor.shape)} is not compared: dimension 0 is not the batch")
        if not any(name.startswith("output") for name in self.compared):
            got = {name: tuple(tensor.shape) for name, tensor in runs[0][1].items() if name.startswith("output")}
            expected = "return a tensor with dimension 0 as the batch, or tuples, lists, mappings, dataclasses of such"
            expect(False, "check_invariance", "module_or_fn", expected, got or self.returned)
        self.incoming = {name: dy for name, dy in (self.incoming or {}).items() if name in self.compared}
        if self.gradients and not self.incoming:
            self.note("no output requires a gradient: gradients are not compared")

    def run(self, rows: Rows, filler: str = "zeros") -> Run:
        generator = torch.Generator().manual_seed(self.seed)
        chosen = _chosen(rows, len(self.sample[0]), generator)
        inputs = [_take(tensor, rows, chosen, filler, generator) for tensor in self.sample]
        self.entered, self.left = {}, {}
        leaves = {f"input[{i}]": x for i, x in enumerate(inputs) if self.gradients and x.is_floating_point()}
        for leaf in leaves.values():
            leaf.requires_grad_()
        for parameter in self.parameters.values():
            if _main_grad(parameter) is not None:
                parameter.main_grad = torch.zeros_like(parameter.main_grad)
        with torch.set_grad_enabled(self.gradients):
            result = self.function(*inputs)
            outputs = dict(self.tensors("output", result))
        self.returned = f"{type(result).__name__} without a tensor"
        found = {**self.left, **{name: _kept(tensor) for name, tensor in outputs.items()}}
        gradients, sums = self.differentiate(outputs, leaves, rows, chosen, filler, generator)
        return Run({**found, **gradients}, sums)

    def differentiate(self, outputs, leaves, rows: Rows, chosen, filler: str, generator) -> tuple[dict, dict]:
        """Gradients of inputs, the function's and the submodules', and of parameters."""
        outputs = {name: x for name, x in outputs.items() if x.requires_grad and has_rows(x, len(rows))}
        if self.incoming is None:  # the first run, of the sample itself
            self.incoming = {name: _made_up("noise", x.shape, generator).to(x) for name, x in outputs.items()}
        outputs = {name: x for name, x in outputs.items() if name in self.incoming}
        # The last submodule's backward runs first
        wanted = {name: x for name, x in reversed(self.entered.items()) if x.requires_grad} | leaves
        sources = [*wanted.values(), *self.parameters.values()]
        if not outputs or not sources:
            return {}, {}
        incoming = [_take(self.incoming[name], rows, chosen, filler, generator) for name in outputs]
        found = torch.autograd.grad(list(outputs.values()), sources, incoming, allow_unused=True)
        gradients = {f"grad of {name}": grad for name, grad in zip(wanted, found, strict=False)}
        sums = {}
        for (name, parameter), grad in zip(self.parameters.items(), found[len(wanted) :], strict=True):
            sums[f"grad of parameter {name}"] = _main_grad(parameter) if grad is None else grad
        for name in [name for name, grad in (gradients | sums).items() if grad is None]:
            self.note(f"{name} is not compared: there is none")
        return tuple({name: _kept(g) for name, g in part.items() if g is not None} for part in (gradients, sums))

    def tensors(self, name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
        """The tensors in a result, named by where they are."""
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (tuple, list, Mapping)):
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            for key, item in items:
                yield from self.tensors(f"{name}[{key!r}]", item)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                yield from self.tensors(f"{name}.{field.name}", getattr(value, field.name))
        elif value is not None:
            self.note(f"{name} is not compared: a {type(value).__name__}")

    def note(self, text: str) -> None:
        self.notes[text] = None

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Records submodules' inputs and outputs; afterwards the module is as it was."""
        if not isinstance(self.function, nn.Module):
            yield
            return
        parameters = [(p, p.grad, _main_grad(p)) for p in self.function.parameters()]
        buffers = [
            (module, name, buffer, buffer.clone())
            for module in self.function.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        handles = []
        try:
            for name, module in self.function.named_modules():
                if name:
                    handles.append(
                        module.register_forward_pre_hook(functools.partial(self.enter, name), with_kwargs=True)
                    )
                    handles.append(module.register_forward_hook(functools.partial(self.leave, name)))
            for parameter, _, _ in parameters:
                parameter.grad = None
            yield
        finally:
            for handle in handles:
                handle.remove()
            for parameter, grad, main_grad in parameters:
                parameter.grad = grad
                if main_grad is not None:
                    parameter.main_grad = main_grad
            for module, name, buffer, before in buffers:
                setattr(module, name, buffer)
                with torch.no_grad():
                    buffer.copy_(before)

    def enter(self, name: str, module: nn.Module, arguments: tuple, named: dict[str, Any]) -> None:
        for key, argument in {**dict(enumerate(arguments)), **named}.items():
            if isinstance(argument, Tensor):
                self.entered[_unused(f"module {name}, input[{key!r}]", self.entered)] = argument

    def leave(self, name: str, module: nn.Module, arguments: tuple, result: Any) -> None:
        for where, tensor in self.tensors(f"module {name}", result):
            self.left[_unused(where, self.left)] = _kept(tensor)


def _chosen(rows: Rows, count: int, generator: torch.Generator) -> Tensor:
    """The rows, with one of the sample's ``count`` for FILLER: of all tensors the same, which may belong together."""
    chosen = torch.tensor(rows, device="cpu")  # as the generator, whatever the default device is
    made_up = chosen == FILLER
    chosen[made_up] = torch.randint(count, (int(made_up.sum()),), generator=generator, device="cpu")
    return chosen


def _take(tensor: Tensor, rows: Rows, chosen: Tensor, filler: str, generator: torch.Generator) -> Tensor:
    """A contiguous copy of the chosen rows, with made-up numbers for FILLER."""
    made_up = [position for position, row in enumerate(rows) if row == FILLER]
    taken = tensor[chosen.to(tensor.device)].contiguous()
    if made_up and tensor.is_floating_point():
        content = _made_up(filler, (len(made_up), *tensor.shape[1:]), generator)
        taken[torch.tensor(made_up, device=tensor.device)] = content.to(taken)
    return taken


def _made_up(filler: str, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    if filler in ("noise", "large"):
        return torch.randn(shape, generator=generator, device="cpu") * (1e4 if filler == "large" else 1.0)
    return torch.full(shape, {"zeros": 0.0, "inf": float("inf"), "nan": float("nan")}[filler], device="cpu")


def _kept(tensor: Tensor) -> Tensor:
    """A dense copy: what follows may work in place, and the next run may write into the same memory."""
    return tensor.detach().to_dense().clone()


def has_rows(tensor: Tensor | None, rows: int) -> bool:
    return tensor is not None and tensor.dim() > 0 and len(tensor) == rows


def _main_grad(parameter: nn.Parameter) -> Tensor | None:
    return getattr(parameter, "main_grad", None)


def _unused(name: str, names: Mapping[str, Tensor]) -> str:
    """The name of a module's second call and so on."""
    calls = 1
    while (numbered := name if calls == 1 else f"{name}, call {calls}") in names:
        calls += 1
    return numbered


def summary(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
