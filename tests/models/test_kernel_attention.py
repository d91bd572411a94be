"""Models of the transformers package inside of ``batch_invariant``: generate, padded batches, one forward."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from cute_kernels import batch_invariant  # noqa: E402
from tests.attention.cases import BF16  # noqa: E402
from tests.models.cases import CONFIGS, WINDOW, alone, generated, make_model, padded, prompts  # noqa: E402
from tests.runtime.bits import assert_same_bits  # noqa: E402

# The results of these models' experts, one after the other, are added in place
ADDS = {"gpt_oss": {"aten.index_add_.default"}}
LENGTHS = (150, 7, 65)
NEW = 2 * WINDOW


FEW = "llama", "gemma3"  # the second has windows and norms of heads


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=[] if n in FEW else pytest.mark.exhaustive) for n in CONFIGS],
)
def model(request):
    """A model, of a mixture of experts its plain implementation, and what of it ``batch_invariant`` does not know."""
    device = "cuda" if request.path.name.startswith("test_kernel") else "cpu"
    found = make_model(request.param, device, BF16)
    if request.param in ADDS:
        found.set_experts_implementation("eager")
    return found, ADDS.get(request.param, set())


@pytest.fixture
def path_of_the_kernels():
    """On the CPU fake kernels: before a block begins."""


@pytest.fixture(autouse=True)
def inside(model, path_of_the_kernels):
    with batch_invariant("warn" if model[1] else "strict") as uncovered:
        yield
    assert set(uncovered) <= model[1]


pytestmark = pytest.mark.filterwarnings("ignore:batch_invariant. aten.index_add_")


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_has_the_bits_of_one_forward(model, cache, device):
    """From prompts of other lengths, padded left; the window's cache drops keys."""
    model, rows = model[0], prompts(LENGTHS, device=device)
    for row, (tokens, logits) in zip(rows, generated(model, rows, NEW, cache_implementation=cache), strict=True):
        assert_same_bits(logits, alone(model, tokens)[len(row) - 1 : -1].float())


def test_padding_and_neighbours_change_no_bit(model, device):
    model, rows = model[0], prompts(LENGTHS, device=device)
    wanted = [alone(model, row) for row in rows]
    for left in (True, False):
        ids, present = padded(rows, left)
        positions = (present.cumsum(1) - 1).clamp(min=0)  # generate makes them so, a forward counts padding
        with torch.no_grad():
            logits = model(ids, attention_mask=present, position_ids=positions, use_cache=False).logits
        for row, found, here in zip(wanted, logits, present, strict=True):
            assert_same_bits(found[here.bool()], row)


def test_packed_sequences(model, device):
    model, rows = model[0], prompts(LENGTHS, device=device)
    starts = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0).int().to(device)
    positions = torch.cat([torch.arange(len(row), device=device) for row in rows])[None]
    options = dict(cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=max(LENGTHS), max_length_k=max(LENGTHS))
    with torch.no_grad():
        found = model(torch.cat(rows)[None], position_ids=positions, use_cache=False, **options).logits[0]
    assert_same_bits(found, torch.cat([alone(model, row) for row in rows]))
