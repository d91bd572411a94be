"""The example: a kernel of a user's own, in a script outside of any package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_users_script_is_cached_until_it_changes(tmp_path):
    script = tmp_path / "mine.py"
    shutil.copy(ROOT / "examples" / "cached_vector_add.py", script)

    def run():
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        return subprocess.run(
            [sys.executable, script], env=environment, capture_output=True, text=True, check=True
        ).stdout

    out = run()
    assert "compiled in" in out and ("the sum is right" in out or "no GPU here" in out)
    assert "loaded from the cache" in run()
    script.write_text(script.read_text().replace("x[i] + y[i]", "y[i] + x[i]"))
    assert "compiled in" in run()
