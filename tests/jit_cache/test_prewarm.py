"""Prewarming: what a package names is compiled in parallel; failures are reported, not fatal."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import cutlass
import pytest

import jit_cache.__main__
from jit_cache import prewarm
from jit_cache.prewarm import available_memory, default_workers, discover
from tests.jit_cache import kernels
from tests.jit_cache.conftest import ROOT, environment

MODULE = "tests.jit_cache.kernels"
ARCHS = ["sm_90a", "sm_100a"]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with two families, the second of which must not be imported whole."""
    for name, text in {
        "warm/__init__.py": "",
        "warm/norm/__init__.py": "",
        "warm/norm/prewarm.py": "from tests.jit_cache.kernels import specializations\n",
        "warm/deep/__init__.py": "",
        "warm/deep/er/__init__.py": "",
        "warm/deep/er/prewarm.py": "from tests.jit_cache import kernels\n"
        "def specializations(arch):\n    yield kernels.broken, (arch, 1)\n    yield kernels.broken, (arch, 1)\n",
        "warm/deep/kernel.py": "raise AssertionError('imported')\n",
        "empty/__init__.py": "",
        "wrong/__init__.py": "",
        "wrong/part/__init__.py": "import nothing_of_this_name\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield str(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("warm", "empty", "wrong")]:
        del sys.modules[name]


def test_discovery(package):
    jobs = discover("warm", ARCHS)
    assert [(builder.__name__, args[0]) for builder, args in jobs] == [
        (name, arch) for arch in ARCHS for name in ("broken", "broken", "add", "add")
    ]
    assert {builder.__name__ for builder, _ in discover("warm", ARCHS, only=["kernels.add"])} == {"add"}
    assert [args[1] for _, args in discover(MODULE, ["sm_90a"])] == [cutlass.Float32, cutlass.BFloat16]


def test_a_config_goes_to_the_package(command, package, monkeypatch, tmp_path):
    def for_config(config, arch):
        return [(kernels.add, (arch, cutlass.Float32, kernels.Config(threads=config["threads"])))]

    monkeypatch.setattr(kernels, "for_config", for_config, raising=False)
    file = tmp_path / "config.json"
    file.write_text('{"threads": 32}')
    status, out, _ = command("prewarm", MODULE, "--arch", "sm_90a", "--config", file, "--check")
    assert status == 1 and "threads=32" in out and out.splitlines()[-1].startswith("1 kernels: 1 missing")
    status, out, _ = command("explain", MODULE, "--arch", "sm_90a", "--config", file)
    assert "threads=32" in out
    status, _, err = command("prewarm", "warm", "--arch", "sm_90a", "--config", file)
    assert status == 1 and "warm has no function `for_config(config, arch)`" in err
    for text, problem in (("[]", "must hold a JSON object, got list"), ("{", "Expecting property name")):
        file.write_text(text)
        status, _, err = command("prewarm", MODULE, "--arch", "sm_90a", "--config", file)
        assert status == 1 and str(file) in err and problem in err
    status, _, err = command("prewarm", MODULE, "--arch", "sm_90a", "--config", tmp_path / "nowhere")
    assert status == 1 and "nowhere" in err


def test_discovery_fails_loudly(package):
    with pytest.raises(LookupError, match="empty has no function `specializations"):
        discover("empty", ARCHS)
    with pytest.raises(ImportError, match="nothing_of_this_name"):
        discover("wrong", ARCHS)
    with pytest.raises(ImportError):
        discover("not_there_at_all", ARCHS)


def test_workers_compile_store_and_report(cache):
    jobs = discover(MODULE, ARCHS)
    seen = []
    report = prewarm(
        [*jobs, jobs[0]], workers=2, progress=lambda result, done, total: seen.append((result, done, total))
    )
    assert report.ok and [result.status for result in report.results] == ["compiled"] * 4
    assert [(done, total) for _, done, total in seen] == [(n, 4) for n in (1, 2, 3, 4)]
    assert {str(result) for result, _, _ in seen} == {str(result) for result in report.results}
    for result, (builder, args) in zip(report.results, jobs, strict=True):
        assert result.builder == builder.kernel and result.arguments == args and result.arch == args[0]
        assert result.seconds > 0 and result.record["kernels"][0]["registers"] > 0
        assert result.record["files"][".o"]["size"] > 1000
    again = prewarm(jobs)
    assert [result.status for result in again.results] == ["disk"] * 4
    assert [result.record for result in again.results] == [result.record for result in report.results]


def test_what_the_compiler_has_not_read_is_in_no_key(run):
    """A variable that is set after the import of the compiler changes nothing here, nor in workers that begin later."""
    code = """
import os
from tests.jit_cache import kernels
from jit_cache import prewarm
builder = kernels.add
served = prewarm([(builder, (arch,)) for arch in ("sm_90a", "sm_100a")], workers=2)
os.environ["CUTE_DSL_LINEINFO"] = "1"
other = kernels.Config(threads=32)
late = prewarm([(builder, (arch, kernels.cutlass.Float32, other)) for arch in ("sm_90a", "sm_100a")], workers=2)
print([result.status for report in (served, late) for result in report.results])
print([result.record["key"]["environment"] for report in (served, late) for result in report.results])
"""
    out, err = run(code)
    assert out == f"{['compiled'] * 4}\n{[{}] * 4}", err


SCRIPT = """
import os, sys
sys.modules["torch"] = None
from tests.jit_cache import kernels
os.environ["CUTE_DSL_LINEINFO"] = "1"  # also where workers import this, before the compiler if they inherit it
if __name__ == "__main__":
    from multiprocessing import forkserver
    from jit_cache import prewarm
    forkserver.ensure_running()  # another library's, which has the environment of now
    jobs = kernels.specializations("sm_90a")
    report = prewarm(jobs, workers=2)
    print([result.status for result in report.results], [builder.find(*args) is not None for builder, args in jobs])
    print(os.environ["CUTE_DSL_LINEINFO"])
"""


def test_workers_compile_under_the_variables_of_the_keys(tmp_path):
    """They import the script, and with it the compiler, before anything else."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, tmp_path / "script.py"]
    done = subprocess.run(command, env=environment({}), capture_output=True, text=True, check=True)
    assert done.stdout == f"{['compiled'] * 2} {[True] * 2}\n1\n", done.stderr


CLASS_OF_A_SCRIPT = """
import dataclasses
from tests.jit_cache import kernels
@dataclasses.dataclass(frozen=True)
class Own(kernels.Config):
    pass
if __name__ == "__main__":
    from jit_cache import prewarm
    jobs = [(kernels.add, (arch, kernels.cutlass.Float32, Own())) for arch in ("sm_90a", "sm_100a")]
    report = prewarm(jobs, workers=2)
    print([result.status for result in report.results], [builder.find(*args) is not None for builder, args in jobs])
"""


def test_a_class_of_a_script_is_the_same_in_the_workers(tmp_path):
    """There the script is __mp_main__."""
    (tmp_path / "script.py").write_text(CLASS_OF_A_SCRIPT)
    command = [sys.executable, tmp_path / "script.py"]
    done = subprocess.run(command, env=environment({}), capture_output=True, text=True, check=True)
    assert done.stdout == f"{['compiled'] * 2} {[True] * 2}\n", done.stderr


@pytest.mark.parametrize("workers", [1, 2])
def test_what_cannot_be_stored_has_failed(cache, workers):
    cache.mkdir()
    cache.chmod(0o777)
    report = prewarm(discover(MODULE, ["sm_90a"]), workers=workers)
    assert [result.status for result in report.failed] == ["failed"] * 2
    assert all(f"writable by others: chmod go-w {cache}" in result.error for result in report.failed)


def test_check_compiles_nothing(cache):
    report = prewarm(discover(MODULE, ["sm_90a"]), check=True)
    assert [result.status for result in report.failed] == ["missing"] * 2 and not cache.exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failure_does_not_stop_the_others(workers):
    jobs = [
        (kernels.broken, ("sm_90a", 1)),
        (kernels.add, ("sm_90a", cutlass.Float32)),
        (kernels.broken, ("sm_90a", 2)),
    ]
    report = prewarm(jobs, workers=workers)
    assert [result.status for result in report.results] == ["failed", "compiled", "failed"]
    assert "broken('sm_90a', 2): RuntimeError: the builder is broken" in report.results[2].error
    assert str(report.failed[0]) == "tests.jit_cache.kernels.broken('sm_90a', 1)"
    assert report.failed[0].message == report.failed[0].error
    assert report.results[1].message == str(report.results[1])


def test_a_worker_that_dies_takes_only_its_own_kernel_along():
    jobs = [(kernels.dies, ("sm_90a",)), *discover(MODULE, ["sm_90a"])]
    report = prewarm(jobs, workers=2)
    assert [result.status for result in report.results][0] == "failed"
    assert report.results[0].message.startswith("tests.jit_cache.kernels.dies('sm_90a'): the process that compiled it")
    assert all(result.ok for result in report.results[1:])


def test_wrong_arguments_raise_at_once():
    with pytest.raises(TypeError, match="argument `n` must be"):
        prewarm([(kernels.broken, ("sm_90a", [1]))])


GB = 2**30


@pytest.mark.parametrize(
    "files, expected",
    [
        ({}, 8 * GB),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, 8 * GB),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/memory.max": f"{4 * GB}\n",
                "sys/fs/cgroup/a/memory.current": f"{3 * GB}\n",
                "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {GB}\n",
            },
            2 * GB,
        ),
        (  # in a container: the path is the host's
            {
                "proc/self/cgroup": "0::/of/the/host\n",
                "sys/fs/cgroup/memory.max": f"{3 * GB}\n",
                "sys/fs/cgroup/memory.current": f"{GB}\n",
            },
            2 * GB,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/x\n4:memory:/x\n0::/\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{2 * GB}\n",
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": f"{GB}\n",
                "sys/fs/cgroup/memory/x/memory.stat": "total_inactive_file 0\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GB}\n",
            },
            GB,
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": f"{GB}\n",
                "sys/fs/cgroup/memory.current": f"{2 * GB}\n",
            },
            0,
        ),
    ],
)
def test_memory_that_control_groups_leave(tmp_path, files, expected):
    for name, text in {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {8 * 2**20} kB\n", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_memory(tmp_path) == expected


@pytest.mark.parametrize(("gigabytes", "expected"), [(0.5, 1), (3.5, 3), (100, 8)])
def test_default_workers(gigabytes, expected, monkeypatch):
    monkeypatch.setattr(sys.modules[available_memory.__module__], "available_memory", lambda: int(gigabytes * GB))
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    assert default_workers() == expected


# --------------------------------------------------------------------------------------------------------- command line


def test_prewarm_command(command, package, monkeypatch, tmp_path):
    status, out, _ = command("prewarm", MODULE, "--arch", "sm_90a", "--check")
    assert status == 1 and "2 kernels: 2 missing" in out
    status, out, err = command("prewarm", MODULE, "--arch", "sm_90a", "--workers", 2)
    lines = out.splitlines()
    assert status == 0 and len(lines) == 3 and "2 kernels: 2 compiled" in lines[-1], err
    assert all(line.startswith("compiled") and " registers" in line for line in lines[:2])
    monkeypatch.setattr(jit_cache.__main__, "_gpu_archs", lambda: [])
    status, out, _ = command("prewarm", MODULE, JIT_CACHE_ARCH="sm_90a")
    assert status == 0 and "2 disk" in out
    status, out, _ = command("prewarm", "warm", "--arch", "sm_90a", "--workers", 1)
    assert status == 1 and "1 failed" in out and "the builder is broken" in out
    status, out, _ = command("prewarm", "warm", "--arch", "sm_90a", "--only", "kernels.add")
    assert status == 0 and "2 kernels: 2 disk" in out
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("JIT_CACHE_DIR", str(tmp_path / "open"))
    status, out, _ = command("prewarm", MODULE, "--arch", "sm_90a", "--workers", 1)
    assert status == 1 and "2 failed" in out and "chmod go-w" in out


def test_prewarm_command_beside_a_gpu_without_kernels(command, package, monkeypatch):
    """The GPUs at hand that the package has kernels for; another one, named, is an error."""

    def specializations(arch):
        if arch == "sm_120a":
            raise ValueError("no kernels for sm_120a")
        return [(kernels.add, (arch,))]

    monkeypatch.setattr(kernels, "specializations", specializations)
    for archs, status_wanted, missing in ((["sm_90a", "sm_120a"], 1, "1 missing"), (["sm_120a"], 2, "")):
        monkeypatch.setattr(jit_cache.__main__, "_gpu_archs", lambda found=archs: found)
        status, out, err = command("prewarm", MODULE, "--check")
        assert status == status_wanted and missing in out and "no kernels for sm_120a" in err
        assert ("left out" in err) == (len(archs) > 1)
    status, out, err = command("prewarm", MODULE, "--arch", "sm_90a", "--arch", "sm_120a", "--check")
    assert status == 2 and not out and "no kernels for sm_120a" in err and "left out" not in err
    monkeypatch.setattr(jit_cache.__main__, "_gpu_archs", lambda: [])
    status, out, err = command("prewarm", MODULE, "--check", JIT_CACHE_ARCH="sm_90a,sm_120a")
    assert status == 2 and not out and "no kernels for sm_120a" in err and "left out" not in err


@pytest.mark.parametrize("words", [["prewarm", "--check"], ["explain"]], ids=lambda words: words[0])
def test_commands_of_nothing_say_what_there_is(words, command):
    name, *options = words
    status, out, err = command(name, MODULE, "--arch", "sm_90a", *options, "--only", "ad_", "--only", "_add")
    assert status == 2 and not out
    assert err == "jit_cache: no kernel matches ad_ or _add; there are: tests.jit_cache.kernels.add"
    for path in (".", "tests/jit_cache", "a..b", ""):
        status, _, err = command(name, path, "--arch", "sm_90a", *options)
        assert status == 2 and err == f"jit_cache: package must be a module's name, such as cute_kernels, got {path!r}"


def test_prewarm_command_with_no_workers(command):
    for wrong in ("0", "-1", "two"):
        status, _, err = command("prewarm", MODULE, "--workers", wrong)
        assert status == 2 and f"must be an integer of at least 1, got {wrong!r}" in err


def test_prewarm_command_without_a_gpu_asks_for_the_architecture(command):
    status, _, err = command("prewarm", MODULE, PATH="/nowhere")
    assert status == 2 and "--arch sm_90a" in err


def test_explain_command(command):
    status, out, _ = command("explain", MODULE, "--arch", "sm_90a")
    assert status == 1 and "nothing is stored of this builder" in out and out.endswith("2 not stored")
    kernels.add.obtain("sm_90a")
    status, out, _ = command("explain", MODULE, "--arch", "sm_90a", CUTE_DSL_NEW="1")
    assert "environment.CUTE_DSL_NEW: wanted 1, stored nothing" in out and out.endswith("2 not stored")
    status, out, _ = command("explain", MODULE, "--arch", "sm_90a")
    assert "arguments.dtype.dtype: wanted BFloat16, stored Float32" in out and out.endswith("1 not stored")


def test_a_worker_that_died_before_all_jobs_were_given_out(monkeypatch):
    real, given = ProcessPoolExecutor.submit, []

    def submit(pool, function, job):
        given.append(job)
        if len(given) == 2:
            raise BrokenProcessPool("a worker died")
        return real(pool, function, job)

    monkeypatch.setattr(ProcessPoolExecutor, "submit", submit)
    report = prewarm(discover(MODULE, ["sm_90a"]), workers=2)
    assert report.ok and len(report.results) == 2 and len(given) == 3


SLOW = """
import pathlib, time
from jit_cache import compiled

@compiled
def slow(arch: str, n: int):
    pathlib.Path({place!r}, str(n)).touch()
    time.sleep(60)

def specializations(arch):
    return [(slow, (arch, n)) for n in range(4)]
"""


@pytest.mark.parametrize(
    "how, status", [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)], ids=["kill", "Ctrl-C"]
)
def test_workers_end_with_the_process_that_started_them(how, status, cache, tmp_path):
    """One that is killed takes them along; Ctrl-C in a terminal goes to all of the group."""
    (tmp_path / "begun").mkdir()
    (tmp_path / "slow.py").write_text(SLOW.format(place=str(tmp_path / "begun")))
    command = [sys.executable, "-m", "jit_cache", "prewarm", "slow", "--arch", "sm_90a", "--workers", "2"]
    variables = environment({"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    process = subprocess.Popen(
        command,
        env=variables,
        cwd=ROOT,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a job in the background ignores
    )
    try:
        _wait_for(lambda: len(list((tmp_path / "begun").iterdir())) == 2, seconds=60)
        if how == signal.SIGKILL:
            process.kill()
        else:
            os.killpg(process.pid, how)
        assert process.wait(timeout=20) == status
        _wait_for(lambda: not _members(process.pid), seconds=20)
        assert len(list((tmp_path / "begun").iterdir())) == 2
        error = process.stderr.read()
        assert how == signal.SIGKILL or error.strip() == "jit_cache: interrupted"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def _members(group):
    """The living processes of a group."""
    found = []
    for status in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of = status.read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state != "Z":
                found.append(status)
    return found
