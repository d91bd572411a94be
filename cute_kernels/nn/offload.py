"""Residuals kept for the backward in host memory instead of the GPU's."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.nn.recompute import expect_no_checkpoint
from cute_kernels.runtime.checks import expect


class ResidualOffload:
    """The residuals of one forward that are kept for the backward in host memory.

    ``keep(x, out)`` copies x to pinned memory on a side stream. The next call waits for that copy and releases the
    GPU's memory, in place, as ``RecomputeManager`` does; the last residual stays on the GPU, where the backward begins.
    A hook on ``out`` brings x back before the backward of the operator that computed ``out`` from x, and starts to
    bring the one before it, so that it comes while the backward computes; nobody else may read that one before its own
    hook has run.

    Example:
        >>> import torch
        >>> from cute_kernels.nn import ResidualOffload
        >>> x = torch.ones(4, 8, device="cuda" if torch.cuda.is_available() else "cpu", requires_grad=True)
        >>> offload, h = ResidualOffload(), x * 1
        >>> out = h * h
        >>> if h.is_cuda:  # the CPU has no other memory
        ...     offload.keep(h, out)
        >>> out.sum().backward()
        >>> x.grad[0, 0].item()
        2.0
    """

    def __init__(self) -> None:
        self._last: _Move | None = None

    def keep(self, x: Tensor, out: Tensor) -> None:
        """Move x to the host until the backward of ``out``.

        Args:
            x: a residual on a GPU; read by nothing but the operator that computes ``out``, forward and backward.
            out: the next residual, computed from x; requires grad.

        Raises:
            ValueError: x is not on a GPU, or ``out`` does not require grad.
            RuntimeError: in a CUDA graph's capture; inside of torch.utils.checkpoint, which reads x before it is back.
        """
        expect_no_checkpoint("ResidualOffload: offload")
        expect(x.is_cuda, "ResidualOffload", "x", "be on a GPU (set offload=False on the CPU)", x.device)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("ResidualOffload: cannot run in a CUDA graph's capture; set offload=False")
        expect(out.requires_grad, "ResidualOffload", "out", "require grad", "one that does not")
        if self._last is not None:
            self._last.release()
        self._last = _Move(x, self._last)
        out.register_hook(self._last)


class _Move:
    """One residual: to the host, and back."""

    def __init__(self, x: Tensor, previous: _Move | None) -> None:
        self.back: torch.cuda.Event | None = None  # first: it is asked for where there is no host memory, too
        self.previous = previous
        self.storage = x.untyped_storage()
        self.size = self.storage.nbytes()
        self.side = _side_stream(x.get_device())
        self.host: Tensor | None = torch.empty(self.size, dtype=torch.uint8, pin_memory=True)
        self.side.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self.side):
            self.host.copy_(self._bytes(), non_blocking=True)
            self.copied = self.side.record_event()
        self.released = False

    def release(self) -> None:
        """The work enqueued from here on may have the GPU's memory: it waits for the copy."""
        torch.cuda.current_stream(self.side.device).wait_event(self.copied)
        self.storage.resize_(0)
        self.released = True

    def start(self) -> None:
        """Begin to bring it back."""
        if not self.released or self.back is not None:
            return
        self.storage.resize_(self.size)
        self.stream = torch.cuda.current_stream(self.side.device)  # whose memory that is
        self.side.wait_stream(self.stream)
        with torch.cuda.stream(self.side):
            self._bytes().copy_(self.host, non_blocking=True)
            self.back = self.side.record_event()

    def __call__(self, gradient: Tensor) -> None:
        previous, self.previous = self.previous, None
        self.start()
        if self.back is not None:
            torch.cuda.current_stream(self.side.device).wait_event(self.back)
            self.host = self.back = None
            self.released = False
        if previous is not None:
            previous.start()

    def __del__(self) -> None:
        """After a backward that ended before its copy: wait for the copy before its memory serves others."""
        if self.back is not None:
            self.stream.wait_event(self.back)

    def _bytes(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.side.device).set_(self.storage)


_side_streams: dict[int, torch.cuda.Stream] = {}


def _side_stream(device: int) -> torch.cuda.Stream:
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)
    return _side_streams[device]
