"""sample: the reference's tokens, each row's own, distributions, filters, ties."""

import math

import pytest
import torch

from cute_kernels import sample
from cute_kernels.sampling import launch
from tests.sampling.cases import BF16, FP16, FP32, Case, make_inputs

FILTERS = [
    (),
    (("temperature", 0.0),),
    (("temperature", 0.3),),
    (("top_k", 1),),
    (("top_k", 50),),
    (("top_k", 3000),),
    (("top_p", 0.9),),
    (("top_p", 1e-9),),
    (("top_p", 0.999), ("temperature", 2.5)),
    (("min_p", 0.05),),
    (("min_p", 1.0),),
    (("top_k", 40), ("top_p", 0.7), ("min_p", 0.1), ("temperature", 0.8)),
]
CASES = [
    *(Case(6, n, BF16, kind, options) for n, kind in ((1000, "ties"), (40000, "model")) for options in FILTERS),
    *(Case(9, 5000, FP32, "flat", options) for options in FILTERS),
    *(Case(3, n, dtype, "model", FILTERS[-1]) for n in (1, 2, 3, 31, 4097, 32769) for dtype in (BF16, FP16, FP32)),
    *(Case(8, n, FP32, "holes", options) for n in (3, 50257) for options in FILTERS),
]


def as_reference(inputs: dict, device: str = "cpu") -> torch.Tensor:
    given = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    return sample(**given, backend="reference").to(inputs["logits"].device)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_references_tokens(case, generator):
    check(case, generator)


def check(case, generator, device="cpu"):
    """``device``: where plain torch finds the same tokens."""
    inputs = make_inputs(case, generator)
    found, wanted = sample(**inputs), as_reference(inputs, device)
    assert found.dtype is torch.int64 and found.shape == (case.rows,)
    different = (found != wanted).nonzero().flatten().tolist()
    assert not different, f"rows {different}: {found[different].tolist()}, wanted {wanted[different].tolist()}"


@pytest.mark.parametrize("options", [(), FILTERS[-1]], ids=["plain", "filtered"])
def test_a_row_does_not_know_its_batch(options, generator):
    inputs = make_inputs(Case(50, 6000, BF16, "model", options), generator)
    whole = sample(**inputs)
    for rows in (
        slice(0, 1),
        slice(7, 20),
        slice(49, 50),
        torch.randperm(50, generator=generator, device=whole.device),
    ):
        part = {name: value[rows] if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
        assert torch.equal(sample(**part), whole[rows])
    wide = torch.zeros(50, 6003, dtype=BF16, device=whole.device)
    wide[:, 1:6001] = inputs["logits"]
    assert torch.equal(sample(**{**inputs, "logits": wide[:, 1:6001]}), whole)


def test_other_seeds_and_positions_are_other_noise(generator):
    inputs = make_inputs(Case(200, 1000, FP32, "flat"), generator)
    tokens = sample(**inputs)
    for name in ("seeds", "positions"):
        others = sample(**{**inputs, name: inputs[name] ^ 1})
        assert (others != tokens).float().mean() > 0.9


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_distribution(temperature, generator):
    """Chi-square of a million draws of 64 tokens, the rarest of 50."""
    device, number = generator.device, 2**20 if generator.device.type == "cuda" else 2**15
    logits = torch.linspace(0, math.log(number / 64 / 50), 64, device=device) * temperature
    seeds = torch.arange(number, device=device) // 1024
    positions = torch.arange(number, device=device) % 1024
    tokens = sample(logits.expand(number, 64).contiguous(), seeds=seeds, positions=positions, temperature=temperature)
    wanted = number * (logits.double() / temperature).softmax(0)
    found = torch.bincount(tokens, minlength=64)
    assert ((found - wanted).square() / wanted).sum() < 63 + 5 * math.sqrt(2 * 63)


def kept_tokens(logits: torch.Tensor, **options) -> set[int]:
    """The tokens that are drawn from one row by many seeds."""
    number = 3000
    device = logits.device
    seeds, zero = torch.arange(number, device=device), torch.zeros(number, dtype=torch.int64, device=device)
    rows = logits.expand(number, -1).contiguous()
    return {*sample(rows, seeds=seeds, positions=zero, **options).tolist()}


def test_filters(device):
    probabilities = torch.tensor([0.05, 0.3, 0.1, 0.3, 0.05, 0.2], device=device)
    logits = probabilities.log()
    assert kept_tokens(logits) == {0, 1, 2, 3, 4, 5}
    assert kept_tokens(logits, top_k=1) == {1} and kept_tokens(logits, temperature=0) == {1}
    assert kept_tokens(logits, top_k=3) == {1, 3, 5} and kept_tokens(logits, top_k=5) == {0, 1, 2, 3, 5}
    assert kept_tokens(logits, top_k=100) == {0, 1, 2, 3, 4, 5}
    assert kept_tokens(logits, top_p=0.29) == {1} and kept_tokens(logits, top_p=0.31) == {1, 3}
    assert kept_tokens(logits, top_p=0.79) == {1, 3, 5} and kept_tokens(logits, top_p=0.92) == {0, 1, 2, 3, 5}
    assert kept_tokens(logits, top_p=1.0) == {0, 1, 2, 3, 4, 5}
    assert kept_tokens(logits, min_p=0.3) == {1, 2, 3, 5} and kept_tokens(logits, min_p=1) == {1, 3}
    assert kept_tokens(logits, top_k=3, top_p=0.74) == {1, 3} and kept_tokens(logits, top_k=3, top_p=0.76) == {1, 3, 5}
    assert kept_tokens(logits, top_p=0.99, min_p=0.5) == {1, 3, 5}


def test_rows_without_a_choice(device):
    inf = math.inf
    rows = [
        [-inf] * 5,
        [math.nan] * 5,
        [-inf, -inf, 3.0, -inf, math.nan],
        [0.0, inf, inf, 1.0, 2.0],
        [-0.0, 0.0, -1, -2, -3],
    ]
    logits = torch.tensor(rows, device=device)
    seeds = torch.arange(5, device=device)
    for options in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0.0}):
        found = sample(logits, seeds=seeds, positions=seeds, **options).tolist()
        assert found[:4] == [0, 0, 2, 1], options
    assert found[4] == 0


def test_nothing_to_draw(device):
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    assert sample(torch.zeros(0, 7, device=device), seeds=empty, positions=empty).shape == (0,)


def test_logits_that_require_a_gradient(generator):
    inputs = make_inputs(Case(2, 100), generator)
    wanted = sample(**inputs)
    found = sample(**{**inputs, "logits": inputs["logits"].requires_grad_()})
    assert torch.equal(found, wanted) and not found.requires_grad


def test_compile_and_opcheck(generator, compile_backend):
    inputs = make_inputs(Case(4, 300, BF16, "model", FILTERS[-1]), generator)
    compiled = torch.compile(sample, backend=compile_backend, fullgraph=True)
    assert torch.equal(compiled(**inputs), sample(**inputs))
    tensors = [inputs[name] for name in ("logits", "seeds", "positions")]
    arguments = (*tensors, torch.zeros_like(inputs["seeds"]), True, 1.0, 5, 0, -1.0)
    torch.library.opcheck(launch.sample_rows.registered, arguments, test_utils=("test_schema", "test_faketensor"))
