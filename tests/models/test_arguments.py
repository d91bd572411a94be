"""models by references: what prepare refuses and changes, what generate is given, and its ends."""

import copy
import types

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from cute_kernels import models, nn  # noqa: E402
from cute_kernels.models.choosing import OFF  # noqa: E402
from cute_kernels.models.families import frequencies_of  # noqa: E402
from tests.models.cases import FAMILIES, SIZES, make_model, make_prepared, padded, prompts  # noqa: E402

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def model():
    return make_prepared("llama")


@pytest.fixture
def ids():
    return padded(prompts((5, 3)), left=False)


SEEDS = torch.tensor([1, 2])


def generate(model, ids, **options):
    options = {"seeds": SEEDS, "attention_mask": ids[1], "max_new_tokens": 4, "eos_token_id": [], **options}
    return models.generate(model, ids[0], **options)


BAD = {
    "seeds of another length": ({"seeds": torch.tensor([1])}, ValueError, r"seeds must have shape \(2,\) on cpu, got"),
    "seeds in fp32": ({"seeds": torch.ones(2)}, TypeError, "seeds must have dtype int64"),
    "no tokens": ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be positive, got 0"),
    "no number of tokens": ({"max_new_tokens": None}, TypeError, "max_new_tokens must be an int, got None"),
    "a cache": ({"cache": "dynamic"}, ValueError, "cache must be 'paged' or 'static', got 'dynamic'"),
    "a gap": (
        {"attention_mask": torch.tensor([[1, 0, 1, 1, 1], [1] * 5])},
        ValueError,
        "attention_mask must have tokens in each row, without a gap",
    ),
    "an empty prompt": (
        {"attention_mask": torch.tensor([[0] * 5, [1] * 5])},
        ValueError,
        "attention_mask must have tokens in each row",
    ),
    "another mask": ({"attention_mask": torch.ones(2, 4)}, ValueError, r"attention_mask must have shape \(2, 5\)"),
    "top_p": ({"top_p": 0.0}, ValueError, r"top_p must be None or in \(0, 1\], got 0.0"),
    "temperature": ({"temperature": -1.0}, ValueError, "temperature must be at least 0"),
    "a graph on a CPU": ({"graph": True}, ValueError, "graph must be False on a CPU, got True"),
    "a graph of a static cache": ({"graph": True, "cache": "static"}, ValueError, "graph must come with cache='paged'"),
    "guesses of a static cache": ({"speculate": 2, "cache": "static"}, ValueError, "speculate must come with cache="),
    "guesses and processors": ({"speculate": 2, "logits_processors": [min]}, ValueError, "no logits_processors"),
    "guesses and stop": ({"speculate": 2, "stop": min}, ValueError, "speculate must come without stop and graph"),
    "no guess": ({"speculate": 0}, ValueError, "speculate must be positive, got 0"),
    "half a guess": ({"speculate": 1.5}, TypeError, "speculate must be an int"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name, model, ids):
    changes, error, message = BAD[name]
    with pytest.raises(error, match=message):
        generate(model, ids, **changes)


def test_models_that_generate_does_not_take(ids, model):
    other = make_model("llama", dtype=BF16, implementation="eager")
    with pytest.raises(ValueError, match=r"model must be prepared \(models.prepare\)"):
        generate(other, ids)
    with pytest.raises(TypeError, match="model must be a causal language model of transformers, got Linear"):
        generate(torch.nn.Linear(2, 2), ids)


LOST = {"num_beams": 2, "repetition_penalty": 1.05, "no_repeat_ngram_size": 3, "min_new_tokens": 4}
LOST |= {"bad_words_ids": [[5]], "suppress_tokens": [7], "min_length": 9, "typical_p": 0.9, "stop_strings": ["."]}


def configured(model, **options):
    model = copy.copy(model)
    model.generation_config = transformers.GenerationConfig(**options)
    return model


@pytest.mark.parametrize("name", LOST)
def test_a_generation_config_is_not_lost(name, model, ids):
    other = configured(model, **{name: LOST[name]})
    with pytest.raises(ValueError, match=f"models.generate: model's generation_config must leave {name} out"):
        generate(other, ids)
    with pytest.raises(ValueError, match=f"models.generate_batch: model's generation_config must leave {name} out"):
        models.generate_batch(other, [[3, 4]], seeds=SEEDS[:1], max_new_tokens=2)


def test_settings_that_are_off(model, ids):
    """Each one that says it, as transformers' own defaults do; top_k 0 is none."""
    off = {name: value for name, value in OFF.items() if value is not None}
    neutral = configured(model, top_k=0, suppress_tokens=[], temperature=1.0, top_p=1.0, **off)
    wanted = generate(model, ids)
    assert all(map(torch.equal, generate(neutral, ids), wanted))
    assert all(map(torch.equal, generate(configured(model, top_k=1), ids, top_k=0), wanted))


def test_generate_and_log_prob_agree_on_the_temperature(model):
    """By default, too: where the generation_config has one that is not 1, log_prob has to be told."""
    (row,) = prompts((6,))
    ids = row[None]
    with torch.no_grad():
        plain = models.log_prob(model, ids, ids)[0]
        assert torch.equal(models.log_prob(model, ids, ids, temperature=1.0)[0], plain)
        assert torch.equal(models.log_prob(configured(model, temperature=1.0), ids, ids)[0], plain)
        warm = configured(model, temperature=0.6)
        with pytest.raises(ValueError, match="temperature must be given: .*, got None, and 0.6 there"):
            models.log_prob(warm, ids, ids)
        assert torch.equal(models.log_prob(warm, ids, ids, temperature=1.0)[0], plain)


def test_prepare_refuses_by_name():
    experts = make_model("gpt_oss", implementation="eager")
    experts.config.model_type = "jamba"
    with pytest.raises(ValueError, match="model must be of a model_type in llama, .*, got 'jamba'"):
        models.prepare(experts)
    assert models.prepare(experts, strict=False).config._attn_implementation == "cute_kernels"
    experts.config.model_type = "qwen3_next"
    with pytest.raises(ValueError, match="'qwen3_next': linear attention and state spaces are not covered"):
        models.prepare(experts)
    with pytest.raises(ValueError, match="dropout must be 0: it is drawn by place in the batch, got 0.1 in"):
        models.prepare(
            transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=1))
        )
    factors = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32, "original_max_position_embeddings": 512}
    for kind, others in (("dynamic", {}), ("longrope", factors)):
        rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4, **others}
        config = transformers.LlamaConfig(**SIZES, rope_parameters=rope)
        with pytest.raises(ValueError, match=f"rotary embedding must .*, got rope_type '{kind}'"):
            models.prepare(transformers.LlamaForCausalLM(config))
    noisy = transformers.MixtralConfig(**SIZES, num_local_experts=4, router_jitter_noise=0.1)
    with pytest.raises(ValueError, match="router_jitter_noise must be 0: training draws it by place .*, got 0.1 in"):
        models.prepare(transformers.MixtralForCausalLM(noisy))
    biased = make_model("llama")
    biased.lm_head = torch.nn.Linear(128, 96)
    with pytest.raises(ValueError, match="output embedding must have no bias"):
        models.prepare(biased)
    assert models.prepare(biased, log_prob=False, norms=False) is biased
    assert not any(isinstance(module, nn.RMSNorm) for module in biased.modules())


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3", "gpt2"])
def test_frequencies_stay_fp32(name):
    """``.to`` rounds them; ``prepare`` computes them again, and nothing scores or draws with rounded ones."""
    model = make_model(name, configs=FAMILIES)
    wanted = frequencies_of(model)
    assert wanted or name == "gpt2"
    wanted = {key: buffer.clone() for key, buffer in wanted.items()}
    models.prepare(model.to(BF16))
    found = frequencies_of(model)
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    rounded = copy.deepcopy(model).to(BF16)
    row = prompts((5,))[0][None]
    for op, call in {
        "log_prob": lambda: models.log_prob(rounded, row, row),
        "generate": lambda: models.generate(rounded, row, seeds=SEEDS[:1], max_new_tokens=1),
    }.items():
        if name == "gpt2":
            call()
            continue
        with pytest.raises(
            ValueError, match=rf"models.{op}: model's rotary \w+ must be in fp32, .*, got torch.bfloat16"
        ):
            call()
        models.prepare(rounded)
        call()
        rounded.to(BF16)


class Adapted(torch.nn.Module):
    """The attributes of peft's models by which its adapters are told."""

    def __init__(self, model, is_prompt_learning):
        super().__init__()
        self.base_model = model
        self.active_peft_config = types.SimpleNamespace(is_prompt_learning=is_prompt_learning)

    def get_base_model(self):
        return self.base_model


def test_a_learned_prompt_is_not_lost(model, ids):
    wanted = generate(model, ids)
    assert all(map(torch.equal, generate(Adapted(model, False), ids), wanted))
    tuned = Adapted(model, True)
    message = "model's adapter must be in its layers, as LoRA's: a learned prompt would be lost, got SimpleNamespace"
    for call in (generate, lambda *_: models.prepare(tuned), lambda *_: models.log_prob(tuned, ids[0], ids[0])):
        with pytest.raises(ValueError, match=message):
            call(tuned, ids)


def test_compiled_models(ids):
    """``torch.compile(model)`` would run eagerly here; compiled in place the base model is what is called."""
    model, (row,) = make_prepared("llama"), prompts((6,))
    wanted = models.log_prob(model, row[None], row[None])
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    for call in (generate, lambda *_: models.log_prob(compiled, row[None], row[None])):
        with pytest.raises(ValueError, match=r"model must not come from torch.compile: its layers would run eagerly"):
            call(compiled, ids)
    assert not graphs
    model.base_model.compile(backend=backend)
    found = models.log_prob(model, row[None], row[None])
    assert graphs and all(map(torch.equal, found, wanted))
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_norms_are_ours_and_share_weights(name):
    """Prepared models keep results, but for a rounding, and state and gradients. Preparing again changes nothing."""
    model, (row,) = make_model(name), prompts((7,))
    state = list(model.state_dict())
    with torch.no_grad():
        wanted = model(row[None]).logits
    models.prepare(models.prepare(model))
    ours = [module for module in model.modules() if isinstance(module, nn.RMSNorm)]
    theirs = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    assert len(ours) >= 2 * 4 + 1 and set(theirs) <= set(ours)
    found = copy.deepcopy(model)(row[None]).logits
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)
    assert list(model.state_dict()) == state
    model(row[None]).logits.sum().backward()
    assert all(norm.weight.grad is not None for norm in ours)


def test_log_prob_is_that_of_the_logits(model):
    (row,) = prompts((9,))
    log_prob, entropy = models.log_prob(model, row[None], row[None], temperature=0.5)
    with torch.no_grad():
        wanted = (model(row[None]).logits.float() / 0.5).log_softmax(-1)[0, :-1]
    torch.testing.assert_close(log_prob[0, 1:], wanted.gather(1, row[1:, None]).squeeze(1), atol=0.05, rtol=0.05)
    torch.testing.assert_close(entropy[0, 1:], -(wanted.exp() * wanted).sum(1), atol=0.05, rtol=0.05)
    assert log_prob[0, 0] == 0.0 and log_prob.requires_grad
    with pytest.raises(ValueError, match="position_ids must count the tokens of attention_mask"):
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]])
        models.log_prob(model, row[None], row[None], attention_mask=torch.ones(1, 9), position_ids=positions)
    with pytest.raises(ValueError, match=r"labels must have shape \(1, 9\)"):
        models.log_prob(model, row[None], row[None, 1:])


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gpt2"])
def test_packed_sequences_by_their_starts(name):
    """Positions begin again where a sequence does; padding beside it is an error, not lost."""
    model, rows = make_prepared(name), prompts((9, 5, 1, 3))
    ids = torch.cat(rows).view(2, 9)
    starts = torch.tensor([0, 9, 14, 15, 18], dtype=torch.int32)
    packing = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 9, "max_length_k": 9}
    positions = torch.cat([torch.arange(len(row)) for row in rows]).view(2, 9)
    with torch.no_grad():
        found = models.log_prob(model, ids, ids, **packing)
        wanted = models.log_prob(model, ids, ids, position_ids=positions, **packing)
        assert all(map(torch.equal, found, wanted))
        present = torch.ones_like(ids)
        present[1, :2] = 0
        message = "attention_mask must be None with cu_seq_lens_q: packed rows have no padding, got both"
        with pytest.raises(ValueError, match=f"models.log_prob: {message}"):
            models.log_prob(model, ids, ids, attention_mask=present, **packing)
        with pytest.raises(ValueError, match=f"cute_kernels: {message}"):
            model(ids, attention_mask=present, **packing)


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_a_prepared_model_is_copied_and_trains(name):
    """Latent keys name their cache, in a copy, too; positions that begin again tell packed sequences."""
    model, rows = copy.deepcopy(models.prepare(make_prepared(name))), prompts((9, 5))
    found = models.generate(model, rows[0][None], seeds=SEEDS[:1], max_new_tokens=2, eos_token_id=[])
    whole = torch.cat([rows[0], found.tokens[0]])[None]
    scored, _ = models.log_prob(model, whole, whole)
    torch.testing.assert_close(found.log_probs[0], scored[0, 9:], atol=0.05, rtol=0.05)
    positions = torch.cat([torch.arange(n) for n in (9, 5)])[None]
    packed, _ = models.log_prob(model, torch.cat(rows)[None], torch.cat(rows)[None], position_ids=positions)
    alone = [models.log_prob(model, row[None], row[None])[0][0, 1:] for row in rows]
    torch.testing.assert_close(packed[0, 1:9], alone[0], atol=0.05, rtol=0.05)
    torch.testing.assert_close(packed[0, 10:], alone[1], atol=0.05, rtol=0.05)
    packed.sum().backward()
    assert all(p.grad is not None for key, p in model.named_parameters() if "experts" in key)


@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_the_logits_scale_and_softcap(name):
    model, (row,) = make_prepared(name), prompts((9,))
    with torch.no_grad():
        log_prob, _ = models.log_prob(model, row[None], row[None])
        wanted = model(row[None]).logits.float().log_softmax(-1)[0, :-1].gather(1, row[1:, None])
    torch.testing.assert_close(log_prob[0, 1:], wanted.squeeze(1), atol=0.06, rtol=0.05)


def test_the_ends_of_sequences(model, ids):
    whole = generate(model, ids, temperature=0.0)
    end = whole.tokens[0, 1].item()
    found = generate(model, ids, temperature=0.0, eos_token_id=end, pad_token_id=95)
    length = whole.tokens[0].tolist().index(end) + 1
    assert found.lengths[0] == length and (found.tokens[0, length:] == 95).all()
    assert (found.log_probs[0, length:] == 0).all()
    both = {t.item() for t in whole.tokens[:, 0]}
    short = generate(model, ids, temperature=0.0, eos_token_id=list(both))
    assert short.tokens.shape == (2, 1) and (short.lengths == 1).all()
    seen = []

    def stop(ids, logits):
        seen.append((ids, logits))
        return torch.tensor([True, ids.shape[1] >= 7])

    found = generate(model, ids, temperature=0.0, stop=stop)
    assert found.lengths.tolist() == [1, 2] and found.tokens.shape == (2, 2)
    assert seen[0][0].shape == (2, 6) and seen[0][1].dtype is torch.float32
    assert seen[0][0][1].tolist() == [0, 0, *ids[0][1, :3].tolist(), whole.tokens[1, 0].item()]  # padded left


def test_what_chooses_tokens(model, ids):
    """The most probable one at temperature 0, processors, the generation_config, other seeds."""
    greedy = generate(model, ids, temperature=0.0)
    with torch.no_grad():
        logits = model(ids[0][:1]).logits[0, -1]
    assert greedy.tokens[0, 0] == logits.argmax()
    top = generate(model, ids, temperature=2.0, top_k=1)
    assert torch.equal(top.tokens, greedy.tokens) and not torch.equal(top.log_probs, greedy.log_probs)

    def only_three(ids, logits):
        return torch.full_like(logits, -torch.inf).index_fill(1, torch.tensor([3]), 0.0)

    assert (generate(model, ids, logits_processors=[only_three]).tokens == 3).all()
    drawn, others = generate(model, ids), generate(model, ids, seeds=SEEDS + 1)
    assert not torch.equal(drawn.tokens, others.tokens)
    other = configured(model, top_k=1, max_new_tokens=2, eos_token_id=None)
    found = models.generate(other, ids[0], seeds=SEEDS, attention_mask=ids[1])
    assert torch.equal(found.tokens, greedy.tokens[:, :2])


def test_paged_cache(model):
    """Chunks, padding on the left, crop, selected and repeated sequences: the logits of one forward."""
    rows = prompts((9, 6))
    wanted = [model(row[None]).logits[0, -1] for row in rows]
    ids, present = padded(rows, left=True)
    cache = models.PagedCache(model.config, pages=4, page_size=16)
    positions = (present.cumsum(1) - 1).clamp(min=0)

    def forward(columns, cache, rows=slice(None)):
        options = {"attention_mask": present[rows, : columns.stop], "position_ids": positions[rows, columns]}
        with torch.no_grad():
            return model(ids[rows, columns], past_key_values=cache, **options).logits[:, -1]

    for columns in (slice(0, 4), slice(4, 8), slice(8, 9)):
        found = forward(columns, cache)
    close = dict(atol=0.05, rtol=0.05)
    torch.testing.assert_close(found, torch.stack(wanted), **close)
    assert cache.get_seq_length() == 9 and cache.layers[0].lengths.tolist() == [9, 6]
    assert cache.get_max_length() == 32
    cache.crop(-1)
    assert torch.equal(forward(slice(8, 9), cache), found)
    cache.crop(-1)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(forward(slice(8, 9), cache, [1, 0]), found.flip(0))
    cache.crop(-1)
    cache.batch_repeat_interleave(2)
    assert torch.equal(forward(slice(8, 9), cache, [1, 1, 0, 0]), found[[1, 1, 0, 0]])
    cache.batch_select_indices(torch.tensor([2]))
    assert cache.batch_size == 1 and cache.layers[1].lengths.tolist() == [9]
    cache.keep(torch.tensor([3]))
    assert cache.get_seq_length() == 9
    cache.keep(torch.tensor([3]), longest=3)
    assert cache.get_seq_length() == 3
    cache.fill()
    assert cache.get_seq_length() == cache.get_max_length() == 32
    with torch.no_grad():
        model(ids[:1, :1], past_key_values=cache)
    assert cache.get_seq_length() == 32 and cache.layers[1].lengths.tolist() == [4]
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.layers[1].lengths.tolist() == [0]


def test_paged_cache_refuses(model):
    ids = torch.ones(2, 20, dtype=torch.int64)
    new = models.PagedCache
    with pytest.raises(ValueError, match="page_size must be 16, 32, 64 or a multiple of 128, got 100"):
        new(model.config, 4, 100)
    with pytest.raises(ValueError, match="config must be of a model that attends by 'cute_kernels', got 'eager'"):
        new(make_model("llama", implementation="eager").config, 4)
    with pytest.raises(ValueError, match="the cache must have tokens, got an empty one"):
        new(model.config, 4, 16).fill()
    with torch.no_grad():
        with pytest.raises(ValueError, match="pages must be at least 4, got 2"):
            model(ids, past_key_values=new(model.config, 2, 16))
        cache = new(model.config, 4, 16)
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="the batch must have 2 sequences, as before, got 1"):
            model(ids[:1], past_key_values=cache)
        fewer = transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 1}, attn_implementation="cute_kernels")
        with pytest.raises(ValueError, match="keys must have 2 heads of 64, as before: .*, got 1 heads"):
            models.prepare(transformers.LlamaForCausalLM(fewer).to(BF16))(ids[:, :1], past_key_values=cache)
        model.set_attn_implementation("sdpa")
        cache.reset()
        model(ids, past_key_values=cache)
        with pytest.raises(RuntimeError, match="were not attended to by 'cute_kernels'"):
            model(ids[:, :1], past_key_values=cache)
        model.set_attn_implementation("cute_kernels")


def test_generate_of_transformers_by_a_paged_cache(model):
    """Its tokens are those by its own cache."""
    ids, present = padded(prompts((9, 6)), left=True)
    options = dict(attention_mask=present, max_new_tokens=3, do_sample=False, eos_token_id=None)
    wanted = model.generate(ids, **options)
    cache = models.PagedCache(model.config, pages=2, page_size=16)
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), wanted)
