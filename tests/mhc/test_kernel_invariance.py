"""Bitwise: again; a token alone, among others, elsewhere; parts and the whole; training and inference; fewer SMs.

Raw bits are compared: +0 is not -0.
"""

from dataclasses import replace

import pytest
import torch

from cute_kernels import mhc
from cute_kernels.mhc import launch
from cute_kernels.mhc.config import ProjectionBackwardConfig
from cute_kernels.runtime import launches
from cute_kernels.runtime.targets import Target, arch_of
from tests.gemm.cases import same_bits
from tests.mhc.cases import (
    BF16,
    FP16,
    FP32,
    OPERATIONS,
    PRESETS,
    Case,
    call,
    differentiate,
    make_inputs,
    make_upstream,
    precision_of,
    sublayer,
)

PARAMETERS = {"phi", "alpha", "beta", "norm_weight", "bias", "fn", "base", "scale"}
TOKENS = (1, 13, 128, 8192)
# Cases that the numerics use, too: the kernels are the same
FULL = Case(4, 64, (130,), norm_weight=True, bias=True)
DEEP = Case(4, 1280, (1100,), norm_weight=True, bias=True)  # two parts of K, three chunks of tokens
RING = Case(4, 4096, norm_weight=True)  # a cluster of 16 walks over 74 blocks of tokens: its ring turns
BATCHES = [
    FULL,
    Case(2, 64, (130,), FP32, BF16, "transformer_engine", norm_weight=True, bias=True),
    Case(8, 64, (13,), BF16, FP32, "tilekernels", norm_weight=True),
    Case(4, 13, (13,), BF16, FP32, "megatron_dev", "channels", norm_weight=True, bias=True),
    Case(1, 64, (13,), FP16, variant="liger", bias=True),
]
# A CTA sums over a token
WIDE = [
    Case(4, 2048, (13,), bias=True),
    Case(8, 1024, (13,), FP16, layout="channels"),
    Case(1, 4096, (13,), FP32, bias=True),
]
# Eight streams by pairs of warpgroups, several slices
PAIRS = [Case(8, 136, norm_weight=True), Case(8, 136, layout="channels", res_orientation="oi")]
STREAMWISE = ("aggregate", "expand_combine")
SOME = ("coefficients", "sinkhorn", "aggregate", "expand_combine", "hyper_connection")


def assert_same_bits(found, wanted, what=""):
    assert found.keys() == wanted.keys()
    for name, result in wanted.items():
        assert same_bits(found[name], result), f"{name}, {what}"


@pytest.mark.parametrize(
    "op, case, precision",
    [(op, replace(FULL, dropout_p=0.3), "tf32") for op in OPERATIONS]
    + [(op, case, "fp32") for case in BATCHES[1:] for op in SOME if (case.n, op) != (2, "hyper_connection")]
    + [(op, replace(DEEP, dropout_p=0.3), "tf32") for op in ("projection", "hyper_connection")]
    + [("hyper_connection", replace(case, tokens=(2100,)), "tf32") for case in PAIRS]
    + [(op, case, "tf32") for case in WIDE for op in STREAMWISE],
    ids=str,
)
def test_again(op, case, precision, generator):
    """The same results and gradients, those of parameters, too; at other addresses."""
    tensors, upstream = make_inputs(case, generator), make_upstream(op, case, generator)
    options = precision_of(op, precision)
    wanted = differentiate(mhc, op, case, tensors, upstream, **options)
    for _ in range(2):
        between = torch.empty(77777, device=generator.device)
        copies = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
        assert_same_bits(differentiate(mhc, op, case, copies, upstream, **options), wanted, "again")
        del between


def tokens_at(tensors, index):
    """The tensors of a batch of these tokens, in memory of their own."""
    return {
        name: t if name in PARAMETERS else t.detach()[index].clone().requires_grad_(t.requires_grad)
        for name, t in tensors.items()
    }


@pytest.mark.parametrize(
    "op, case, precision",
    [(op, FULL, "tf32") for op in OPERATIONS]
    + [("hyper_connection", FULL, "fp32")]
    + [(op, case, "fp32") for case in BATCHES[1:] for op in SOME if (case.n, op) != (2, "hyper_connection")]
    + [(op, BATCHES[1], "fp32") for op in ("projection", "pre")]
    + [(op, RING, "tf32") for op in ("projection", "pre")]
    + [("hyper_connection", case, "tf32") for case in PAIRS]
    + [(op, case, "tf32") for case in WIDE for op in STREAMWISE],
    ids=str,
)
def test_a_token_does_not_know_its_batch(op, case, precision, generator):
    """Any number of tokens drawn from the largest batch; the last of these stands first, 78th and last among them."""
    rows = max(TOKENS)
    whole_case = replace(case, tokens=(rows,))
    tensors, upstream = make_inputs(whole_case, generator), make_upstream(op, whole_case, generator)
    options = precision_of(op, precision)
    whole = differentiate(mhc, op, whole_case, tensors, upstream, **options)
    of_tokens = [name for name in whole if name.removeprefix("d") not in PARAMETERS]
    for m in TOKENS:
        for position in sorted({0, 77, m - 1}):
            if position >= m:
                continue
            index = torch.randperm(rows, generator=generator, device=generator.device)[:m]
            index[position] = rows - 1
            batch, few = tokens_at(tensors, index), tokens_at(upstream, index)
            found = differentiate(mhc, op, replace(case, tokens=(m,)), batch, few, **options)
            for name in of_tokens:
                assert same_bits(found[name], whole[name][index]), f"{name}, {m} tokens, {position}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "op, case, copies",
    [(op, FULL, 1045) for op in ("projection", "aggregate", "expand_combine", "pre", "hyper_connection")]
    + [(op, Case(8, 4096), 263) for op in ("projection", "hyper_connection")],
    ids=str,
)
def test_many_tokens(op, case, copies, generator):
    """251 tokens over and over: more than four times 65,535 of them, more than 2^31 elements of x."""
    case = replace(case, tokens=(251,))
    tensors, upstream = make_inputs(case, generator), make_upstream(op, case, generator)
    wanted = differentiate(mhc, op, case, tensors, upstream)
    index = torch.arange(251, device=generator.device).repeat(copies)
    many, incoming = tokens_at(tensors, index), tokens_at(upstream, index)
    found = differentiate(mhc, op, replace(case, tokens=(len(index),)), many, incoming)
    for name, result in wanted.items():
        if name.removeprefix("d") in PARAMETERS:
            expected, largest = copies * result.double(), copies * float(result.abs().max())
            torch.testing.assert_close(found[name].double(), expected, rtol=1e-3, atol=1e-4 * largest)
        else:
            for copy in found[name].split(251):
                assert same_bits(copy, result), name


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("op", ["projection", "aggregate", "expand_combine", "head", "pre", "hyper_connection"])
def test_a_token_does_not_know_its_neighbours_values(op, value, generator):
    tensors, upstream = make_inputs(FULL, generator), make_upstream(op, FULL, generator)
    wanted = differentiate(mhc, op, FULL, tensors, upstream)
    for row in (0, 64, 129):
        others = torch.arange(130, device=generator.device) != row
        x = tensors["x"].detach().clone()
        x[others] = value
        found = differentiate(mhc, op, FULL, tensors | {"x": x.requires_grad_()}, upstream)
        for name in wanted:
            if name.removeprefix("d") not in PARAMETERS:
                assert same_bits(found[name][row], wanted[name][row]), f"{name}, token {row}"


def steps(case, t, precision):
    """layer_input, post, res and the new streams, one op after the other."""
    H, mean_square = call(mhc, "projection", case, t, precision=precision)
    pre, post, logits = call(mhc, "coefficients", case, t | {"H": H, "mean_square": mean_square})
    (res,) = call(mhc, "sinkhorn", case, {"logits": logits})
    (layer_input,) = call(mhc, "aggregate", case, t | {"pre": pre})
    (out,) = call(mhc, "expand_combine", case, t | {"f": sublayer(layer_input), "post": post, "res": res})
    return layer_input, post, res, out


CHAINED = [replace(FULL, variant=name) for name in PRESETS]
CHAINED += [*BATCHES[1:], DEEP, Case(4, 64, (130,), FP16, BF16, "megatron", "channels", "io", bias=True)]
CLUSTERS = [Case(4, channels, (230,)) for channels in (2560, 7168)]  # of 8 and of 16 CTAs


@pytest.mark.parametrize(
    "case, precision",
    [(case, "tf32") for case in CHAINED + CLUSTERS] + [(case, "fp32") for case in (FULL, DEEP, CLUSTERS[0])],
    ids=str,
)
@pytest.mark.parametrize("forward_of", [("hyper_connection", "projection", "coefficients", "sinkhorn", "aggregate")])
def test_the_whole_is_its_parts(forward_of, case, precision, generator):
    """And training is inference, of the parts, too; one token or many."""
    for tokens in (case.tokens, (1,)):
        case = replace(case, tokens=tokens)
        t = make_inputs(case, generator)
        with torch.no_grad():
            wanted = steps(case, t, precision)
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                whole = (*call(mhc, "pre", case, t, precision=precision),)
                whole += call(mhc, "hyper_connection", case, t, precision=precision)
                chained = steps(case, t, precision)
            for found, part, result in zip(whole, chained, wanted, strict=True):
                assert found.requires_grad == part.requires_grad == grad
                assert same_bits(found.detach(), result) and same_bits(part.detach(), result)


@pytest.mark.parametrize("case", [replace(case, dropout_p=0.3) for case in BATCHES], ids=str)
@pytest.mark.parametrize("forward_of", [("expand_combine", "aggregate")])
def test_a_residual_with_the_next_layer_input(forward_of, case, generator, monkeypatch):
    """One launch of recompute has the bits of expand_combine, and of aggregate of its result."""
    t = {name: tensor.detach() for name, tensor in make_inputs(case, generator).items()}
    (wanted,) = call(mhc, "expand_combine", case, t)
    (wanted_input,) = call(mhc, "aggregate", case, t | {"x": wanted})
    layer_input, launched = torch.full_like(wanted_input, float("nan")), launch.expand_combine_forward.function

    def both(*arguments):
        launched(*arguments[:7], t["pre"], layer_input, *arguments[9:])

    monkeypatch.setattr(launch.expand_combine_forward, "function", both)
    (found,) = call(mhc, "expand_combine", case, t)
    assert same_bits(found, wanted) and same_bits(layer_input, wanted_input)


@pytest.mark.parametrize("op", OPERATIONS)
def test_training_is_inference(op, generator):
    """Whichever inputs learn; the bits, whatever is kept for the backward."""
    t = make_inputs(FULL, generator)
    with torch.no_grad():
        wanted = call(mhc, op, FULL, t)
    for names in (OPERATIONS[op][0], OPERATIONS[op][0][:1], OPERATIONS[op][0][-1:]):
        some = {name: tensor.detach().requires_grad_(name in names) for name, tensor in t.items()}
        for found, result in zip(call(mhc, op, FULL, some), wanted, strict=True):
            assert found.requires_grad or len(OPERATIONS[op][1]) > 1
            assert same_bits(found.detach(), result)


@pytest.mark.parametrize(
    "op, case, precision",
    [
        ("projection", DEEP, "tf32"),
        ("projection", DEEP, "fp32"),
        ("hyper_connection", DEEP, "tf32"),
        ("hyper_connection", BATCHES[2], "fp32"),
        ("projection", PAIRS[0], "tf32"),
        ("hyper_connection", PAIRS[0], "tf32"),
        ("hyper_connection", PAIRS[1], "tf32"),
        ("hyper_connection", Case(8, 24), "tf32"),  # one slice for a pair of CTAs, chunk after chunk
        ("head", FULL, "tf32"),
        ("pre", FULL, "tf32"),
    ],
    ids=str,
)
def test_any_number_of_sms(op, case, precision, generator, monkeypatch):
    """The kernels of the products run with as many CTAs as fit on the SMs: fewer give the same bits, one, too, where an
    item of the projection's backward is a group of chunks."""
    case = replace(case, tokens=(3700,))
    tensors, upstream = make_inputs(case, generator), make_upstream(op, case, generator)
    options = precision_of(op, precision)
    wanted = differentiate(mhc, op, case, tensors, upstream, **options)
    for count in (1, 7, 100):
        monkeypatch.setattr(launches, "target_of", lambda index, count=count: Target(arch_of(index), count))
        launches.forget()
        found = differentiate(mhc, op, case, tensors, upstream, **options)
        assert_same_bits(found, wanted, f"{count} SMs")


# Clusters of 16 CTAs with four, three and five slots, of 8, of 4 and of 2 CTAs
RINGS = [Case(4, channels, (640,)) for channels in (5120, 7168, 4096, 2560, 1280, 768)]


@pytest.mark.parametrize("case", RINGS, ids=str)
@pytest.mark.parametrize("forward_of", [("projection", "pre")])
def test_any_number_of_blocks(forward_of, case, generator, monkeypatch):
    """Tokens of one cluster, and of three, of which some have one more: so the order of loads and arrivals differs."""
    t = {name: tensor.detach() for name, tensor in make_inputs(case, generator).items()}
    wanted = {op: call(mhc, op, case, t) for op in forward_of}
    for count in (16, 64):
        monkeypatch.setattr(launches, "target_of", lambda index, count=count: Target(arch_of(index), count))
        launches.forget()
        for blocks in (*range(1, 15), 40):
            tokens = 16 * blocks - (3 if blocks % 2 else 0)
            few = tokens_at(t, torch.arange(tokens, device=generator.device))
            for op in forward_of:
                found = call(mhc, op, replace(case, tokens=(tokens,)), few)
                for result, whole in zip(found, wanted[op], strict=True):
                    assert same_bits(result, whole[:tokens]), f"{op}, {blocks} blocks, {count} SMs"


@pytest.mark.parametrize("tokens", [600, 2600])
@pytest.mark.parametrize(
    "op, case, precision",
    [(op, FULL, "tf32") for op in ("projection", "hyper_connection", "head")]
    + [("hyper_connection", case, "fp32") for case in BATCHES[1:] if case.n < 8]
    + [("projection", case, "fp32") for case in BATCHES[1:] if case.n < 8],
    ids=str,
)
def test_groups_of_chunks(op, case, precision, tokens, generator, monkeypatch):
    """Items of the projection's backward are chunks or groups of them, the last of fewer: the same bits."""
    case = replace(case, tokens=(tokens,))
    tensors, upstream = make_inputs(case, generator), make_upstream(op, case, generator)
    found = []
    for whole in (False, True):

        def schedule(self, num_tokens, num_sms, whole=whole):
            chunks = self.group if whole else 1
            return chunks, min(num_sms, -(-num_tokens // (chunks * self.chunk)) * self.slices)

        monkeypatch.setattr(ProjectionBackwardConfig, "schedule", schedule)
        found.append(differentiate(mhc, op, case, tensors, upstream, **precision_of(op, precision)))
    assert_same_bits(*found, "groups")


@pytest.mark.parametrize("op", ["projection", "hyper_connection"])
def test_main_grad_is_reproducible(op, generator):
    """Again the same bits where main_grad is added to; what is added is the gradient."""
    tensors, upstream = make_inputs(DEEP, generator), make_upstream(op, DEEP, generator)
    plain = differentiate(mhc, op, DEEP, tensors, upstream)
    names = [name for name in OPERATIONS[op][0] if name in PARAMETERS]
    start = {name: torch.randn(tensors[name].shape, generator=generator, device=generator.device) for name in names}
    results = []
    for _ in range(2):
        for name in names:
            tensors[name].main_grad = start[name].clone()
        differentiate(mhc, op, DEEP, tensors, upstream)
        results.append({name: tensors[name].main_grad for name in names})
    assert_same_bits(*results, "main_grad")
    for name in names:
        wanted = start[name] + plain[f"d{name}"]
        torch.testing.assert_close(results[0][name], wanted, rtol=1e-6, atol=1e-6 * wanted.abs().max().item())
