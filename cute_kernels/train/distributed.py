"""The ranks of a run: one process by itself, or those that torchrun started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from cute_kernels.runtime.checks import expect


@dataclass(frozen=True)
class World:
    """This process among the others, and its device; ``sharded`` if torchrun started it."""

    rank: int
    size: int
    device: torch.device
    sharded: bool

    def rows(self, batch: Tensor) -> Tensor:
        """This rank's rows of a global batch, on its device."""
        count = len(batch) // self.size
        return batch[self.rank * count : (self.rank + 1) * count].to(self.device)

    def mean(self, value: Tensor) -> Tensor:
        """The mean over the ranks, on every rank."""
        if self.sharded:
            value = value.clone()
            dist.all_reduce(value)
        return value / self.size

    def all(self, holds: bool) -> bool:
        """Whether it holds on all ranks, on every rank."""
        return self.mean(torch.tensor(float(holds), device=self.device)).item() == 1

    def same(self, number: int) -> bool:
        """Whether all ranks have this number, on every rank."""
        own = torch.tensor(number, dtype=torch.float64, device=self.device)
        return self.all(self.mean(own).item() == number)


@contextlib.contextmanager
def world(device: str) -> Iterator[World]:
    """Join the ranks that torchrun started, if it did; device is "cuda" or "cpu"."""
    if not dist.is_torchelastic_launched():
        yield World(0, 1, torch.device(device), sharded=False)
        return
    if device == "cuda":
        local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        expect(local < gpus, "train", "--nproc-per-node", f"be at most {gpus}, the GPUs of this machine", local + 1)
        own = torch.device("cuda", local)
        torch.cuda.set_device(own)
        dist.init_process_group("nccl", device_id=own)
    else:
        own = torch.device("cpu")
        dist.init_process_group("gloo")
    yield World(dist.get_rank(), dist.get_world_size(), own, sharded=True)
    dist.destroy_process_group()  # not after an error: it would wait for ranks that are gone
