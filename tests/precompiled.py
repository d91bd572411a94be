"""The kernels of the tests that were collected, compiled before the first of them."""

import os
import random
from collections.abc import Iterable

from jit_cache import prewarm
from jit_cache.prewarm import Job, default_workers


def precompile(jobs: Iterable[Job]) -> None:
    """A kernel that fails to compile fails again where it is used.

    Of pytest's processes each goes through all of them in an order of its own and finds what others have compiled:
    with as many processes of its own each, as ``prewarm`` has, they would stand in each other's way.
    """
    jobs, worker = list(dict.fromkeys(jobs)), os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        prewarm(jobs)
    else:
        processes = default_workers() // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        prewarm(random.Random(worker).sample(jobs, len(jobs)), workers=max(processes, 1))
