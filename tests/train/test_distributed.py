"""The train command under torchrun, two ranks on the CPU: FSDP2, gloo, checkpoints for another number of ranks."""

import fcntl
import os
import re
import shutil

import pytest

from cute_kernels.train import checkpoint
from tests.marks import first_of
from tests.train import cases as train_cases

OPTIONS = {"layers": 1, "hidden": 32, "heads": 2, "sequence": 16, "batch": 4, "device": "cpu"}

# Two ranks add other rows' gradients first than one process does, behind bf16 activations: 2e-4 was seen.
LOSS_BOUND = 2e-3


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of runs of one process and of two ranks, and what the second printed.

    A rank that comes to its interpreter's end aborts, as gloo's threads can make it there.
    """
    folder = tmp_path_factory.mktemp("runs")
    program = "import atexit, os\nif 'RANK' in os.environ:\n    atexit.register(os.abort)\n"
    (folder / "sitecustomize.py").write_text(program)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        two = train_cases.start_ranks(folder / "two", 2, **OPTIONS)
    with train_cases.stopped_on_error(two):
        train_cases.run_alone(folder / "one", **OPTIONS)
    return folder, train_cases.finish(two)


def test_two_ranks_have_the_losses_of_one_process(runs):
    folder, text = runs
    train_cases.assert_close(folder / "two", folder / "one", LOSS_BOUND)
    assert text.count("parameters") == text.count("on held-out text") == 1  # rank 0 alone prints
    assert not list(folder.glob("two/*partial"))


@pytest.mark.parametrize("wrote, ranks, changed", first_of([("two", 0, {}), ("one", 2, {"recompute": True})]))
def test_resumes_on_another_number_of_ranks(runs, tmp_path, wrote, ranks, changed):
    train_cases.check_resumes_elsewhere(runs[0] / wrote, tmp_path / "run", ranks, LOSS_BOUND, **OPTIONS, **changed)


@pytest.mark.exhaustive
def test_a_killed_rank_ends_the_job_and_the_resumed_job_goes_on(runs, tmp_path):
    """Bit by bit as the run that was not killed: two runs of two ranks are equal, too."""
    train_cases.check_killed_rank(runs[0] / "two", tmp_path, **OPTIONS)


@pytest.mark.parametrize("ranks", first_of([2, 0]))
def test_a_damaged_shard_of_the_other_rank(runs, tmp_path, ranks):
    """Every file has its digest; a rank that reads a damaged one names it, and no rank makes a step."""
    folder = shutil.copytree(runs[0] / "two", tmp_path / "run")
    newest = checkpoint.latest(folder)
    digests = (newest / checkpoint.DIGESTS).read_text().split()[1::2]
    assert {"__0_0.distcp", "__1_0.distcp"} <= set(digests) == {path.name for path in newest.iterdir()} - {"SHA256SUMS"}
    content = bytearray((newest / "__1_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (newest / "__1_0.distcp").write_bytes(content)
    options = {**train_cases.RANKS_OPTIONS, **OPTIONS, "steps": 18, "resume": True}
    process = train_cases.start(train_cases.arguments(folder, **options), ranks)
    with train_cases.stopped_on_error(process):
        text, _ = process.communicate(timeout=train_cases.PATIENCE)
    assert process.returncode == 1, text
    assert re.search(
        "step-00000016 could not be read: OSError: __1_0.distcp is damaged.*go on from step-00000012", text
    )
    assert train_cases.numbers(folder) == train_cases.numbers(runs[0] / "two")


@pytest.mark.exhaustive  # ranks that agree on an error: see above
def test_a_folder_that_another_run_writes(tmp_path):
    """Rank 0 alone sees it, and no rank makes a step."""
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = train_cases.start_ranks(tmp_path, 2, **OPTIONS)
        with train_cases.stopped_on_error(process):
            text, _ = process.communicate(timeout=train_cases.PATIENCE)
    assert process.returncode == 1, text
    assert f"train: --checkpoint must be a folder that no other run writes, got {tmp_path}" in text
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
