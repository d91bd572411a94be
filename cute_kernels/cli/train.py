"""``python -m cute_kernels train``, alone or under torchrun."""

from __future__ import annotations

import argparse
import dataclasses
import os

from cute_kernels.train.options import Options
from jit_cache.command import UsageError


def run(arguments: argparse.Namespace) -> int:
    """Trains as the parsed options say; returns the exit status.

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
    return 0
