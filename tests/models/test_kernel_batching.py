"""models.generate_batch: tokens and log-probabilities are those of models.generate, whatever the scheduler does."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17")

from cute_kernels import batch_invariant, models  # noqa: E402
from tests.models.cases import FAMILIES, make_prepared, padded, prompts  # noqa: E402
from tests.runtime.bits import assert_same_bits  # noqa: E402

NEW = 4
OPTIONS = {"max_new_tokens": NEW, "temperature": 0.7, "top_k": 50, "top_p": 0.95, "eos_token_id": []}
FEW = "llama", "gemma3", "deepseek_v3"  # the second has windows in half of its layers, the third caches latents
of_caches = pytest.mark.parametrize("model", FEW, indirect=True)  # a family's other layers have no part in it
# Blocks that two requests of 18 tokens do not fit into, but one does; a window's layers have blocks of their own, and
# mistral's never ask for another
BLOCKS = {"gemma2": 5, "gemma3_text": 5, "gpt_oss": 5, "mistral": 2}


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=[] if n in FEW else pytest.mark.exhaustive) for n in FAMILIES],
)
def model(request):
    return make_prepared(request.param, "cuda" if request.path.name.startswith("test_kernel") else "cpu")


@pytest.fixture
def path_of_the_kernels():
    """On the CPU fake kernels: before a block begins."""


@pytest.fixture
def pinned():
    """On the CPU there is no memory of that kind."""


@pytest.fixture
def memory():
    """On the CPU transformers is told that there is some."""


@pytest.fixture(autouse=True)
def inside(model, path_of_the_kernels, memory):
    with batch_invariant("strict"):
        yield


def batched(model, rows, seeds, block_size=16, num_blocks=400, max_batch_tokens=512, options=OPTIONS, **batching):
    sizes = {"block_size": block_size, "num_blocks": num_blocks, "max_batch_tokens": max_batch_tokens}
    config = transformers.ContinuousBatchingConfig(**sizes, **batching)
    return models.generate_batch(model, [row.tolist() for row in rows], seeds=seeds, batching=config, **options)


def generated(model, rows, seeds):
    ids, present = padded(rows, left=False)
    return models.generate(model, ids, seeds=seeds, attention_mask=present, **OPTIONS)


def assert_same(found, wanted):
    assert found.lengths.tolist() == wanted.lengths.tolist()
    assert torch.equal(found.tokens, wanted.tokens)
    assert_same_bits(found.log_probs, wanted.log_probs)


def test_as_generate_whatever_the_scheduler(model, device):
    """Chunks of prompts beside single tokens, another scheduler, other sizes of blocks, another order, one forward."""
    longest = 20 if device == "cpu" else 900 if model.config.model_type == "gpt2" else 2100  # passes a split of keys
    rows = prompts((1, longest, 17), device=device)
    seeds = torch.tensor([5, 5, 8], device=device)
    wanted = generated(model, rows, seeds)
    assert_same(batched(model, rows, seeds, max_batch_tokens=11, scheduler_type="prefill_first"), wanted)
    assert_same(batched(model, rows, seeds, max_requests_per_batch=2, block_size=128), wanted)
    order = [2, 0, 1]
    found = batched(model, [rows[i] for i in order], seeds[order], max_batch_tokens=24, block_size=32)
    assert torch.equal(found.tokens, wanted.tokens[order])
    assert_same_bits(found.log_probs, wanted.log_probs[order])
    whole = torch.cat([rows[1], wanted.tokens[1]])[None]
    scored, _ = models.log_prob(model, whole, whole, temperature=0.7)
    assert_same_bits(wanted.log_probs[1], scored[0, len(rows[1]) :])


def test_requests_that_are_computed_again(model, device, monkeypatch):
    """So few blocks that a request loses its own, and is computed again from its tokens."""
    rows = prompts((14, 14), device=device)
    seeds = torch.arange(2, device=device)
    wanted = generated(model, rows, seeds)
    lost = count_lost(monkeypatch)
    blocks = BLOCKS.get(model.config.model_type, 3)
    assert_same(batched(model, rows, seeds, num_blocks=blocks, safety_margin=0.0), wanted)
    assert bool(lost) == (model.config.model_type != "mistral")


@of_caches
def test_requests_that_wait_in_the_hosts_memory(model, device, monkeypatch, pinned):
    """The blocks that a request loses are copied to the host, and back."""
    from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

    rows = prompts((14, 14), device=device)
    seeds = torch.arange(2, device=device)
    wanted = generated(model, rows, seeds)
    copied, copy = [], OffloadingManager._offload_to_cpu

    def copies(*arguments):
        copied.append(copy(*arguments))
        return copied[-1]

    monkeypatch.setattr(OffloadingManager, "_offload_to_cpu", copies)
    blocks = BLOCKS.get(model.config.model_type, 3)
    assert_same(batched(model, rows, seeds, num_blocks=blocks, safety_margin=0.0, cpu_offload_space=0.01), wanted)
    assert any(copied)


def count_lost(monkeypatch):
    from transformers.generation.continuous_batching.requests import RequestState

    lost, again = [], RequestState.create_equivalent_initial_request

    def counted(state):
        lost.append(state.request_id)
        return again(state)

    monkeypatch.setattr(RequestState, "create_equivalent_initial_request", counted)
    return lost


@of_caches
def test_a_shared_prefix(model, device, monkeypatch):
    """Eight samples of one prompt: blocks of it are shared where all layers see all keys, and change no bit."""
    from transformers.generation.continuous_batching import PagedAttentionCache

    shared, search = [], PagedAttentionCache.search_prefix_match

    def searched(*arguments):
        shared.append(search(*arguments))
        return shared[-1]

    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", searched)
    (row,) = prompts((33,), device=device)
    seeds = torch.arange(8, device=device)
    wanted = generated(model, [row] * 8, seeds)
    assert len({tuple(tokens) for tokens in wanted.tokens.tolist()}) > 4
    assert_same(batched(model, [row] * 8, seeds, max_requests_per_batch=3), wanted)
    assert any(shared) == (getattr(model.config, "sliding_window", None) is None)


@of_caches
def test_ends(model, device):
    rows = prompts((9, 20), device=device)
    seeds = torch.tensor([3, 4], device=device)
    wanted = generated(model, rows, seeds)
    end = wanted.tokens[0, 2].item()
    first = wanted.tokens[0].tolist().index(end) + 1
    found = batched(model, rows, seeds, options={**OPTIONS, "eos_token_id": end, "pad_token_id": 95})
    assert found.lengths[0] == first and torch.equal(found.tokens[0, :first], wanted.tokens[0, :first])
    assert (found.tokens[0, first:] == 95).all() and (found.log_probs[0, first:] == 0).all()
