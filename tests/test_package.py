"""The wheel: what it holds, and that it installs and runs in a fresh environment. Nothing leaves the machine."""

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import cute_kernels
from tests.marks import first_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("cute_kernels", "jit_cache")

FIRST_PROGRAM = """
import torch
import cute_kernels, jit_cache
from cute_kernels import rms_norm

x = torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True)
weight = torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
rms_norm(x, weight).sum().backward()
assert x.grad.shape == x.shape and weight.grad.isfinite().all()
print(cute_kernels.__file__, jit_cache.__file__, sep="\\n")
"""


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: a checkout would keep a folder build/, whose files the next wheel would hold."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", *offline, "--wheel-dir", target, source)
    (found,) = target.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """The folder of programs of an environment with the wheel; what it depends on is this environment's."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A path alone: the .pth files there, such as that of an editable install, are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_the_wheel_holds_the_packages_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    held = {name for name in names if ".dist-info/" not in name}
    assert held == sources | {f"{package}/py.typed" for package in PACKAGES}


def test_the_metadata(wheel):
    """An index and pip read it: each extra is declared, and what it needs is behind it."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    assert (metadata["Name"], metadata["Version"]) == ("cute-kernels", cute_kernels.__version__)
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Keywords"]
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    extras = set(metadata.get_all("Provides-Extra"))
    assert extras >= {"cu13", "train", "test", "bench", "dev"}
    needs = metadata.get_all("Requires-Dist")
    assert [need for need in needs if "[cu13]" in need and need.endswith('extra == "cu13"')]
    assert [need for need in needs if need.startswith("torch>=") and "extra" not in need]


NEEDED = {"torch": "2.10", "nvidia-cutlass-dsl": "4.8", "apache-tvm-ffi": "0.1.15", "cuda-python": "12.8", "rich": "13"}
OPTIONAL = {"nvidia-cutlass-dsl-libs-cu13": "4.8", "matplotlib": "3.8", "pytest": "8", "pytest-xdist": "3.6"}
OPTIONAL |= {"hypothesis": "6", "setuptools": "77.0.3", "transformers": "5.17", "ruff": "1", "mypy": "1"}
OF_EXTRA = {
    None: set(),
    "cu13": {"nvidia-cutlass-dsl-libs-cu13"},
    "train": {"matplotlib"},
    "models": {"transformers"},
    "test": {"pytest", "pytest-xdist", "hypothesis", "matplotlib", "setuptools", "transformers"},
    "dev": {"ruff", "mypy"},
}


@pytest.mark.parametrize("extra", first_of(list(OF_EXTRA), 2))
def test_installs_by_name_from_an_index(extra, wheel, tmp_path):
    """``pip install 'cute-kernels[extra]'`` from an index that holds the wheel and, empty, all that it may need."""
    index = tmp_path / "index"
    offer(index, wheel)
    for name, version in (NEEDED | OPTIONAL).items():
        cu13 = 'Provides-Extra: cu13\nRequires-Dist: nvidia-cutlass-dsl-libs-cu13; extra == "cu13"\n'
        offer(index, empty_wheel(tmp_path, name, version, cu13 if name == "nvidia-cutlass-dsl" else ""))

    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False)
    pip = (sys.executable, "-m", "pip", "--isolated", "--python", folder / "bin" / "python")
    wanted = "cute-kernels" + (f"[{extra}]" if extra else "")
    run(*pip, "install", "--quiet", "--no-cache-dir", "--index-url", index.as_uri(), wanted)
    installed = {line.split("==")[0] for line in run(*pip, "list", "--format=freeze").splitlines()}
    assert installed == {"cute-kernels", *NEEDED, *OF_EXTRA[extra]}


def offer(index, file):
    """Put a wheel into a simple index (PEP 503) of files."""
    folder = index / file.name.split("-")[0].replace("_", "-").lower()
    folder.mkdir(parents=True)
    shutil.copy(file, folder)
    (folder / "index.html").write_text(f'<!DOCTYPE html><a href="{file.name}">{file.name}</a>')


def empty_wheel(folder, name, version, metadata=""):
    """A wheel of nothing."""
    stem = f"{name.replace('-', '_')}-{version}"
    file, info = folder / f"{stem}-py3-none-any.whl", f"{stem}.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return file


def test_the_first_program_runs_from_the_wheel(environment, tmp_path):
    places = run(environment / "python", "-I", "-c", FIRST_PROGRAM, cwd=tmp_path).split()
    assert len(places) == 2 and all(place.startswith(str(environment.parent)) for place in places)


@pytest.mark.parametrize("program", ["cute-kernels", "jit-cache"])
def test_the_programs_of_the_wheel(program, environment, tmp_path):
    assert run(environment / program, "--version", cwd=tmp_path, env={}) == f"{program} {cute_kernels.__version__}\n"
