"""Imports: architecture rules that keep `import cute_kernels` light and kernels free of torch."""

import ast
import sys
from pathlib import Path

import pytest

import cute_kernels

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = sorted((ROOT / "cute_kernels").rglob("*.py"))
COMPILER = {"cutlass", "tvm_ffi"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
REFERENCE_MODULES = ("checks", "config", "reference", "variants")


def names(paths):
    return [str(path.relative_to(ROOT)) for path in paths]


def for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imported(path: Path, top_level_only: bool) -> set[str]:
    """Dotted names that a file imports; with ``top_level_only`` those that importing the file imports."""
    found = set()

    def visit(node):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            found.add(prefix)
            found.update(f"{prefix}.{alias.name}" for alias in node.names)
        if (top_level_only and isinstance(node, FUNCTIONS)) or for_type_checkers(node):
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def packages(path: Path, top_level_only: bool) -> set[str]:
    return {name.split(".")[0] for name in imported(path, top_level_only)}


def test_the_rules_see_imports(tmp_path):
    """In functions, under conditions, in classes, with aliases; not what type checkers alone import."""
    file = tmp_path / "a.py"
    text = (
        "if 1:\n  import a.b as c\nif TYPE_CHECKING:\n  import h\nclass X:\n  from d import e\ndef f():\n  import g\n"
    )
    file.write_text(text)
    assert packages(file, top_level_only=True) == {"a", "d"} and packages(file, top_level_only=False) == {"a", "d", "g"}


KERNELS = [path for path in LIBRARY if path.name.startswith("kernel") or "kernel" in path.parent.name.split("_")]


def test_there_are_kernels():
    assert "cute_kernels/norm/kernel.py" in names(KERNELS)


@pytest.mark.parametrize("path", KERNELS, ids=names(KERNELS))
def test_kernels_do_not_import_torch(path):
    """A kernel knows its arguments' dtypes and static sizes alone: it compiles where there is no GPU."""
    assert "torch" not in packages(path, top_level_only=False)
    ours = {name for name in imported(path, top_level_only=False) if name.startswith("cute_kernels")}
    family = ".".join(path.relative_to(ROOT).parts[:2])
    allowed = ("cute_kernels.common", f"{family}.config", f"{family}.kernel", f"{family}.variants")
    assert all(name.startswith(allowed) for name in ours), ours


CONFIGS = [path for path in LIBRARY if path.name in ("config.py", "config_tokens.py", "variants.py")]


@pytest.mark.parametrize("path", CONFIGS, ids=names(CONFIGS))
def test_configs_are_plain_python(path):
    """The modules that kernels, launches and references all read."""
    allowed = {"__future__", "cute_kernels", *sys.stdlib_module_names}
    assert packages(path, top_level_only=False) <= allowed
    ours = {name for name in imported(path, top_level_only=False) if name.startswith("cute_kernels.")}
    family = ".".join(path.relative_to(ROOT).parts[:2])
    allowed_ours = "cute_kernels.common.", "cute_kernels.runtime.real", f"{family}.config_"
    assert all(name.startswith(allowed_ours) for name in ours)
    for name in ours:
        module = ROOT / Path(*name.split(".")).with_suffix(".py")
        assert not module.exists() or packages(module, top_level_only=True) <= allowed


REFERENCES = [path for path in LIBRARY if path.stem == "reference" or path.parent.name == "reference"]


def test_there_are_references():
    assert {"cute_kernels/norm/reference.py", "cute_kernels/mhc/reference/pre.py"} <= set(names(REFERENCES))


@pytest.mark.parametrize("path", REFERENCES, ids=names(REFERENCES))
def test_references_are_plain_torch(path):
    """A specification stands on checks and other references alone, not on what it is the measure of."""
    assert packages(path, top_level_only=False) <= {"__future__", "cute_kernels", "torch", *sys.stdlib_module_names}
    ours = {name for name in imported(path, top_level_only=False) if name.startswith("cute_kernels")}
    family = ".".join(path.relative_to(ROOT).parts[:2])
    shared = tuple(f"cute_kernels.runtime.{name}" for name in ("checks", "real", "autograd", "strict"))
    allowed = (*shared, *(f"{family}.{n}" for n in REFERENCE_MODULES))
    assert all(name.startswith(allowed) for name in ours), ours


def test_modules_reach_into_no_internals():
    """They take a family's public ops and its ``functional.py``."""
    families = {path.parent.name for path in LIBRARY if path.name == "launch.py"} | {"mhc"}
    for path in LIBRARY:
        if path.parent.name == "nn":
            for name in imported(path, top_level_only=False):
                _, _, rest = name.partition("cute_kernels.")
                family, _, module = rest.partition(".")
                if family in families and (ROOT / "cute_kernels" / family / f"{module.split('.')[0]}.py").exists():
                    assert module.startswith("functional"), f"{path.name}: {name}"


def test_integrations_stand_on_the_public_api():
    """They take what a user could take; a system's package loads its peer when it is asked to. Nobody imports them."""
    public, room = cute_kernels.__all__, "cute_kernels.integrations"
    for path in LIBRARY:
        ours = {name for name in imported(path, top_level_only=False) if name.startswith("cute_kernels.")}
        others = {name for name in ours if not name.startswith(room)}
        if path.is_relative_to(ROOT / room.replace(".", "/")):
            assert all(name.split(".")[1] in public for name in others), f"{path}: {others}"
            if path.name == "__init__.py":
                assert packages(path, top_level_only=True) <= {"__future__", "cute_kernels", *sys.stdlib_module_names}
        else:
            assert others == ours, f"{path}: {ours - others}"


def test_the_runtime_alone_asks_whether_a_call_is_eager():
    """The others begin with ``mode_of``."""
    asking = [path for path in LIBRARY if path.parent.name != "runtime" and "is_eager" in path.read_text()]
    assert names(asking) == []
