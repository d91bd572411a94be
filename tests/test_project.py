"""The project's own files agree with each other."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_pre_commit_pins_what_ci_uses():
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    used = re.findall(r"\[([\w-]+)==([\w.]+)\]", (ROOT / ".pre-commit-config.yaml").read_text())
    assert {name for name, _ in used} == {"ruff", "mypy"}
    assert all(pins[name] == version for name, version in used)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize(
    ("version", "extra", "index"), [("12.8", "", True), ("13.0", ",cu13", False), (None, "", False)]
)
def test_what_is_installed_is_what_the_driver_runs(version, extra, index, tmp_path):
    text = f"| Driver Version: 580.1  CUDA Version: {version} |" if version else "no devices were found"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{text}'\n")
    program.chmod(0o755)
    command = ["make", "--dry-run", "--what-if=pyproject.toml", "demo"]
    printed = subprocess.run(
        command, cwd=ROOT, env={"PATH": f"{tmp_path}:/usr/local/bin:/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert printed.returncode == 0, printed.stderr
    assert f"--editable '.[test,dev{extra}]'" in printed.stdout
    assert ("https://download.pytorch.org/whl/cu126" in printed.stdout) == index


def test_ci_runs_lint_docs_and_all_tests():
    """The README's test command, and the tests that it leaves out."""
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    assert commands == ["make lint", "make docs", "make test", "make test-exhaustive"]
    assert "\nmake test " in (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    marks = [
        re.search(rf"^{name}:.*\n\t.* -m (.*)$", makefile, re.MULTILINE)[1] for name in ("test", "test-exhaustive")
    ]
    assert marks == ['"not exhaustive"', "exhaustive"] and "\ntest-all: test test-exhaustive " in makefile


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_prints_its_targets():
    path = {"PATH": "/usr/local/bin:/usr/bin:/bin"}  # not MAKELEVEL: below `make test` it names directories, too
    printed = subprocess.run(["make"], cwd=ROOT, env=path, capture_output=True, text=True, check=True).stdout
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [line.split()[1] for line in printed.splitlines()] == targets.split()
    assert all(len(line.split()) > 3 for line in printed.splitlines())
