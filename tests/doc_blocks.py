"""The code blocks of README.md and docs/, which run as they stand, those of a page in order and in one folder.

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
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/api").glob("*.md")))
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
        """In a process of its own, in ``folder``; commands with a cache there. Raises AssertionError."""
        scripts = Path(sys.executable).parent
        program = folder / "program.py"
        program.write_text(self.text)
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        }
        command = [sys.executable, str(program)]
        if self.language == "bash":
            command = ["bash", "-ec", self.text]
            environment["JIT_CACHE_DIR"] = str(folder / "cache")
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, f"{self}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def run_page(page: Path, folder: Path, marks: tuple[str, ...]) -> None:
    """Run the blocks of a page that have one of these marks; a model's config is there."""
    (folder / "config.json").write_text('{"hidden_size": 64}')
    for block in blocks():
        if block.page == page and block.mark in marks:
            block.run(folder)


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in _BLOCK.finditer(text):
            line = text[: match.start("language")].count("\n") + 1
            found.append(Block(page, line, match["mark"] or "", match["language"], match["text"]))
    return found
