"""The project's own files agree with each other."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_pre_commit_pins_what_ci_uses():
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    used = re.findall(r"\[([\w-]+)==([\w.]+)\]", (ROOT / ".pre-commit-config.yaml").read_text())
    assert {name for name, _ in used} == {"ruff", "mypy"}
    assert all(pins[name] == version for name, version in used)
