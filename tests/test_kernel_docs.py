"""The code of README.md and docs/ that needs a GPU, and the rest of it on one."""

import pytest

from tests.doc_blocks import PAGES, run_page


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_runs(page, tmp_path):
    run_page(page, tmp_path, ("", "gpu"))
