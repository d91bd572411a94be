"""The code of README.md and docs/ that needs a GPU, and the rest of it on one."""

import pytest

from tests.doc_blocks import blocks


@pytest.mark.parametrize("block", [block for block in blocks() if block.mark in ("", "gpu")], ids=str)
def test_code_runs(block, tmp_path):
    block.run(tmp_path)
