"""linear_log_prob: results against fp64, rows bit by bit in other batches, autograd, and the torch bridge."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cute_kernels import linear_log_prob, provenance
from cute_kernels.log_prob import launch
from cute_kernels.log_prob.config import candidates
from cute_kernels.log_prob.launch import log_prob_backward, log_prob_forward
from jit_cache import stats
from tests.gemm.cases import BF16, FP16, FP32, Recorder, assert_same_bits, check, here, kernel_name
from tests.log_prob.cases import IGNORED, Case, check_masked, make_inputs, mask_columns, only_kernel, oracle, run
from tests.norm.cases import name_of
from tests.sanitizer import assert_clean, needs_sanitizer

CASES = [
    Case(300, 1000, 200),
    Case(1, 1, 8),
    Case(5, 129, 64),
    Case(65, 127, 72, FP16),
    Case(100, 300, 200, temperature=0.7, index=torch.int32),
    Case(257, 520, 136, FP16, temperature=1.7),
    Case(130, 264, 64, weight_by_columns=True),
    Case(70, 8200, 64, entropy=False),
    Case(40, 264, 60, gap=4),
    Case(5, 129, 64, temperature=1e6),
    Case(70, 300, 64, scale=0.25, temperature=0.7),
    Case(300, 393, 136, scale=0.5, softcap=3.0, temperature=0.7),
    Case(40, 264, 64, FP16, softcap=30.0, weight_by_columns=True, entropy=False),
    Case(40, 264, 64, exact=True),
    Case(100, 520, 64, temperature=1e-2, exact=True),
    Case(300, 1033, 72, temperature=1e-6, exact=True),
]
# Gradients are sums of rounded factors and are rounded themselves. Equal factors have equal errors, so two roundings
RMS = {BF16: 2**-8, FP16: 2**-11}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_fp64(case, generator):
    inputs = make_inputs(case, generator)
    found, truth = run(linear_log_prob, case, inputs), oracle(case, inputs)
    for name, value in truth.values.items():
        result = found[name]
        assert result.dtype is FP32 and result.shape == (case.m,)
        assert ((result.double() - value).abs() <= truth.bounds[name]).all(), name
        assert (result[inputs.target == IGNORED] == 0.0).all()
        assert (result.double() - value).norm() <= 2e-6 * (1 + value.abs()).norm(), name
    check({name: found[name] for name in ("dx", "dw")}, truth.gradients)
    assert (found["dx"][inputs.target == IGNORED] == 0.0).all()
    for name in ("dx", "dw") if case.v > 1 else ():
        value = truth.gradients[name].value
        assert (found[name].double() - value).norm() <= RMS[case.dtype] * value.norm(), name


@pytest.mark.parametrize("temperature", [1.0, 1e-2, 1e-6])
def test_a_token_that_is_sure(temperature, generator):
    """Its log-probability is 0, that of two equal logits -ln 2, at any temperature; nothing is beyond its range."""
    case = Case(300, 520, 64, temperature=temperature, exact=True)
    inputs = make_inputs(case, generator)
    found = run(linear_log_prob, case, inputs)
    assert (found["log_prob"] <= 0.0).all() and (found["entropy"] >= 0.0).all()
    assert not found["log_prob"][1::4].any()
    assert all((found[name][1::4].abs() <= 1e-9).all() for name in ("entropy", "dx"))
    halved = found["log_prob"][2::4][inputs.target[2::4] != IGNORED]
    assert len(halved) and (halved == -torch.tensor(math.log(2))).all()


LOWEST = ["finfo.min", "-inf"]  # logits of masked columns


def lowest(name, dtype):
    return torch.finfo(dtype).min if name == "finfo.min" else -math.inf


@pytest.mark.parametrize("low", LOWEST)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=name_of)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1e-2])
def test_a_masked_vocabulary(temperature, dtype, low, generator, monkeypatch):
    """Some columns of each tile, a whole tile, the last ones; few tokens and many; gradients whole and in parts."""
    for m, columns in ((40, 2048), (300, 256)):
        monkeypatch.setattr(launch, "GRADIENT_COLUMNS", columns)
        monkeypatch.setattr(launch, "GRADIENT_ELEMENTS", columns * m)
        case = Case(m, 600, 64, dtype, temperature=temperature)
        column = torch.arange(case.v, device="cuda")
        masked = (column % 3 == 1) | (column // 128 == 1) | (column >= 530)
        check_masked(linear_log_prob, case, make_inputs(case, generator), masked, lowest(low, dtype))


@pytest.mark.parametrize("low", LOWEST)
def test_a_padded_vocabulary_changes_no_bit(low, generator):
    """Masked columns behind the last one, to the end of its tile and some tiles more."""
    case = Case(100, 1100, 64, temperature=0.7)
    masked = torch.arange(case.v, device="cuda") >= 393
    padded, without = mask_columns(make_inputs(case, generator), masked, lowest(low, BF16))
    found, wanted = run(linear_log_prob, case, padded), run(linear_log_prob, case, without)
    for name in ("log_prob", "entropy") + ("dx",) * (low == "finfo.min"):
        assert_same_bits(found[name], wanted[name], name)
    assert_same_bits(found["dw"][:393], wanted["dw"], "dw")


def test_a_target_that_is_masked(generator):
    """Its log-probability is the fp64 value where fp32 holds it, else -inf; without a logit above -inf it is NaN."""
    case = Case(40, 300, 64, entropy=False)
    masked = torch.arange(case.v, device="cuda") % 3 == 1
    padded, _ = mask_columns(make_inputs(case, generator), masked, torch.finfo(BF16).min)
    padded.target[:] = 4
    for temperature, wanted in ((1.0, torch.finfo(BF16).min), (2.0, torch.finfo(BF16).min / 2), (0.7, -math.inf)):
        found = run(linear_log_prob, replace(case, temperature=temperature), padded)
        assert torch.allclose(found["log_prob"], torch.full_like(found["log_prob"], wanted), rtol=1e-6)
        # A product with the lowest number may leave bf16
        assert found["dx"][:, 1:].isfinite().all() and found["dw"].isfinite().all()
    with torch.no_grad():
        padded.weight[:, 0] = -math.inf
    log_prob, entropy = linear_log_prob(padded.x, padded.weight, padded.target)
    assert log_prob.isnan().all() and entropy.isnan().all()


def test_dimensions(generator):
    """Tokens in any number of dimensions, of any stride; none at all."""
    case = Case(24, 264, 64)
    inputs = make_inputs(case, generator)
    wanted = run(linear_log_prob, case, inputs)
    wide = torch.full((2, 3, 4, 72), float("nan"), dtype=BF16, device=inputs.x.device)
    wide[..., :64] = inputs.x.detach().view(2, 3, 4, 64)
    shaped = replace(inputs, x=wide[..., :64].requires_grad_(), target=inputs.target.view(2, 3, 4))
    shaped = replace(shaped, g=inputs.g.view(2, 3, 4), h=inputs.h.view(2, 3, 4))
    found = run(linear_log_prob, case, shaped)
    assert found["log_prob"].shape == (2, 3, 4) and found["dx"].shape == (2, 3, 4, 64)
    for name, result in wanted.items():
        assert_same_bits(found[name].reshape(result.shape), result, name)
    apart = torch.stack((inputs.target, inputs.target + 1), 1)[:, 0]
    for name, result in run(linear_log_prob, case, replace(inputs, target=apart)).items():
        assert_same_bits(result, wanted[name], f"{name}, targets apart")
    one = linear_log_prob(inputs.x[5], inputs.weight, inputs.target[5])
    assert one[0].shape == () and torch.equal(one[0], wanted["log_prob"][5])
    nothing = run(linear_log_prob, Case(0, 264, 64), make_inputs(Case(0, 264, 64), generator))
    assert nothing["log_prob"].shape == (0,) and nothing["dx"].shape == (0, 64) and not nothing["dw"].any()


def test_a_row_has_no_stride(generator):
    """One token, or none, of a padded matrix, and a vocabulary of one."""
    case = Case(40, 264, 60, gap=4)
    inputs = make_inputs(case, generator)
    wanted = run(linear_log_prob, case, inputs)
    rows = {name: getattr(inputs, name).detach()[5] for name in ("x", "target", "g", "h")}
    rows["x"].requires_grad_()
    found = run(linear_log_prob, case, replace(inputs, **rows))
    for name in ("log_prob", "entropy", "dx"):
        assert_same_bits(found[name], wanted[name][5], name)
    none = {name: getattr(inputs, name).detach()[:0].reshape(2, 0) for name in ("target", "g", "h")}
    x = inputs.x.detach().new_empty(2, 0, 60).requires_grad_()
    found = run(linear_log_prob, case, replace(inputs, x=x, **none))
    assert found["log_prob"].shape == (2, 0) and found["dx"].shape == (2, 0, 60) and not found["dw"].any()
    weight = inputs.weight.detach()[5].clone().view(1, 60).requires_grad_()
    target = torch.where(inputs.target == IGNORED, IGNORED, 0)
    found = run(linear_log_prob, case, replace(inputs, weight=weight, target=target))
    assert not any(result.any() for result in found.values())


def test_no_k(generator):
    """All logits are 0."""
    case = Case(40, 264, 0)
    inputs = make_inputs(Case(40, 264, 8), generator)
    x, weight = (t.detach()[:, :0].contiguous().requires_grad_() for t in (inputs.x, inputs.weight))
    found = run(linear_log_prob, case, replace(inputs, x=x, weight=weight))
    counts = inputs.target != IGNORED
    assert torch.allclose(found["log_prob"], -math.log(264) * counts)
    assert torch.allclose(found["entropy"], math.log(264) * counts)
    assert found["dx"].shape == (40, 0) and found["dw"].shape == (264, 0)


def test_results_may_be_written_over(generator):
    """Between forward and backward: the backward has what it needs to itself."""
    case = Case(40, 264, 64, entropy=False)
    inputs = make_inputs(case, generator)
    wanted = run(linear_log_prob, case, inputs)
    log_prob, entropy = linear_log_prob(inputs.x, inputs.weight, inputs.target)
    entropy.zero_()
    log_prob.detach().zero_()
    assert_same_bits(torch.autograd.grad(log_prob, inputs.x, inputs.g)[0], wanted["dx"])


def test_targets_that_are_no_column(generator):
    """Neither a column nor ignored: NaN, without a gradient; also 2^32 columns further on. What is ignored may be 0."""
    case = Case(40, 264, 64)
    inputs = make_inputs(case, generator)
    wanted = run(linear_log_prob, case, inputs)
    inputs.target[:4] = torch.tensor([264, -1, 2**32 + 5, -(2**40)])
    found = run(linear_log_prob, case, inputs)
    assert found["log_prob"][:4].isnan().all() and found["entropy"][:4].isnan().all()
    assert (found["dx"][:4] == 0.0).all() and found["dw"].isfinite().all()
    for name in ("log_prob", "entropy", "dx"):
        assert_same_bits(found[name][4:], wanted[name][4:], name)
    inputs.target[:8] = 0
    log_prob, _ = linear_log_prob(inputs.x, inputs.weight, inputs.target, ignore_index=0)
    (dx,) = torch.autograd.grad(log_prob[:8].sum(), inputs.x)
    assert (log_prob[:8] == 0.0).all() and (dx == 0.0).all()


@pytest.mark.parametrize("keep", [False, True], ids=["", "keep"])
def test_a_token_does_not_know_its_batch(keep, generator):
    """T1 to T5: alone, among others, elsewhere, beside NaN and infinities, by each kernel that a batch may get."""
    case = Case(700, 1000, 72, keep=keep)
    inputs = make_inputs(case, generator)
    whole = run(linear_log_prob, case, inputs)

    def some(index, **changes):
        part = {name: getattr(inputs, name).detach()[index] for name in ("x", "target", "g", "h")}
        return replace(inputs, **{**part, **changes}, weight=inputs.weight.detach())

    for m in (1, 2, 5, 16, 33, 63, 64, 65, 100, 128, 129, 256, 257, 500):
        index = torch.randperm(case.m, generator=generator, device=inputs.x.device)[:m]
        part = some(index)
        part.x.requires_grad_()
        for name, result in run(linear_log_prob, case, part).items():
            assert_same_bits(result, whole[name][index], f"{name}, {m} tokens")
    clean = torch.arange(case.m, device=inputs.x.device) % 3 == 1
    for value in (0.0, 3e38, float("inf"), float("nan")):
        part = some(slice(None), x=torch.where(clean[:, None], inputs.x.detach(), value).to(BF16))
        part.x.requires_grad_()
        for name, result in run(linear_log_prob, case, part).items():
            assert_same_bits(result[clean], whole[name][clean], f"{name} beside {value}")
            if value != value and name in ("log_prob", "entropy"):
                counts = ~clean & (inputs.target != IGNORED)
                assert result[counts].isnan().all()


@pytest.mark.parametrize("num_sms", [132, 4])
@pytest.mark.parametrize("config", dict.fromkeys(candidates(here())), ids=lambda c: kernel_name((c, False)))
def test_every_kernel_has_the_same_bits(config, num_sms, generator):
    """With an SM for each tile, and with few, so that a CTA has many; few tokens and many."""
    cases = Case(40, 1000, 136), Case(300, 1033, 200), Case(100, 393, 136, scale=0.5, softcap=3.0)
    for case in (*cases, Case(100, 1033, 136, keep=True)):
        inputs = make_inputs(case, generator)
        wanted = run(linear_log_prob, case, inputs)
        with only_kernel(config, num_sms):
            found = run(linear_log_prob, case, inputs)
        for name, result in wanted.items():
            assert_same_bits(found[name], result, name)


def test_parts_change_no_bit(generator, monkeypatch):
    """Tokens of a launch, and columns whose gradients are in memory at a time."""
    case = Case(300, 2500, 136)
    inputs = make_inputs(case, generator)
    wanted = run(linear_log_prob, case, inputs)
    monkeypatch.setattr(launch, "STATISTICS_TOKENS", 100)
    for columns in (128, 1024):
        monkeypatch.setattr(launch, "GRADIENT_COLUMNS", columns)
        monkeypatch.setattr(launch, "GRADIENT_ELEMENTS", 1)
        for name, result in run(linear_log_prob, case, inputs).items():
            assert_same_bits(result, wanted[name], name)


KEPT = [
    Case(300, 1033, 136, keep=True),
    Case(40, 264, 64, FP16, temperature=0.7, weight_by_columns=True, keep=True),
    Case(100, 520, 72, scale=0.5, softcap=3.0, entropy=False, keep=True),
]


@pytest.mark.parametrize("case", KEPT, ids=str)
def test_kept_logits(case, generator):
    """The forward's bits are those without; the gradients are those at the rounded logits, with the same statistics."""
    inputs = make_inputs(case, generator)
    found, without = run(linear_log_prob, case, inputs), run(linear_log_prob, replace(case, keep=False), inputs)
    for name in ("log_prob", "entropy"):
        assert_same_bits(found[name], without[name], name)
    x, weight, g, h = (t.detach().double() for t in (inputs.x, inputs.weight, inputs.g, inputs.h))
    exact = x @ weight.t()
    z, z_kept = (logits_of(case, logits) for logits in (exact, exact.to(case.dtype).double()))
    log_p = z_kept - z.logsumexp(1, keepdim=True)
    p, entropy = log_p.exp(), found["entropy"].double()[:, None]
    one = torch.zeros_like(p).scatter_(1, inputs.target.long().clamp_min(0)[:, None], 1.0)
    dz = g[:, None] * (one - p) - case.entropy * h[:, None] * p * (log_p + entropy)
    slope = 1 - (z_kept * case.temperature / case.softcap) ** 2 if case.softcap else 1.0
    dz *= slope * case.scale / case.temperature * (inputs.target != IGNORED)[:, None]
    for name, value in (("dx", dz @ weight), ("dw", dz.t() @ x)):
        # A logit between two numbers of its dtype may be rounded to either
        assert (found[name].double() - value).norm() <= 2 * RMS[case.dtype] * value.norm(), name
        assert 0 < (found[name].double() - without[name].double()).norm() <= 0.05 * value.norm(), name


def logits_of(case: Case, products: torch.Tensor) -> torch.Tensor:
    """The numbers that the softmax is taken of."""
    logits = case.scale * products
    return (case.softcap * torch.tanh(logits / case.softcap) if case.softcap else logits) / case.temperature


def test_kept_logits_are_used_once(generator):
    """Their gradients take their place: autograd refuses a second backward, also of a part of the results."""
    case = Case(40, 264, 64)
    inputs = make_inputs(case, generator)
    results = linear_log_prob(inputs.x, inputs.weight, inputs.target, keep_logits=True)
    torch.autograd.grad(results[0].sum(), inputs.x, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(results[1].sum(), inputs.weight)


def test_micro_batches_add_up_in_main_grad(generator, device):
    """B0, B1, B3: the same again; ignored tokens behind; batches of multiples of 16 tokens."""
    case = Case(144, 520, 64)
    inputs = make_inputs(case, generator)

    def main_grad(*slices):
        weight = inputs.weight.detach().requires_grad_()
        weight.main_grad = torch.ones(case.v, case.k, device=device)
        for some in slices:
            part = {name: getattr(inputs, name).detach()[some] for name in ("x", "target", "g", "h")}
            found = run(linear_log_prob, case, replace(inputs, **part, weight=weight))
            assert "dw" not in found and weight.grad is None
        return weight.main_grad

    whole = main_grad(slice(None))
    assert_same_bits(main_grad(slice(None)), whole, "again")
    assert_same_bits(main_grad(slice(0, 16), slice(16, 112), slice(112, None)), whole, "micro-batches")
    inputs.target[96:] = IGNORED
    assert_same_bits(main_grad(slice(None)), main_grad(slice(0, 96)), "ignored behind")


@pytest.mark.parametrize("wanted", ["x", "weight"])
def test_frozen(wanted, generator, device):
    """One gradient alone; the main_grad of a frozen weight stays, and one whose gradient was not asked for."""
    case = Case(40, 264, 64)
    inputs = make_inputs(case, generator)
    both = run(linear_log_prob, case, inputs)
    frozen = inputs.weight if wanted == "x" else inputs.x
    frozen.requires_grad_(False)
    inputs.weight.main_grad = torch.full((264, 64), 7.0, device=device) if wanted == "x" else None
    found = run(linear_log_prob, case, inputs)
    name = {"x": "dx", "weight": "dw"}[wanted]
    assert_same_bits(found[name], both[name])
    assert wanted != "x" or (inputs.weight.main_grad == 7.0).all()


def test_one_result_alone(generator):
    """A gradient of the entropy or of the log-probability only, an expanded one, and none of either."""
    case = Case(40, 264, 64)
    inputs = make_inputs(case, generator)
    zero = torch.zeros_like(inputs.g)
    for results, g, h in ((slice(0, 1), inputs.g, zero), (slice(1, 2), zero, inputs.h)):
        chosen = (inputs.g, inputs.h)[results]
        calls = linear_log_prob(inputs.x, inputs.weight, inputs.target)
        alone = torch.autograd.grad(calls[results], (inputs.x, inputs.weight), chosen)
        both = run(linear_log_prob, case, replace(inputs, g=g, h=h))
        for found, name in zip(alone, ("dx", "dw"), strict=True):
            assert torch.equal(found, both[name]), name  # a product with 0 may have the other sign
    summed = torch.autograd.grad(linear_log_prob(inputs.x, inputs.weight, inputs.target)[0].sum(), inputs.x)[0]
    ones = torch.autograd.grad(linear_log_prob(inputs.x, inputs.weight, inputs.target)[0], inputs.x, zero + 1)[0]
    assert_same_bits(summed, ones)


def test_checkpoint(generator):
    case = Case(40, 264, 64)
    inputs = make_inputs(case, generator)
    wanted = run(linear_log_prob, case, inputs)
    found = run(lambda *t, **o: checkpoint(linear_log_prob, *t, use_reentrant=False, **o), case, inputs)
    for name, result in wanted.items():
        assert_same_bits(found[name], result, name)


def test_provenance(generator):
    """Its products are named: of the logits, these again, and of their gradients."""
    case = Case(130, 264, 64)
    inputs = make_inputs(case, generator)
    entries = provenance(run, linear_log_prob, case, inputs)
    assert [entry.shape for entry in entries] == [(130, 264, 64), (130, 264, 64), (130, 64, 264), (264, 64, 130)]
    assert all(entry.contract.startswith("serial_k16") for entry in entries)
    kernels = [entry.kernel.partition(" ")[0] for entry in entries]
    assert kernels == ["log_prob_statistics", "log_prob_gradient", "gemm", "gemm"]


def test_second_derivatives_are_refused(generator):
    inputs = make_inputs(Case(40, 264, 64), generator)
    with pytest.raises(RuntimeError, match="LinearLogProb has no second derivative, got create_graph=True"):
        torch.autograd.grad(
            linear_log_prob(inputs.x, inputs.weight, inputs.target)[0].sum(), inputs.x, create_graph=True
        )


def test_compile(generator, compile_backend):
    """One graph, forward and backward; eager mode's bits, also for numbers of tokens that take other kernels."""
    torch._dynamo.reset()
    compiled = torch.compile(linear_log_prob, fullgraph=True, backend=compile_backend)
    for m in (65, 3, 300):
        case = Case(m, 264, 64, temperature=0.7)
        inputs = make_inputs(case, generator)
        wanted = run(linear_log_prob, case, inputs)
        before = stats().compiles
        for name, result in run(compiled, case, inputs).items():
            assert_same_bits(result, wanted[name], name)
        assert stats().compiles == before
    another = Case(300, 264, 64, temperature=1.3)
    for what, case in (("at another temperature", another), ("with logits kept", replace(another, keep=True))):
        wanted = run(linear_log_prob, case, inputs)
        for name, result in run(compiled, case, inputs).items():
            assert_same_bits(result, wanted[name], f"{name} {what}")


def test_a_gradient_that_is_negated_lazily(generator):
    """One token: the imaginary part of a conjugate, whose sign is not in memory."""
    case = Case(1, 264, 64)
    inputs = make_inputs(case, generator)
    wanted = run(linear_log_prob, case, inputs)
    lazy = [torch.complex(t, -t).conj().imag for t in (inputs.g, inputs.h)]
    assert all(t.is_neg() and t.is_contiguous() for t in lazy)
    for name, result in run(linear_log_prob, case, replace(inputs, g=lazy[0], h=lazy[1])).items():
        assert_same_bits(result, wanted[name], name)


def test_opcheck(generator):
    """Every call that a forward and a backward make: the schema names what is written, fakes and functionalisation."""
    case = Case(40, 264, 64)
    inputs = make_inputs(case, generator)
    wanted = run(linear_log_prob, case, inputs)
    with Recorder() as recorder:
        found = run(linear_log_prob, case, inputs)
    for name, result in wanted.items():
        assert_same_bits(found[name], result, name)
    assert [function for function, _ in recorder.calls] == [log_prob_forward.registered, log_prob_backward.registered]
    for function, arguments in recorder.calls:
        torch.library.opcheck(function, arguments)


def test_another_number_of_tokens_compiles_nothing(generator):
    """Forward: within a kernel's class, and for another vocabulary and width. The backward's products are mm's."""

    def forward(m, v, k):
        inputs = make_inputs(Case(m, v, k), generator)
        linear_log_prob(inputs.x, inputs.weight, inputs.target)

    for m in (7, 100, 300):
        forward(m, 264, 64)
    before = stats().compiles
    for sizes in ((9, 1000, 128), (64, 77, 8), (127, 264, 64), (1000, 520, 72), (20000, 264, 64)):
        forward(*sizes)
    assert stats().compiles == before


# Behaviour that the CPU does not show


def test_graph(generator):
    """Forward and backward captured, and replayed on other values: eager mode's bits."""
    case = Case(300, 5000, 136)
    inputs = make_inputs(case, generator)
    run(linear_log_prob, case, inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(linear_log_prob, case, inputs)
    other = make_inputs(case, generator)
    with torch.no_grad():
        for name in ("x", "weight", "target", "g", "h"):
            getattr(inputs, name).copy_(getattr(other, name))
    graph.replay()
    for name, result in run(linear_log_prob, case, other).items():
        assert_same_bits(found[name], result, name)


def test_no_logits_in_memory(generator):
    """At 4096 tokens of 65,536 columns, bf16: logits would be 512 MiB; what is there beside results is 216 at most."""
    case = Case(4096, 65536, 512, entropy=False)
    inputs = make_inputs(case, generator)
    run(linear_log_prob, case, inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(linear_log_prob, case, inputs)
    results = 2 * 512 * (4096 + 65536)
    assert torch.cuda.max_memory_allocated() - before - results <= 216 * 2**20


def test_a_thousand_repeats(generator):
    case = Case(300, 1033, 200)
    inputs = make_inputs(case, generator)
    wanted = run(linear_log_prob, case, inputs)
    for _ in range(1000):
        found = run(linear_log_prob, case, inputs)
        assert all(torch.equal(found[name], result) for name, result in wanted.items())


def test_what_no_target_of_32_bits_is(generator):
    """2^32 is 0 in 32 bits."""
    case = Case(4, 40, 64, index=torch.int32)
    inputs = make_inputs(case, generator)
    inputs.target.zero_()
    log_prob, _ = linear_log_prob(inputs.x, inputs.weight, inputs.target, ignore_index=2**32)
    assert (log_prob < 0).all() and torch.autograd.grad(log_prob.sum(), inputs.x)[0].any()


PROGRAM = """
import torch
from cute_kernels import linear_log_prob, provenance
from cute_kernels.log_prob import launch
from cute_kernels.runtime import launches
target_of = launches.target_of
launches.target_of = lambda index: target_of(index)._replace(num_sms=2)
launch.GRADIENT_COLUMNS, launch.GRADIENT_ELEMENTS = 256, 1
for m in (13, 70, 264):
    x = torch.randn(m, 72, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(393, 72, device="cuda").bfloat16().requires_grad_()
    target = torch.randint(-1, 393, (m,), device="cuda")
    log_prob, entropy = linear_log_prob(x, weight, target, ignore_index=-1)
    (log_prob + entropy).sum().backward()
torch.cuda.synchronize()
print("done")
"""


@needs_sanitizer
@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool):
    run(linear_log_prob, Case(300, 264, 72), make_inputs(Case(300, 264, 72), torch.Generator("cuda")))
    assert_clean(tool, PROGRAM, "log_prob")
