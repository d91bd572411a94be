"""``python -m cute_kernels train``, alone or under torchrun."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from typing import NoReturn

from cute_kernels.train.options import Options
from jit_cache.command import UsageError


def run(arguments: argparse.Namespace) -> int:
    """Trains as the parsed options say; returns the exit status, but ends the process of a rank that has succeeded.

    Raises:
        UsageError: an option is out of range, or two do not go together.
        ValueError, OSError: as of `train`.
    """
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import record

    from cute_kernels.train.loop import train

    try:
        options = Options(**{option.name: getattr(arguments, option.name) for option in dataclasses.fields(Options)})
    except ValueError as error:
        raise UsageError(str(error)) from None
    try:
        (record(train) if dist.is_torchelastic_launched() else train)(options)  # torchrun's summary names the error
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") != "0":  # rank 0 says so
            return 130
        raise
    if dist.is_torchelastic_launched():
        _leave()
    return 0


def _leave() -> NoReturn:
    """End this rank now, with status 0, without the interpreter's end.

    A thread of gloo may still drop a tensor of the last collective. It needs Python's lock for that, and aborts the
    process where the interpreter is ending: destroy_process_group does not wait for it (torch 2.13,
    github.com/pytorch/pytorch/pull/179291).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
