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
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict

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
        ValueError: the file is damaged.
    """
    try:
        return json.loads((checkpoint / FACTS).read_text())
    except ValueError as error:
        raise ValueError(f"train: {checkpoint / FACTS} must be what a run wrote, got {error}") from error


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, facts: dict[str, Any]) -> Path:
    """Write the state after this many steps; every rank calls it, and it returns when the checkpoint is there."""
    checkpoint = folder / f"step-{step:08d}"
    partial = folder / f"{checkpoint.name}.partial"
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / FACTS).write_text(json.dumps(facts, indent=1))
    _barrier()
    with _quiet():
        dcp.save(_state(model, optimizer), checkpoint_id=partial)  # ends with every rank's files on the disk
    if is_first:
        _sync(partial / FACTS)
        _sync(partial)
        partial.rename(checkpoint)
        _sync(folder)
    _barrier()
    return checkpoint


def load(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put the checkpoint's state into a model and an optimizer of the same parameters; every rank calls it."""
    with _quiet():
        state = _state(model, optimizer)
        dcp.load(state, checkpoint_id=checkpoint)
        of_optimizer = get_optimizer_state_dict(model, optimizer) | {"state": state["optimizer"]}
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=of_optimizer)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What learning changes: not the optimizer's settings, which are the run's."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer["state"]}


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
