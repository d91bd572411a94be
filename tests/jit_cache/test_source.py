"""Which edits rebuild a kernel."""

import ast
import datetime
import importlib
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jit_cache import source
from jit_cache.key import module_name
from jit_cache.source import SourceError, source_digest
from tests.jit_cache.conftest import environment

FILES = {
    "fam/__init__.py": "from .norm import kernel\nfrom .mhc import kernel as other\n",
    "fam/norm/__init__.py": '"""The norm family."""\nfrom .kernel import build\n',
    "fam/norm/kernel.py": "from ..common import reduce\nfrom .config import Config\n"
    "import foreign.device\nimport plain\n"
    "def build():\n    from fam.common.late import late\n    from .. import settings\n    from . import here\n",
    "fam/norm/config.py": "Config = 1\n",
    "fam/norm/here.py": "",
    "fam/settings.py": "from fam.package import thing\n",
    "fam/package/__init__.py": "thing = 1\n",
    "fam/common/__init__.py": '"""Helpers."""\n',
    "fam/common/reduce.py": "import fam.common.deep\n",
    "fam/common/deep.py": "",
    "fam/common/late.py": "late = 1\n",
    "fam/mhc/__init__.py": "",
    "fam/mhc/kernel.py": "import fam.mhc.tiles\nimport fam.common.deep\nfrom fam.norm import config\n"
    "fam.mhc.tiles.thing, fam.mhc.THREADS\n",
    "fam/mhc/tiles.py": "",
    "foreign/__init__.py": "",
    "foreign/device.py": "import cutlass\nfrom . import helper\n",
    "foreign/helper.py": "",
    "plain.py": "",
    "script.py": "import sibling\nimport plain\nfrom beside.tiles import TILE\nimport installed\n",
    "sibling.py": "from foreign import device\n",
    "beside/__init__.py": "",
    "beside/tiles.py": "from .deep import TILE\n",
    "beside/deep.py": "TILE = 1\n",
    "venv/site-packages/installed.py": "",
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """The packages above, importable; gives a function that edits a file."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "venv/site-packages"))
    monkeypatch.syspath_prepend(str(tmp_path))
    for cached in (source._locate, source._scan):
        cached.cache_clear()

    def edit(name, text="# edited\n"):
        with (tmp_path / name).open("a") as file:
            file.write(text)

    yield edit
    tops = {name.partition("/")[0].removesuffix(".py") for name in FILES}
    for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
        del sys.modules[name]
    source._locate.cache_clear()


def module(name, tmp_path):
    """A module object as if imported, without running it (the files import what is not there)."""
    spec = importlib.machinery.ModuleSpec(name, None, origin=str(tmp_path / (name.replace(".", "/") + ".py")))
    result = importlib.util.module_from_spec(spec)
    result.__file__ = spec.origin
    return result


def hashed(module, began=None):
    """The hash in a process that began then, by default just now, and looks at the sources for the first time."""
    source._looks.clear()
    return digest(module, began)


def digest(module, began=None):
    """The hash in the same process later; None if there is none."""
    try:
        return source_digest([module], time.time() + 1 if began is None else began)
    except SourceError:
        return None


@pytest.mark.parametrize(
    "name",
    [
        "fam/norm/kernel.py",
        "fam/norm/config.py",  # from .config import
        "fam/norm/here.py",  # from . import, inside a function
        "fam/settings.py",  # from .. import, inside a function
        "fam/package/__init__.py",  # a name that a package defines
        "fam/common/reduce.py",
        "fam/common/deep.py",  # transitively
        "fam/common/late.py",  # absolute, inside a function
        "foreign/device.py",  # device code of another package
        "foreign/helper.py",  # and its own imports
    ],
)
def test_what_a_kernel_imports_rebuilds_it(tree, tmp_path, name):
    kernel = module("fam.norm.kernel", tmp_path)
    before = hashed(kernel)
    assert before is not None and before == hashed(kernel)
    tree(name)
    assert hashed(kernel) != before


@pytest.mark.parametrize(
    "name", ["fam/mhc/kernel.py", "fam/__init__.py", "fam/norm/__init__.py", "plain.py", "script.py"]
)
def test_other_kernels_and_tables_of_contents_do_not(tree, tmp_path, name):
    kernel = module("fam.norm.kernel", tmp_path)
    before = hashed(kernel)
    tree(name)
    assert hashed(kernel) == before


@pytest.mark.parametrize(
    "name, counts",
    [("fam/mhc/__init__.py", 1), ("fam/mhc/tiles.py", 1), ("fam/__init__.py", 0), ("fam/common/__init__.py", 0)],
)
def test_a_package_counts_if_more_is_taken_of_it_than_the_module_imported(tree, tmp_path, name, counts):
    kernel = module("fam.mhc.kernel", tmp_path)
    before = hashed(kernel)
    tree(name)
    assert (hashed(kernel) != before) == bool(counts)


@pytest.mark.parametrize(
    "text",
    [
        "from . import lazy\nlazy.tiles.THREADS\n",
        "from . import other, lazy as l\nl.tiles\n",
        "from .. import mhc\nmhc.lazy.tiles.THREADS\n",
        "import fam\nfam.mhc.lazy.tiles.THREADS\n",
        "import fam.mhc.lazy\nfam.mhc.lazy.tiles.THREADS\n",
        "import fam.mhc.lazy as l\nl.tiles.THREADS\n",
    ],
)
def test_what_is_taken_of_a_package_that_imports_lazily_counts(tree, tmp_path, text):
    (tmp_path / "fam/mhc/user.py").write_text(text)
    (tmp_path / "fam/mhc/lazy").mkdir()
    for name in ("__init__", "tiles", "more"):
        (tmp_path / f"fam/mhc/lazy/{name}.py").write_text("")
    user = module("fam.mhc.user", tmp_path)
    digests = [hashed(user)]
    for name in ("tiles", "more"):
        tree(f"fam/mhc/lazy/{name}.py")
        digests.append(hashed(user))
    assert digests[0] != digests[1] == digests[2]


@pytest.mark.parametrize(
    "name, counts",
    [
        ("script.py", 1),
        ("sibling.py", 1),
        ("plain.py", 1),
        ("beside/tiles.py", 1),  # a package in the script's directory, which mentions no cutlass
        ("beside/deep.py", 1),
        ("foreign/helper.py", 1),
        ("venv/site-packages/installed.py", 0),
        ("fam/settings.py", 0),
    ],
)
def test_a_script_counts_with_its_neighbours(tree, tmp_path, name, counts):
    script = module("script", tmp_path)
    before = hashed(script)
    tree(name)
    assert (hashed(script) != before) == bool(counts)


def test_the_place_of_the_source_does_not_count(tree, tmp_path, monkeypatch):
    before = hashed(module("fam.norm.kernel", tmp_path))
    moved = tmp_path.with_name("moved")
    tmp_path.rename(moved)
    monkeypatch.syspath_prepend(str(moved))
    source._locate.cache_clear()
    assert hashed(module("fam.norm.kernel", moved)) == before
    moved.rename(tmp_path)


@pytest.mark.parametrize("name, counts", [("fam/common/deep.py", True), ("plain.py", False)])
@pytest.mark.parametrize("date", [None, -3600, 3600])
def test_a_source_that_changed_after_the_look_has_no_hash(tree, tmp_path, name, counts, date):
    """Whatever its date says, and whatever the clock does."""
    kernel = module("fam.norm.kernel", tmp_path)
    assert hashed(kernel)
    tree(name)
    if date is not None:
        os.utime(tmp_path / name, (time.time() + date,) * 2)
    assert (digest(kernel, 2e9) is None) == counts
    assert hashed(kernel), "another process"


def test_the_message_names_the_file_and_its_date(tree, tmp_path):
    kernel = module("fam.norm.kernel", tmp_path)
    hashed(kernel)
    tree("fam/common/deep.py")
    today = datetime.date.today().isoformat()
    with pytest.raises(SourceError, match=rf"fam/common/deep.py changed \(content, name, links or mode\) at {today} "):
        source_digest([kernel], 2e9)


def clock(monkeypatch, seconds):
    """The clock of this process is ahead by so much of the one that dates files."""
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + int(seconds * 1e9))


def load(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, module(name, tmp_path))


def test_a_helper_that_changed_between_its_import_and_the_look_has_no_hash(tree, tmp_path, monkeypatch):
    """It was loaded at some time since the process began: perhaps before the change."""
    kernel, now = module("fam.norm.kernel", tmp_path), time.time()
    os.utime(tmp_path / "fam/common/deep.py")
    clock(monkeypatch, 40)
    monkeypatch.setattr(source, "IMPORTED", now - 30)
    assert hashed(kernel, now - 30)  # not loaded yet: it will be as it is
    load("fam.common.deep", tmp_path, monkeypatch)
    assert digest(kernel, now - 30), "it was loaded after the look, since which it did not change"
    assert hashed(kernel, now - 30) is None
    assert hashed(kernel, time.time() + 1)
    assert time.time() - 3600 * 24 < source.PROCESS_START <= time.time()


@pytest.mark.parametrize("seconds, stored", [(0, False), (-30, False), (-3600, True)])
def test_a_date_in_the_future_says_nothing(tree, tmp_path, monkeypatch, seconds, stored):
    """The clock was set back since; a file server's is not ahead by more than a minute."""
    kernel, now = module("fam.norm.kernel", tmp_path), time.time()
    for name in ("fam/norm/kernel.py", "fam/common/deep.py"):
        (tmp_path / name).touch()
    load("fam.common.deep", tmp_path, monkeypatch)
    monkeypatch.setattr(source, "IMPORTED", now + seconds - 60)
    clock(monkeypatch, seconds)
    assert (hashed(kernel, now + seconds - 60) is not None) == stored
    tree("fam/common/deep.py")
    assert digest(kernel, now + seconds - 60) is None


def test_a_forked_process_began_with_its_first_parent():
    """It runs what that has read, also where it imports this package itself; one that was started anew does not."""
    program = """
import multiprocessing, os, subprocess, sys, time
began = time.time()
time.sleep(1)
for _ in range(2):
    if child := os.fork():
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
from jit_cache.source import PROCESS_START
assert abs(PROCESS_START - began) < 0.9, (PROCESS_START, began)
anew = "from jit_cache.source import PROCESS_START; print(PROCESS_START)"
printed = subprocess.run([sys.executable, "-c", anew], capture_output=True, text=True, check=True).stdout
assert float(printed) > began + 0.9, (printed, began)
"""
    subprocess.run([sys.executable, "-c", program], check=True, env=environment({}), timeout=60)


@pytest.mark.parametrize("first", ["jit_cache", "helper"])
def test_a_process_that_a_shell_became(tmp_path, first):
    """As at a container's start. It is as old as the shell, which brought the sources; what is loaded after this
    package is not.
    """
    other = {"jit_cache": "helper", "helper": "jit_cache"}[first]
    (tmp_path / "helper.py").write_text("THREADS = 32\n")
    (tmp_path / "mine.py").write_text(f"import {first}, {other}\nfrom jit_cache import compiled\n{BUILD}")
    code = f"import {first}, mine; print(mine.build.key('sm_90a').storable)"
    script = f"sleep 0.3; touch helper.py mine.py; sleep 0.1; exec {sys.executable} -c {shlex.quote(code)}"
    env = environment({"PYTHONPATH": os.pathsep.join([str(tmp_path), environment({})["PYTHONPATH"]])})
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(first == "jit_cache")


BUILD = "@compiled\ndef build(arch):\n    raise AssertionError\n"


def test_a_file_replaced_by_one_with_an_older_time_has_no_hash(tree, tmp_path, monkeypatch):
    """As rsync -t, cp -p, tar and installers do."""
    kernel, new = module("fam.norm.kernel", tmp_path), tmp_path / "new.py"
    now = time.time()
    monkeypatch.setattr(source, "IMPORTED", now)
    assert hashed(kernel, now)
    time.sleep(0.05)
    new.write_text("Config = 1\n")
    os.utime(new, (now - 3600, now - 3600))
    new.replace(tmp_path / "fam/norm/config.py")
    assert digest(kernel, now) is None
    load("fam.norm.config", tmp_path, monkeypatch)
    assert hashed(kernel, now) is None, "also of a process that was reading it"


@pytest.mark.parametrize("age, stored", [(10, False), (50, True)])
def test_a_builders_module_may_take_half_a_minute_from_its_reading_to_its_builder(
    tree, tmp_path, monkeypatch, age, stored
):
    kernel, now = module("fam.norm.kernel", tmp_path), time.time()
    (tmp_path / "fam/norm/kernel.py").touch()
    clock(monkeypatch, age)
    monkeypatch.setattr(source, "IMPORTED", now - 90)
    assert (hashed(kernel, now - 90) is not None) == stored
    assert hashed(kernel, time.time() + 1), "older than the process"
    kernel.__name__, kernel.__spec__ = "__main__", importlib.machinery.ModuleSpec("fam.norm.kernel", None)
    assert hashed(kernel, now - 90) is None, "a script is read when the process begins"
    assert hashed(kernel, time.time() + 1)


SCRIPT = """
import sys, time
from pathlib import Path
THREADS = 32
if "edit" in sys.argv:  # as a person does, while what a kernel imports is being imported
    time.sleep(0.1)
    Path(__file__).write_text(Path(__file__).read_text().replace("THREADS = 32", "THREADS = 64"))
    time.sleep(0.1)
from jit_cache import compiled
@compiled
def build(arch):
    raise AssertionError
print(build.key("sm_90a").storable)
"""


@pytest.mark.parametrize("how", ["script", "module"])
@pytest.mark.parametrize("edit", [True, False])
def test_a_file_saved_before_its_builder_is_decorated_has_no_hash_but_one_saved_before_the_process(tmp_path, how, edit):
    (tmp_path / "mine.py").write_text(SCRIPT)
    words = {"script": [tmp_path / "mine.py"], "module": ["-c", "import mine"]}[how] + ["edit"] * edit
    env = environment({"PYTHONPATH": os.pathsep.join([str(tmp_path), environment({})["PYTHONPATH"]])})
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(not edit)


def test_a_forked_child_knows_when_its_parent_began(tmp_path, run):
    """It runs what its parent has read."""
    (tmp_path / "mine.py").write_text(SCRIPT.replace("print", "if 0: print"))
    code = f"""
import os, time
sys.path.insert(0, {str(tmp_path)!r})
import mine
time.sleep(0.1)
open(mine.__file__, "a").write("# edited")
time.sleep(0.1)
child = os.fork()
if child == 0:
    print(mine.build.key("sm_90a").storable, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    assert run(code)[0] == "False"


FUTURE = """
sys.path.insert(0, {place!r})
import os, time
if {back}:  # the clock, while this process runs
    real, real_ns = time.time, time.time_ns
    time.time, time.time_ns = lambda: real() - 7200, lambda: real_ns() - 7200 * 10**9
from future import build
before = jc.stats()
build("sm_90a")
print(stats().compiles, stats().disk_loads, stats().bundle_loads)
"""


@pytest.mark.parametrize("back", [False, True])
def test_a_source_that_is_dated_in_the_future(tmp_path, run, back):
    """Its kernel is compiled once, then loaded, from a bundle too; an edit after its import is noticed all the same."""
    (tmp_path / "future.py").write_text(
        "from jit_cache import compiled\nfrom future_tiles import THREADS\nfrom tests.jit_cache import kernels\n"
        "@compiled\ndef build(arch):\n    return kernels.add.build(arch, config=kernels.Config(threads=THREADS))\n"
    )
    (tmp_path / "future_tiles.py").write_text("THREADS = 64\n")
    later = time.time() + 3 * 3600
    for name in ("future.py", "future_tiles.py"):
        os.utime(tmp_path / name, (later, later))
    code = FUTURE.format(place=str(tmp_path), back=back)
    assert run(code)[0] == "1 0 0"
    assert run(code)[0] == "0 1 0"
    bundle = {"JIT_CACHE_MODE": "off", "JIT_CACHE_BUNDLE": os.environ["JIT_CACHE_DIR"]}
    assert run(code, **bundle, JIT_CACHE_DIR=str(tmp_path / "none"))[0] == "0 0 1"
    edit = f"""
path = {str(tmp_path / "future_tiles.py")!r}
open(path, "w").write("THREADS = 32\\n")
os.utime(path, ({later}, {later}))
print(jc.Compiled(build.build).key("sm_90a").storable)
"""
    assert run(code + edit)[0].split() == ["0", "1", "0", "False"]


def test_an_unreadable_source_has_no_hash(tree, tmp_path):
    assert hashed(module("fam.nowhere", tmp_path)) is None
    tree("fam/norm/config.py", "def (:\n")
    assert hashed(module("fam.norm.kernel", tmp_path)) is None
    notebook = module("fam.norm.here", tmp_path)
    del notebook.__file__
    assert hashed(notebook) is None


@pytest.mark.parametrize("coding, readable", [("latin-1", True), ("utf-8", False)])
def test_a_table_of_contents_may_be_in_any_coding(tree, tmp_path, coding, readable):
    (tmp_path / "fam/norm/__init__.py").write_bytes(f"# -*- coding: {coding} -*-\n# \xe9\n".encode("latin-1"))
    digest = hashed(module("fam.norm.kernel", tmp_path))
    assert (digest is not None) == readable


IMPORTS = r"""
import a, b.c as d , e . f
from g import (  # (a comment)
    h as i,  # j
    k,
)
from .l import m; from ... import n
from . o import *
if x: import p
else:
    try: from.q import r
    finally: from s \
        import t, \
        u
# import (
import v
"""


def parsed(text: str, package: list[str]) -> set[tuple[str, str | None]]:
    """The imports that `source._imports` finds, by Python's own parser."""
    found: set[tuple[str, str | None]] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {(alias.name, None) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, node.module] if node.module else base)
            found |= {(module, alias.name) for alias in node.names}
    return found


PACKAGE = ["one", "two", "three"]


def test_every_import_statement_is_found():
    assert set(source._imports(IMPORTS, PACKAGE)) >= parsed(IMPORTS, PACKAGE)


@pytest.mark.parametrize(
    "text", ["'''import (\n'''", "'import \\\n'", "# import \\", "# from x import (", "'''\nfrom x import (\n'''"]
)
def test_what_looks_like_an_import_hides_none(text):
    assert ("a", None) in set(source._imports(f"{text}\nimport a\n", PACKAGE))


def test_every_import_statement_of_the_standard_library_is_found():
    files = [path for path in Path(os.__file__).parent.glob("*.py") if path.stat().st_size < 50_000]
    assert len(files) > 100
    for path in files:
        text = importlib.util.decode_source(path.read_bytes())
        assert parsed(text, PACKAGE) <= set(source._imports(text, PACKAGE)), path


def test_a_script_has_the_name_under_which_it_is_imported(tmp_path):
    script = module("script", tmp_path)
    script.__name__, script.__spec__ = "__main__", None
    assert module_name(script) == "script"
    script.__spec__ = importlib.machinery.ModuleSpec("package.tool", None)
    assert module_name(script) == "package.tool"
