"""Calls of a builder: once compiled, then loaded, whatever happens to the disk, the process or its neighbours."""

import json
import os
import shutil
import subprocess
import time

import pytest

from jit_cache.compile import Compiled, stats
from jit_cache.store import Store
from tests.jit_cache import kernels

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
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


def fresh():
    """The builder of kernels.add as a new process has it: with an empty memory."""
    return Compiled(kernels.add.build)


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


def test_the_loaded_function_is_positional_and_not_the_compilers(run):
    out, _ = run(CALL + "print(type(f).__module__, type(f).__name__)")
    assert out == "tvm_ffi.core Function"


def test_every_argument_that_differs_has_an_object_of_its_own(run, cache):
    code = "import cutlass\nfor c in (kernels.Config(), kernels.Config(threads=128), kernels.Config(scale=-0.0), kernels.Config(scale=0.0)):\n"
    run(code + "    kernels.add('sm_90a', config=c)\nkernels.add('sm_90a', cutlass.BFloat16)\nkernels.add('sm_100a')")
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
    assert Store(tmp_path / "other").find(key).read() == store.find(key).read()


# ----------------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("damage", ["half", "flipped bit", "garbage", "record", "other arch", "other flavour"])
def test_what_is_damaged_or_of_another_is_rebuilt_with_one_warning(run, stored, damage):
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
        record["key"]["stack"]["dsl"]["nvidia-cutlass-dsl-libs-cu13"] = "4.8.1"
        record_file.write_text(json.dumps(record))
    else:
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        object_file.write_bytes({"half": data[:middle], "flipped bit": flipped, "garbage": b"x"}[damage])
    out, err = run(CALL + WORKS)
    assert out == "1 0 0 1" and len(warnings(err)) == 1 and "not used" in err
    out, err = run(CALL + WORKS)
    assert out == "0 1 0 0" and not warnings(err)
    assert object_file.read_bytes() == data


def test_an_object_with_a_right_hash_that_does_not_load_is_rebuilt(run, stored):
    store, key = stored
    store.write(key.name, store.find(key).record, {".o": b"no object at all"})
    out, err = run(CALL + WORKS)
    assert out == "1 0 0 1" and len(warnings(err)) == 1 and "does not load" in err


# ------------------------------------------------------------------------------------------------- directories that fail

UNCACHED = CALL + "kernels.add('sm_90a', config=kernels.Config(threads=32))" + WORKS


@pytest.mark.parametrize("event", ["world-writable", "foreign-owned", "file instead", "linked below", "missing parent is a file"])
def test_directories_that_cannot_be_used_cost_one_warning(run, cache, event, tmp_path):
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
        cache = tmp_path / "plain" / "cache"
    out, err = run(UNCACHED, JIT_CACHE_DIR=str(cache))
    assert out == "2 0 0 2"
    assert 1 <= len(set(warnings(err))) == len(warnings(err)) <= 2, err
    assert not (tmp_path / "elsewhere").exists() or not list((tmp_path / "elsewhere").iterdir())


def test_a_missing_directory_is_made(run, tmp_path):
    out, err = run(CALL + WORKS, JIT_CACHE_DIR=str(tmp_path / "a" / "b" / "c"))
    assert out == "1 0 0 1" and not warnings(err) and list(Store(tmp_path / "a" / "b" / "c").entries())


@as_root
@pytest.mark.parametrize("filled", [False, True])
def test_a_read_only_directory(run, filled, open_tmp, tmp_path):
    """Root writes everywhere, so this runs as another user in a directory of its own with mode 0500."""
    place = open_tmp / "cache"
    place.mkdir(mode=0o700)
    os.chown(place, 65534, -1)
    if filled:
        run(CALL, JIT_CACHE_DIR=str(place), user=65534, HOME=str(open_tmp))
    for path in [place, *(path for path in place.rglob("*") if path.is_dir())]:
        path.chmod(0o500)
    out, err = run(UNCACHED, JIT_CACHE_DIR=str(place), user=65534, HOME=str(open_tmp))
    assert out == ("1 1 0 1" if filled else "2 0 0 2")
    assert len(warnings(err)) == 1 and "Permission denied" in err


@pytest.mark.parametrize("how", ["small disk", "file size limit"])
def test_a_full_disk_costs_one_warning(run, tmp_path, how):
    place, limit = tmp_path / "small", ""
    place.mkdir()
    if how == "small disk":
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", place], capture_output=True).returncode:
            pytest.skip("mounting is not permitted here")
    else:  # memory files count as files: the object goes through, the second half of the limit is for it
        limit = (
            "import tempfile\n"
            "def mkstemp(real=tempfile.mkstemp, **words):\n"
            "    import resource\n"
            "    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))\n"
            "    return real(**words)\n"
            "tempfile.mkstemp = mkstemp\n"
            "import jit_cache.store as s, resource\n"
            "def replace(path, data, real=s.Store._replace):\n"
            "    try:\n"
            "        real(path, data)\n"
            "    finally:\n"
            "        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"
            "s.Store._replace = staticmethod(replace)\n"
        )
    try:
        out, err = run(limit + UNCACHED, JIT_CACHE_DIR=str(place / "cache"))
        assert out == "2 0 0 2" and len(warnings(err)) == 1
        assert "No space left" in err or "File too large" in err
        assert not [path for path in place.rglob("*") if path.suffix in (".tmp", ".o", ".json")]
    finally:
        if how == "small disk":
            subprocess.run(["umount", place], check=True)


def test_a_source_that_changed_after_the_import_is_not_stored(run, cache):
    code = "import os, time\nkernels.add._imported_at = os.stat(kernels.__file__).st_mtime - 1\n"
    out, err = run(code + CALL + WORKS)
    assert out == "1 0 0 1" and len(warnings(err)) == 1 and "source unreadable or changed" in err
    assert not list(cache.rglob("*.o"))


# ---------------------------------------------------------------------------------------------------- errors and modes


def test_compile_errors_name_the_call_and_are_never_cached(run, cache, tmp_path):
    code = """
for _ in range(2):
    for call in (lambda: kernels.broken("sm_90a", 3), lambda: kernels.broken_kernel("sm_100a")):
        try:
            call()
        except jit_cache.KernelCompileError as error:
            print(error, repr(error.__cause__) != "None")
"""
    out, _ = run(code, COMPILES=str(tmp_path / "compiles"))
    lines = [line for line in out.splitlines() if line.startswith("tests.")]
    assert lines[0] == lines[2] == "tests.jit_cache.kernels.broken('sm_90a', 3): RuntimeError: the builder is broken True"
    assert lines[1].startswith("tests.jit_cache.kernels.broken_kernel('sm_100a'): ")
    assert (tmp_path / "compiles").read_bytes() == b"...."
    assert not list(cache.rglob("*.o"))


def test_an_architecture_that_the_compiler_does_not_know_names_the_call(run):
    code = "try:\n    kernels.add('sm_91x'[:5])\nexcept jit_cache.KernelCompileError as error:\n    print(error)"
    assert run(code)[0].startswith("tests.jit_cache.kernels.add('sm_91', Float32, Config(")


def test_a_builder_must_return_a_program(run):
    code = """
builder = jit_cache.Compiled(kernels.Add.__init__.__class__(kernels._note.__code__.replace(co_name="x"), {}, "x"))
"""
    code = "kernels.add.build = lambda *args: None\ntry:\n    kernels.add('sm_90a')\nexcept jit_cache.KernelCompileError as error:\n    print(error)"
    assert "must return a Program, got NoneType" in run(code)[0]


def test_mode_off_loads_but_never_compiles(run):
    call = "try:\n    f = kernels.add('sm_90a')\nexcept jit_cache.MissingKernelError as error:\n    print(error)\n"
    out, _ = run(call, JIT_CACHE_MODE="off")
    assert "tests.jit_cache.kernels.add('sm_90a', Float32" in out
    assert "python -m jit_cache prewarm tests --arch sm_90a" in out
    run(CALL)
    assert run(CALL + WORKS, JIT_CACHE_MODE="off")[0] == "0 1 0 0"


def test_mode_warn_says_what_it_compiles(run):
    _, err = run(CALL, JIT_CACHE_MODE="warn")
    assert len(warnings(err)) == 1 and "compiling tests.jit_cache.kernels.add('sm_90a'" in err
    assert not warnings(run(CALL, JIT_CACHE_MODE="warn")[1])


def test_explain_names_what_differs(run, stored, monkeypatch):
    builder = fresh()
    assert builder.explain("sm_90a") == []
    assert builder.explain("sm_100a") == ["arch: wanted sm_100a, stored sm_90a"]
    (line,) = builder.explain("sm_90a", config=kernels.Config(threads=32))
    assert line == "arguments.config.fields.threads: wanted 32, stored 64"
    builder._imported_at = 0.0
    assert "changed after it was imported" in builder.explain("sm_90a")[0]
    other = Compiled(kernels.broken.build)
    assert other.explain("sm_90a", 1) == ["nothing is stored of this builder"]


def test_a_miss_is_logged_with_its_reason(run, stored):
    _, err = run(CALL, JIT_CACHE_LOG="info", CUTE_DSL_LINEINFO="1")
    (line,) = warnings(err)
    assert "compiling tests.jit_cache.kernels.add" in line and "environment.CUTE_DSL_LINEINFO: wanted 1, stored nothing" in line
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
    code = code.replace("import cutlass, tvm_ffi\n", "") if danger == "compiling" else "import cutlass, tvm_ffi\n" + code.replace("import cutlass, tvm_ffi\n", "")
    out, _ = run(code)
    word = "CUDA was in use" if danger == "cuda" else "another thread was compiling"
    assert out.count(word) == 2 and "spawn or forkserver" in out and "kernels.add('sm_100a'" in out


def test_a_lock_holder_that_dies_hands_over(start, run, stored, tmp_path):
    store, key = stored
    store.remove(key.name)
    holder = start(f"with Store(settings().root).lock({key.name!r}):\n    print('held', flush=True)\n    import time; time.sleep(60)")
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
