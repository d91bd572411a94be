"""Continuous batching by references: where keys are, what is refused, and transformers' own generate_batch."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17")

from transformers.generation.continuous_batching import cache as of_transformers  # noqa: E402

from cute_kernels import models  # noqa: E402
from cute_kernels.models import paged  # noqa: E402
from tests.models.cases import make_model, make_prepared, prompts  # noqa: E402

SEEDS = torch.tensor([1, 2])
BATCHING = {"block_size": 16, "num_blocks": 64, "max_batch_tokens": 64}


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """Without psutil transformers sees none on a CPU."""
    monkeypatch.setattr(of_transformers, "get_device_and_memory_breakdown", lambda: ("cpu", 2**32, 0, 0))


@pytest.fixture(scope="module")
def model():
    return make_prepared("llama")


def generate(model, rows, **options):
    config = transformers.ContinuousBatchingConfig(**BATCHING)
    options = {"seeds": SEEDS, "max_new_tokens": 3, "eos_token_id": [], "batching": config, **options}
    return models.generate_batch(model, [row.tolist() for row in rows], **options)


def test_blocks_of_requests():
    """Requests of 5 and 70 keys, with 5 and 2 of them new, in blocks of 16 whose numbers are 7 and 3, 9, 1, 4, 2."""
    blocks = [7], [3, 9, 1, 4, 2]
    read = [blocks[i][key // 16] * 16 + key % 16 for i, count in enumerate((5, 70)) for key in range(count)]
    starts, starts_k = torch.tensor([0, 5, 7]), torch.tensor([0, 5, 75])
    lengths, table, columns = paged.block_places(starts, starts_k, 70, torch.tensor(read), 16)
    assert lengths.tolist() == [0, 68] and table.dtype is torch.int32 and columns is None
    assert table[0, 0] == 7 and table[1].tolist() == blocks[1]


@pytest.mark.parametrize("split", [8, 64])
def test_places_of_a_windows_keys(split):
    """Each key stands at its own place in its sequence's splits, after whole splits are left out."""
    kept, new, first_new = (0, 9, 9, 9), (20, 1, 3, 1), (0, 150, 9, 40)  # the first request's keys are all new
    starts = torch.tensor([0, *new]).cumsum(0).int()
    keys = [a + b for a, b in zip(kept, new, strict=True)]
    starts_k = torch.tensor([0, *keys]).cumsum(0).int()
    positions = torch.cat([torch.arange(p, p + n) for p, n in zip(first_new, new, strict=True)])[None].int()
    places = paged.window_places(starts, starts_k, max(keys), positions, sum(keys), split)
    assert places.lengths.dtype is places.page_table.dtype is torch.int32
    of_pages = places.columns.view(-1, paged.WINDOW_PAGE)
    assert places.page_table.min() >= 0 and places.page_table.max() < len(of_pages)
    for i, (before, position) in enumerate(zip(kept, first_new, strict=True)):
        dropped = position - before
        assert places.lengths[i] == dropped % split + keys[i]
        found = of_pages[places.page_table[i].long()].flatten()[: places.lengths[i]]
        assert found[dropped % split :].tolist() == list(range(starts_k[i], starts_k[i + 1]))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_generate_batch_of_transformers(name):
    """Its greedy tokens, in its own thread, are those of each prompt alone."""
    model, rows = make_model(name), prompts((9, 21))
    options = transformers.GenerationConfig(do_sample=False, max_new_tokens=8, eos_token_id=None)
    wanted = [model.generate(row[None], generation_config=options)[0, len(row) :].tolist() for row in rows]
    options.eos_token_id = -1
    model.set_attn_implementation("paged|cute_kernels")
    config = transformers.ContinuousBatchingConfig(**{**BATCHING, "max_batch_tokens": 10})
    found = model.generate_batch(
        [row.tolist() for row in rows], generation_config=options, continuous_batching_config=config
    )
    assert [output.generated_tokens for output in found.values()] == wanted


def test_leaves_the_model_and_random_numbers_as_they_were(model):
    rows = prompts((9, 5))
    model.train()
    model.model.norm.eval()
    state = torch.random.get_rng_state()
    found = generate(model, rows)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.training and not model.model.norm.training and model.model.layers[0].training
    assert model.config._attn_implementation == "cute_kernels"
    model.eval()
    tokens, log_probs, lengths = found
    assert tokens.shape == log_probs.shape == (2, 3) and lengths.tolist() == [3, 3]
    assert (tokens.dtype, log_probs.dtype, lengths.dtype) == (torch.int64, torch.float32, torch.int64)
    scored, _ = models.log_prob(model, torch.cat([rows[0], tokens[0]])[None], torch.cat([rows[0], tokens[0]])[None])
    torch.testing.assert_close(log_probs[0], scored[0, 9:], atol=0.05, rtol=0.05)
    as_tensors = models.generate_batch(
        model,
        rows,
        seeds=SEEDS,
        max_new_tokens=3,
        eos_token_id=[],
        batching=transformers.ContinuousBatchingConfig(**BATCHING),
    )
    assert torch.equal(as_tensors.tokens, tokens)


def test_latents():
    """transformers makes its cache for their heads in generate_batch alone, which leaves the config as it was."""
    model, rows = make_prepared("deepseek_v3, heads of 192 and 128"), prompts((9, 5))
    before = model.config.to_dict()
    assert generate(model, rows).lengths.tolist() == [3, 3] and model.config.to_dict() == before
    too_large = transformers.ContinuousBatchingConfig(**{**BATCHING, "num_blocks": 2**30})
    with pytest.raises(MemoryError):
        generate(model, rows, batching=too_large)
    assert model.config.to_dict() == before
    model.set_attn_implementation("paged|cute_kernels")
    options = transformers.GenerationConfig(do_sample=False, max_new_tokens=2, eos_token_id=-1)
    config = transformers.ContinuousBatchingConfig(**BATCHING)
    found = model.generate_batch([[1, 2]], generation_config=options, continuous_batching_config=config)
    (output,) = found.values()
    assert "the cache must have heads of (4, 192), as models.generate_batch makes it, got (4, 64)" in output.error


BAD = {
    "no prompt": ([], {"seeds": SEEDS[:0]}, ValueError, "prompts must have one at least"),
    "an empty prompt": ([[1], []], {}, ValueError, "prompts must have a token each"),
    "a prompt of floats": ([[1], [0.5]], {}, TypeError, "prompts must be sequences of int"),
    "seeds": ([[1], [2]], {"seeds": SEEDS[:1]}, ValueError, r"seeds must have shape \(2,\) on cpu"),
    "no number": ([[1], [2]], {"max_new_tokens": None}, TypeError, "max_new_tokens must be an int, got None"),
    "top_p": ([[1], [2]], {"top_p": 0.0}, ValueError, "top_p must be None or in"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name, model):
    rows, changes, error, message = BAD[name]
    config = transformers.ContinuousBatchingConfig(**BATCHING)
    options = {"seeds": SEEDS, "max_new_tokens": 3, "eos_token_id": [], "batching": config, **changes}
    with pytest.raises(error, match=message):
        models.generate_batch(model, rows, **options)
    assert model.config._attn_implementation == "cute_kernels"


def test_what_is_refused(model):
    rows = prompts((9, 5))
    with pytest.raises(ValueError, match=r"model must be prepared \(models.prepare\)"):
        generate(make_model("llama", implementation="eager"), rows)
    sizes = transformers.ContinuousBatchingConfig(**{**BATCHING, "block_size": 20})
    with pytest.raises(ValueError, match="attention_with_kv_cache: .*page"):
        generate(model, rows, batching=sizes)
    few = transformers.ContinuousBatchingConfig(**{**BATCHING, "num_blocks": 1})
    with pytest.raises(RuntimeError):
        generate(model, rows, max_new_tokens=20, batching=few)
    model.set_attn_implementation("paged|cute_kernels")
    with pytest.raises(ValueError, match="the forward must be one of transformers' continuous batching"):
        model(rows[0][None])
    model.set_attn_implementation("cute_kernels")
