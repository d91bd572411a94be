"""Models of the transformers package on ``attention``, by its reference: what a layer is given, and what it refuses."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from cute_kernels.models import attention as ours  # noqa: E402
from tests.models.cases import CONFIGS, alone, generated, make_model, padded, prompts  # noqa: E402

CLOSE = dict(atol=2e-5, rtol=1e-4)


@pytest.fixture(autouse=True)
def short_splits(monkeypatch):
    """So that a window's cache drops some."""
    monkeypatch.setattr(ours, "SPLIT", 8)


@pytest.mark.parametrize("name", CONFIGS)
def test_as_transformers_own(name):
    """One sequence, and two batches with padding: real tokens' logits are those of the eager implementation."""
    model, eager = make_model(name), make_model(name, implementation="eager")
    rows = prompts()
    for row in rows:
        torch.testing.assert_close(alone(model, row), alone(eager, row), **CLOSE)
    for left in (False, True):
        ids, present = padded(rows, left)
        found, wanted = (m(ids, attention_mask=present).logits for m in (model, eager))
        torch.testing.assert_close(found[present.bool()], wanted[present.bool()], **CLOSE)


@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
@pytest.mark.parametrize("name", CONFIGS)
def test_generate(name, cache):
    """Through a cache, also of a window that has dropped keys, from prompts padded left."""
    model = make_model(name)
    options = {"use_cache": False} if cache == "none" else {"cache_implementation": cache}
    for row, (tokens, logits) in zip(prompts(), generated(model, prompts(), 20, **options), strict=True):
        assert len(tokens) == len(row) + 20
        wanted = alone(model, tokens)[len(row) - 1 : -1]
        torch.testing.assert_close(logits, wanted, **CLOSE)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_prompt_in_chunks(name):
    model, (row,) = make_model(name), prompts((23,))
    wanted = alone(model, row)
    for cache in (transformers.DynamicCache(config=model.config), transformers.StaticCache(model.config, 64)):
        found = []
        for chunk in row.split((9, 1, 7, 6)):
            found.append(model(chunk[None], past_key_values=cache).logits[0])
        torch.testing.assert_close(torch.cat(found), wanted, **CLOSE)


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name in ("llama", "mistral") for how in ("positions", "lengths")] + [("gpt_oss", "lengths")],
)
def test_packed_sequences(name, how):
    model, rows = make_model(name), prompts()
    ids = torch.cat(rows)[None]
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    options = {}
    if how == "lengths":
        starts = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0).int()
        options = dict(cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=9, max_length_k=9)
    found = model(ids, position_ids=positions, use_cache=False, **options).logits[0]
    torch.testing.assert_close(found, torch.cat([alone(model, row) for row in rows]), **CLOSE)


def test_gradients_of_the_reference():
    model, eager = make_model("gpt_oss"), make_model("gpt_oss", implementation="eager")
    (row,) = prompts((9,))
    for m in (model, eager):
        m(row[None], labels=row[None], use_cache=False).loss.backward()
    for (name, a), b in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-3, msg=name)


def test_set_later_on_and_registered_twice():
    model = make_model("llama", implementation="eager")
    (row,) = prompts((5,))
    wanted = alone(model, row)
    model.set_attn_implementation("cute_kernels")
    assert model.config._attn_implementation == "cute_kernels"
    torch.testing.assert_close(alone(model, row), wanted, **CLOSE)


def test_columns_of_keys():
    """The layers are told the columns of keys that are found by hand."""
    causal = transformers.masking_utils.causal_mask_function

    def of(q_length, kv_length, q_offset=0, kv_offset=0, present=None):
        present = None if present is None else torch.tensor(present)
        found = ours.mask(2, q_length, kv_length, q_offset, kv_offset, causal, present)
        return None if found is None else found[:, 0, 0].tolist()

    assert of(4, 4) is None and of(1, 9, 8) is None and of(3, 9, 6) is None
    assert of(4, 4, present=[[1, 1, 1, 1], [1, 1, 0, 0]]) is None  # behind the queries that count
    assert of(3, 9, torch.tensor(2)) == [[5], [5]]  # of a static cache's 9 places 5 are taken
    assert of(3, 3, present=[[0, 1, 1], [1, 1, 1]]) == [[2, 1, 2, 2], [3, 0, 1, 2]]
    # The cache has dropped 3 keys and 11: whole splits of 8 stay away
    assert of(1, 2, 4, 3) == [[5, 0, 0, 0, 0, 1]] * 2
    assert of(1, 2, 12, 11)[0][:6] == [5, 0, 0, 0, 0, 1]
    # The first two places of the first sequence are padding
    assert of(1, 2, 4, 3, present=[[0, 0, 1, 1, 1], [1] * 5])[0][:4] == [3, 0, 0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_mask": torch.ones(1, 1, 5, 5, dtype=torch.bool)}, "attention_mask must be 2-D"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1]])}, "attention_mask must have no gap"),
        ({"position_bias": torch.zeros(1)}, "position_bias must be absent"),
    ],
    ids=["4-D", "gap", "bias"],
)
def test_refused(options, message):
    model, (row,) = make_model("llama"), prompts((5,))
    with pytest.raises(ValueError, match=f"^cute_kernels: {message}"):
        model(row[None], **options)


def test_refused_masks_and_dropout():
    model, (row,) = make_model("llama"), prompts((5,))
    chunks = transformers.masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="the mask must be causal or none, of windows or packed, got.*chunked_overlay"):
        ours.mask(1, 5, 5, mask_function=chunks)
    with pytest.raises(ValueError, match="the mask must be causal"):
        ours.mask(1, 5, 5, mask_function=lambda b, h, q, k: q >= k, use_vmap=True)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match="dropout must be absent"):
        model.train()(row[None])
    layer.self_attn.is_causal = False
    model.eval()
    attend = ours.attend
    q = torch.zeros(1, 4, 5, 64)
    with pytest.raises(ValueError, match="sliding_window must be None"):
        attend(layer.self_attn, q, q, q, None, sliding_window=3)


def test_both_sides_seen():
    """Without a causal mask keys behind a query count, and padding on the right does not."""
    layer = torch.nn.Module()
    layer.is_causal = False
    bidirectional = transformers.masking_utils.bidirectional_mask_function
    q = torch.randn(2, 4, 6, 64)
    k = torch.randn(2, 2, 6, 64)
    present = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    keys = ours.mask(2, 6, 6, 0, 0, bidirectional, present)
    out, _ = ours.attend(layer, q, k, k, keys)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k, k, attn_mask=present.bool()[:, None, None], enable_gqa=True
    )
    torch.testing.assert_close(out, wanted.transpose(1, 2), **CLOSE)
    assert ours.mask(2, 6, 6, 0, 0, bidirectional) is None
