"""MHCTransformer.generate on a GPU: its logits and log-probabilities are those of one forward, bit by bit."""

import pytest
import torch

from cute_kernels import batch_invariant, check_invariance, provenance
from tests.nn.cases import make_config, make_model
from tests.runtime.bits import assert_same_bits

SIZES = {"hidden": 256, "layers": 2, "length": 512, "vocab": 512}
LENGTHS = [300, 7, 129]
NEW = 20
CONFIGS = {
    "one": make_config(**SIZES, streams=None),
    "four": make_config(**SIZES),
    "head size 128": make_config(**SIZES, heads=2, streams=None),
}


@pytest.fixture(scope="module", params=CONFIGS)
def model(request):
    return make_model(CONFIGS[request.param], "cuda").eval()


@pytest.fixture
def prompts(model, generator):
    shape = len(LENGTHS), max(LENGTHS)
    return torch.randint(model.config.vocab_size, shape, generator=generator, device="cuda")


@torch.no_grad()
def test_generate_has_the_bits_of_one_forward(model, prompts):
    seen = []

    def choose(logits):
        seen.append(logits)
        return logits.argmax(-1)

    tokens, log_probs = model.generate(prompts, NEW, lengths=LENGTHS, choose=choose)
    for i, length in enumerate(LENGTHS):
        whole = torch.cat([prompts[i, :length], tokens[i]])[None]
        assert_same_bits(torch.stack(seen, 1)[i], model(whole)[0, length - 1 : -1])
        assert_same_bits(log_probs[i], model.log_prob(whole[:, :-1], whole[:, 1:])[0, length - 1 :])
        alone = model.generate(whole[:, :length], NEW)
        assert torch.equal(alone.tokens[0], tokens[i])
        assert_same_bits(alone.log_probs[0], log_probs[i])


def test_the_whole_forward_is_invariant(model, prompts):
    """Every module's outputs, strictly: no operator of torch's may add anything up."""

    def forward(tokens):
        with batch_invariant("strict"), torch.no_grad():
            return model(tokens)

    check_invariance(forward, prompts[:, :200].repeat(3, 1), gradients=False).raise_if_failed()


@torch.no_grad()
def test_what_computed_it(model, prompts):
    entries = provenance(model.generate, prompts[:, :9], 2)
    contracts = [entry.contract for entry in entries if entry.kernel.startswith("attention_decode")]
    assert contracts == ["kv_grid (128, 2048)"] * 4  # two layers, the prompt and a token


@torch.no_grad()
def test_a_step_in_a_graph(model, prompts):
    """A captured decode step writes to its cache, and has the bits of one that is not captured."""
    from cute_kernels.nn.attention import PagedCache

    token = prompts[:, :1].contiguous()
    caches = [PagedCache(model.config, len(prompts), 320, token.device, torch.bfloat16) for _ in range(2)]
    ends = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")
    for cache in caches:
        model.block(model.embedding(prompts), cache)
        cache.seqlens.copy_(ends)
    eager, captured = caches
    wanted = []
    for _ in range(3):
        wanted.append(model.output(model.block(model.embedding(token), eager)))
        eager.seqlens += 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = model.output(model.block(model.embedding(token), captured))
        captured.seqlens += 1
    for logits in wanted:
        graph.replay()
        assert_same_bits(found, logits)
