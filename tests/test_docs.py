"""README.md and docs/: their code runs, their links lead somewhere."""

import re

import pytest

from tests.doc_blocks import PAGES, ROOT, blocks, run_page

LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)(?:#([^)]*))?\)")


# Pages with commands that compile all kernels of a model
EXHAUSTIVE = {"README.md": pytest.mark.exhaustive, "jit-cache.md": pytest.mark.exhaustive}


@pytest.mark.parametrize("page", [pytest.param(p, id=p.name, marks=EXHAUSTIVE.get(p.name, ())) for p in PAGES])
def test_code_runs(page, tmp_path):
    run_page(page, tmp_path, ("",))


def test_the_first_program_runs(tmp_path):
    first = next(block for block in blocks() if block.language == "python")
    assert first.page.name == "README.md" and not first.mark
    first.run(tmp_path)


def test_every_fence_is_found():
    """A block in another form would not be run."""
    fences = sum(len(re.findall(r"^```(?:python|bash)$", page.read_text(), re.M)) for page in PAGES)
    assert fences == len(blocks()) > 10


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "bench/README.md"], ids=lambda page: page.name
)
def test_links_lead_somewhere(page):
    for target, anchor in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
            assert not anchor or anchor in anchors(page.parent / target), f"{target}#{anchor}"


def anchors(page):
    """The anchors that GitHub and MyST make of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_is_read_in_one_go():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
