"""The text that is learned, as bytes: what a step sees is a function of the seed and the step alone."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cute_kernels.runtime.checks import expect

VOCABULARY = 256
HELD_OUT = 0.1  # share of the text, its end, that is never trained on


@dataclass(frozen=True)
class Text:
    """Bytes to learn from and bytes to test on.

    digest: sha256 of the whole text; a resumed run must see the same
    """

    training: Tensor
    held_out: Tensor
    digest: str

    def batch(self, seed: int, step: int, size: int, sequence: int) -> tuple[Tensor, Tensor]:
        """(tokens, targets), each (size, sequence) int64, from places drawn for this step."""
        places = random.Random(f"{seed} {step}")
        starts = [places.randrange(len(self.training) - sequence) for _ in range(size)]
        return _windows(self.training, starts, sequence)

    def test_batch(self, index: int, count: int, size: int, sequence: int) -> tuple[Tensor, Tensor]:
        """The index-th of count batches that lie evenly over the held-out text."""
        last = len(self.held_out) - sequence - 1
        starts = [row * last // (count * size) for row in range(index * size, (index + 1) * size)]
        return _windows(self.held_out, starts, sequence)


def read_text(path: Path | None, sequence: int) -> Text:
    """The file's bytes, or Python's documentation of its language if there is no file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is too short for sequences of this length.
    """
    try:
        content = _documentation() if path is None else path.read_bytes()
    except OSError as error:
        raise OSError(f"train: --data must be a file that can be read, got {path}: {error.strerror}") from error
    split = len(content) - int(HELD_OUT * len(content))
    least = int((sequence + 1) / HELD_OUT) + 1
    expect(
        len(content) >= least, "train", "--data", f"have at least {least} bytes at --sequence {sequence}", len(content)
    )
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return Text(text[:split], text[split:], hashlib.sha256(content).hexdigest())


def _documentation() -> bytes:
    """Half a megabyte of English that every CPython has: the text of `help("topics")`."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


def _windows(text: Tensor, starts: list[int], sequence: int) -> tuple[Tensor, Tensor]:
    windows = text[torch.tensor(starts)[:, None] + torch.arange(sequence + 1)].long()
    return windows[:, :-1], windows[:, 1:]
