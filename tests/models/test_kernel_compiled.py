"""``torch.compile`` of whole prepared models: loss, gradients and steps of decoding of the eager model, bit by bit."""

import contextlib

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

import cute_kernels.invariance.compiled  # noqa: E402, F401
from cute_kernels import batch_invariant, models  # noqa: E402
from tests.models.cases import FAMILIES, alone, generated, make_prepared, padded, prompts  # noqa: E402
from tests.runtime.bits import assert_same_bits  # noqa: E402

pytestmark = pytest.mark.sm90
LENGTHS = (9, 300, 17)
FEW = "llama", "gpt_oss"
CACHES = "llama", "gpt_oss", "deepseek_v3"  # the second has windows in half of its layers, the third caches latents
PACKED = "llama", "gemma3", "deepseek_v3"  # gpt_oss does not look at positions that begin again


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def families(names):
    return [pytest.param(n, marks=[] if n in FEW else pytest.mark.exhaustive) for n in names]


def step(call, model, **inputs):
    """The loss, then each parameter's gradient."""
    model.zero_grad()
    loss = call(**inputs, use_cache=False).loss
    loss.backward()
    return [loss.detach()] + [p.grad for p in model.parameters() if p.grad is not None]


def compare(name, device, *batches):
    """The batches go through one compiled function, in turn."""
    model = make_prepared(name, device).train()
    compiled = torch.compile(model, backend="cute_kernels", dynamic=True)
    for inputs in batches:
        with inside_on_gpu(model):
            wanted = step(model, model, **inputs)
        found = step(compiled, model, **inputs)
        assert len(found) == len(wanted) > 2
        for a, b in zip(found, wanted, strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("name", families(FAMILIES))
def test_batches(name, device):
    """Rows without a mask, in two sizes, then padded."""
    rows = prompts(LENGTHS, device=device)
    ids, present = padded(rows, left=True)
    labels = torch.where(present > 0, ids, -100)
    compare(
        name,
        device,
        {"input_ids": ids, "labels": ids},
        {"input_ids": ids[:2, :7], "labels": ids[:2, :7]},
        {"input_ids": ids, "labels": labels, "attention_mask": present},
    )


@pytest.mark.parametrize("name", families(PACKED))
def test_packed(name, device):
    rows = prompts(LENGTHS, device=device)
    ids = torch.cat(rows)[None]
    positions = torch.cat([torch.arange(len(row), device=device) for row in rows])[None]
    compare(name, device, {"input_ids": ids, "labels": ids, "position_ids": positions})


@torch.no_grad()
def decoded(call, model, rows, full):
    """Logits (B, 1, vocabulary) of steps behind prompts whose keys are in pages; ``call``: the model, or compiled."""
    ids, present = padded(rows, left=False)
    cache = models.PagedCache(model.config, len(rows) * 3, page_size=128)
    with inside_on_gpu(model):
        model(ids, past_key_values=cache, use_cache=True)
    lengths = present.sum(1)
    cache.keep(lengths)
    if full:  # else the host counts, and the compiled function is asked for another length each time
        cache.fill()
    found = []
    for step in range(4):
        options = {"position_ids": lengths[:, None] + step, "past_key_values": cache, "use_cache": True}
        with inside_on_gpu(model) if call is model else contextlib.nullcontext():
            found.append(call(input_ids=ids[:, step : step + 1], **options).logits)
    return found


def inside_on_gpu(model):
    """A CPU has the kernels of torch, which a block does not cover."""
    return batch_invariant("strict") if model.device.type == "cuda" else contextlib.nullcontext()


@pytest.mark.parametrize("name", families(FAMILIES))
def test_steps_of_decoding(name, device):
    check_decoding(name, True, device)


@pytest.mark.parametrize("name", families(CACHES))
def test_steps_of_decoding_counted_by_the_host(name, device):
    check_decoding(name, False, device)


@pytest.mark.parametrize("name", families(("llama", "gemma3")))
def test_what_transformers_compiles(name, device):
    """Its own generate compiles the steps over a static cache, unasked: logits are those of one forward."""
    model, rows = make_prepared(name, device), prompts((9, 130, 17), device=device)
    options = {"cache_implementation": "static", "disable_compile": False}
    with inside_on_gpu(model):
        found = generated(model, rows, 4, **options)
        wanted = [alone(model, tokens)[len(row) - 1 : -1] for row, (tokens, _) in zip(rows, found, strict=True)]
    assert model.device.type == "cpu" or model._compiled_call
    for (_, logits), of_forward in zip(found, wanted, strict=True):
        assert_same_bits(logits, of_forward.float())


def check_decoding(name, full, device):
    model, rows = make_prepared(name, device), prompts(LENGTHS, device=device)
    compiled = torch.compile(model, backend="cute_kernels")
    wanted = decoded(model, model, rows, full)
    found = decoded(compiled, model, rows, full)
    for a, b in zip(found, wanted, strict=True):
        assert_same_bits(a, b)
