"""The train command under torchrun on two GPUs: FSDP2 and NCCL. As tests/train/test_distributed.py, on kernels.

Best run by itself and without workers: each worker would make the runs that the tests share.
"""

import contextlib

import pytest
import torch

from cute_kernels.runtime.targets import arch_of
from cute_kernels.train.model import config_of
from cute_kernels.train.options import Options
from tests.nn import cases as nn_cases
from tests.precompiled import precompile
from tests.train import cases as train_cases

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.slow,
]

OPTIONS = {"recompute": True}
LOSS_BOUND = 5e-3  # as on the CPU, where 2e-4 was seen; this one was not measured


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of runs of one process without torchrun, of one rank twice, and of two twice; all at the same time."""
    folder = tmp_path_factory.mktemp("runs")
    options = Options(**OPTIONS)
    precompile(nn_cases.kernels_of([config_of(options)], arch_of(0), batch=options.batch, dtypes=(torch.float32,)))
    with contextlib.ExitStack() as stack:
        processes = []
        for name, ranks in (("one", 1), ("one again", 1), ("two", 2), ("two again", 2)):
            processes.append(train_cases.start_ranks(folder / name, ranks, **OPTIONS))
            stack.enter_context(train_cases.stopped_on_error(processes[-1]))
        train_cases.run_alone(folder / "alone", **OPTIONS)
        for process in processes:
            train_cases.finish(process)
    return folder


@pytest.mark.parametrize("name", ["one", "two"])
def test_run_to_run(runs, name):
    assert train_cases.numbers(runs / name) == train_cases.numbers(runs / f"{name} again")


@pytest.mark.parametrize("name", ["one", "two"])
def test_ranks_have_the_losses_of_one_gpu(runs, name):
    train_cases.assert_close(runs / name, runs / "alone", LOSS_BOUND)


@pytest.mark.parametrize("wrote, ranks", [("two", 0), ("alone", 2)])
def test_resumes_on_another_number_of_ranks(runs, tmp_path, wrote, ranks):
    train_cases.check_resumes_elsewhere(runs / wrote, tmp_path / "run", ranks, LOSS_BOUND, **OPTIONS)


def test_a_killed_rank_ends_the_job_and_the_resumed_job_goes_on(runs, tmp_path):
    train_cases.check_killed_rank(runs / "two", tmp_path, **OPTIONS)
