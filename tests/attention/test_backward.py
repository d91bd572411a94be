"""The backward of attention on the CPU: its formulas, its contract, and the kernels' path with fakes of them."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cute_kernels import UnsupportedDeviceError, attention
from cute_kernels.attention import launch, prewarm, reference, reference_backward
from cute_kernels.attention.config import (
    BACKWARD_CONFIGS,
    BACKWARD_L2_BYTES,
    UNBOUNDED,
    BackwardConfig,
    BackwardSpec,
    backward_config,
    backward_heads_together,
    takes_steps_of_80,
)
from cute_kernels.runtime import launches
from cute_kernels.runtime.targets import Target
from tests.attention.cases import (
    BF16,
    FP16,
    Case,
    Inputs,
    gradients_of,
    make_inputs,
    make_packed,
    rms,
    same_bits,
)
from tests.fakes import fake_kernels
from tests.runtime.thread_cases import first_calls

CASES = [
    Case(2, 5, 9, 4, 2, 64),
    Case(1, 70, 200, 2, 1, 128),
    Case(1, 12, 5, 2, 2, 64),
    Case(2, 9, 300, 2, 2, 64, False, FP16),
    Case(1, 130, 130, 6, 2, 128, False),
    Case(1, 70, 130, 2, 1, 192, True, BF16, 128),
    Case(2, 9, 70, 2, 2, 248, False),
]


def exact(case, inputs, dout, dlse=None):
    """Gradients in fp64."""
    wide = [t.double() for t in inputs]
    return gradients_of(
        lambda q, k, v: reference.attention(q, k, v, causal=case.causal, return_lse=True), wide, dout, dlse
    )


def incoming(case, inputs, generator):
    out, lse = reference.attention(*inputs, causal=case.causal, return_lse=True)
    dout = torch.randn(out.shape, generator=generator).to(out.dtype)
    dlse = torch.randn(lse.shape, generator=generator).masked_fill(lse == -math.inf, 0.0)
    return out, lse, dout, dlse


def errors(found, wanted):
    return [rms(a.double() - b) / max(rms(b), 1e-9) for a, b in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_formulas_are_autograds(case, generator):
    inputs = [t.double() for t in make_inputs(case, generator)]
    out, lse, dout, dlse = incoming(case, inputs, generator)
    *found, _ = reference_backward.attention_backward(
        dout, *inputs, out, lse, dlse, case.causal, case.head_size**-0.5
    )  # fmt: skip
    assert max(errors(found, exact(case, inputs, dout, dlse))) < 1e-12


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_contract_is_the_gradient(case, generator):
    """It is what rounding makes of it."""
    inputs = make_inputs(case, generator)
    out, lse, dout, dlse = incoming(case, inputs, generator)
    found = reference_backward.kv_grid_backward(dout, *inputs, out, lse, dlse, causal=case.causal)
    assert max(errors(found, exact(case, inputs, dout, dlse))) < 3 * torch.finfo(case.dtype).eps


def test_the_order_of_blocks_and_of_heads(generator):
    """Sums are added one after the other: causal from the last block of keys down, else up; heads up."""
    inputs = make_inputs(Case(1, 400, 400, 3, 1, 64), generator)
    out, lse, dout, _ = incoming(Case(1, 400, 400, 3, 1, 64), inputs, generator)
    causal = reference_backward.kv_grid_backward(dout, *inputs, out, lse, causal=True)
    part = [t[:, :, :1] for t in (dout, inputs.q)]
    one = reference_backward.kv_grid_backward(*part, *inputs[1:], out[:, :, :1], lse[:, :1], causal=True)
    assert same_bits(one[0], causal[0][:, :, :1])
    assert reference_backward._ascending(torch.tensor([[1e8, 1.0, -1e8]]), 3).item() == 0.0
    assert reference_backward._ascending(torch.tensor([[1e8, -1e8, 1.0]]), 3).item() == 1.0


# ---- the kernels' path


@pytest.fixture
def jobs():
    with fake_kernels() as jobs:
        yield jobs


@pytest.mark.parametrize("through_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case, through_lse, jobs, generator):
    inputs = make_inputs(case, generator)
    _, _, dout, dlse = incoming(case, inputs, generator)
    dlse = dlse if through_lse else None
    found = gradients_of(lambda *t: attention(*t, causal=case.causal, return_lse=True), inputs, dout, dlse)
    assert all(a.dtype is case.dtype and a.is_contiguous() for a in found)
    assert max(errors(found, exact(case, inputs, dout, dlse))) < 4 * torch.finfo(case.dtype).eps


OPTIONS = [
    {"window": (20, 0)},
    {"window": (3, 5)},
    {"causal": True, "softcap": 2.0},
    {"causal": True, "sinks": True},
    {"window": (None, 7), "softcap": 3.0, "sinks": True},
]


def through(call, tensors, sinks, dout, dlse):
    """Gradients of q, k, v and, where there are some, sinks."""
    leaves = (*tensors, sinks) if sinks is not None else tuple(tensors)
    return gradients_of(lambda q, k, v, *rest: call(q, k, v, sinks=rest[0] if rest else None), leaves, dout, dlse)


@pytest.mark.parametrize("lengths", [None, ((70, 0, 33), (200, 5, 33)), "used"], ids=["dense", "packed", "used"])
@pytest.mark.parametrize("sizes", [(64, 64), (96, 72), (160, 40), (192, 128)], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option(options, sizes, lengths, jobs, generator):
    """Against autograd through the reference in fp64. Rows that are no sequence's have no gradient."""
    case, options = Case(2, 70, 200, 4, 2, sizes[0], False, BF16, sizes[1]), dict(options)
    sinks = torch.randn(4, generator=generator) if options.pop("sinks", False) else None
    inputs, places = make_inputs(case, generator), {}
    if lengths == "used":
        places = {"seqused_k": torch.tensor([130, 0], dtype=torch.int32)}
    elif lengths:
        inputs, places = make_packed(case, *lengths, generator)
        inputs = Inputs(*(torch.cat([t, t.new_zeros(5, *t.shape[1:])]) for t in inputs))
    out, lse = reference.attention(*inputs, **options, **places, sinks=sinks, return_lse=True)
    dout = torch.randn(out.shape, generator=generator).to(BF16)
    dlse = torch.randn(lse.shape, generator=generator).masked_fill(lse == -math.inf, 0.0)

    def call(function):
        return lambda q, k, v, sinks: function(q, k, v, sinks=sinks, **options, **places, return_lse=True)

    wide = [t.double() for t in inputs]
    wanted = through(call(reference.attention), wide, None if sinks is None else sinks.double(), dout, dlse)
    found = through(call(attention), inputs, sinks, dout, dlse)
    assert max(errors(found, wanted)) < 0.03
    by_formulas = reference_backward.attention_backward(
        dout.double(),
        *wide,
        *reference.attention(*wide, **options, **places, sinks=sinks, return_lse=True),
        dlse.double(),
        options.get("causal", False),
        sizes[0] ** -0.5,
        *(-1 if distance is None else distance for distance in options.get("window", (-1, -1))),
        options.get("softcap", 0.0),
        sinks,
        **places,
    )
    assert max(errors(by_formulas[: len(wanted)], wanted)) < 1e-6


@pytest.mark.parametrize(
    ("sizes", "filled"),
    [
        *(((128, 64), True), ((160, 128), True), ((192, 64), True), ((200, 192), True), ((80, 96), True)),
        *(((168, 72), False), ((8, 8), False), ((88, 96), False)),
    ],
    ids=str,
)
def test_no_box_of_a_ragged_tensor_is_without_channels(sizes, filled, jobs, generator):
    """Such a box is read outside of memory: packed sequences and used keys come with all channels then."""
    tensors, places = make_packed(Case(1, 1, 1, 2, 1, sizes[0], True, BF16, sizes[1]), (9, 4), (9, 4), generator)
    used = {"seqused_k": torch.tensor([9], dtype=torch.int32)}
    for inputs, options in ((tensors, places), ([t[None] for t in tensors], used), ([t[None] for t in tensors], {})):
        jobs.clear()
        dout = torch.ones(*inputs[0].shape[:-1], sizes[1], dtype=BF16)
        found = gradients_of(lambda *t, options=options: attention(*t, **options), inputs, dout)
        assert all(a.is_contiguous() and a.shape == t.shape for a, t in zip(found, inputs, strict=True))
        padded = {arguments[1].padded for _, arguments in jobs if type(arguments[1]) is BackwardSpec}
        assert padded == {not (filled and options)}


def test_of_lse_alone(jobs, generator):
    case = Case(1, 6, 6, 2, 2, 64)
    inputs = make_inputs(case, generator)
    wanted = exact(case, inputs, None, torch.ones(1, 2, 6))
    found = gradients_of(lambda *t: attention(*t, causal=True, return_lse=True), inputs, None, torch.ones(1, 2, 6))
    assert max(errors(found[:2], wanted[:2])) < 0.02 and (found[2] == 0).all()


def test_gradients_that_nobody_wants(jobs, generator):
    inputs = [t.clone() for t in make_inputs(Case(1, 6, 6, 2, 1, 64), generator)]
    inputs[1].requires_grad_()
    attention(*inputs, causal=True).sum().backward()
    assert inputs[0].grad is None and inputs[2].grad is None and inputs[1].grad.shape == inputs[1].shape


def test_incoming_gradients_of_any_layout(jobs, generator):
    """Expanded, transposed, off 16 bytes, negated lazily."""
    case = Case(2, 6, 6, 2, 2, 64)
    inputs = make_inputs(case, generator)
    dout = torch.randn(2, 6, 2, 64, generator=generator).to(BF16)
    shifted = torch.empty(dout.numel() + 1, dtype=BF16)[1:].view(dout.shape).copy_(dout)
    layouts = [dout.transpose(1, 2).contiguous().transpose(1, 2), shifted, torch._neg_view(-dout)]
    wanted = gradients_of(lambda *t: attention(*t, causal=True), inputs, dout)
    for t in layouts:
        for a, b in zip(gradients_of(lambda *t: attention(*t, causal=True), inputs, t), wanted, strict=True):
            assert same_bits(a, b)
    ones = torch.ones((), dtype=BF16).expand(dout.shape)
    for a, b in zip(
        gradients_of(lambda *t: attention(*t, causal=True), inputs, ones),
        gradients_of(lambda *t: attention(*t, causal=True), inputs, ones.contiguous()),
        strict=True,
    ):
        assert same_bits(a, b)


def test_nothing_to_do(jobs):
    for shape, keys in (((0, 3, 2, 64), 5), ((2, 0, 2, 64), 5), ((2, 3, 2, 64), 0)):
        q = torch.ones(shape, dtype=BF16, requires_grad=True)
        k = torch.ones(shape[0], keys, 2, 64, dtype=BF16, requires_grad=True)
        attention(q, k, k).sum().backward()
        assert (q.grad == 0).all() and (k.grad == 0).all() and k.grad.shape == k.shape
    assert not jobs


def test_no_second_derivative(jobs, generator):
    q, k, v = (t.requires_grad_() for t in make_inputs(Case(1, 4, 4, 1, 1, 64), generator))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)


def test_as_an_operator(jobs, generator):
    """torch.compile goes through forward and backward; both are counted; opcheck passes."""
    case = Case(2, 5, 9, 4, 2, 64)
    inputs = make_inputs(case, generator)
    out, lse, dout, dlse = incoming(case, inputs, generator)

    def call(q, k, v):
        return attention(q, k, v, causal=True, return_lse=True)

    wanted = gradients_of(call, inputs, dout, dlse)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for a, b in zip(gradients_of(compiled, inputs, dout, dlse), wanted, strict=True):
        assert same_bits(a, b)
    with FlopCounterMode(display=False) as counter:
        gradients_of(call, inputs, dout)
    assert counter.get_total_flops() == 7 * 2 * 2 * 4 * 5 * 9 * 64
    packed, lengths = make_packed(Case(1, 5, 9, 4, 2, 64), (2, 3), (4, 5), generator)
    with FlopCounterMode(display=False) as counter:
        gradients_of(lambda q, k, v: attention(q, k, v, **lengths), packed, dout[0, :5])
    assert counter.get_total_flops() == 7 * 2 * 5 * 4 * (9 // 2) * 64
    arguments = (dout, *inputs, out, lse, dlse, True, 0.125)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(launch.attention_backward.registered, arguments, test_utils=checks)


def test_threads_that_make_the_first_call_together(jobs, generator):
    inputs = make_inputs(Case(2, 5, 9, 4, 2), generator)
    first_calls((lambda q, k, v: attention(q, k, v, causal=True), tuple(inputs)), True)


def test_a_gpu_without_kernels(jobs, generator, monkeypatch):
    monkeypatch.setattr(launches, "target_of", lambda index: Target("sm_100a", 148))
    inputs = make_inputs(Case(1, 2, 2, 1, 1, 64), generator)
    with pytest.raises(UnsupportedDeviceError, match="attention: has a backward for compute"):
        launch.attention_backward(inputs.q, *inputs, inputs.q, torch.zeros(1, 1, 2), None, True, 0.1)


def test_heads_that_fit_into_the_cache_come_together():
    def together(head_size, len_q, group, left=UNBOUNDED, right=UNBOUNDED):
        return backward_heads_together(head_size, 2, len_q, group, left, right)

    assert together(128, 1024, 4) == 4 * (BACKWARD_L2_BYTES // (1024 * 128 * 8) // 4) > 4
    assert together(128, 2**20, 4) == 4 and together(64, 1, 3) % 3 == 0
    assert together(64, 2**20, 8, 128, 0) == together(64, 256, 8) == 128  # a window: the rows that see a block
    assert together(64, 2**20, 8, UNBOUNDED, 0) == 8 and together(64, 100, 8, 128, 0) == together(64, 100, 8)


@pytest.mark.parametrize("choices", [{"adders": 3, "dq_parts": 2}, {"adders": 1}], ids=str)
def test_buffers_fit_their_adders(choices):
    with pytest.raises(ValueError, match="expected a buffer for each adder"):
        BackwardConfig(64, 2, **choices)


def test_which_sequences_take_steps_of_80():
    """Their last step is not full: 512 queries take seven of 80, or eight of 64."""
    spec = BackwardSpec(BF16, 128, True, False)
    assert [n for n in (64, 160, 500, 512, 1024, 8192) if takes_steps_of_80(spec, n)] == [160, 1024, 8192]
    others = {"window": True}, {"softcap": True}, {"packed_q": True}, {"used_k": True}, {"padded": True}
    assert not any(takes_steps_of_80(spec._replace(**other), 8192) for other in others)
    assert not any(takes_steps_of_80(spec._replace(head_size=d), 8192) for d in (64, 96, 256))
    rows = [backward_config(spec._replace(steps_of_80=many)).tile_rows for many in (False, True)]
    assert rows == [64, 80]


def test_the_config_follows_from_head_sizes_and_the_mask():
    jobs = [arguments[1:] for _, arguments in prewarm.specializations("sm_90a") if type(arguments[1]) is BackwardSpec]
    found = {}
    for spec, _ in jobs:
        found.setdefault((spec.sizes, spec.causal, spec.window, spec.steps_of_80), set()).add(backward_config(spec))
    assert all(len(configs) == 1 for configs in found.values())
    every = [config for found in BACKWARD_CONFIGS.values() for config in found]
    assert all(config.padded_rows % config.tile_rows == 0 for config in every)
    assert all(1 <= config.adders <= 2 for config in every)  # a warp each beside the one that loads
