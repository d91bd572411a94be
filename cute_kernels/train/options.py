"""The options of ``python -m cute_kernels train``: one field each, with its default and its help."""

from __future__ import annotations

import argparse
import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from cute_kernels.moe.functional import MAX_EXPERTS, MAX_K
from cute_kernels.runtime.checks import expect

STREAMS = (0, 1, 2, 4, 8)


def _option(default: Any, help: str, **parsing: Any) -> Any:
    return field(default=default, metadata={"help": help, **parsing})


@dataclass(frozen=True)
class Options:
    """A run. Of the first group a run that is resumed must have the same; the second may change with what is to come.

    Raises:
        TypeError: an option is not of its type.
        ValueError: an option is out of range, or two do not go together; the message names them.
    """

    data: Path | None = _option(None, "text file to learn; default: Python's documentation", type=Path, metavar="FILE")
    layers: int = _option(2, "transformer layers")
    hidden: int = _option(64, "channels of a token")
    heads: int = _option(4, "attention heads")
    hyper_connections: int = _option(4, "residual streams; 0: a plain residual", choices=STREAMS)
    experts: int = _option(0, "experts in the place of a layer's MLP; 0: an MLP")
    experts_per_token: int = _option(2, "experts that each token has, with --experts")
    balance: float = _option(0.0, "of a loss that is least where all experts have as many tokens, with --experts")
    z_loss: float = _option(0.0, "of a loss that keeps the router's logits small, with --experts")
    dropout: float = _option(0.0, "share of a sublayer's output that is dropped")
    sequence: int = _option(64, "tokens (bytes) of a sequence")
    batch: int = _option(16, "sequences of a step, of all ranks together")
    seed: int = _option(0, "of the initial weights, the order of the data and the dropout")

    steps: int = _option(300, "steps of the run, those before it was resumed included")
    lr: float = _option(1e-2, "highest learning rate")
    warmup: int = _option(20, "steps in which the learning rate rises to it; then it falls as a cosine to a tenth")

    recompute: bool = _option(False, "compute activations again in the backward instead of keeping them")
    compile: bool = _option(False, "torch.compile every layer")
    torch_attention: bool = _option(False, "attend by torch, also on a GPU where this library's has no gradients")
    graph: bool = _option(False, "capture the step in a CUDA graph")
    device: str = _option("", "cuda or cpu; default: cuda if there is one", metavar="DEVICE")

    checkpoint: Path = _option(
        Path("cute_kernels_train"),
        "folder of checkpoints, log.jsonl and loss.png; all ranks write there; default: %(default)s",
        type=Path,
        metavar="DIR",
    )
    checkpoint_every: int = _option(100, "steps from a checkpoint to the next; the last step always makes one")
    evaluate_every: int = _option(100, "steps from a test on held-out text to the next; the last step is always tested")
    resume: bool = _option(False, "go on from the newest checkpoint in the folder; its SHA256SUMS are checked")

    def __post_init__(self) -> None:
        kinds = get_type_hints(Options)
        for option in dataclasses.fields(Options):
            value = getattr(self, option.name)
            of_type = f"be of type {option.type}"
            _expect(_is_of(value, kinds[option.name]), option.name, of_type, repr(value), TypeError)
        for name in ("layers", "hidden", "heads", "sequence", "batch", "steps", "checkpoint_every", "evaluate_every"):
            _expect(getattr(self, name) >= 1, name, "be at least 1", getattr(self, name))
        for name in ("seed", "warmup", "experts"):
            _expect(getattr(self, name) >= 0, name, "not be negative", getattr(self, name))
        _expect(
            self.hidden % (2 * self.heads) == 0, "hidden", f"be a multiple of 2 * --heads {self.heads}", self.hidden
        )
        _expect(self.hyper_connections in STREAMS, "hyper_connections", f"be one of {STREAMS}", self.hyper_connections)
        most = min(self.experts, MAX_K) if self.experts else MAX_K
        _expect(self.experts <= MAX_EXPERTS, "experts", f"be at most {MAX_EXPERTS}", self.experts)
        _expect(
            1 <= self.experts_per_token <= most, "experts_per_token", f"be from 1 to {most}", self.experts_per_token
        )
        for name in ("balance", "z_loss"):
            value = getattr(self, name)
            _expect(0 <= value < math.inf, name, "be finite and not negative", value)
            _expect(self.experts > 0 or not value, name, "be left out, or --experts be at least 1", value)
        _expect(0 <= self.dropout < 1, "dropout", "be at least 0 and below 1", self.dropout)
        _expect(self.seed < 2**63, "seed", "be below 2^63", self.seed)
        _expect(0 < self.lr < math.inf, "lr", "be positive and finite", self.lr)
        _expect(self.device in ("", "cpu", "cuda"), "device", "be cuda or cpu", self.device)
        needs_streams = "be left out, or --hyper-connections be at least 1: what is recomputed are the streams"
        _expect(not self.recompute or self.hyper_connections > 0, "recompute", needs_streams, "--hyper-connections 0")
        _expect(not (self.recompute and self.compile), "recompute", "be left out with --compile", "both")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Gives the parser every option, its name with dashes."""
    for option in dataclasses.fields(Options):
        keywords: dict[str, Any] = {"default": option.default, **option.metadata}
        if isinstance(option.default, bool):
            keywords["action"] = "store_true"
        elif "type" not in keywords:
            keywords["type"] = type(option.default)
            if option.default != "":
                keywords["help"] += "; default: %(default)s"
        parser.add_argument(flag(option.name), **keywords)


def flag(name: str) -> str:
    """hyper_connections -> --hyper-connections"""
    return "--" + name.replace("_", "-")


def _is_of(value: object, kind: Any) -> bool:
    """An int does for a float; True and False, ints to Python, are bools alone."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (float, int) if kind is float else kind)


def _expect(condition: bool, name: str, expected: str, got: object, error: type = ValueError) -> None:
    expect(condition, "train", flag(name), expected, got, error)
