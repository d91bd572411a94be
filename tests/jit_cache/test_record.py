"""Records and manifests that are not what jit_cache writes: one line at import and nothing written; on disk a miss."""

import copy
import hashlib
import io
import json
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jit_cache import BundleError, Damaged
from jit_cache.bundle import export_bundle, import_bundle
from jit_cache.key import Key, digest
from jit_cache.record import check_record
from jit_cache.store import Store, describe
from tests.jit_cache.test_store import DATA, key, put

KERNEL = {"name": "k", "registers": 8, "stack_bytes": 0, "static_smem_bytes": 0, "dynamic_smem_bytes": 0, "threads": 32}
ABSENT = object()


def whole():
    """A right record."""
    record = {"key": copy.deepcopy(key().record), "options": "", "kernels": [dict(KERNEL)], "seconds": 0.0}
    return {**record, "files": {".o": describe(DATA)}}


def change(path, value):
    """A record with another value at a path such as ("key", "arch")."""
    record = whole()
    *places, last = path
    part = record
    for place in places:
        part = part[place]
    if value is ABSENT:
        del part[last]
    else:
        part[last] = value
    return record


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


WRONG = [1, -1, True, None, "text", [], {}, [1], ["text"], {"x": 1}, float("nan"), float("inf"), 10**400, 1.5, ABSENT]
PATHS = [
    *((name,) for name in ("key", "files", "kernels")),
    *(("key", name) for name in ("kernel", "arch", "arguments", "stack", "environment", "source")),
    *(("key", "stack", name) for name in ("format", "machine", "dsl")),
    ("files", ".o"),
    *(("files", ".o", name) for name in ("size", "sha256")),
    ("kernels", 0),
    *(("kernels", 0, name) for name in KERNEL),
]
OTHERS = {
    "a file of another kind": (("files", ".exe"), describe(b"")),
    "no file": (("files",), {}),
    "a path": (("files", "/../../x.o"), describe(b"")),
    "not finite": (("seconds",), float("nan")),
    "infinite": (("more",), float("inf")),
    "nested": (("more",), nested(200)),
    "nested deeper": (("more",), nested(700)),
    "a nested argument": (("key", "arguments", "n"), nested(200)),
    "an argument of no kind": (("key", "arguments", "n"), {"x": 1}),
    "a dtype that is a number": (("key", "arguments", "n"), {"dtype": 1}),
    "an enum without value": (("key", "arguments", "n"), {"enum": "E", "member": "M"}),
    "an enum that is a list": (("key", "arguments", "n"), {"enum": [], "member": "M", "value": 1}),
    "a dataclass without fields": (("key", "arguments", "n"), {"dataclass": "C"}),
    "a dataclass that is a number": (("key", "arguments", "n"), {"dataclass": 1, "fields": {}}),
    "fields in a list": (("key", "arguments", "n"), {"dataclass": "C", "fields": []}),
    "an argument that moves the cursor": (("key", "arguments", "\x1b[2J"), 1),
    "a kernel that moves the cursor": (("key", "kernel"), "a.b\x1b[2J"),
    "a lone surrogate": (("key", "kernel"), "a.\ud800"),
    "a flavour of many digits": (("key", "stack", "dsl"), {"nvidia-cutlass-dsl-libs-cu" + "1" * 5000: 1}),
}


def is_right(record):
    """Whether wrong values are none at this place; then the record is to be of the key's name."""
    try:
        check_record(Key(record["key"]).name, record)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def name_of(record):
    """The name under which the record's key has the right digest."""
    try:
        return f"sm_90a/build-{digest(record['key'])[:32]}"
    except (KeyError, ValueError, RecursionError):
        return key().name


MALFORMED = {
    **{f"{'.'.join(map(str, path))} = {value!r:.20}": (path, value) for path in PATHS for value in WRONG},
    **OTHERS,
}
MALFORMED = {title: item for title, item in MALFORMED.items() if not is_right(change(*item))}


def test_a_right_record_is_accepted():
    check_record(key().name, whole())
    assert len(MALFORMED) > 200


def store_record(store, name, text):
    """Writes an object and a record past the checks."""
    put(store, key())
    (store.base / "sm_90a").mkdir(exist_ok=True)
    store.path(name, ".json").write_text(text)
    store.path(name, ".o").write_bytes(DATA)


def with_checksum(record):
    try:
        return json.dumps({**record, "checksum": digest(record)})
    except (ValueError, RecursionError):
        return json.dumps({**record, "checksum": "0" * 64})


@pytest.mark.parametrize("title", MALFORMED)
def test_a_malformed_record_on_disk_is_damage(cache, title):
    record = change(*MALFORMED[title])
    store, name = Store(cache), name_of(record)
    store_record(store, name, with_checksum(record))
    with pytest.raises(Damaged, match=f"^{store.path(name, '.json')}: .*") as info:
        store.entry(name)
    assert "\n" not in str(info.value) and len(str(info.value)) < 500 and str(info.value).isprintable()
    for each in (store, Store(cache, writable=False)):
        problems = []
        assert [entry.name for entry in each.entries(problems)] == [key().name] * (name != key().name)
        assert problems == [str(info.value)]


def pack(path, members):
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def refused(path, wanted, target):
    with pytest.raises(BundleError) as info:
        import_bundle(path, wanted, Store(target))
    assert str(info.value).startswith(f"{path}: ") and len(str(info.value)) < 500 and str(info.value).isprintable()
    assert not target.exists()


@pytest.mark.parametrize("title", MALFORMED)
def test_a_malformed_record_in_an_archive_is_refused(tmp_path, title):
    """Behind a right one, which is not stored either."""
    record = change(*MALFORMED[title])
    right, name = {**whole(), "key": key(2).record}, name_of(record)
    kernels = [{"name": key(2).name, "record": right}, {"name": name, "record": record}]
    manifest = json.dumps({"format": 1, "kernels": kernels}).encode()
    wanted = pack(tmp_path / "a.tar", [("manifest.json", manifest), (f"{key(2).name}.o", DATA), (f"{name}.o", DATA)])
    refused(tmp_path / "a.tar", wanted, tmp_path / "other")


RIGHT = {"name": key().name, "record": whole()}
MANIFESTS = {
    "nested": b"[" * 100_000,
    "nested objects": b'{"a":' * 100_000,
    "nested less": b"[" * 900 + b"]" * 900,
    "empty": b"",
    "no UTF-8": b"\xff\xfe{}",
    "a huge number": b'{"format": ' + b"1" * 5000 + b"}",
    **{
        repr(value)[:40]: json.dumps(value).encode()
        for value in (
            *(None, 1, "x", [], {}, [RIGHT], {"format": 1}, {"kernels": [RIGHT]}),
            *({"format": version, "kernels": [RIGHT]} for version in (True, 1.0, "1", None, [], 2, float("nan"))),
            *({"format": 1, "kernels": kernels} for kernels in (None, 1, "x", {}, [], [1], ["x"], [None], [[]], [{}])),
        )
    },
    **{
        f"name {name!r:.20}": json.dumps({"format": 1, "kernels": [{"name": name, "record": whole()}]}).encode()
        for name in (None, 1, [], {}, "", "../x", "/tmp/x", key().name + "\n", key().name + "/../x", key(2).name)
    },
    "a kernel twice": json.dumps({"format": 1, "kernels": [RIGHT, RIGHT]}).encode(),
    "a kernel without record": json.dumps({"format": 1, "kernels": [{"name": key().name}]}).encode(),
}


@pytest.mark.parametrize("title", MANIFESTS)
def test_a_malformed_manifest_is_refused(tmp_path, title):
    wanted = pack(tmp_path / "a.tar", [("manifest.json", MANIFESTS[title]), (f"{key().name}.o", DATA)])
    refused(tmp_path / "a.tar", wanted, tmp_path / "other")


def header(data, **fields):
    """An archive with other bytes in its first header; its checksum is right."""
    changed = bytearray(data)
    places = {"name": (0, 100), "size": (124, 136), "type": (156, 157), "prefix": (345, 500)}
    for field, value in fields.items():
        start, end = places[field]
        changed[start:end] = value.ljust(end - start, b"\0")
    changed[148:156] = b" " * 8
    changed[148:156] = b"%06o\0 " % sum(changed[:512])
    return bytes(changed)


HEADERS = {
    "a size below zero": {"size": b"\xff" * 12},
    "a size that leads back": {"size": b"\xff" * 10 + b"\xfc\x00"},
    "a huge size": {"size": b"\x80" + b"\x7f" * 11},
    "a size of 8 GB": {"size": b"77777777777\0"},
    "a huge header": {"type": b"x", "size": b"\x80" + b"\x7f" * 11},
    "a sparse file": {"type": b"S"},
    "a name that is no UTF-8": {"name": b"\xff\xfe"},
    "a name of two lines": {"name": b"a\nb"},
    **{f"type {kind!r}": {"type": kind} for kind in (b"1", b"2", b"3", b"4", b"5", b"6", b"K", b"L", b"g", b"M", b"V")},
}


@pytest.mark.parametrize("title", HEADERS)
def test_a_header_that_lies_is_refused(cache, tmp_path, title):
    path = tmp_path / "a.tar"
    put(Store(cache), key())
    export_bundle(path, Store(cache).entries())
    path.write_bytes(header(path.read_bytes(), **HEADERS[title]))
    refused(path, hashlib.sha256(path.read_bytes()).hexdigest(), tmp_path / "other")


def test_many_headers_of_headers_are_refused(tmp_path):
    """Each makes tarfile call itself."""
    one = header(tarfile.TarInfo("x").tobuf(tarfile.USTAR_FORMAT), type=b"x", size=b"00000000000\0")
    path = tmp_path / "a.tar"
    path.write_bytes(one * 2000)
    refused(path, hashlib.sha256(path.read_bytes()).hexdigest(), tmp_path / "other")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(path=st.sampled_from([*PATHS, ("key", "arguments", "n")]), value=json_values)
def test_any_value_is_refused_or_can_be_printed(path, value):
    from jit_cache.__main__ import _facts, _plain

    record = change(path, value)
    name = name_of(record)
    try:
        check_record(name, record)
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        _facts(record).encode()
        _plain(record["key"]["arguments"]).encode()
        json.dumps(record, indent=1)


def test_the_commands_leave_malformed_records_out(cache, command):
    store = Store(cache)
    for title in ("key.arguments = 'text'", "key.stack = 1", "key.environment = 1", "kernels = 'text'"):
        record = change(*MALFORMED[title])
        store_record(store, name_of(record), with_checksum(record))
    put(store, key(2))
    status, out, err = command("list")
    assert status == 0 and out.splitlines()[0].startswith(key(2).name) and len(out.splitlines()) == 2
    lines = err.splitlines()
    assert len(lines) == 4 and all(line.startswith(f"jit_cache: {cache}/v1/sm_90a/") for line in lines)
    assert command("info")[0] == 0
    status, out, _ = command("verify")
    assert status == 1 and out.endswith("1 kernels, 4 problems")
    assert command("explain", "tests.jit_cache.kernels", "--arch", "sm_90a")[::2] == (1, "")
    assert command("gc", "--max-gb", "0")[0] == 0 and not list(store.base.glob("*/*"))
