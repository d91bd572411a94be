"""The error for an operator that is not covered, and what it says: the operator, who called it, what to use instead."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

_SKIPPED = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent}/")


class UncoveredOperatorError(RuntimeError):
    """An operator that may sum in an order that depends on the batch, inside ``batch_invariant("strict")``.

    Its message names the operator, dtypes and shapes, the first line outside of torch that led to it, and what to use
    instead.

    Example:
        >>> import torch
        >>> from cute_kernels import UncoveredOperatorError, batch_invariant
        >>> try:
        ...     with batch_invariant("strict"):
        ...         y = torch.ones(2, 4).cumprod(0)  # on a GPU it is not covered
        ... except UncoveredOperatorError as error:
        ...     print(error)
    """


class Place(NamedTuple):
    """A line of Python."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, in {self.function}" if self.file else "a backward"


def caller() -> Place:
    """The innermost line outside of torch and of this package; none in a thread of autograd's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    return Place("", 0, "") if frame is None else Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def uncovered(name: str, arguments: tuple[Any, ...], reason: str) -> UncoveredOperatorError:
    """The error for a call of an operator."""
    instead = f": {reason}" if reason else ""
    return UncoveredOperatorError(
        f"batch_invariant: {name} of {', '.join(signatures(arguments))} is not covered{instead}. It was called at "
        f"{caller()}. The mode 'warn' lets it run"
    )


def signatures(values: Iterable[Any]) -> list[str]:
    """Dtype and shape of each tensor."""
    return [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors(values)]


def tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those among the arguments, and in their lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)
