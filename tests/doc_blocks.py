"""The code blocks of README.md and docs/, which run as they stand.

A line before a block says what is special: `<!-- gpu -->`, it needs a GPU; `<!-- not run: why -->`, it is not run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>gpu|not run: [^\n]+) -->\n\n?)?```(?P<language>python|bash)\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    mark: str  # "", "gpu" or "not run: why"
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def run(self, folder: Path) -> None:
        """In a process of its own, in ``folder``. Raises AssertionError."""
        scripts = Path(sys.executable).parent
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        }
        command = [sys.executable, "-c", self.text] if self.language == "python" else ["bash", "-ec", self.text]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{self}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in _BLOCK.finditer(text):
            line = text[: match.start("language")].count("\n") + 1
            found.append(Block(page, line, match["mark"] or "", match["language"], match["text"]))
    return found
