"""``python -m cute_kernels train``, alone or under torchrun."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from cute_kernels.train.options import Options


def run(arguments: argparse.Namespace) -> int:
    """Trains as the parsed options say; returns the exit status: 0, or 1 with a message on the standard error."""
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import record

    from cute_kernels.train.loop import train

    try:
        options = Options(**{option.name: getattr(arguments, option.name) for option in dataclasses.fields(Options)})
        (record(train) if dist.is_torchelastic_launched() else train)(options)  # torchrun's summary names the error
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
