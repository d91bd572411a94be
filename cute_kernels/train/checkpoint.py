"""Checkpoints that are whole or not there, and that any number of ranks can load.

A folder step-00000300 is written under another name and renamed when all of it is on the disk, so a run that dies while
it writes leaves nothing that a later run would take. Its tensors are torch.distributed.checkpoint's: names and shards,
not ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from cute_kernels._check import expect

FACTS = "run.json"
_NAME = re.compile(r"step-(\d{8})")


def latest(folder: Path) -> Path | None:
    """The whole checkpoint of the highest step."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    return max(found, default=None, key=lambda path: path.name)


def step_of(checkpoint: Path) -> int:
    """How many steps had been made."""
    return int(checkpoint.name.removeprefix("step-"))


def facts_of(checkpoint: Path) -> dict[str, Any]:
    """What ``save`` was given to tell of the run.

    Raises:
        OSError: the file could not be read.
        ValueError: it is damaged.
    """
    with _named(checkpoint, "read"):
        content = (checkpoint / FACTS).read_bytes()
    try:
        facts = json.loads(content)
    except ValueError as error:
        raise ValueError(f"train: {checkpoint / FACTS} must be what a run wrote, got {error}") from error
    expect(isinstance(facts, dict), "train", str(checkpoint / FACTS), "be what a run wrote", facts)
    return facts


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, facts: dict[str, Any]) -> Path:
    """Write the state after this many steps; every rank calls it, and it returns when the checkpoint is there.

    Raises:
        OSError: it could not be written.
    """
    checkpoint = folder / f"step-{step:08d}"
    partial = folder / f"{checkpoint.name}.partial"
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    with _quiet():
        state = _state(*get_state_dict(model, optimizer))
    with _named(checkpoint, "written"):
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            (partial / FACTS).write_text(json.dumps(facts, indent=1))
        _barrier()
        if not (partial / FACTS).is_file():  # each rank has a folder of its own
            raise FileNotFoundError(f"{partial} is not the folder that rank 0 writes to: all ranks must share it")
        with _quiet():
            dcp.save(state, checkpoint_id=partial)  # ends when all ranks have written
        if is_first:
            for path in partial.iterdir():  # torch has synced what it had not written whole, of its metadata
                _sync(path)
            _sync(partial)
            partial.rename(checkpoint)
            _sync(folder)
        _barrier()
    return checkpoint


def load(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put the checkpoint's state into a model and an optimizer of the same parameters; every rank calls it.

    Raises:
        OSError: it could not be read.
    """
    with _quiet():
        of_model, of_optimizer = get_state_dict(model, optimizer)
        state = _state(of_model, of_optimizer)
        with _named(checkpoint, "read"):
            # Of metadata that it cannot read, dcp.load logs tracebacks and, in torch 2.10, does not tell the cause.
            dcp.FileSystemReader(checkpoint).read_metadata()
            dcp.load(state, checkpoint_id=checkpoint)
        of_optimizer = {**of_optimizer, "state": state["optimizer"]}
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=of_optimizer)


def _state(of_model: dict[str, Any], of_optimizer: Any) -> dict[str, Any]:
    """What learning changes: not the optimizer's settings, which are the run's."""
    return {"model": of_model, "optimizer": of_optimizer["state"]}


@contextlib.contextmanager
def _named(checkpoint: Path, done: str) -> Iterator[None]:
    """What fails is an OSError that tells the checkpoint and the first cause."""
    try:
        yield
    except (dcp.CheckpointException, Exception) as error:  # torch's, of all ranks, is a BaseException
        cause = next(iter(error.failures.values()))[0] if isinstance(error, dcp.CheckpointException) else error
        while cause.__context__ is not None:  # "unexpected pos" of a writer whose disk was full
            cause = cause.__context__
        if not isinstance(cause, Exception):  # Ctrl-C
            raise cause from None
        line = traceback.format_exception_only(type(cause), cause)[0].splitlines()[0]
        raise OSError(f"train: {checkpoint} could not be {done}: {line}") from None


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings that a run of one process is one, and of functions that torch calls and deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
