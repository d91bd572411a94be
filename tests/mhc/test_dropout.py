"""Dropout of expand_combine: Philox's known answers, the mask, where seeds come from."""

import dataclasses

import pytest
import torch

from cute_kernels.mhc import reference
from cute_kernels.mhc.reference.dropout import philox4x32
from tests.mhc.cases import (
    BF16,
    FP32,
    FP64,
    LAYOUTS,
    OPERATIONS,
    SEED,
    Case,
    call,
    differentiate,
    in_fp64,
    make_inputs,
    make_upstream,
)

CPU = torch.device("cpu")


VECTORS = [  # Random123's known answers of philox4x32 with 10 rounds: counter, key, words
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize("counter, key, words", VECTORS, ids=["zeros", "ones", "pi"])
def test_philox_known_answers(counter, key, words):
    found = philox4x32(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
    assert " ".join(f"{word.item():08x}" for word in found) == words


def philox_in_python(counter, key):
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 % 2**32, (p0 >> 32) ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def test_philox_is_exact_for_all_words(generator):
    """Against Python's integers: products beyond 2^63 and sums beyond 2^32."""
    words = torch.randint(0, 2**32, (6, 500), generator=generator)
    words[:, :64] = torch.cartesian_prod(*[torch.tensor([0, 0xFFFFFFFF])] * 6).t()
    found = torch.stack(philox4x32(tuple(words[:4]), tuple(words[4:]))).t().tolist()
    for column, row in zip(words.t().tolist(), found, strict=True):
        assert tuple(row) == philox_in_python(column[:4], column[4:])


@pytest.mark.parametrize("seed", [0, 1, SEED, -1, -(2**63), 2**63 - 1])
def test_dropout_mask_is_its_definition(seed):
    """Counter (k // 4, m, 0, 0), key (low, high), word k % 4; K need not be a multiple of 4."""
    key = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for p in (0.1, 0.5):
        mask = reference.dropout_mask(seed, 3, 13, p, CPU)
        assert mask.shape == (3, 13) and mask.dtype is torch.bool
        for m in range(3):
            for k in range(13):
                word = philox_in_python((k // 4, m, 0, 0), key)[k % 4]
                assert mask[m, k].item() == (word >= int(p * 2**32))
        assert torch.equal(mask, reference.dropout_mask(torch.tensor([seed]), 3, 13, p, CPU))
    threshold = philox_in_python((0, 0, 0, 0), key)[0]
    assert reference.dropout_mask(seed, 1, 1, threshold / 2**32, CPU).all()
    assert not reference.dropout_mask(seed, 1, 1, (threshold + 1) / 2**32, CPU).any()


def test_dropout_mask_keeps_its_share():
    masks = torch.stack([reference.dropout_mask(seed, 100, 1000, 0.3, CPU) for seed in (1, 2, 1 << 32)]).double()
    assert (masks.mean((1, 2)) - 0.7).abs().max() < 0.01  # five standard deviations are 0.007
    assert (masks.mean(1) - 0.7).abs().max() < 0.3 and (masks.mean(2) - 0.7).abs().max() < 0.1
    assert (torch.corrcoef(masks.flatten(1)) - torch.eye(3)).abs().max() < 0.02
    assert reference.dropout_mask(1, 10, 100, 0.0, CPU).all()
    assert not reference.dropout_mask(1, 10, 100, 1.0 - 2.0**-53, CPU).any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_of_expand_combine(layout, generator):
    """The added part alone is masked, each stream with a mask of its own; backward with the same mask."""
    case = Case(4, 16, (2, 3), FP32, layout=layout, bias=True, dropout_p=0.3)
    t = make_inputs(case, generator)
    nothing = torch.zeros_like(t["x"])
    arguments = t["f"], t["post"]
    options = {"bias": t["bias"], "layout": layout}
    added = reference.expand_combine(*arguments, nothing, t["res"], **options)
    mixed = reference.expand_combine(torch.zeros_like(t["f"]), t["post"], t["x"], t["res"], layout=layout)
    out = reference.expand_combine(*arguments, t["x"], t["res"], dropout_p=0.3, seed=SEED, **options)
    mask = reference.dropout_mask(SEED, 6, 64, 0.3, CPU).view(t["x"].shape)
    torch.testing.assert_close(out, torch.where(mask, added / 0.7, 0.0) + mixed)
    assert mask.float().mean() < 1.0 and not torch.equal(mask[..., 0], mask[..., 1])
    upstream = torch.randn(out.shape, generator=generator)
    df, dx = torch.autograd.grad(out, (t["f"], t["x"]), upstream)
    df_masked, dx_all = torch.autograd.grad(added + mixed, (t["f"], t["x"]), upstream)[0:2]
    masked = torch.autograd.grad(
        reference.expand_combine(*arguments, nothing, t["res"], **options), t["f"], upstream * mask / 0.7
    )[0]
    torch.testing.assert_close(df, masked)
    torch.testing.assert_close(dx, dx_all)
    assert not torch.allclose(df, df_masked)


def test_the_scale_of_dropout_is_of_the_compute_dtype(generator):
    """In fp64 to the last bit."""
    case = Case(4, 16, (2, 3), bias=True)
    t = in_fp64(make_inputs(case, generator)) | {"x": torch.zeros(case.residual_shape, dtype=FP64)}
    (added,) = call(reference, "expand_combine", case, t, compute_dtype=FP64)
    dropped = dataclasses.replace(case, dropout_p=0.3)
    (out,) = call(reference, "expand_combine", dropped, t, compute_dtype=FP64)
    mask = reference.dropout_mask(SEED, 6, 64, 0.3, CPU).view(out.shape)
    assert torch.equal(out, torch.where(mask, added * (1.0 / 0.7), 0.0))


def test_the_default_dtype_changes_nothing(generator):
    case = Case(4, 16, (5,), FP32, norm_weight=True, bias=True, dropout_p=0.3)
    inputs = make_inputs(case, generator)
    for op in OPERATIONS:
        upstream = make_upstream(op, case, generator)
        wanted = differentiate(reference, op, case, inputs, upstream)
        torch.set_default_dtype(BF16)
        try:
            found = differentiate(reference, op, case, inputs, upstream)
        finally:
            torch.set_default_dtype(FP32)
        for name, result in wanted.items():
            assert found[name].dtype is result.dtype and torch.equal(found[name], result), (op, name)


def test_seeds(generator):
    """An int and a tensor of it are one seed; another gives another mask; without dropout it changes nothing."""
    case = Case(4, 16, (5,))
    t = make_inputs(case, generator)

    def out(seed, p=0.5):
        return reference.expand_combine(t["f"], t["post"], t["x"], t["res"], dropout_p=p, seed=seed)

    assert torch.equal(out(7), out(torch.tensor(7))) and torch.equal(out(7), out(torch.tensor([7])))
    assert torch.equal(out(-1), out(torch.tensor([-1])))
    assert not torch.equal(out(7), out(8)) and not torch.equal(out(7), out(7 + 2**32))
    assert torch.equal(out(7, 0.0), out(None, 0.0)) and torch.equal(out(7, 0), out(7, 0.0))


def test_dropout_under_checkpointing(generator):
    """Recomputed in the backward, the mask is the same: the seed is an argument, no state."""
    from torch.utils.checkpoint import checkpoint

    case = Case(4, 16, (5,), FP32, bias=True, dropout_p=0.4)
    inputs = make_inputs(case, generator)
    upstream = torch.randn(case.residual_shape, generator=generator)
    leaves = [inputs[name] for name in OPERATIONS["hyper_connection"][0] if name in inputs]
    plain = call(reference, "hyper_connection", case, inputs)[0]
    again = checkpoint(lambda: call(reference, "hyper_connection", case, inputs)[0], use_reentrant=False)
    assert torch.equal(plain, again)
    one, two = (torch.autograd.grad(out, leaves, upstream) for out in (plain, again))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
