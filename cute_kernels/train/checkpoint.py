"""Checkpoints that are whole or not there, and that any number of ranks can load.

A folder step-00000300 is written under another name and renamed when all of it is on the disk, so a run that dies while
it writes leaves nothing that a later run would take. Its tensors are torch.distributed.checkpoint's: names and shards,
not ranks.

SHA256SUMS holds the digests of all other files, as ``sha256sum --check`` reads them. Each rank reads its shards again
after they are written, and its share of all files before they are loaded: 1 GB takes about 1 s of a core (1.2 GB/s on
an AMD EPYC). A version before wrote no digests; such a checkpoint is loaded unchecked.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

FACTS = "run.json"
DIGESTS = "SHA256SUMS"
_NAME = re.compile(r"step-(\d{8})")
_LINES = re.compile(rb"(?:[0-9a-f]{64}  [^\n]+\n)+")
_T = TypeVar("_T")


def latest(folder: Path) -> Path | None:
    """The whole checkpoint of the highest step."""
    return max(_all(folder), default=None, key=step_of)


def step_of(checkpoint: Path) -> int:
    """How many steps had been made."""
    return int(checkpoint.name.removeprefix("step-"))


def has_digests(checkpoint: Path) -> bool:
    """False where a version before wrote it."""
    return (checkpoint / DIGESTS).exists()


def facts_of(checkpoint: Path) -> dict[str, Any]:
    """The facts of the run that ``save`` was given.

    Raises:
        OSError: it could not be read, or files are missing or damaged.
    """
    with _readable(checkpoint):
        digests = _digests(checkpoint)
        if digests:
            _expect_digest(checkpoint / FACTS, digests[FACTS])
        facts = json.loads((checkpoint / FACTS).read_bytes())
        if not isinstance(facts, dict):
            raise ValueError(f"{FACTS} is not what a run wrote")
        if not digests and "digests" in facts:
            raise FileNotFoundError(f"{DIGESTS} is missing")
    return facts


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, facts: dict[str, Any]) -> Path:
    """Write the state after this many steps; every rank calls it, and it returns when the checkpoint is there.

    Raises:
        OSError: it could not be written.
    """
    checkpoint = folder / f"step-{step:08d}"
    partial = folder / f"{checkpoint.name}.partial"
    rank, _ = _place()
    with _quiet():
        state = _state(*get_state_dict(model, optimizer))
    with _named(checkpoint, "written"):
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            (partial / FACTS).write_text(json.dumps(facts | {"digests": DIGESTS}, indent=1))
        _barrier()
        if not (partial / FACTS).is_file():  # each rank has a folder of its own
            raise FileNotFoundError(f"{partial} is not the folder that rank 0 writes to: all ranks must share it")
        with _quiet():
            dcp.save(state, checkpoint_id=partial)  # ends when all ranks have written
        own = {path.name: _digest(path) for path in partial.glob(f"__{rank}_*")}
        digests = {name: digest for shards in _gathered(own) for name, digest in shards.items()}
        if rank == 0:
            digests |= {path.name: _digest(path) for path in partial.iterdir() if path.name not in digests}
            (partial / DIGESTS).write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items())))
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
        OSError: it could not be read, or files are missing or damaged; on every rank.
    """
    with _readable(checkpoint):
        _verify(checkpoint)
    with _quiet():
        of_model, of_optimizer = get_state_dict(model, optimizer)
        state = _state(of_model, of_optimizer)
        with _readable(checkpoint):
            # For metadata that it cannot read, dcp.load logs tracebacks and, in torch 2.10, does not tell the cause.
            dcp.FileSystemReader(checkpoint).read_metadata()
            dcp.load(state, checkpoint_id=checkpoint)
        of_optimizer = {**of_optimizer, "state": state["optimizer"]}
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=of_optimizer)


def _all(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]


def _state(of_model: dict[str, Any], of_optimizer: Any) -> dict[str, Any]:
    """The state that learning changes: not the optimizer's settings, which are the run's."""
    return {"model": of_model, "optimizer": of_optimizer["state"]}


def _verify(checkpoint: Path) -> None:
    """Raises OSError on every rank if a file is not as it was written. Each rank reads its share of the files."""
    rank, size = _place()
    damage = None
    try:
        for name, digest in list(_digests(checkpoint).items())[rank::size]:
            _expect_digest(checkpoint / name, digest)
    except OSError as error:
        damage = error
    for error in _gathered(damage):
        if error is not None:
            raise error


def _digests(checkpoint: Path) -> dict[str, str]:
    """The written digests by the file's name; {} if a version before wrote none."""
    if not has_digests(checkpoint):
        return {}
    content = (checkpoint / DIGESTS).read_bytes()
    if not _LINES.fullmatch(content):
        raise OSError(f"{DIGESTS} is damaged")
    digests = {line[66:]: line[:64] for line in map(os.fsdecode, content.splitlines())}
    there = {path.name for path in checkpoint.iterdir()} - {DIGESTS}
    if missing := sorted(digests.keys() - there):
        raise FileNotFoundError(f"{missing[0]} is missing")
    if extra := sorted(there - digests.keys()):
        raise OSError(f"{DIGESTS} does not name {extra[0]}")
    return digests


def _expect_digest(path: Path, digest: str) -> None:
    found = _digest(path)
    if found != digest:
        raise OSError(f"{path.name} is damaged: its sha256 is {found}, not {digest}")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    chunk = bytearray(1 << 20)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            digest.update(memoryview(chunk)[:count])
    return digest.hexdigest()


def _readable(checkpoint: Path) -> contextlib.AbstractContextManager[None]:
    """An error becomes an OSError that also tells how the run goes on from the checkpoint before."""
    name = checkpoint.name
    before = [path.name for path in _all(checkpoint.parent) if step_of(path) < step_of(checkpoint)]
    way_on = "there is no checkpoint before it"
    if before:
        way_on = f"to go on from {max(before)}, rename {name} to {name}.damaged and give --resume again"
    return _named(checkpoint, "read", f"; {way_on}")


@contextlib.contextmanager
def _named(checkpoint: Path, done: str, way_on: str = "") -> Iterator[None]:
    """An error becomes an OSError that tells the checkpoint and the first cause."""
    try:
        yield
    except (dcp.CheckpointException, Exception) as error:  # torch's, of all ranks, is a BaseException
        cause = next(iter(error.failures.values()))[0] if isinstance(error, dcp.CheckpointException) else error
        # "unexpected pos" of a writer whose disk was full
        while cause.__context__ is not None and not cause.__suppress_context__:
            cause = cause.__context__
        if not isinstance(cause, Exception):  # Ctrl-C
            raise cause from None
        line = traceback.format_exception_only(type(cause), cause)[0].splitlines()[0]
        raise OSError(f"train: {checkpoint} could not be {done}: {line}{way_on}") from None


def _place() -> tuple[int, int]:
    """(rank, number of ranks)"""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _gathered(own: _T) -> list[_T]:
    """The values of every rank, on every rank."""
    if not dist.is_initialized():
        return [own]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


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
