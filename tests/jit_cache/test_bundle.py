"""Bundles: the same bytes for the same kernels; nothing gets in that is not in the manifest under the right digest."""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile

import pytest

import jit_cache.__main__
from jit_cache import BundleError, Damaged, MissingKernelError, load_shared
from jit_cache.bundle import export_bundle, import_bundle
from jit_cache.compile import Compiled, reset, stats
from jit_cache.key import Key, stack
from jit_cache.store import Store
from tests.jit_cache import kernels
from tests.jit_cache.conftest import ROOT
from tests.jit_cache.test_store import key, put


@pytest.fixture
def store(cache):
    store = Store(cache)
    for n in (2, 1):
        put(store, key(n), bytes([n]) * 100)
    return store


@pytest.fixture
def archive(store, tmp_path):
    """An archive of two kernels, its digest."""
    digest, count = export_bundle(tmp_path / "a.tar", store.entries())
    assert count == 2
    return tmp_path / "a.tar", digest


def test_an_archive_is_deterministic(store, archive, tmp_path):
    path, digest = archive
    for n in (1, 2):  # stored again, in another order, at another time
        record = {"key": key(n).record, "kernels": [], "created": f"at {n}", "seconds": n}
        store.write(key(n).name, record, {".o": bytes([n]) * 100})
    assert export_bundle(tmp_path / "b.tar", reversed(list(store.entries()))) == (digest, 2)
    assert path.read_bytes() == (tmp_path / "b.tar").read_bytes()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    with tarfile.open(path) as tar:
        assert tar.getnames()[0] == "manifest.json"
        manifest = json.load(tar.extractfile("manifest.json"))
    assert sorted(kernel["record"]["key"]["arguments"]["n"] for kernel in manifest["kernels"]) == [1, 2]


def test_what_was_exported_is_imported(archive, tmp_path):
    other = Store(tmp_path / "other")
    assert len(import_bundle(*archive, other)) == 2
    assert other.find(key(1))[0].read() == b"\1" * 100
    assert Store(tmp_path / "other", writable=False).find(key(2))[0].read() == b"\2" * 100


def test_an_empty_archive_is_refused(tmp_path):
    with pytest.raises(BundleError, match="no kernel"):
        export_bundle(tmp_path / "a.tar", [])


def test_a_damaged_object_is_not_exported(store, tmp_path):
    store.path(key(1).name, ".o").write_bytes(b"x")
    with pytest.raises(Damaged):
        export_bundle(tmp_path / "a.tar", store.entries())


def test_another_digest_is_refused(archive, tmp_path):
    path, digest = archive
    other = Store(tmp_path / "other")
    for wrong in ("0" * 64, digest[:-1], ""):
        with pytest.raises(BundleError, match="the digest is"):
            import_bundle(path, wrong, other)
    changed = bytearray(path.read_bytes())
    changed[len(changed) // 2] ^= 1
    path.write_bytes(changed)
    with pytest.raises(BundleError, match="the digest is"):
        import_bundle(path, digest, other)
    assert not (tmp_path / "other").exists()


def rewrite(path, change):
    """Rebuilds an archive after change(members: name -> (TarInfo, bytes)); returns its digest, which then is right."""
    with tarfile.open(path) as tar:
        members = {member.name: (member, tar.extractfile(member).read()) for member in tar}
    change(members)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member, data in members.values():
            member.size = len(data) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(data))
    path.write_bytes(buffer.getvalue())
    return hashlib.sha256(buffer.getvalue()).hexdigest()


def edit_manifest(change):
    def edit(members):
        member, data = members["manifest.json"]
        manifest = json.loads(data)
        change(manifest)
        members["manifest.json"] = member, json.dumps(manifest).encode()

    return edit


def add_member(name, kind=tarfile.REGTYPE, target=""):
    def add(members):
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, target
        members["new"] = member, b"x"

    return add


def replace_by_link(members):
    """The second object becomes a link to the first, whose bytes the manifest says it has."""
    manifest = json.loads(members["manifest.json"][1])
    first, second = manifest["kernels"]
    second["record"]["files"] = first["record"]["files"]
    member = tarfile.TarInfo(second["name"] + ".o")
    member.type, member.linkname = tarfile.SYMTYPE, os.path.basename(first["name"]) + ".o"
    members[member.name] = member, b""
    members["manifest.json"] = members["manifest.json"][0], json.dumps(manifest).encode()


def rename(directory):
    """Moves an object to another directory, in the manifest, too; its name has the right digest."""

    def change(members):
        manifest = json.loads(members["manifest.json"][1])
        kernel = manifest["kernels"][0]
        old = kernel["name"]
        kernel["name"] = directory + os.path.basename(old)
        members[old + ".o"][0].name = kernel["name"] + ".o"
        members["manifest.json"] = members["manifest.json"][0], json.dumps(manifest).encode()

    return change


CHANGES = {
    "a path that escapes": add_member("../escaped.o"),
    "an absolute path": add_member("/tmp/escaped.o"),
    "an escaping name in the manifest": rename("../../escaped/"),
    "an escaping name below its arch": rename("sm_90a/../../../escaped/"),
    "an absolute name in the manifest": rename("/tmp/"),
    "a name of another arch": rename("sm_100a/"),
    "a symbolic link": add_member("sm_90a/link", tarfile.SYMTYPE, "/etc"),
    "a link in place of an object": replace_by_link,
    "a hard link": add_member("sm_90a/link", tarfile.LNKTYPE, "manifest.json"),
    "a device": add_member("sm_90a/device", tarfile.CHRTYPE),
    "a directory": add_member("sm_90a", tarfile.DIRTYPE),
    "a file that is not in the manifest": add_member("sm_90a/other.o"),
    "a member twice": add_member("manifest.json"),
    "no manifest": lambda members: members.pop("manifest.json"),
    "a manifest that is no JSON": lambda members: members.update(
        {"manifest.json": (members["manifest.json"][0], b"{")}
    ),
    "another format": edit_manifest(lambda manifest: manifest.update(format=2)),
    "a missing object": lambda members: members.pop(f"{key(1).name}.o"),
    "other bytes": lambda members: members.update({f"{key(1).name}.o": (members[f"{key(1).name}.o"][0], b"x" * 100)}),
    "the key of another kernel": edit_manifest(
        lambda m: m["kernels"][0]["record"].update(key=m["kernels"][1]["record"]["key"])
    ),
    "another arch": edit_manifest(lambda m: m["kernels"][0]["record"]["key"].update(arch="sm_100a")),
    "a file of another kind": edit_manifest(lambda m: m["kernels"][0]["record"]["files"].update({".json": {}})),
    "no object": edit_manifest(lambda m: m["kernels"][0]["record"].update(files={})),
    "a kernel that is no dict": edit_manifest(lambda m: m["kernels"].append("x")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_archive_that_is_not_as_its_manifest_says_is_refused_whole(archive, tmp_path, change):
    path, _ = archive
    digest = rewrite(path, CHANGES[change])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BundleError):
        import_bundle(path, digest, Store(tmp_path / "other"))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("data", [b"", b"garbage" * 1000, b"\0" * 10240])
def test_what_is_no_archive_is_refused(tmp_path, data):
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(BundleError):
        import_bundle(tmp_path / "a.tar", hashlib.sha256(data).hexdigest(), Store(tmp_path / "other"))


# --------------------------------------------------------------------------------------------------------- with kernels


def fresh():
    reset()
    return Compiled(kernels.add.build)


@pytest.fixture
def bundle(cache, tmp_path, monkeypatch):
    """A directory with kernels.add('sm_90a'), also as shared library; JIT_CACHE_BUNDLE names it, the cache is empty."""
    fresh().obtain("sm_90a")
    digest, _ = export_bundle(tmp_path / "a.tar", Store(cache).entries(), shared=True)
    import_bundle(tmp_path / "a.tar", digest, Store(tmp_path / "bundle"))
    shutil.rmtree(cache)
    monkeypatch.setenv("JIT_CACHE_BUNDLE", str(tmp_path / "bundle"))
    reset()
    return tmp_path / "bundle"


def test_a_bundle_serves_where_compiling_is_forbidden(bundle, monkeypatch, cache):
    monkeypatch.setenv("JIT_CACHE_MODE", "off")
    before = stats()
    with pytest.raises(TypeError, match="Expects 3 parameters"):
        fresh()("sm_90a")(1)
    assert stats().bundle_loads - before.bundle_loads == 1 and stats().compiles == before.compiles
    assert fresh().find("sm_90a").origin == "bundle" and not cache.exists()
    with pytest.raises(MissingKernelError):
        fresh()("sm_100a")


def test_a_bundle_is_never_written(bundle):
    tree = {path: path.stat().st_mtime_ns for path in bundle.rglob("*")}
    for path in bundle.rglob("*.json"):
        os.utime(path, (0, 0))
        tree[path] = 0
    fresh()("sm_90a")
    fresh()("sm_100a")
    assert {path: path.stat().st_mtime_ns for path in bundle.rglob("*")} == tree


def test_a_damaged_bundle_falls_back_to_compiling(bundle, caplog):
    (path,) = bundle.rglob("*.o")
    path.write_bytes(path.read_bytes()[:-1])
    before = stats().compiles
    fresh()("sm_90a")
    assert stats().compiles == before + 1 and len(caplog.messages) == 1 and "not used" in caplog.text


def test_a_damaged_entry_does_not_hide_another_that_serves(bundle, caplog):
    """The same kernel, built for an older processor, too."""
    (entry,) = Store(bundle, writable=False).entries()
    record = {**entry.record, "key": {**entry.record["key"], "stack": {**stack(), "machine": "x86_64-v1"}}}
    older = Key(record["key"])
    assert older.name != entry.name
    Store(bundle).write(older.name, record, {".o": entry.read()})
    for name in (entry.name, older.name):
        path = Store(bundle).path(name, ".o")
        data = path.read_bytes()
        path.write_bytes(data[:-1])
        before = stats()
        fresh()("sm_90a")
        assert stats().compiles == before.compiles and stats().bundle_loads == before.bundle_loads + 1
        path.write_bytes(data)


@pytest.mark.parametrize("event", ["missing", "world-writable", "empty"])
def test_a_bundle_that_cannot_be_used_costs_one_warning(bundle, event, caplog):
    if event == "missing":
        shutil.rmtree(bundle)
    elif event == "empty":
        shutil.rmtree(bundle / "v1")
    else:
        bundle.chmod(0o777)
    before = stats().compiles
    builder = fresh()
    builder("sm_90a")
    builder("sm_100a")
    assert stats().compiles == before + 2
    assert len(caplog.messages) == 1 and str(bundle) in caplog.text


@pytest.mark.parametrize("built, here, serves", [(12, 13, True), (13, 12, False)])
def test_flavours_in_the_direction_that_works(cache, tmp_path, monkeypatch, built, here, serves):
    def install(cuda):
        stack.cache_clear()
        stack()["dsl"].clear()
        stack()["dsl"].update({"nvidia-cutlass-dsl": "4.8.1", f"nvidia-cutlass-dsl-libs-cu{cuda}": "4.8.1"})

    try:
        install(built)
        Compiled(kernels.add.build).obtain("sm_90a")
        monkeypatch.setenv("JIT_CACHE_BUNDLE", str(cache))
        monkeypatch.setenv("JIT_CACHE_DIR", str(tmp_path / "empty"))
        reset()
        install(here)
        found = Compiled(kernels.add.build).find("sm_90a")
        assert (found is not None and found.origin == "bundle") == serves
        monkeypatch.setenv("JIT_CACHE_DIR", str(cache))
        monkeypatch.delenv("JIT_CACHE_BUNDLE")
        reset()
        assert Compiled(kernels.add.build).find("sm_90a") is None, "the cache itself is exact"
    finally:
        monkeypatch.undo()
        stack.cache_clear()


SERVE = """
import os, sys
for name in ("cutlass", "torch", "cutlass._mlir"):
    sys.modules[name] = None
import jit_cache
f = jit_cache.load_shared(os.environ["BUNDLE"], os.environ["NAME"])
try:
    f(1)
except TypeError as error:
    print(error)
"""


def test_a_shared_library_needs_no_compiler(bundle, run):
    (path,) = bundle.rglob("*.so")
    name = f"sm_90a/{path.stem}"
    out, _ = run(SERVE, BUNDLE=str(bundle), NAME=name)
    assert out.startswith("Expects 3 parameters when calling: `__call__(x: Tensor([n0], float32)")
    _, err = run(SERVE, BUNDLE=str(bundle), NAME="sm_90a/add-" + "0" * 32, status=1)
    assert "FileNotFoundError" in err
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    _, err = run(SERVE, BUNDLE=str(bundle), NAME=name, status=1)
    assert "Damaged" in err


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tvm_ffi": "9.9"}, "tvm_ffi: wanted .*, stored 9.9"),
        ({"dsl": {"nvidia-cutlass-dsl": "9.9"}}, "dsl.nvidia-cutlass-dsl: wanted .*, stored 9.9"),
        ({"machine": "x86_64-v9"}, "machine: wanted .*, stored x86_64-v9"),
    ],
)
def test_a_shared_library_of_another_stack_is_refused(bundle, change, message):
    (entry,) = Store(bundle, writable=False).entries()
    record = {**entry.record, "key": {**entry.record["key"], "stack": {**stack(), **change}}}
    other = Key(record["key"]).name
    Store(bundle).write(other, record, {".o": entry.read(), ".so": entry.read(".so")})
    with pytest.raises(Damaged, match=message):
        load_shared(bundle, other)


def test_a_shared_library_that_is_not_there(bundle, tmp_path):
    (entry,) = Store(bundle, writable=False).entries()
    record = {**entry.record, "key": {**entry.record["key"], "source": "another"}}
    alone = Key(record["key"]).name
    Store(bundle).write(alone, record, {".o": entry.read()})
    for place, name, message in (
        (tmp_path / "nowhere", entry.name, f"{tmp_path / 'nowhere'} is no bundle"),
        (bundle, "sm_90a/x-" + "0" * 32, f"{bundle} holds no kernel sm_90a/x-{'0' * 32}; python -m jit_cache list"),
        (bundle, alone, f"{bundle} holds no shared library of {alone}: it was exported without --shared"),
    ):
        with pytest.raises(FileNotFoundError) as caught:
            load_shared(place, name)
        assert str(caught.value).startswith(message)


def test_a_shared_library_is_loaded_where_no_compiler_is_installed(bundle, run):
    (path,) = bundle.rglob("*.so")
    installed = "from jit_cache import bundle, key\nbundle.stack = lambda: {**key.stack(), 'dsl': {}}\n"
    assert run(installed + SERVE, BUNDLE=str(bundle), NAME=f"sm_90a/{path.stem}")[0].startswith("Expects 3 parameters")


FAKE_TENSOR = """
import numpy
class Fake:  # a tensor that claims to be on a GPU
    def __init__(self, rows, dtype=numpy.float32):
        self.host = numpy.zeros(rows, dtype)
    def __dlpack_device__(self):
        return 2, 0
    def __dlpack__(self, **words):
        import ctypes
        capsule = self.host.__dlpack__()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        ctypes.c_int32.from_address(get(capsule, b"dltensor") + 8).value = 2
        return capsule
"""


def test_the_code_of_a_shared_library_checks_its_arguments(bundle, run):
    """The entry is compiled code: what it says about wrong tensors shows that it runs."""
    (path,) = bundle.rglob("*.so")
    code = SERVE.replace("f(1)", "f(Fake(4), Fake(4), Fake(5))").replace("except TypeError", "except ValueError")
    out, _ = run(FAKE_TENSOR + code, BUNDLE=str(bundle), NAME=f"sm_90a/{path.stem}")
    assert "out.shape[0]" in out and "x.shape[0]" in out


def test_the_package_runs_as_a_command(cache):
    done = subprocess.run([sys.executable, "-m", "jit_cache", "info"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and str(cache) in done.stdout
    assert subprocess.run([sys.executable, "-m", "jit_cache"], capture_output=True, cwd=ROOT).returncode == 2
    piped = f"{sys.executable} -u -m jit_cache info | true; test $PIPESTATUS = 0"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, b"")


def test_commands(command, tmp_path, cache):
    kernels.add.obtain("sm_90a")
    kernels.add.obtain("sm_100a")
    status, out, _ = command("info")
    assert status == 0 and str(cache) in out and "sm_100a, sm_90a" in out
    status, out, _ = command("list", "--json", "-", "--arch", "sm_90a")
    (record,) = json.loads(out)
    assert record["name"].startswith("sm_90a/add-") and record["kernels"][0]["threads"] == 64
    status, out, _ = command("list")
    assert out.count("registers") == 2 and "config=Config(mode=Mode.PLAIN, scale=1.0, threads=64, tile=(1, 2))" in out
    status, out, _ = command("export", tmp_path / "a.tar", "--arch", "sm_90a")
    digest = out.splitlines()[-1]
    assert status == 0 and out.startswith("1 kernels") and len(digest) == 64
    status, _, err = command("export", tmp_path / "b.tar", "--only", "nothing")
    assert status == 1 and "no kernel" in err
    assert command("clear", "--yes")[1] == "2 kernels removed"
    status, _, err = command("import", tmp_path / "a.tar", "--digest", "0" * 64)
    assert status == 1 and "the digest is" in err
    status, out, _ = command("import", tmp_path / "a.tar", "--digest", digest)
    assert status == 0 and out == f"1 kernels in {cache}"
    assert command("verify")[:2] == (0, "1 kernels, 0 problems")
    (path,) = cache.rglob("*.o")
    path.write_bytes(b"x")
    status, out, _ = command("verify")
    assert status == 1 and str(path) in out
    status, out, _ = command("verify", JIT_CACHE_BUNDLE=str(tmp_path / "nowhere"))
    assert status == 1 and f"{tmp_path / 'nowhere'} is no bundle" in out and out.endswith("2 problems")
    status, out, _ = command("gc", "--max-gb", "0")
    assert status == 0 and "1 removed" in out and not list(cache.rglob("*.o"))
    for bad in ("much", "-1", "nan"):
        for option in ("--max-gb", "--max-days"):
            status, _, err = command("gc", option, bad)
            assert status == 2 and f"{option}: must be a number of at least 0, got {bad!r}" in err


@pytest.mark.parametrize(
    ("field", "value", "difference", "serves"),
    [
        ("machine", "x86_64-v1", "stack.machine: wanted", True),  # an older processor's
        ("machine", "x86_64-v9", "stack.machine: wanted", False),
        ("tvm_ffi", "0.0.0", "stack.tvm_ffi: wanted", False),
        ("dsl", {"nvidia-cutlass-dsl-libs-cu99": "4.8.1"}, "stack.dsl.nvidia-cutlass-dsl: wanted", False),
    ],
)
def test_import_of_what_would_not_be_found(command, tmp_path, cache, monkeypatch, field, value, difference, serves):
    """Into the cache it is refused; a bundle may be for another machine."""
    with monkeypatch.context() as patch:
        patch.setitem(stack(), field, value)
        kernels.add.obtain("sm_90a")
    _, out, _ = command("export", tmp_path / "a.tar")
    shutil.rmtree(cache)
    words = ("import", tmp_path / "a.tar", "--digest", out.splitlines()[-1])
    status, out, err = command(*words)
    assert status == 1 and not out and not list(cache.rglob("*.o"))
    assert f"1 kernels would not be loaded here: {difference}" in err and ("--into DIR" in err) == serves
    status, out, err = command(*words, "--into", tmp_path / "bundle")
    assert status == 0 and out == f"1 kernels in {tmp_path / 'bundle'}" and (difference in err) != serves


def test_import_for_other_gpus(command, tmp_path, cache, monkeypatch):
    kernels.add.obtain("sm_90a")
    _, out, _ = command("export", tmp_path / "a.tar")
    words = ("import", tmp_path / "a.tar", "--digest", out.splitlines()[-1])
    for here, warned in (([], False), (["sm_100a", "sm_90a"], False), (["sm_100a"], True)):
        monkeypatch.setattr(jit_cache.__main__, "_gpu_archs", lambda found=here: found)
        status, _, err = command(*words)
        assert status == 0 and err == "jit_cache: the kernels are of sm_90a, the GPUs here of sm_100a" * warned


def test_a_cache_that_is_no_directory(command, tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        settings = {"JIT_CACHE_DIR": str(path)}
        assert "1: see python -m jit_cache verify" in command("info", **settings)[1]
        status, out, _ = command("verify", **settings)
        assert status == 1 and out.startswith(f"cannot use {path}: ") and out.endswith("0 kernels, 1 problems")
        assert f"cannot use {path}: " in command("list", **settings)[2]


def test_list_shows_bundles(command, tmp_path, cache):
    """Their names are what load_shared takes."""
    put(Store(tmp_path / "bundle"), key(1))
    put(Store(cache), key(2))
    status, out, _ = command("list", JIT_CACHE_BUNDLE=str(tmp_path / "bundle"))
    assert status == 0 and [line.split()[0] for line in out.splitlines()[::2]] == [key(2).name, key(1).name]
    assert out.count(f"in {tmp_path / 'bundle'}") == 1
    status, out, _ = command("list", "--json", "-", JIT_CACHE_BUNDLE=str(tmp_path / "bundle"))
    places = {record["name"]: record["directory"] for record in json.loads(out)}
    assert places == {key(1).name: str(tmp_path / "bundle"), key(2).name: str(cache)}


def test_export_says_what_it_leaves_out(command, store, tmp_path):
    store.path(key(1).name, ".json").write_text("{")
    status, out, err = command("export", tmp_path / "a.tar")
    assert status == 1 and out.startswith("1 kernels") and str(store.path(key(1).name, ".json")) in err
    assert "problems       1: see python -m jit_cache verify" in command("info")[1]
    store.path(key(1).name, ".json").unlink()
    assert command("export", tmp_path / "a.tar")[::2] == (0, "")
    assert "verify" not in command("info")[1]
