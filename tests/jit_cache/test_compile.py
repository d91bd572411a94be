"""Calls of a builder: once compiled, then loaded, whatever happens to the disk, the process or its neighbours."""

import json
import os
import resource
import shutil
import subprocess
import threading
import time

import cutlass
import pytest

from jit_cache import KernelCompileError, MissingKernelError, recording, source
from jit_cache.compile import Compiled, reset, stats
from jit_cache.key import machine, stack
from jit_cache.store import Store
from tests.jit_cache import kernels
from tests.jit_cache.test_store import HOLD

CALL = "f = kernels.add('sm_90a')\n"
# A loaded function refuses a wrong number of arguments by itself: the code runs.
WORKS = """
def works(f):
    try:
        f(1)
    except TypeError as error:
        assert "Expects 3 parameters" in str(error) and "x: Tensor([n0], float32)" in str(error), error
    else:
        raise AssertionError
works(f)
print(stats().compiles, stats().disk_loads, stats().bundle_loads, stats().misses)
"""


def works(function):
    with pytest.raises(TypeError, match=r"Expects 3 parameters when calling: .*x: Tensor\(\[n0\], float32\)"):
        function(1)


def fresh(builder=kernels.add):
    """The builder as a new process has it: with an empty memory, settings not read, no warning given."""
    reset()
    return Compiled(builder.build)


def counted(call):
    """Runs a call that gives a function which works; returns how many compilations and loads from disk it took."""
    before = stats()
    works(call())
    after = stats()
    return after.compiles - before.compiles, after.disk_loads - before.disk_loads


def warnings(err):
    return [line for line in err.splitlines() if line.startswith("jit_cache:")]


@pytest.fixture
def stored(cache):
    """A store with kernels.add('sm_90a') in it, and the key."""
    kernels_add = fresh()
    kernels_add.obtain("sm_90a")
    return Store(cache), kernels_add.key("sm_90a")


def test_compiled_once_then_loaded_by_every_process(run):
    assert run(CALL + WORKS)[0] == "1 0 0 1"
    assert run(CALL + WORKS)[0] == "0 1 0 0"
    assert run(CALL + CALL + "assert kernels.add(arch='sm_90a', config=kernels.Config()) is f" + WORKS)[0] == "0 1 0 0"


def test_keywords_and_defaults_are_the_same_call():
    builder = fresh()
    function = builder("sm_90a")
    assert type(function).__name__ == "Function" and type(function).__module__.startswith("tvm_ffi")
    assert counted(lambda: builder(config=kernels.Config(), arch="sm_90a")) == (0, 0)
    assert builder("sm_90a", kernels.cutlass.Float32, kernels.Config()) is function


def test_every_argument_that_differs_has_an_object_of_its_own(cache):
    builder = fresh()
    for config in (
        kernels.Config(),
        kernels.Config(threads=128),
        kernels.Config(scale=-0.0),
        kernels.Config(scale=0.0),
    ):
        builder.obtain("sm_90a", config=config)
    builder.obtain("sm_90a", kernels.cutlass.BFloat16)
    builder.obtain("sm_100a")
    assert len(list(Store(cache).entries())) == 6


def test_stats_and_record(stored):
    store, key = stored
    builder, before = fresh(), stats()
    kernel = builder.obtain("sm_90a")
    after = stats()
    assert (after.disk_loads - before.disk_loads, after.compiles - before.compiles) == (1, 0)
    assert kernel.origin == "disk" and kernel.record == builder.record("sm_90a") == builder.find("sm_90a").record
    assert builder.record("sm_100a") is None and builder.find("sm_100a") is None
    assert kernel.record["key"] == key.record and kernel.record["files"][".o"]["size"] == len(kernel.data)
    assert kernel.record["seconds"] > 0
    (cuda,) = kernel.record["kernels"]
    assert cuda["registers"] > 0 and cuda["stack_bytes"] == 0 and cuda["static_smem_bytes"] == 0
    assert cuda["dynamic_smem_bytes"] == 1024 and cuda["threads"] == 64


def test_objects_do_not_depend_on_process_or_cache(run, stored, tmp_path):
    run(CALL, JIT_CACHE_DIR=str(tmp_path / "other"), PYTHONHASHSEED="7")
    store, key = stored
    assert Store(tmp_path / "other").find(key)[0].read() == store.find(key)[0].read()


# --------------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("damage", ["half", "flipped bit", "garbage", "record", "other arch", "other flavour"])
def test_what_is_damaged_or_of_another_is_rebuilt_with_one_warning(stored, damage, caplog):
    store, key = stored
    object_file, record_file = store.path(key.name, ".o"), store.path(key.name, ".json")
    data = object_file.read_bytes()
    if damage == "record":
        record_file.write_text("{")
    elif damage == "other arch":
        fresh().obtain("sm_100a")
        for suffix in (".o", ".json"):
            shutil.copy(store.path(fresh().key("sm_100a").name, suffix), store.path(key.name, suffix))
    elif damage == "other flavour":
        record = json.loads(record_file.read_text())
        record["key"]["stack"]["dsl"]["nvidia-cutlass-dsl-libs-cu99"] = "4.8.1"
        record_file.write_text(json.dumps(record))
    else:
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        object_file.write_bytes({"half": data[:middle], "flipped bit": flipped, "garbage": b"x"}[damage])
    builder = fresh()
    assert counted(lambda: builder("sm_90a")) == (1, 0)
    assert len(caplog.messages) == 1 and "not used" in caplog.text
    builder = fresh()
    assert counted(lambda: builder("sm_90a")) == (0, 1)
    assert len(caplog.messages) == 1 and object_file.read_bytes() == data


@pytest.mark.parametrize("suffix", [".o", ".json", ".lock"])
def test_a_directory_in_the_place_of_a_file_is_replaced_with_one_warning(stored, suffix, caplog):
    store, key = stored
    path = store.path(key.name, suffix)
    path.unlink()
    path.mkdir()
    if suffix == ".lock":
        store.path(key.name, ".o").unlink()
        store.path(key.name, ".json").unlink()
    builder = fresh()
    assert counted(lambda: builder("sm_90a")) == (1, 0)
    assert len(caplog.messages) == 1 and str(path) in caplog.text
    builder = fresh()
    assert counted(lambda: builder("sm_90a")) == (0, 1)
    assert len(caplog.messages) == 1 and path.is_file()


def test_an_object_with_a_right_hash_that_does_not_load_is_rebuilt(stored, caplog):
    store, key = stored
    store.write(key.name, store.find(key)[0].record, {".o": b"no object at all"})
    builder = fresh()
    assert counted(lambda: builder("sm_90a")) == (1, 0)
    assert len(caplog.messages) == 1 and "does not load" in caplog.text


# ------------------------------------------------------------------------------------------------ directories that fail


def two_kernels():
    """Two kernels work; returns how many compilations and loads from disk that took."""
    builder = fresh()
    first = counted(lambda: builder("sm_90a"))
    second = counted(lambda: builder("sm_90a", config=kernels.Config(threads=32)))
    return first[0] + second[0], first[1] + second[1]


@pytest.mark.parametrize(
    "event", ["world-writable", "foreign-owned", "file instead", "linked below", "missing parent is a file"]
)
def test_directories_that_cannot_be_used_cost_one_warning(cache, event, tmp_path, caplog, monkeypatch):
    if event == "foreign-owned":
        if os.geteuid() != 0:
            pytest.skip("only root can give files away")
        cache.mkdir(mode=0o700)
        os.chown(cache, 12345, -1)
    elif event == "world-writable":
        cache.mkdir()
        cache.chmod(0o777)
    elif event == "file instead":
        cache.write_text("")
    elif event == "linked below":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        cache.mkdir(mode=0o700)
        (cache / "v1").symlink_to(tmp_path / "elsewhere")
    else:
        (tmp_path / "plain").write_text("")
        monkeypatch.setenv("JIT_CACHE_DIR", str(tmp_path / "plain" / "cache"))
    assert two_kernels() == (2, 0)
    assert len(caplog.messages) == 1, caplog.text
    assert not list(tmp_path.glob("elsewhere/*"))


def test_a_missing_directory_is_made(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("JIT_CACHE_DIR", str(tmp_path / "a" / "b" / "c"))
    assert two_kernels() == (2, 0) and not caplog.messages
    assert len(list(Store(tmp_path / "a" / "b" / "c").entries())) == 2


@pytest.mark.parametrize("filled", [False, True])
def test_a_read_only_directory(filled, tmp_path, monkeypatch, caplog):
    place = tmp_path / "disk"
    place.mkdir()
    root = os.geteuid() == 0  # who writes everywhere but on a file system that is mounted read-only
    if root and subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        cache = place / "cache"
        cache.mkdir(mode=0o700)
        monkeypatch.setenv("JIT_CACHE_DIR", str(cache))
        if filled:
            fresh().obtain("sm_90a")
        if root:
            subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        else:
            [path.chmod(0o500) for path in (cache, *cache.rglob("*")) if path.is_dir()]
        assert two_kernels() == ((1, 1) if filled else (2, 0))
        assert len(caplog.messages) == 1
        assert "Read-only file system" in caplog.text or "Permission denied" in caplog.text
    finally:
        if root:
            subprocess.run(["umount", place], check=True)


def test_a_full_disk_costs_one_warning(tmp_path, monkeypatch, caplog):
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        monkeypatch.setenv("JIT_CACHE_DIR", str(place / "cache"))
        assert two_kernels() == (2, 0)
        assert len(caplog.messages) == 1 and "No space left" in caplog.text
        assert not [path for path in place.rglob("*") if path.suffix in (".tmp", ".o", ".json")]
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_file_size_limit_costs_one_warning(cache, monkeypatch, caplog):
    real = Store.write

    def limited(*arguments):  # the limit counts for memory files, too, so it is set for the disk alone
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        try:
            return real(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    monkeypatch.setattr(Store, "write", limited)
    assert two_kernels() == (2, 0)
    assert len(caplog.messages) == 1 and "File too large" in caplog.text
    assert not [path for path in cache.rglob("*") if path.suffix in (".tmp", ".o", ".json")]


def change_source(monkeypatch):
    """The builders' file is another than this process has looked at."""
    monkeypatch.setitem(source._looks, kernels.__file__, source._Look((0, 0, 0), 0, True))


def test_a_source_that_changed_after_the_import_is_not_stored(cache, caplog, monkeypatch):
    change_source(monkeypatch)
    builder = fresh()
    assert counted(lambda: builder("sm_90a")) == (1, 0)
    assert len(caplog.messages) == 1 and f"add is not stored: {kernels.__file__} changed" in caplog.text
    assert not list(cache.rglob("*.o"))


LATE = """
from jit_cache import compiled
from tests.jit_cache.kernels import Config, add
@compiled
def build(arch, n):
    if n > 4096:
        from late_tiles import THREADS
    else:
        THREADS = 32
    return add.build(arch, config=Config(threads=THREADS))
"""


def test_what_a_builder_imports_after_it_changed_is_not_stored(run, tmp_path):
    """The key was made of what the file said before."""
    (tmp_path / "late.py").write_text(LATE)
    (tmp_path / "late_tiles.py").write_text("THREADS = 64\n")
    code = f"""
sys.path.insert(0, {str(tmp_path)!r})
import pathlib, time
from late import build
print(build.obtain("sm_90a", 1).origin)
time.sleep(0.1)
if {{edit}}:
    pathlib.Path(build._module.__file__).with_name("late_tiles.py").write_text("THREADS = 128\\n")
for n in (8192, 8193):
    kernel = build.obtain("sm_90a", n)
    print(kernel.origin, kernel.record["kernels"][0]["threads"], build.find("sm_90a", n) is not None)
"""
    out, err = run(code.format(edit=True))
    assert out.split("\n") == ["compiled", "compiled 128 False", "compiled 128 False"]
    assert len(warnings(err)) == 1 and f"late.build is not stored: {tmp_path}/late_tiles.py changed" in err
    out, err = run(code.format(edit=False))
    assert out.split("\n") == ["compiled", "compiled 128 True", "compiled 128 True"] and not warnings(err)


def test_a_variable_of_the_compiler_that_changed_keeps_kernels_from_being_stored(cache, caplog, monkeypatch):
    """One that the DSL does not list: nobody knows when it is read."""
    builder = fresh()
    monkeypatch.setenv("CUTE_DSL_NOT_KNOWN_YET", "1")
    assert builder.obtain("sm_90a").problem and not list(cache.rglob("*.o"))
    assert len(caplog.messages) == 1 and "CUTE_DSL_* variables changed" in caplog.text
    assert fresh().obtain("sm_90a").problem is None


# ----------------------------------------------------------------------------------------------------- errors and modes


def test_compile_errors_name_the_call_and_are_never_cached(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("COMPILES", str(tmp_path / "compiles"))
    broken, broken_kernel = fresh(kernels.broken), fresh(kernels.broken_kernel)
    for _ in range(2):
        with pytest.raises(KernelCompileError) as info:
            broken("sm_90a", 3)
        assert str(info.value) == "tests.jit_cache.kernels.broken('sm_90a', 3): RuntimeError: the builder is broken"
        assert isinstance(info.value.__cause__, RuntimeError)
        with pytest.raises(KernelCompileError, match=r"^tests.jit_cache.kernels.broken_kernel\('sm_100a'\): "):
            broken_kernel("sm_100a")
    assert (tmp_path / "compiles").read_bytes() == b"...."
    assert not list(cache.rglob("*.o"))
    assert counted(lambda: fresh()("sm_90a")) == (1, 0), "and the next kernel compiles"


def test_an_architecture_that_the_compiler_does_not_know_names_the_call():
    with pytest.raises(KernelCompileError, match=r"^tests.jit_cache.kernels.add\('sm_91a', Float32, Config\("):
        fresh()("sm_91a")


def test_a_builder_must_return_a_program():
    builder = fresh()
    builder.build = lambda *args: None
    with pytest.raises(KernelCompileError, match="must return a Program, got NoneType"):
        builder("sm_90a")


def test_options_reach_the_compiler_and_the_record():
    builder = fresh()
    plain = builder.obtain("sm_90a").data
    build = builder.build

    def with_options(*args):
        program = build(*args)
        program.options = "--generate-line-info"
        return program

    builder.build = with_options
    kernel = builder.obtain("sm_100a")
    assert kernel.record["options"] == "--generate-line-info" and b".debug_line" in kernel.data
    assert b".debug_line" not in plain


def test_mode_off_loads_but_never_compiles(monkeypatch):
    monkeypatch.setenv("JIT_CACHE_MODE", "off")
    with pytest.raises(MissingKernelError) as info:
        fresh()("sm_90a")
    assert "tests.jit_cache.kernels.add('sm_90a', Float32" in str(info.value)
    assert "JIT_CACHE_MODE=on python -m jit_cache prewarm tests --arch sm_90a" in str(info.value)
    assert "is not stored (nothing is stored of this builder)" in str(info.value)
    monkeypatch.setenv("JIT_CACHE_MODE", "on")
    fresh().obtain("sm_90a")
    monkeypatch.setenv("JIT_CACHE_MODE", "off")
    builder = fresh()
    assert counted(lambda: builder("sm_90a")) == (0, 1)


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("arch", "sm_100a", "(arch: wanted sm_90a, stored sm_100a)"),
        ("machine", "x86_64-v9", f"(stack.machine: wanted {machine()}, stored x86_64-v9)"),
        ("dsl", {"nvidia-cutlass-dsl-libs-cu99": "4.8.1"}, "stack.dsl.nvidia-cutlass-dsl-libs-cu99: wanted nothing"),
    ],
)
def test_mode_off_names_what_differs_from_the_nearest_kernel(cache, monkeypatch, field, value, line):
    """The error of a serving node whose kernels were built for another machine."""
    builder = fresh()
    if field == "arch":
        builder.obtain(value)
    else:
        with monkeypatch.context() as patch:
            patch.setitem(stack(), field, value)
            builder.obtain("sm_90a")
    monkeypatch.setenv("JIT_CACHE_MODE", "off")
    with pytest.raises(MissingKernelError) as info:
        fresh()("sm_90a")
    assert line in str(info.value)


def test_recording_compiles_nothing(monkeypatch):
    """Launch code runs as ever; the calls that it makes are all that remains, and of this thread alone."""
    builder, elsewhere = fresh(), []
    before = stats()
    with recording() as calls:
        function = builder("sm_90a", config=kernels.Config(threads=32))
        assert function(1, None) is None
        thread = threading.Thread(target=lambda: elsewhere.append(builder("sm_100a")))
        thread.start()
        thread.join()
    wanted = "sm_90a", cutlass.Float32, kernels.Config(threads=32)
    assert calls == [(builder, wanted)] and stats().compiles == before.compiles + 1
    assert elsewhere != [function] and builder("sm_100a") is elsewhere[0]
    assert builder.find(*wanted) is None


def test_mode_off_says_if_the_source_keeps_a_kernel_from_being_found(stored, monkeypatch):
    """As after a hard link or chmod of a file, which changes its ctime."""
    monkeypatch.setenv("JIT_CACHE_MODE", "off")
    change_source(monkeypatch)
    builder = fresh()
    date = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    changed = rf"{kernels.__file__} changed \(content, name, links or mode\) at {date}"
    with pytest.raises(MissingKernelError, match=f"{changed}, .* Start the process anew") as info:
        builder("sm_90a")
    assert "prewarm" not in str(info.value)


def test_mode_warn_says_what_it_compiles(monkeypatch, caplog):
    monkeypatch.setenv("JIT_CACHE_MODE", "warn")
    fresh()("sm_90a")
    assert len(caplog.messages) == 1 and "compiling tests.jit_cache.kernels.add('sm_90a'" in caplog.text
    fresh()("sm_90a")
    assert len(caplog.messages) == 1


def test_explain_names_what_differs(stored, monkeypatch):
    builder = fresh()
    assert builder.explain("sm_90a") == []
    assert builder.explain("sm_100a") == ["arch: wanted sm_100a, stored sm_90a"]
    (line,) = builder.explain("sm_90a", config=kernels.Config(threads=32))
    assert line == "arguments.config.fields.threads: wanted 32, stored 64"
    other = Compiled(kernels.broken.build)
    assert other.explain("sm_90a", 1) == ["nothing is stored of this builder"]
    store, key = stored
    store.path(key.name, ".o").write_bytes(b"x")
    assert fresh().explain("sm_90a") == ["stored, but its files are damaged"]
    builder = fresh()
    change_source(monkeypatch)
    assert "during or after its import" in builder.explain("sm_90a")[0]


def test_a_miss_is_logged_with_its_reason(run, stored):
    _, err = run(CALL, JIT_CACHE_LOG="info", CUTE_DSL_LINEINFO="1")
    (line,) = warnings(err)
    assert (
        "compiling tests.jit_cache.kernels.add" in line
        and "environment.CUTE_DSL_LINEINFO: wanted True, stored nothing" in line
    )
    assert not warnings(run(CALL)[1])


# ------------------------------------------------------------------------------------------------ threads and processes


def test_eight_processes_compile_a_kernel_once(start, tmp_path):
    code = CALL + WORKS
    processes = [start(code, COMPILES=str(tmp_path / "compiles")) for _ in range(8)]
    outputs = [process.communicate(timeout=180) for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    assert (tmp_path / "compiles").read_bytes() == b"."
    assert sorted(out.split()[:2] for out, _ in outputs) == [["0", "1"]] * 7 + [["1", "0"]]


def test_sixteen_threads_and_two_architectures(run):
    code = """
import threading
jobs = [(arch, kernels.Config(threads=threads)) for arch in ("sm_90a", "sm_100a") for threads in (32, 64)]
results, errors = {job: set() for job in jobs}, []
barrier = threading.Barrier(16)
def work(i):
    try:
        barrier.wait()
        for j in range(len(jobs)):
            arch, config = jobs[(i + j) % len(jobs)]
            results[arch, config].add(kernels.add(arch, config=config))
    except Exception as error:
        errors.append(error)
threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not errors, errors
assert all(len(found) == 1 for found in results.values())
f = kernels.add("sm_90a")
"""
    assert run(code + WORKS)[0] == "4 0 0 4"


def test_a_fork_resets_the_locks(run):
    code = """
import os, threading, time
kernels.add("sm_90a")
held = threading.Event()
def hold():
    with jc._process_lock:
        held.set()
        time.sleep(60)
threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    import signal; signal.alarm(20)
    f = kernels.add("sm_90a", config=kernels.Config(threads=32))
    os._exit(0 if f else 1)
assert os.waitpid(child, 0)[1] == 0
print("fine", flush=True)
os._exit(0)
"""
    assert run(code)[0] == "fine"


@pytest.mark.parametrize("danger", ["cuda", "compiling"])
def test_a_dangerous_fork_may_load_but_not_compile(run, danger, stored):
    code = f"""
import os, threading, types
if {danger == "cuda"}:
    sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: True))
else:
    jc._compiling = 12345
import cutlass, tvm_ffi
child = os.fork()
if child == 0:
    try:
        f = kernels.add("sm_90a")
        for again in range(2):
            try:
                kernels.add("sm_100a")
                os._exit(2)
            except jit_cache.ForkedProcessError as error:
                print(error, flush=True)
        child = os.fork()
        if child:
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        kernels.add("sm_100a")
    except jit_cache.ForkedProcessError:
        os._exit(0)
    finally:
        os._exit(3)
assert os.waitpid(child, 0)[1] == 0
jc._compiling = 0
kernels.add("sm_100a")
"""
    code = (
        code.replace("import cutlass, tvm_ffi\n", "")
        if danger == "compiling"
        else "import cutlass, tvm_ffi\n" + code.replace("import cutlass, tvm_ffi\n", "")
    )
    out, _ = run(code)
    word = "CUDA was in use" if danger == "cuda" else "another thread was compiling"
    assert out.count(word) == 2 and "spawn or forkserver" in out and "kernels.add('sm_100a'" in out


def test_a_fork_while_another_thread_compiles(run):
    """Its child must not compile; the child of a fork after that may."""
    code = """
import os, threading
began, go_on, compile_program = threading.Event(), threading.Event(), jc._compile_program
def slow(program, arch):
    began.set()
    go_on.wait(60)
    return compile_program(program, arch)
def child_of_a_fork(arch):
    child = os.fork()
    if child == 0:
        status = 3
        try:
            kernels.add(arch)
            status = 0
        except jit_cache.ForkedProcessError as error:
            status = 1 if "another thread was compiling" in str(error) else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
jc._compile_program = slow
thread = threading.Thread(target=kernels.add, args=("sm_90a",))
thread.start()
assert began.wait(60)
refused = child_of_a_fork("sm_100a")
go_on.set()
thread.join()
print(refused, child_of_a_fork("sm_100a"), stats().compiles)
"""
    assert run(code)[0] == "1 0 1"


def test_threads_obtain_one_kernel_after_the_other(run):
    """The compiler takes one at a time, whichever way it is asked."""
    code = """
import threading, time
running, together, compile_program = [], [], jc._compile_program
def observed(program, arch):
    running.append(program)
    time.sleep(0.2)
    together.append(len(running))
    running.remove(program)
    with compiler:
        return compile_program(program, arch)
compiler, jc._compile_program = threading.Lock(), observed
configs = [kernels.Config(threads=32 * n) for n in (1, 2, 3, 4)]
threads = [threading.Thread(target=kernels.add.obtain, args=("sm_90a",), kwargs={"config": c}) for c in configs]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(*together)
"""
    assert run(code)[0] == "1 1 1 1"


def test_a_lock_holder_that_dies_hands_over(start, run, stored, tmp_path):
    store, key = stored
    store.remove(key.name)
    holder = start(f"name = {key.name!r}" + HOLD.replace("'sm_90a/x'", "name"))
    assert holder.stdout.readline() == "held\n"
    waiter = start(CALL + WORKS)
    time.sleep(3)
    assert waiter.poll() is None
    holder.kill()
    out, err = waiter.communicate(timeout=60)
    assert out.strip() == "1 0 0 1", err


# ---------------------------------------------------------------------------------------------------------------- speed


def test_a_hit_in_memory_is_cheap():
    builder = fresh()
    builder._obtain = lambda key, args, load: type("Kernel", (), {"function": object()})
    builder("sm_90a", kernels.cutlass.Float32)
    dtype, best = kernels.cutlass.Float32, 1.0
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(2000):
            builder("sm_90a", dtype)
        best = min(best, (time.perf_counter() - begin) / 2000)
    assert best < 3e-6, f"{best * 1e6:.2f} µs"  # 0.4 µs measured on a quiet machine


@pytest.mark.parametrize("torch", [True, False], ids=["torch", "no_torch"])
def test_the_loader_is_imported_with_the_builders_where_torch_is(run, torch):
    code = "del sys.modules['torch']\nimport torch\n" if torch else ""
    out, _ = run(code + "import tests.jit_cache.kernels\nprint('tvm_ffi' in sys.modules)")
    assert out == str(torch)
