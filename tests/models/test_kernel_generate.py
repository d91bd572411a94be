"""models.generate: tokens and log-probabilities are those of log_prob over the whole sequence, in any batch."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from cute_kernels import batch_invariant, models  # noqa: E402
from cute_kernels.models import decoding  # noqa: E402
from tests.models.cases import FAMILIES, alone, generated, make_prepared, padded, prompts  # noqa: E402
from tests.runtime.bits import assert_same_bits  # noqa: E402

LENGTHS = (1, 128, 17)
OPTIONS = {"max_new_tokens": 4, "temperature": 0.7, "top_k": 50, "top_p": 0.95, "eos_token_id": []}


# The others differ in norms, biases and rotary embeddings alone
FEW = "llama", "gemma2", "gpt2"


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
def capture():
    """On the CPU a graph is what it captures."""


@pytest.fixture(autouse=True)
def inside(model, path_of_the_kernels):
    with batch_invariant("strict"):
        yield


def score(model, row, first):
    """Log-probabilities of a row's tokens from place ``first`` on, and entropies."""
    with torch.no_grad():
        return [t[0, first:] for t in models.log_prob(model, row[None], row[None], temperature=0.7)]


def test_as_one_forward_whatever_the_batch(model, device):
    """Paged and static caches, padded left and right, another order, alone."""
    rows = prompts(LENGTHS, device=device)
    seeds = torch.tensor([5, 5, 7], device=device)
    ids, present = padded(rows, left=True)
    tokens, log_probs, lengths = models.generate(model, ids, seeds=seeds, attention_mask=present, **OPTIONS)
    assert (lengths == 4).all() and tokens.shape == log_probs.shape == (3, 4)
    for row, new, found in zip(rows, tokens, log_probs, strict=True):
        assert_same_bits(found, score(model, torch.cat([row, new]), len(row))[0])
    order = [2, 0, 1]
    others = [([rows[i] for i in order], False, "paged"), ([rows[i] for i in order], True, "static")]
    for some, left, cache in others:
        ids, present = padded(some, left)
        found = models.generate(model, ids, seeds=seeds[order], attention_mask=present, cache=cache, **OPTIONS)
        assert torch.equal(found.tokens, tokens[order])
        assert_same_bits(found.log_probs, log_probs[order])
    alone = models.generate(model, rows[1][None], seeds=seeds[1:2], **OPTIONS)
    assert torch.equal(alone.tokens[0], tokens[1])
    assert_same_bits(alone.log_probs[0], log_probs[1])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_of_transformers(model, device, cache):
    """Its own loop, greedy, over its own caches: logits are those of one forward."""
    rows = prompts(LENGTHS, device=device)
    for row, (tokens, logits) in zip(rows, generated(model, rows, 4, cache_implementation=cache), strict=True):
        assert_same_bits(logits, alone(model, tokens)[len(row) - 1 : -1].float())


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.7, marks=pytest.mark.exhaustive)])
def test_graphs_and_guesses_change_no_bit(model, device, temperature, capture):
    """Steps from a CUDA graph, and 1, 3 and 7 guesses a step: what a step at a time draws, with an end and without."""
    new, widths = (9, (1, 3, 7)) if device == "cuda" else (4, (3,))
    row = prompts((13,), device=device)[0]
    ids, present = padded([row.repeat(3), *prompts((1, 17), device=device)], left=True)
    options = {**OPTIONS, "max_new_tokens": new, "temperature": temperature, "top_k": 4}
    options |= {"seeds": torch.tensor([5, 6, 7], device=device), "attention_mask": present}
    wanted = models.generate(model, ids, **options)
    end = wanted.tokens[0, 3].item()
    for ends in ([], [end]) if device == "cuda" else ([end],):
        options["eos_token_id"] = ends
        wanted = models.generate(model, ids, **options) if ends else wanted
        for other in ({"graph": True}, *({"speculate": width} for width in widths)):
            found = models.generate(model, ids, **options, **other)
            for name, a, b in zip(found._fields, found, wanted, strict=True):
                assert a.shape == b.shape and torch.equal(a, b), f"{name} of {other}, ends {ends}: {a} and {b}"


def test_sizes_of_pages_change_no_bit(model, device, monkeypatch):
    """Pages of 16 and of 128 keys, and the batch in reverse."""
    rows = prompts((1, 130, 17) if device == "cuda" else (1, 30, 17), device=device)
    seeds = torch.tensor([5, 6, 7], device=device)
    ids, present = padded(rows, left=False)
    options = {**OPTIONS, "max_new_tokens": 3}
    found = []
    for size in (16, 128):
        monkeypatch.setattr(decoding, "PAGE_SIZE", size)
        found.append(models.generate(model, ids, seeds=seeds, attention_mask=present, **options))
        ids, present, seeds = ids.flip(0), present.flip(0), seeds.flip(0)
    assert torch.equal(found[0].tokens, found[1].tokens.flip(0))
    assert_same_bits(found[0].log_probs, found[1].log_probs.flip(0))


def test_log_prob_does_not_know_padding_or_packing(model, device):
    rows = prompts(LENGTHS, device=device)
    wanted = [score(model, row, 0) for row in rows]
    with torch.no_grad():
        for left in (True, False):
            ids, present = padded(rows, left)
            labels = torch.where(present > 0, ids, -100)
            labels[torch.arange(3), present.argmax(1)] = -100  # the row before it is padding
            results = models.log_prob(model, ids, labels, temperature=0.7, attention_mask=present)
            for result, of_rows in zip(results, zip(*wanted, strict=True), strict=True):
                for found, here, row in zip(result, present, of_rows, strict=True):
                    assert_same_bits(found[here > 0], row)
        ids = torch.cat(rows)[None]
        positions = torch.cat([torch.arange(n, device=device) for n in LENGTHS])[None]
        labels = torch.where(positions > 0, ids, -100)
        starts = torch.tensor([0, *LENGTHS], device=device).cumsum(0).int()
        longest = max(LENGTHS)
        by_lengths = dict(cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=longest, max_length_k=longest)
        for options in ({}, by_lengths):
            found = models.log_prob(model, ids, labels, temperature=0.7, position_ids=positions, **options)
            for result, of_rows in zip(found, zip(*wanted, strict=True), strict=True):
                assert_same_bits(result[0], torch.cat(of_rows))
