"""The key tells apart: arguments, types, environment, wheels, processor."""

import dataclasses
import enum
import functools
import importlib.metadata
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import ClassVar

import cutlass
import pytest
from cutlass.cutlass_dsl import CuTeDSL
from hypothesis import given, settings
from hypothesis import strategies as st

from jit_cache import Program, compiled, key
from jit_cache.compile import Compiled, Kernel, reset
from jit_cache.key import differences, digest, encode, flavour, machine, runs_here, runs_on, same, stack
from tests.jit_cache import kernels


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass(frozen=True)
class Pair:
    left: object
    right: object


@dataclasses.dataclass(frozen=True)
class Other:
    left: object
    right: object


@compiled
def build(arch: str, a=None, b=None, c=None) -> Program:
    raise AssertionError("keys need no compilation")


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3) | st.integers(),
    st.sampled_from([0.0, -0.0, 1.0, float("nan"), float("inf")]) | st.floats(),
    st.text(st.characters(), max_size=3) | st.sampled_from(["", "1", "None", "\ud83d\ude00", "😀"]),
    st.sampled_from([*Color, *Level, cutlass.Float32, cutlass.BFloat16, cutlass.Float16]),
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple) | st.builds(Pair, inner, inner) | st.builds(Other, inner, inner)
    ),
    max_leaves=5,
)


def exact(value):
    """An independent account of identity: the type of everything, and floats by their text."""
    if isinstance(value, float):
        return float, repr(value)
    if isinstance(value, tuple):
        return tuple, tuple(map(exact, value))
    if dataclasses.is_dataclass(value):
        return type(value), exact(value.left), exact(value.right)
    return type(value), value


@given(values, values)
@settings(max_examples=600, deadline=None)
def test_encodings_are_equal_exactly_if_the_values_are(left, right):
    equal = exact(left) == exact(right)
    assert (digest(encode(left)) == digest(encode(right))) == equal
    if left == right or equal:
        assert same(left, right) == equal


@given(st.tuples(values, values, values), st.integers(0, 2), values)
@settings(max_examples=300, deadline=None)
def test_any_change_of_any_argument_changes_the_key(args, position, new):
    changed = (*args[:position], new, *args[position + 1 :])
    assert (build.key("sm_90a", *args).digest == build.key("sm_90a", *changed).digest) == (
        exact(args) == exact(changed)
    )
    assert build.key("sm_90a", *args).digest == build.key("sm_90a", c=args[2], b=args[1], a=args[0]).digest
    assert build.key("sm_90a", *args).digest != build.key("sm_100a", *args).digest


@given(st.lists(st.tuples(values, values), min_size=1, max_size=20))
@settings(max_examples=150, deadline=None)
def test_memory_never_confuses_arguments(calls):
    builder = Compiled(build.build)
    builder._obtain = lambda key, args, load: Kernel("compiled", {}, b"", key.digest)
    for args in calls * 2:
        assert builder("sm_90a", *args) == build.key("sm_90a", *args).digest


@pytest.mark.parametrize(
    "left, right",
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ((1,), (True,)),
        ((0.0,), (-0.0,)),
        (Pair(1, 2), Pair(True, 2)),
        (Pair(1, 2), Pair(1.0, 2)),
        (Level.LOW, 1),
        ("1", 1),
        ((), None),
    ],
)
def test_memory_tells_apart_what_python_calls_equal(left, right):
    builder = Compiled(build.build)
    builder._obtain = lambda key, args, load: Kernel("compiled", {}, b"", object())
    first, second = builder("sm_90a", left), builder("sm_90a", right)
    assert first is not second
    assert builder("sm_90a", left) is first and builder("sm_90a", right) is second
    assert builder(arch="sm_90a", b=None, a=left) is first


@dataclasses.dataclass(frozen=True)
class Unhashable:
    n: int
    __hash__ = None


def test_not_a_number_and_unhashable_dataclasses_hit_the_same_kernel():
    builder = Compiled(build.build)
    builder._obtain = lambda key, args, load: Kernel("compiled", {}, b"", object())
    assert builder("sm_90a", float("nan")) is builder("sm_90a", float("nan"))
    assert builder("sm_90a", Unhashable(1)) is builder("sm_90a", Unhashable(1))
    assert builder("sm_90a", Unhashable(1)) is not builder("sm_90a", Unhashable(2))


@dataclasses.dataclass
class Mutable:
    n: int = 1


class Text(str):
    pass


@dataclasses.dataclass(frozen=True)
class Derived:
    name: str
    bits: ClassVar[int] = 16
    wide: dataclasses.InitVar[bool] = False

    def __post_init__(self, wide):
        object.__setattr__(self, "threads", 128 if wide else 32)


@dataclasses.dataclass(frozen=True)
class Quoted:
    name: str
    wide: "dataclasses.InitVar[bool]" = False


@pytest.mark.parametrize("value", [Derived("a", wide=True), Quoted("a"), (1, Derived("a"))])
def test_a_dataclass_whose_fields_do_not_say_all_is_refused(value):
    """Values that differ by an InitVar have equal fields."""
    with pytest.raises(TypeError, match=r"^build: argument `a` must be .*, got (Derived|Quoted), which has an InitVar"):
        build.key("sm_90a", value)


@dataclasses.dataclass(frozen=True)
class Constant:
    bits: ClassVar[int] = 16
    n: int = 1


def test_a_constant_of_a_dataclass_is_no_field():
    assert build.key("sm_90a", Constant()).record["arguments"]["a"]["fields"] == {"n": 1}


@pytest.mark.parametrize(
    "value", [[1], {"a": 1}, {1}, b"x", 1j, object(), int, len, Mutable(), Text("x"), range(3), (1, [2]), Pair(1, [2])]
)
def test_other_types_are_refused_by_name(value):
    with pytest.raises(TypeError, match=r"^build: argument `b` must be .*, got "):
        build("sm_90a", 1, value)


def test_wrong_calls():
    with pytest.raises(TypeError, match="build: .*missing.* 'arch'"):
        build()
    with pytest.raises(TypeError, match="build: .*unexpected keyword argument 'd'"):
        build("sm_90a", d=1)
    with pytest.raises(TypeError, match="`arch` must be a str such as 'sm_90a', got 90"):
        build(90)
    with pytest.raises(ValueError, match="`arch` must be like 'sm_90a', got 'hopper'"):
        build("hopper")


@pytest.mark.parametrize(
    "function",
    [
        lambda: None,
        lambda n, arch: None,
        lambda arch, *rest: None,
        lambda arch, **rest: None,
        lambda arch, *, n: None,
        lambda arch, /: None,
    ],
)
def test_builders_whose_arguments_are_no_key_are_refused(function):
    with pytest.raises(TypeError, match="compiled builder"):
        compiled(function)


def test_a_builder_has_a_name_for_its_files():
    with pytest.raises(ValueError, match="must have a name: use def"):
        compiled(lambda arch: None)


def test_builders_of_one_name_in_one_file_are_told_apart():
    twins = []
    for n in range(2):
        if n:

            @compiled
            def twin(arch):
                return 32

        else:

            @compiled
            def twin(arch):
                return 64

        twins.append(twin)
    first, second = (twin.key("sm_90a") for twin in twins)
    assert twins[0].kernel == twins[1].kernel and first.digest != second.digest
    assert [line.partition(":")[0] for line in differences(first.record, second.record)] == ["line"]


def maker(value):
    def build(arch):
        return value

    return build


@pytest.mark.parametrize("value", [32, (1, 2), None, [], Pair(1, 2), cutlass.Float32, Pair, maker])
def test_a_value_of_an_enclosing_function_is_refused(value):
    """It is in no key: make(32) and make(64) would be the same kernel."""
    with pytest.raises(TypeError, match=r"build: `value`, of an enclosing function, .* make it an argument or"):
        compiled(maker(value))


def test_code_of_an_enclosing_function_is_refused():
    """It may capture a value in turn."""

    class Inner:
        scale = 2

    def helper():
        return 2

    def of_class(arch):
        return Inner.scale

    def of_function(arch):
        return helper()

    for build in (of_class, of_function):
        with pytest.raises(TypeError, match="of an enclosing function, .* a name of the module"):
            compiled(build)


def test_a_module_of_an_enclosing_function_is_accepted():
    def build(arch):
        return module

    module = cutlass
    assert compiled(build).key("sm_90a").storable


def test_a_builder_is_a_function():
    """A method's object and a partial's arguments would be in no key."""

    class Maker:
        def build(self, arch):
            return self

    for build in (Maker().build, functools.partial(maker, 32)):
        with pytest.raises(TypeError, match="a builder must be a function, got (method|partial)"):
            compiled(build)


def local_classes(scale):
    @dataclasses.dataclass(frozen=True)
    class Scaled:
        n: int = 1

        def value(self):
            return self.n * scale

    class Kind(enum.Enum):
        A = 1

        def scaled(self):
            return self.value * scale

    return Scaled(), Kind.A


@pytest.mark.parametrize("i", [0, 1])
def test_arguments_of_a_class_made_in_a_function_are_refused(i):
    """Scaled of local_classes(2) and of local_classes(3) have the same fields."""
    value = local_classes(2)[i]
    with pytest.raises(
        TypeError, match="`a` must be of a class that is not made in a function, got local_classes.<loc"
    ):
        build.key("sm_90a", (value,))


def test_a_variable_that_is_not_set_yet_is_refused():
    def build(arch):
        return value

    with pytest.raises(TypeError, match="make it an argument"):
        compiled(build)
    value = 32


def test_strings_are_told_apart_by_their_code_points():
    texts = ["\ud800", "\ud801", "?", "??", "\ufffd", "\ud83d\ude00", "😀", "\\ud83d"]
    assert len({build.key("sm_90a", text).digest for text in texts}) == len(texts)


@pytest.mark.parametrize("value", [Pair(1, 2), Color.RED, (1, (Color.RED,)), kernels.Config(mode=Color.RED)])
def test_the_source_of_the_arguments_classes_counts(value):
    """Their methods and properties take part in building the kernel."""
    own = kernels.add.key("sm_90a", config=kernels.Config()).record["source"]
    assert kernels.add.key("sm_90a", config=1).record["source"] == own
    assert kernels.add.key("sm_90a", config=value).record["source"] != own


def test_builders_are_pickled_by_name():
    assert pickle.loads(pickle.dumps(kernels.add)) is kernels.add


def test_a_builder_keeps_its_name_and_docstring():
    assert kernels.add.__name__ == "add" and kernels.add.kernel == "tests.jit_cache.kernels.add"


@pytest.mark.parametrize("name, counts", [("NOT_KNOWN_YET", True), ("LOG_LEVEL", False), ("LINEINFO", False)])
def test_compiler_variables(monkeypatch, name, counts):
    """LINEINFO: the DSL has read it before."""
    before = build.key("sm_90a").digest
    monkeypatch.setenv(f"CUTE_DSL_{name}", "1")
    reset()
    assert (build.key("sm_90a").digest != before) == counts


@pytest.mark.parametrize(
    "variables, environment",
    [
        ({}, {}),
        ({"LINEINFO": "1", "TOLERATE_M2M": "off"}, {"LINEINFO": "True", "TOLERATE_M2M": "False"}),
        ({"LINEINFO": "true", "DEBUG": "1"}, {"DEBUG": "True"}),  # which sets the default of LINEINFO
        ({"LINEINFO": "0", "COMPILER_OPT": "remarks"}, {"COMPILER_OPT": "remarks"}),
        ({"NEW": "1", "KEEP": "ptx", "KEEP_IR": "0", "ARCH": "sm_90a"}, {"NEW": "1", "KEEP_IR": "0"}),
    ],
)
@pytest.mark.parametrize("first", ["cutlass.cute", "jit_cache.key"])
def test_the_compilers_variables_are_those_that_it_holds(run, variables, environment, first):
    """Whatever the environment says later; and the same if the builder's module does not import the compiler."""
    code = f"""
import os, {first}
if {first == "cutlass.cute"}:
    os.environ.update(CUTE_DSL_LINEINFO="1", CUTE_DSL_DEBUG="1", CUTE_DSL_COMPILER_OPT="1")
from jit_cache.key import environment
print(environment() == eval(os.environ["EXPECTED"]), environment())
"""
    expected = {f"CUTE_DSL_{name}": value for name, value in environment.items()}
    env = {f"CUTE_DSL_{name}": value for name, value in variables.items()}
    out, _ = run(code, EXPECTED=repr(expected), **env)
    assert out.startswith("True "), out


def test_a_compiler_that_does_not_say_what_it_holds(monkeypatch):
    monkeypatch.setattr(CuTeDSL, "_get_dsl", lambda: None)
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert build.key("sm_90a").record["environment"] == {"CUTE_DSL_LINEINFO": "1"}


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """Replaces the installed distributions by (name, version) pairs."""

    def replace(**versions):
        place = Path(tempfile.mkdtemp(dir=tmp_path))
        for name, version in versions.items():
            directory = place / f"{name}-{version}.dist-info"
            directory.mkdir()
            (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        monkeypatch.setattr(sys, "path", [str(place)])
        stack.cache_clear()
        return stack()

    yield replace
    monkeypatch.undo()
    stack.cache_clear()


def test_every_wheel_of_the_stack_is_in_the_key(wheels):
    base = {
        "nvidia_cutlass_dsl": "4.8.1",
        "nvidia_cutlass_dsl_libs_cu12": "4.8.1",
        "apache_tvm_ffi": "0.1",
        "torch": "2",
    }
    assert wheels(**base)["dsl"] == CU12 and stack()["tvm_ffi"] == "0.1"
    changes = [{"nvidia_cutlass_dsl": "4.8.2"}, {"nvidia_cutlass_dsl_libs_cu13": "4.8.1"}, {"apache_tvm_ffi": "0.2"}]
    digests = []
    for change in ({}, *changes):
        wheels(**{**base, **change})
        digests.append(build.key("sm_90a").digest)
    assert len(set(digests)) == 4
    wheels(**{**base, "torch": "3"})
    assert build.key("sm_90a").digest == digests[0]
    assert wheels()["dsl"] == {} and stack()["tvm_ffi"] is None


def test_the_installed_wheels_are_found():
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    assert stack()["dsl"] == {name: v for name, v in installed.items() if name.startswith("nvidia-cutlass-dsl")}
    assert stack()["dsl"] and stack()["tvm_ffi"] == installed["apache-tvm-ffi"]


CU12 = {"nvidia-cutlass-dsl": "4.8.1", "nvidia-cutlass-dsl-libs-cu12": "4.8.1"}
CU13 = {"nvidia-cutlass-dsl": "4.8.1", "nvidia-cutlass-dsl-libs-cu13": "4.8.1"}
BOTH = {**CU12, **CU13}


@pytest.mark.parametrize(
    "built, here, runs",
    [
        ({}, {}, True),
        ({"dsl": CU12}, {"dsl": CU13}, True),
        ({"dsl": CU12}, {"dsl": BOTH}, True),
        ({"dsl": CU13}, {"dsl": BOTH}, True),
        ({"dsl": CU13}, {"dsl": CU12}, False),
        ({"dsl": BOTH}, {"dsl": CU12}, False),
        ({"dsl": CU12}, {"dsl": {**CU12, "nvidia-cutlass-dsl": "4.8.2"}}, False),
        ({"dsl": CU12}, {"dsl": {**CU13, "nvidia-cutlass-dsl-libs-cu13": "4.8.2"}}, False),
        ({"tvm_ffi": "1"}, {"tvm_ffi": "2"}, False),
        ({"format": 1}, {"format": 2}, False),
        ({"machine": "x86_64-v3"}, {"machine": "x86_64-v4"}, True),
        ({"machine": "x86_64-v4"}, {"machine": "x86_64-v3"}, False),
        ({"machine": "aarch64-1"}, {"machine": "x86_64-v4"}, False),
    ],
)
def test_where_a_bundle_runs(built, here, runs):
    record = build.key("sm_90a").record
    base = {**stack(), "dsl": CU12}
    assert runs_here({**record, "stack": {**base, **built}}, {**record, "stack": {**base, **here}}) == runs


@pytest.mark.parametrize("field", ["kernel", "arguments", "arch", "environment", "source"])
def test_a_bundle_must_match_in_every_other_field(field):
    record = build.key("sm_90a").record
    assert runs_here(record, record) and not runs_here({**record, field: "x"}, record)


def test_true_is_not_one():
    """Equal in Python, but other kernels."""
    record = build.key("sm_90a").record
    one, true = ({**record, "arguments": {"n": value}} for value in (1, True))
    assert runs_here(one, one) and not runs_here(one, true)
    assert differences(one, true) == ["arguments.n: wanted 1, stored True"]


def test_flavour():
    assert flavour(CU12) == (12, {"nvidia-cutlass-dsl": "4.8.1", "nvidia-cutlass-dsl-libs": "4.8.1"})
    assert flavour(BOTH)[0] == 13


def test_the_processor_is_known():
    assert runs_on(machine(), machine())
    assert machine() in ("x86_64-v1", "x86_64-v2", "x86_64-v3", "x86_64-v4") or not machine().startswith("x86_64")


@pytest.mark.parametrize("name", ["x86_64-v1", "aarch64-12345678"])
def test_the_processor_is_in_the_key(monkeypatch, name):
    """An object for a newer one can die of SIGILL."""
    before = build.key("sm_90a").digest
    monkeypatch.setattr(key, "machine", lambda: name)
    stack.cache_clear()
    try:
        assert build.key("sm_90a").record["stack"]["machine"] == name
        assert build.key("sm_90a").digest != before
    finally:
        stack.cache_clear()


def test_importing_jit_cache_imports_nothing_heavy():
    heavy = {"torch", "cutlass", "tvm_ffi", "cute_kernels", "rich"}
    code = f"import sys, jit_cache, jit_cache.__main__; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(kernels.__file__).parents[2]
    )
    assert done.stdout.strip() == "[]"
