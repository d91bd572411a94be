"""python -m cute_kernels train on the CPU, one process: it learns, it is killed, it goes on with the same losses."""

import contextlib
import dataclasses
import errno
import json
import math
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from cute_kernels.cli import main as cli
from cute_kernels.runtime import targets
from cute_kernels.train import checkpoint, data, distributed, log, loop
from cute_kernels.train.distributed import World
from cute_kernels.train.model import Learner, config_of
from cute_kernels.train.options import Options
from tests.train import cases as train_cases

TINY = {"layers": 1, "hidden": 32, "heads": 2, "sequence": 16, "batch": 4, "device": "cpu"}


@pytest.fixture(autouse=True)
def one_thread():
    """As the processes have that the runs here are compared with."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(folder, **options):
    assert cli.main(["train", *train_cases.arguments(folder, **{**TINY, **options})]) == 0
    return train_cases.numbers(folder)


def test_learns(tmp_path):
    """Below what the frequencies of single letters give, about 3 nats a byte."""
    lines = run(tmp_path, hidden=64, heads=4, batch=16, sequence=32, steps=80, evaluate_every=40)
    held_out = {line["step"]: line["held_out_loss"] for line in lines if "held_out_loss" in line}
    assert list(held_out) == [40, 80] and held_out[80] < 2.5
    assert [line["step"] for line in lines] == list(range(1, 81))
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("changed", [{"hyper_connections": 0}, {"recompute": True}, {"dropout": 0.1}, {"experts": 8}])
def test_resumes_with_the_same_losses(tmp_path, changed):
    """Also a run that was to be shorter: the learning rate alone knows of the end, and warms up here."""
    options = {**TINY, **changed, "warmup": 10, "checkpoint_every": 2, "evaluate_every": 2}
    whole = run(tmp_path / "whole", steps=4, **options)
    run(tmp_path / "parts", steps=2, **options)
    assert run(tmp_path / "parts", steps=4, resume=True, **options) == whole


def test_experts(tmp_path):
    """They learn, with recompute bit by bit the same; another number of them cannot go on."""
    options = {"steps": 2, "experts": 8, "experts_per_token": 2, "balance": 0.1, "z_loss": 0.1}
    lines = run(tmp_path / "kept", **options)
    for name in ("balance", "z_loss"):
        assert lines[1]["loss"] != run(tmp_path / name, **{**options, name: 0.0})[1]["loss"]
    assert run(tmp_path / "again", **options, recompute=True) == lines
    long = run(tmp_path / "long", hidden=64, heads=4, batch=16, sequence=32, **{**options, "steps": 40})
    assert long[-1]["held_out_loss"] < 2.9
    with pytest.raises(ValueError, match="--experts 8 -> 4"):
        loop.train(Options(**{**TINY, "checkpoint": tmp_path / "kept", "resume": True, "steps": 3, "experts": 4}))


def test_recompute_changes_no_bit(tmp_path):
    assert run(tmp_path / "kept", steps=3) == run(tmp_path / "again", steps=3, recompute=True)


def test_learns_a_file(tmp_path):
    """A file of one letter is soon learned."""
    path = tmp_path / "text"
    path.write_bytes(b"a" * 4000)
    assert run(tmp_path / "run", data=path, steps=30)[-1]["held_out_loss"] < 0.5


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compile(tmp_path):
    """Whole layers as graphs, whose sums are rounded in other places."""
    wanted, found = run(tmp_path / "eager", steps=3), run(tmp_path / "compiled", steps=3, compile=True)
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in wanted], rel=2e-3)


def test_a_killed_process_goes_on(tmp_path):
    options = {**TINY, "steps": 40, "checkpoint_every": 10, "evaluate_every": 20}
    whole = run(tmp_path / "whole", **options)
    process = train_cases.start(train_cases.arguments(tmp_path / "killed", **options))
    train_cases.kill_after(process, tmp_path / "killed", steps=13)
    assert process.returncode == -9
    done = checkpoint.step_of(checkpoint.latest(tmp_path / "killed"))
    assert 10 <= done < 40
    assert run(tmp_path / "killed", resume=True, **options) == whole


def test_a_checkpoint_is_whole_or_not_there(tmp_path, monkeypatch):
    """A run that dies while it writes leaves nothing that --resume takes, and its rest is written over."""
    whole = run(tmp_path / "whole", steps=4)

    def dies(state, checkpoint_id):
        save(state, checkpoint_id=checkpoint_id)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        save = checkpoint.dcp.save
        patch.setattr(checkpoint.dcp, "save", dies)
        command = train_cases.arguments(tmp_path / "killed", steps=4, checkpoint_every=2, **TINY)
        assert cli.main(["train", *command]) == 130
    assert [path.name for path in tmp_path.glob("killed/step-*")] == ["step-00000002.partial"]
    assert checkpoint.latest(tmp_path / "killed") is None
    assert run(tmp_path / "killed", steps=4) == whole
    assert [path.name for path in sorted(tmp_path.glob("killed/step-*"))] == [
        "step-00000002.partial",
        "step-00000004",
    ]


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"layers": 2}, "--resume must go on with the options of .*step-00000001, got --layers 1 -> 2\n$"),
        ({"seed": 1, "hyper_connections": 0, "lr": 1.0}, "got --hyper-connections 4 -> 0, --seed 0 -> 1\n$"),
        ({"data": __file__}, "got --data another text\n$"),
        ({"steps": 1}, "--steps must be more than the 1 steps of .*, got 1"),
    ],
)
def test_goes_on_with_the_same_run_alone(tmp_path, capsys, changed, message):
    run(tmp_path, steps=1)
    capsys.readouterr()
    command = train_cases.arguments(tmp_path, **{**TINY, "steps": 2, "resume": True, **changed})
    assert cli.main(["train", *command]) == 1
    assert_says(capsys, message)


def flipped(content):
    """With one bit of its middle flipped."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGES = {"flipped": flipped, "truncated": lambda content: content[:-1], "empty": lambda content: b""}


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    run(folder, steps=2, checkpoint_every=1)
    return folder


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("name", [checkpoint.FACTS, checkpoint.DIGESTS, ".metadata", "__0_0.distcp"])
def test_a_damaged_checkpoint_is_named(two_checkpoints, tmp_path, capsys, caplog, name, damage):
    """In one line, which tells how to go on from the one before."""
    folder = shutil.copytree(two_checkpoints, tmp_path / "run")
    path = checkpoint.latest(folder) / name
    path.write_bytes(damage(path.read_bytes()))
    named = r"\S*" if (name, damage) == (checkpoint.DIGESTS, flipped) else name  # a digest may be of any file
    assert_refused(folder, capsys, caplog, f"OSError: {named} is damaged")


@pytest.mark.parametrize("name", [checkpoint.FACTS, checkpoint.DIGESTS, ".metadata", "__0_0.distcp"])
def test_a_checkpoint_that_lacks_a_file(two_checkpoints, tmp_path, capsys, caplog, name):
    folder = shutil.copytree(two_checkpoints, tmp_path / "run")
    (checkpoint.latest(folder) / name).unlink()
    assert_refused(folder, capsys, caplog, f"FileNotFoundError: {name} is missing")


def test_a_file_without_a_digest(two_checkpoints, tmp_path, capsys, caplog):
    """As where a line of the digests is lost: nothing is loaded that is not checked."""
    folder = shutil.copytree(two_checkpoints, tmp_path / "run")
    path = checkpoint.latest(folder) / checkpoint.DIGESTS
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert_refused(folder, capsys, caplog, f"OSError: {checkpoint.DIGESTS} does not name run.json")


def test_goes_on_from_the_checkpoint_before_a_damaged_one(two_checkpoints, tmp_path):
    """As the message says."""
    whole = run(tmp_path / "whole", steps=3)
    folder = shutil.copytree(two_checkpoints, tmp_path / "run")
    (folder / "step-00000002").rename(folder / "step-00000002.damaged")
    assert checkpoint.step_of(checkpoint.latest(folder)) == 1
    found = run(folder, steps=3, resume=True)
    assert [line["loss"] for line in found] == [line["loss"] for line in whole]


def test_the_first_checkpoint_is_damaged(two_checkpoints, tmp_path, capsys):
    folder = shutil.copytree(two_checkpoints, tmp_path / "run", ignore=shutil.ignore_patterns("step-00000002"))
    (folder / "step-00000001" / "__0_0.distcp").write_bytes(b"")
    assert cli.main(["train", *train_cases.arguments(folder, **{**TINY, "steps": 3, "resume": True})]) == 1
    assert_says(capsys, "step-00000001 could not be read: .* is damaged.*; there is no checkpoint before it\n$")


def assert_refused(folder, capsys, caplog, message):
    capsys.readouterr()
    command = train_cases.arguments(folder, **{**TINY, "steps": 3, "resume": True})
    assert cli.main(["train", *command]) == 1
    way_on = "to go on from step-00000001, rename step-00000002 to step-00000002.damaged and give --resume again"
    assert_says(capsys, rf"^cute_kernels: train: .*step-00000002 could not be read: {message}[^\n]*; {way_on}\n$")
    assert not [record for record in caplog.records if record.name == "root"]


def without_digests(found):
    """As a version before the digests wrote it."""
    (found / checkpoint.DIGESTS).unlink()
    facts = json.loads((found / checkpoint.FACTS).read_text())
    del facts["digests"]
    (found / checkpoint.FACTS).write_text(json.dumps(facts))


def test_a_checkpoint_of_an_earlier_version(two_checkpoints, tmp_path, capsys):
    """It has no digests: it is loaded, and one line says so."""
    whole = run(tmp_path / "whole", steps=3)
    folder = shutil.copytree(two_checkpoints, tmp_path / "run")
    without_digests(checkpoint.latest(folder))
    capsys.readouterr()
    found = run(folder, steps=3, resume=True)
    assert [line["loss"] for line in found] == [line["loss"] for line in whole]
    message = "step-00000002, which an earlier version wrote without SHA256SUMS: its files are not checked"
    assert capsys.readouterr().out.count(message) == 1
    assert checkpoint.has_digests(checkpoint.latest(folder))


def test_a_resumed_run_says_what_changed(tmp_path, capsys):
    run(tmp_path, steps=1, evaluate_every=5)
    assert "options changed" not in capsys.readouterr().out
    run(tmp_path, steps=2, evaluate_every=5, lr=0.003, recompute=True, resume=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("options changed")]
    assert lines == ["options changed: --steps 1 -> 2, --lr 0.01 -> 0.003, --recompute False -> True"]


def test_a_resumed_run_of_a_checkpoint_that_tells_less(tmp_path, capsys):
    """As earlier versions wrote them: with the options alone that must be the same."""
    run(tmp_path, steps=1)
    path = checkpoint.latest(tmp_path) / checkpoint.FACTS
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({name: facts[name] for name in ("text", *loop.SAME)}))
    (checkpoint.latest(tmp_path) / checkpoint.DIGESTS).unlink()
    capsys.readouterr()
    run(tmp_path, steps=2, lr=0.003, resume=True)
    assert "options changed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, content, message",
    [
        (checkpoint.FACTS, b"", "JSONDecodeError"),
        (checkpoint.FACTS, b"[1]", "ValueError: run.json is not what a run wrote"),
        (checkpoint.FACTS, None, "FileNotFoundError.*run.json"),
        ("__0_0.distcp", b"", "EOFError"),
        ("__0_0.distcp", b"PK", ""),
        ("__0_0.distcp", None, "FileNotFoundError.*distcp"),
        (".metadata", b"", "EOFError"),
        (".metadata", None, "FileNotFoundError.*metadata"),
    ],
)
def test_a_damaged_checkpoint_of_an_earlier_version(two_checkpoints, tmp_path, capsys, caplog, name, content, message):
    """It is named where torch notices."""
    folder = shutil.copytree(two_checkpoints, tmp_path / "run")
    without_digests(checkpoint.latest(folder))
    path = checkpoint.latest(folder) / name
    path.write_bytes(content) if content is not None else path.unlink()
    assert_refused(folder, capsys, caplog, f".*{message}")


def test_sha256sum_reads_the_digests(two_checkpoints):
    found = checkpoint.latest(two_checkpoints)
    names = {path.name for path in found.iterdir()} - {checkpoint.DIGESTS}
    text = subprocess.run(
        ["sha256sum", "--check", "--strict", checkpoint.DIGESTS], cwd=found, check=True, capture_output=True, text=True
    ).stdout
    assert set(text.splitlines()) == {f"{name}: OK" for name in names}


def test_a_checkpoint_that_cannot_be_written_is_named(tmp_path, capsys):
    """On a full disk, here with files of at most 20 kB: the resumed run goes on from the checkpoint before."""
    run(tmp_path, steps=1)
    command = train_cases.arguments(tmp_path, **{**TINY, "steps": 2, "resume": True})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        assert cli.main(["train", *command]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_says(capsys, r"^cute_kernels: train: .*/step-00000002 could not be written: OSError: .* File too large\n$")
    assert checkpoint.step_of(checkpoint.latest(tmp_path)) == 1
    assert cli.main(["train", *command]) == 0


def test_ctrl_c_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """Torch wraps it in the error of a rank."""

    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.dcp.DefaultSavePlanner, "create_local_plan", interrupted)
    assert cli.main(["train", *train_cases.arguments(tmp_path, steps=1, **TINY)]) == 130


@pytest.mark.parametrize("rank, said", [("0", "cute_kernels: interrupted\n"), ("1", "")])
def test_ctrl_c_is_told_once(tmp_path, monkeypatch, capsys, rank, said):
    """By rank 0."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(loop, "test_loss", mock.Mock(side_effect=KeyboardInterrupt))
    assert cli.main(["train", *train_cases.arguments(tmp_path, steps=1, **TINY)]) == 130
    assert capsys.readouterr().err == said


def test_ctrl_c_of_a_process(tmp_path):
    process = train_cases.start(train_cases.arguments(tmp_path, steps=10_000, **TINY))
    with train_cases.stopped_on_error(process):
        deadline = time.monotonic() + train_cases.PATIENCE
        while len(log.read(tmp_path / "log.jsonl")) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=train_cases.PATIENCE)
    assert process.returncode == 130 and "Traceback" not in text and text.endswith("\ncute_kernels: interrupted\n")


def test_a_run_leaves_determinism_as_it_was(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with loop._deterministic("cuda"):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_folder_is_not_written_over(tmp_path, capsys):
    run(tmp_path, steps=1)
    assert cli.main(["train", *train_cases.arguments(tmp_path, **TINY)]) == 1
    assert_says(capsys, "--checkpoint must be a folder without checkpoints, or --resume be given .*step-00000001")


def test_a_folder_that_is_a_file(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert cli.main(["train", *train_cases.arguments(tmp_path / "file", **TINY)]) == 1
    assert capsys.readouterr() == (
        "",
        f"cute_kernels: train: --checkpoint must be a folder, got the file {tmp_path / 'file'}\n",
    )


def test_a_folder_is_of_one_run_at_a_time(tmp_path, monkeypatch, capsys):
    """A second one is refused while the first makes its first step; the first goes on, and then leaves the folder."""
    options = {**TINY, "evaluate_every": 1}
    whole = run(tmp_path / "whole", steps=2, **options)

    def second(*arguments):
        monkeypatch.undo()
        assert cli.main(["train", *train_cases.arguments(tmp_path / "run", steps=2, **options)]) == 1
        return loop.test_loss(*arguments)

    monkeypatch.setattr(loop, "test_loss", second)
    assert run(tmp_path / "run", steps=2, **options) == whole
    assert_says(capsys, f"train: --checkpoint must be a folder that no other run writes, got {tmp_path / 'run'}")
    run(tmp_path / "run", steps=3, resume=True, **options)


def test_a_run_that_ended_while_this_one_started(tmp_path):
    ranks = World(0, 1, torch.device("cpu"), sharded=False)
    (tmp_path / "step-00000001").mkdir()
    with loop._alone(tmp_path, tmp_path / "step-00000001", ranks):
        pass
    with pytest.raises(ValueError, match="folder that no other run writes"), loop._alone(tmp_path, None, ranks):
        pass


@pytest.mark.parametrize("others, same_options", [(6, True), (12, True), (6, False)])
def test_ranks_of_another_run(others, same_options, tmp_path, monkeypatch, capsys):
    """As of folders that are not shared. This process is rank 0; what rank 1 adds is written down here."""
    run(tmp_path, steps=6)
    from_rank_1 = [others, float(others == 6), 7, float(same_options)]
    monkeypatch.setattr(loop, "_fingerprint", lambda *run: 7 if same_options else 8)
    ranks = World(0, 2, torch.device("cpu"), sharded=True)
    monkeypatch.setattr(loop, "world", lambda device: contextlib.nullcontext(ranks))
    monkeypatch.setattr(loop, "Learner", mock.Mock(side_effect=ValueError("on it goes")))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda value: value.add_(from_rank_1.pop(0)))
    assert cli.main(["train", *train_cases.arguments(tmp_path, steps=8, resume=True, **TINY)]) == 1
    differ = "train: --checkpoint must be a folder in which all ranks find the same checkpoint, got step 6 on rank 0"
    if not same_options:
        differ = "train: the options must be the same on all ranks, got others"
    assert_says(capsys, "on it goes" if others == 6 and same_options else differ)


def test_what_is_one_run(tmp_path):
    text = data.read_text(None, 16)
    options = Options(**TINY, steps=4)
    number = loop._fingerprint(options, text)
    assert 0 <= number < 2**32
    for name, value, counts in (("lr", 1e-3, True), ("seed", 1, True), ("checkpoint", tmp_path, False)):
        other = dataclasses.replace(options, **{name: value})
        assert (loop._fingerprint(other, text) != number) == counts, name
    assert loop._fingerprint(options, dataclasses.replace(text, digest="0")) != number


def test_a_checkpoint_in_folders_of_each_rank(tmp_path, monkeypatch, capsys):
    """Rank 0 would call whole what lacks the others' parts."""
    monkeypatch.setattr(checkpoint, "_barrier", lambda: [path.unlink() for path in tmp_path.glob("step-*/run.json")])
    assert cli.main(["train", *train_cases.arguments(tmp_path, steps=1, **TINY)]) == 1
    assert_says(capsys, "partial is not the folder that rank 0 writes to: all ranks must share it")
    assert checkpoint.latest(tmp_path) is None


def test_all_of_a_checkpoint_is_on_the_disk(tmp_path, monkeypatch):
    """torch syncs its metadata before all of it is written."""
    synced, sync = set(), checkpoint._sync
    monkeypatch.setattr(checkpoint, "_sync", lambda path: (synced.add(path.name), sync(path)))
    run(tmp_path, steps=1)
    assert synced >= {path.name for path in checkpoint.latest(tmp_path).iterdir()} >= {".metadata", checkpoint.FACTS}


def test_runs_where_locks_do_not_work(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(loop.fcntl, "flock", flock)
    run(tmp_path, steps=1)


def test_the_log_of_a_run_without_checkpoints_is_kept(tmp_path):
    (tmp_path / "log-1.jsonl").write_text("one\n")
    (tmp_path / "log.jsonl").write_text("two\n")
    assert len(run(tmp_path, steps=2)) == 2
    assert [path.read_text() for path in sorted(tmp_path.glob("log-*.jsonl"))] == ["one\n", "two\n"]


def test_a_gpu_without_kernels(tmp_path, monkeypatch, capsys):
    targets.arch_of_gpu.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    assert cli.main(["train", *train_cases.arguments(tmp_path, steps=1)]) == 1
    assert_says(capsys, "train: --device must be cpu on a GPU without kernels, got compute capability 8.0")


@pytest.mark.parametrize(
    "changed, message, status",
    [
        ({"hidden": 66}, r"--hidden must be a multiple of 2 \* --heads 2, got 66", 2),
        ({"layers": 0}, "--layers must be at least 1, got 0", 2),
        ({"seed": -1}, "--seed must not be negative, got -1", 2),
        ({"seed": 2**64}, rf"--seed must be below 2\^63, got {2**64}", 2),
        ({"lr": float("inf")}, "--lr must be positive and finite, got inf", 2),
        ({"dropout": 1.0}, "--dropout must be at least 0 and below 1, got 1.0", 2),
        ({"experts": 4, "balance": -1.0}, "--balance must be finite and not negative, got -1.0", 2),
        ({"balance": 0.1}, "--balance must be left out, or --experts be at least 1, got 0.1", 2),
        ({"z_loss": 0.1}, "--z-loss must be left out, or --experts be at least 1, got 0.1", 2),
        ({"lr": 0.0}, "--lr must be positive and finite, got 0.0", 2),
        ({"device": "tpu"}, "--device must be cuda or cpu, got tpu", 2),
        ({"recompute": True, "hyper_connections": 0}, "--recompute must be left out, or --hyper-connections be", 2),
        ({"recompute": True, "compile": True}, "--recompute must be left out with --compile", 2),
        ({"graph": True}, "--graph must be left out, or the run be one process on a GPU", 1),
        ({"resume": True}, "--resume must find a whole checkpoint, got none in", 1),
        (
            {"data": "/no/such/text"},
            "train: --data must be a file that can be read, got /no/such/text: No such file",
            1,
        ),
        ({"sequence": 100_000}, r"--data must have at least \d+ bytes at --sequence 100000, got \d+", 1),
    ],
)
def test_bad_options_are_named(tmp_path, capsys, changed, message, status):
    """Status 2 where the command line alone is wrong, 1 where it does not fit what is there."""
    assert cli.main(["train", *train_cases.arguments(tmp_path, **{**TINY, "steps": 1, **changed})]) == status
    assert_says(capsys, message)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "option, message",
    [
        ({"steps": 1.5}, "--steps must be of type int, got 1.5"),
        ({"batch": True}, "--batch must be of type int, got True"),
        ({"hidden": "64"}, "--hidden must be of type int, got '64'"),
        ({"lr": "1"}, "--lr must be of type float, got '1'"),
        ({"dropout": False}, "--dropout must be of type float, got False"),
        ({"resume": 1}, "--resume must be of type bool, got 1"),
        ({"device": None}, "--device must be of type str, got None"),
        ({"data": "text"}, r"--data must be of type Path \| None, got 'text'"),
        ({"checkpoint": None}, "--checkpoint must be of type Path, got None"),
    ],
)
def test_options_of_another_type_are_named(option, message):
    with pytest.raises(TypeError, match=f"^train: {message}$"):
        Options(**option)


def test_options_of_their_types():
    assert Options(lr=1, dropout=0, data=Path("text"), resume=True).lr == 1


def assert_says(capsys, message):
    text = capsys.readouterr().err
    with pytest.raises(ValueError, match=message):
        raise ValueError(text)


def test_a_step_s_data_are_of_the_seed_and_the_step():
    text = data.read_text(None, sequence=16)
    tokens, targets = text.batch(1, 2, size=4, sequence=16)
    again, _ = text.batch(1, 2, size=4, sequence=16)
    assert tokens.shape == (4, 16) and tokens.dtype == torch.int64
    assert torch.equal(tokens, again) and torch.equal(tokens[:, 1:], targets[:, :-1])
    assert not any(torch.equal(tokens, text.batch(*of, size=4, sequence=16)[0]) for of in ((1, 3), (2, 2)))
    bytes_of = bytes(text.training.tolist())
    assert all(bytes(row.tolist()) in bytes_of for row in tokens)


def test_ranks_share_a_batch():
    batch = torch.arange(8)[:, None]
    rows = [World(rank, 4, torch.device("cpu"), sharded=False).rows(batch) for rank in range(4)]
    assert torch.equal(torch.cat(rows), batch)


def test_held_out_text_is_not_trained_on(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(250)) * 4)
    text = data.read_text(path, sequence=9)
    assert bytes(text.training.tolist()) + bytes(text.held_out.tolist()) == path.read_bytes()
    assert len(text.held_out) == 100
    windows = [text.test_batch(index, 2, size=3, sequence=9)[1] for index in range(2)]
    starts = torch.cat(windows)[:, 0] - 1
    assert starts.tolist() == [150, 165, 180, 195, 210, 225]


def test_learning_rate():
    rates = [loop.learning_rate(Options(steps=100, warmup=10, lr=1.0), step) for step in range(100)]
    assert rates[0] == 0.1 and max(rates) == rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True) and 0.1 < rates[-1] < 0.102


def test_the_log_goes_on_behind_its_checkpoint(tmp_path):
    """Lines of steps that will be made again, and half a line, are dropped."""
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 6)) + '{"step": 6, "lo')
    lines = log.Log(path, 3)
    lines.add({"step": 4, "loss": 1.0})
    assert [line["step"] for line in log.read(path)] == [1, 2, 3, 4] and log.read(path)[-1]["loss"] == 1.0


def test_a_loss_that_is_not_finite(tmp_path, capsys):
    """Printed as nan; null in the file, which stays JSON, and which a resumed run reads and draws."""
    options = {**TINY, "lr": 1e30, "warmup": 0}

    def lines():
        text = (tmp_path / "log.jsonl").read_text()
        return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]

    run(tmp_path, steps=3, **options)
    assert "step 3: nan nats a byte" in capsys.readouterr().out
    assert math.isfinite(lines()[0]["loss"]) and lines()[2]["loss"] is lines()[2]["held_out_loss"] is None
    run(tmp_path, steps=4, resume=True, **options)
    assert [line["loss"] is None for line in lines()] == [False, *3 * [True]]


def test_more_ranks_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="train: --nproc-per-node must be at most 2, the GPUs of this machine, got 3"):
        distributed.world("cuda").__enter__()


def test_a_log_that_is_none(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo\n')
    with pytest.raises(ValueError, match=r"log.jsonl, line 2: Invalid control character"):
        log.read(path)
    path.write_bytes(b'{"step": 1}\n{"step": 2, "text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"log.jsonl, line 2: 'utf-8' codec can't decode"):
        log.read(path)
    for line in ('{"epoch": 1}', "[1]"):
        path.write_text(f'{{"step": 1}}\n{line}\n')
        with pytest.raises(ValueError, match="log.jsonl, line 2: no object with a step, got "):
            log.read(path)


def test_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run(tmp_path, steps=1)
    assert "no loss.png (pip install -e '.[train]')" in capsys.readouterr().out


def test_matrices_alone_decay():
    learner = Learner(Options(**TINY), World(0, 1, torch.device("cpu"), sharded=False))
    matrices, others = learner.optimizer.param_groups
    assert matrices["weight_decay"] > 0 == others["weight_decay"]
    assert {parameter.dim() for parameter in matrices["params"]} == {2} and others["params"]
    assert sum(len(group["params"]) for group in (matrices, others)) == len(list(learner.model.parameters()))
    assert config_of(Options(hidden=64)).ffn_hidden_size == 192
