"""Every file that the library writes for a user: where it cannot be written, the old one survives and is named."""

import os
import resource

import pytest

from bench import harness, report
from cute_kernels.cli import check
from cute_kernels.cli import main as cli
from cute_kernels.invariance import Report
from cute_kernels.train import log

LINES = [{"step": step, "loss": 1.0} for step in range(1, 501)]


def add_to_log(path):
    lines = log.Log(path, 500)
    for line in LINES:
        lines.add(line)


WRITERS = {
    "line of a log": ("log.jsonl", add_to_log),
    "plot of the losses": ("loss.png", lambda path: log.plot(LINES, path)),
    "results": ("gpu.jsonl", lambda path: harness.append_lines(path, LINES)),
    "page of the results": ("performance.md", lambda path: report.main(docs=path.parent)),
    "report of the checker": ("report.json", lambda path: Report("x" * 10_000, 1, 0, (), (), ()).save(path)),
}


@pytest.fixture
def limit():
    """No file may grow beyond so many bytes, as after `ulimit -f`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("what", WRITERS)
def test_a_file_that_cannot_be_written_whole(what, tmp_path, limit, monkeypatch):
    name, write = WRITERS[what]
    path = tmp_path / name
    old = b'{"step": 1}\n'
    path.write_bytes(old)
    limit(2048)
    monkeypatch.setattr(report, "pages", lambda results: {"performance.md": "x" * 10_000})
    with pytest.raises(OSError, match="File too large") as info:
        write(path)
    assert info.value.filename == str(path)
    data = path.read_bytes()
    assert data.startswith(old) and data.endswith(b"\n"), "no half line"
    assert what == "line of a log" or data == old
    assert os.listdir(tmp_path) == [name]


def test_the_log_of_a_run_that_is_resumed(tmp_path, limit):
    path = tmp_path / "log.jsonl"
    add_to_log(path)
    old = path.read_bytes()
    limit(len(old) - 1)
    with pytest.raises(OSError, match="File too large") as info:
        log.Log(path, 500)
    assert info.value.filename == str(path)
    assert path.read_bytes() == old and os.listdir(tmp_path) == ["log.jsonl"]


def test_the_json_of_the_checks(tmp_path, limit, monkeypatch, capsys):
    path = tmp_path / "checks.json"
    path.write_text("old")
    monkeypatch.setattr(check, "_check", lambda subject, make, has_gpu: (None, "x" * 1000, True))
    limit(2048)
    assert cli.main(["check", "--json", str(path)]) == 1
    assert capsys.readouterr().err == f"cute_kernels: [Errno 27] File too large: '{path}'\n"
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["checks.json"]
