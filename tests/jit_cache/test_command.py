"""The shared parts of command lines, and `python -m jit_cache`: statuses, Ctrl-C, --json, progress, stale."""

import contextlib
import importlib.metadata
import json
import os
import pty
import signal
import subprocess
import sys
import time

import cutlass
import pytest

from jit_cache import command as shared
from jit_cache.stale import stale_fields
from jit_cache.store import Store
from tests.jit_cache import kernels
from tests.jit_cache.conftest import ROOT, environment
from tests.jit_cache.test_store import key, put

MODULE = "tests.jit_cache.kernels"


# ---------------------------------------------------------------------------------------------------------- exit status


@pytest.mark.parametrize(
    "error, status, message",
    [
        (shared.UsageError("it takes a or b"), 2, "program: it takes a or b\n"),
        (FileNotFoundError(2, "No such file", "x"), 1, "program: [Errno 2] No such file: 'x'\n"),
        (KeyboardInterrupt(), 130, "program: interrupted\n"),
    ],
)
def test_how_a_command_ends(error, status, message, capsys):
    def fail():
        raise error

    assert shared.run("program", fail) == status
    assert capsys.readouterr() == ("", message)
    assert shared.run("program", lambda: 1) == 1


def test_a_bug_has_a_traceback():
    with pytest.raises(ZeroDivisionError):
        shared.run("program", lambda: 1 // 0)


def test_version_and_exit_statuses_are_told(command):
    assert command("--version") == (0, f"jit-cache {importlib.metadata.version('cute-kernels')}", "")
    _, out, _ = command("--help")
    assert " ".join(shared.EXIT_STATUS.split()) in " ".join(out.split())


def test_a_wrong_variable_is_wrong_usage(command):
    status, out, err = command("info", JIT_CACHE_MODE="sometimes")
    assert status == 2 and not out and err.startswith("jit_cache: JIT_CACHE_MODE must be ")


# ----------------------------------------------------------------------------------------------------------------- JSON


def test_json_beside_the_text_or_alone(command, tmp_path, cache):
    _, text, _ = command("info", "--json", tmp_path / "info.json")
    assert text.startswith("directory")
    status, out, err = command("info", "--json", "-")
    assert (status, err) == (0, "") and out + "\n" == (tmp_path / "info.json").read_text()
    assert json.loads(out) == {
        "directory": str(cache),
        "exists": False,
        "kernels": 0,
        "bytes": 0,
        "architectures": [],
        "bundles": [],
        "mode": "on",
        "problems": [],
    }


def test_json_into_no_directory_is_refused_before_the_work(tmp_path):
    for path in (tmp_path, tmp_path / "none" / "x.json"):
        with pytest.raises(shared.UsageError, match="--json must be a file in a directory that is there"):
            shared.reported(pytest.fail, str(path))


def test_json_that_cannot_be_written_fails(tmp_path, monkeypatch, capsys):
    def full(path, data):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(shared, "write_whole", full)
    command = lambda: shared.reported(lambda: (0, {}), str(tmp_path / "x"))  # noqa: E731
    assert shared.run("program", command) == 1
    assert str(tmp_path / "x") in capsys.readouterr().err


def test_numbers_that_json_has_not(tmp_path):
    found = {"us": float("nan"), "errors": (float("inf"), 1.5, True, None)}
    assert shared.reported(lambda: (0, found), str(tmp_path / "x")) == 0
    assert json.loads((tmp_path / "x").read_text()) == {"us": None, "errors": [None, 1.5, True, None]}


def test_nothing_but_json_on_the_standard_output():
    """Nor what other processes print."""
    code = """
import os, sys
from jit_cache import command
def work():
    print("text")
    os.system("echo foreign")
    return 3, [1]
sys.exit(command.reported(work, "-"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment({}), cwd=ROOT)
    assert (done.returncode, json.loads(done.stdout), done.stderr) == (3, [1], "foreign\n")


def test_the_json_of_every_command(command, tmp_path, cache):
    def found(*words):
        status, out, err = command(*words, "--json", "-")
        assert not err
        return status, json.loads(out)

    package = (MODULE, "--arch", "sm_90a")
    status, report = found("prewarm", *package, "--check")
    assert status == 1 and not report["ok"] and report["seconds"] >= 0
    assert [kernel["status"] for kernel in report["kernels"]] == ["missing"] * 2
    kernels.add.obtain("sm_90a", cutlass.Float32)
    status, report = found("prewarm", *package, "--check")
    (stored, missing) = report["kernels"]
    assert (stored["kernel"], stored["arch"], stored["status"]) == (f"{MODULE}.add", "sm_90a", "disk")
    assert stored["record"]["kernels"] and missing["record"] is None
    assert missing["call"].startswith(f"{MODULE}.add('sm_90a', BFloat16")

    status, report = found("explain", *package)
    assert status == 1 and [kernel["stored"] for kernel in report] == [True, False]
    assert "arguments.dtype.dtype: wanted BFloat16, stored Float32" in report[1]["reasons"]
    (record,) = found("list")[1]
    assert record["directory"] == str(cache) and record["stale"] == [] and record["key"]["kernel"] == f"{MODULE}.add"
    assert found("verify") == (0, {"kernels": 1, "problems": []})

    archive = tmp_path / "a.tar"
    status, exported = found("export", archive)
    assert status == 0 and exported == {
        "file": str(archive),
        "kernels": 1,
        "bytes": archive.stat().st_size,
        "sha256": exported["sha256"],
        "problems": [],
    }
    assert found("clear", "--yes") == (0, {"removed": [record["name"]]})
    status, report = found("import", archive, "--digest", exported["sha256"])
    assert report == {"directory": str(cache), "kernels": [record["name"]], "problems": []}
    status, report = found("gc", "--max-gb", "0")
    assert [kernel["name"] for kernel in report["removed"]] == [record["name"]]
    assert report["bytes"] == sum(kernel["bytes"] for kernel in report["removed"]) > 1000


# ------------------------------------------------------------------------------------------------------------- progress


def test_progress_where_there_is_no_terminal(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with shared.progress("compiling", 9) as update:
        for done, now in enumerate((1.0, 4.0, 6.0, 7.0, 10.0, 12.5), start=1):  # noqa: B007
            update(done, "loss 1.5" if done == 6 else "")
    out, err = capsys.readouterr()
    assert not out and err.splitlines() == ["compiling 3 of 9, 6 s", "compiling 6 of 9, loss 1.5, 12 s"]
    with shared.progress("compiling", 9, quiet=True) as update:
        now = 100.0
        update(1, "")
    assert capsys.readouterr() == ("", "")


def on_terminal(code, answer=""):
    """The output and status of a process whose standard streams are a terminal."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, "-c", code], environment({"TERM": "xterm"}))
    os.write(terminal, answer.encode())
    text = b""
    with contextlib.suppress(OSError):  # the end, to Linux
        while data := os.read(terminal, 4096):
            text += data
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), text.decode()


def test_a_bar_on_a_terminal():
    code = """
from jit_cache import command
with command.progress("compiling", 4) as update:
    for done in range(1, 5):
        print("kernel", done)
        update(done, "")
"""
    status, text = on_terminal(code)
    assert status == 0 and all(f"kernel {n}" in text for n in (1, 2, 3, 4)) and "4/4" in text


# ---------------------------------------------------------------------------------------------------------------- clear


def names(store):
    return [entry.name for entry in store.entries()]


def test_clear_without_a_terminal_needs_yes(command, cache, monkeypatch):
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115
    put(Store(cache), key(1))
    status, out, err = command("clear")
    assert status == 2 and not out and str(cache) in err and "--yes" in err and names(Store(cache))
    assert command("clear", "--yes")[:2] == (0, "1 kernels removed") and not names(Store(cache))


def test_clear_takes_filters(command, cache):
    store = Store(cache)
    for n in (1, 2):
        put(store, key(n))
    kernels.add.obtain("sm_100a")
    before = names(store)
    assert command("clear", "--yes", "--only", "nothing")[:2] == (0, "0 kernels removed")
    assert command("clear", "--yes", "--arch", "sm_90a", "--only", "kernels.add")[1] == "0 kernels removed"
    assert command("clear", "--yes", "--arch", "sm_100a")[1] == "1 kernels removed"
    assert names(store) == [name for name in before if name.startswith("sm_90a/")]


@pytest.mark.parametrize("answer, status, left", [("y\n", 0, 0), ("no\n", 1, 1), ("\n", 1, 1)])
def test_clear_asks_on_a_terminal(cache, answer, status, left):
    put(Store(cache), key(1))
    code = "import sys; from jit_cache.__main__ import main; sys.exit(main(['clear']))"
    found, text = on_terminal(code, answer)
    assert (found, len(names(Store(cache)))) == (status, left), text
    assert f"remove all kernels in {cache}? [y/N]" in text


# ---------------------------------------------------------------------------------------------------------------- stale


BUILDER = """
import enum, dataclasses
from jit_cache import compiled

class Mode(enum.Enum):
    PLAIN = 1

@dataclasses.dataclass(frozen=True)
class Config:
    mode: Mode = Mode.PLAIN

@compiled
def build(arch: str, config: Config = Config()):
    from own import helper
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The directory of a package with a builder that is imported, and one kernel of it in the cache."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "helper.py").touch()
    (folder / "kernel.py").write_text(BUILDER)
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


STORE = """
from own import kernel
key = kernel.build.key("sm_90a", kernel.Config())
record = {"key": key.record, "options": "", "seconds": 0.1, "created": "now", "kernels": []}
Store(settings().root).write(key.name, record, {".o": b"object"})
"""
STALE = """
from jit_cache.stale import stale_fields
print([stale_fields(entry) for entry in Store(settings().root).entries()], "own" in sys.modules)
"""


def test_kernels_of_another_source_are_stale(run, own, tmp_path):
    """A builder's, and that of what it imports; nothing is imported."""
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    run(STORE, PYTHONPATH=path)
    assert run(STALE, PYTHONPATH=path)[0] == "[[]] False"
    (own / "helper.py").write_text("# changed\n")
    assert run(STALE, PYTHONPATH=path)[0] == "[['source']] False"
    run(STORE, PYTHONPATH=path)
    assert sorted(run(STALE, PYTHONPATH=path)[0]) == sorted("[[], ['source']] False")
    (own / "kernel.py").unlink()
    assert run(STALE, PYTHONPATH=path)[0] == "[['source'], ['source']] False"
    assert run(STALE, PYTHONPATH=str(ROOT))[0] == "[None, None] False"


def test_kernels_of_another_stack_are_stale(cache, monkeypatch):
    kernels.add.obtain("sm_90a")
    (entry,) = Store(cache).entries()
    assert stale_fields(entry) == []
    stack = {**entry.record["key"]["stack"], "tvm_ffi": "0"}
    monkeypatch.setattr("jit_cache.stale.stack", lambda: stack)
    assert stale_fields(entry) == ["stack"]


def test_a_bundle_of_another_flavour_is_not_stale(cache, monkeypatch):
    """It serves here, as `find` has it."""
    kernels.add.obtain("sm_90a")
    (entry,) = Store(cache, writable=False).entries()
    stack = entry.record["key"]["stack"]
    newer = {name.replace("cu12", "cu13"): version for name, version in stack["dsl"].items()}
    monkeypatch.setattr("jit_cache.stale.stack", lambda: {**stack, "dsl": newer})
    assert stale_fields(entry) == []
    (entry,) = Store(cache).entries()
    assert stale_fields(entry) == (["stack"] if newer != stack["dsl"] else [])


def test_list_marks_what_is_stale_and_names_the_module(command, cache, monkeypatch):
    kernels.add.obtain("sm_90a")
    put(Store(cache), key(1))
    ours, other = sorted(command("list")[1].split("\nsm_"), key=lambda text: f"{MODULE}.add(" not in text)
    assert "stale" not in ours and key(1).record["kernel"] in other
    monkeypatch.setattr("jit_cache.stale._source_now", lambda names: "changed")
    assert "; stale: another source\n" in command("list", "--only", MODULE)[1]


# --------------------------------------------------------------------------------------------------------------- Ctrl-C

STARTING = """
import pathlib, sys, time
from jit_cache.__main__ import main
if __name__ == "__main__":
    sys.exit(main(["prewarm", "tests.jit_cache.kernels", "--arch", "sm_90a", "--workers", "2"]))
pathlib.Path({place!r}, str(time.monotonic_ns())).touch()
time.sleep(1.5)
"""


def test_ctrl_c_while_workers_start(tmp_path):
    """They import what the main module imports, and are interrupted, too: one line in all."""
    (tmp_path / "begun").mkdir()
    script = tmp_path / "script.py"
    script.write_text(STARTING.format(place=str(tmp_path / "begun")))
    process = subprocess.Popen(
        [sys.executable, script],
        env=environment({}),
        start_new_session=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        end = time.monotonic() + 60
        while len(list((tmp_path / "begun").iterdir())) < 2:
            assert time.monotonic() < end
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, out, err) == (130, "", "jit_cache: interrupted\n")
