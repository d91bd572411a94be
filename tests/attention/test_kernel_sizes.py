"""Head sizes other than 64 and 128 on a GPU."""

import math

import pytest
import torch
import torch.nn.functional as F

from cute_kernels.attention import reference
from cute_kernels.attention.config import FORWARD_CONFIGS, ForwardSpec, grid_for, kernel_sizes
from cute_kernels.attention.launch.forward import ForwardLaunch
from cute_kernels.runtime.targets import target_of
from tests.attention.cases import BF16, Case, Inputs, exact, make_inputs, make_packed, rms
from tests.attention.on_gpu import HOPPER, assert_same, forward_job, run, torch_error
from tests.precompiled import precompile

pytestmark = HOPPER
SIZES = pytest.mark.parametrize("sizes", [(96, 96), (192, 128), (192, 192), (256, 256)], ids=str)
PADDED = [(72, 72), (8, 8), (80, 24), (64, 128), (136, 128), (160, 40), (200, 136), (128, 192), (248, 256)]


@pytest.fixture(scope="module", autouse=True)
def precompiled():
    jobs = []
    for sizes in ((96, 96), (192, 128), (192, 192), (256, 256)):
        spec = ForwardSpec(BF16, sizes[0], True, sizes[1])
        jobs += [
            forward_job(spec._replace(causal=causal), config)
            for causal in (True, False)
            for config in FORWARD_CONFIGS[sizes]
        ]
        others = {"packed_q": True, "packed_k": True}, {"padded": True}
        jobs += [forward_job(spec._replace(**other)) for other in others]
    jobs += [
        forward_job(ForwardSpec(BF16, 80, causal, 80, padded=padded), config)
        for causal in (True, False)
        for padded in (True, False)
        for config in FORWARD_CONFIGS[80, 80]
    ]
    jobs += [
        forward_job(ForwardSpec(BF16, 96, False, 96, **{flag: True}), config)
        for flag in ("padded", "softcap", "sinks", "used_k")
        for config in FORWARD_CONFIGS[96, 96]
    ]
    precompile([*jobs, *(forward_job(ForwardSpec(BF16, d, True, d, padded=True)) for d in (64, 128))])


def inputs_of(sizes, len_q, len_k, causal, generator, batch=2):
    d, dv = sizes
    case = Case(batch, len_q, len_k, 4, 2, d, causal, BF16, dv)
    return case, make_inputs(case, generator)


@SIZES
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_is_the_contract_within_rounding(causal, sizes, generator):
    block, split = grid_for(*sizes)
    for len_q, len_k in ((1, 1), (100, 100), (300, block + 1), (130, split + 1), (70, 2 * split + 300), (90, 40)):
        case, inputs = inputs_of(sizes, len_q, len_k, causal, generator)
        wanted = reference.kv_grid(*inputs, causal=causal)
        full, of_rows = exact(case, inputs)
        out, lse = run(inputs, causal)
        error, limit = rms(out.double() - wanted.out.double()), rms(full - wanted.out.double())
        assert error <= 0.5 * limit + 1e-9, f"{case}: {error:.2e}, {limit:.2e}"
        empty = of_rows == -math.inf
        assert torch.equal(lse == -math.inf, empty), case
        torch.testing.assert_close(lse[~empty].double(), of_rows[~empty], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head_size", [96, 192, 256])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_error(causal, head_size, generator):
    """No more than 1.2 times that of the best of torch's own, which have one size for q and v."""
    for length in (64, 200, 1000):
        case, inputs = inputs_of((head_size, head_size), length, length, causal, generator)
        wanted, _ = exact(case, inputs)
        error = rms(run(inputs, causal)[0].double() - wanted)
        limit = torch_error(inputs, wanted, causal)
        assert error <= 1.2 * limit + 1e-9, f"{case}: {error:.3e}, torch {limit:.3e}"


@SIZES
@pytest.mark.parametrize("number", range(max(map(len, FORWARD_CONFIGS.values()))), ids="config_{}".format)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_every_config_and_number_of_ctas(causal, number, sizes, generator):
    """T10, T11."""
    if number >= len(FORWARD_CONFIGS[sizes]):
        pytest.skip("there are fewer configs")
    config = FORWARD_CONFIGS[sizes][number]
    _, split = grid_for(*sizes)
    several = 2 * split + 77, 3 * split + 300
    for len_q, len_k in (*zip(several, several, strict=True), (65, 300), (300, 65)):
        _, inputs = inputs_of(sizes, len_q, len_k, causal, generator)
        wanted = run(inputs, causal)
        launch = ForwardLaunch.of(target_of(0), ForwardSpec(BF16, sizes[0], causal, sizes[1]), config)
        for num_sms in (3, 66, 132) if number == 0 else (13, 132):
            found = torch.full_like(wanted[0], math.nan), torch.full_like(wanted[1], math.nan)
            launch._replace(num_sms=num_sms).run(*inputs, *found, sizes[0] ** -0.5)
            assert_same(found, wanted)


@pytest.mark.parametrize("flags", [{"padded": True}, {"softcap": True}, {"sinks": True}, {"used_k": True}], ids=str)
def test_full_rows_of_every_config_of_96_channels(flags, generator):
    head_size, split = 88 if "padded" in flags else 96, grid_for(96).split
    options = {"softcap": 5.0} if "softcap" in flags else {}
    if "sinks" in flags:
        options["sinks"] = torch.tensor([0.0, 3.0, -5.0, 40.0], device="cuda")
    for len_q, len_k in ((2 * split + 77, 2 * split + 77), (65, 300), (300, split + 65)):
        _, inputs = inputs_of((head_size, head_size), len_q, len_k, False, generator)
        if "used_k" in flags:
            options["seqused_k"] = torch.tensor([len_k - 70, len_k], dtype=torch.int32, device="cuda")
        wanted = run(inputs, False, **options)
        for config in FORWARD_CONFIGS[96, 96]:
            found = torch.full_like(wanted[0], math.nan), torch.full_like(wanted[1], math.nan)
            launch = ForwardLaunch.of(target_of(0), ForwardSpec(BF16, 96, False, 96, **flags), config)
            launch.run(*inputs, *found, head_size**-0.5, **options)
            assert_same(found, wanted)


@pytest.mark.parametrize("head_size", [72, 80])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_kernels_of_80_channels_have_the_bits_of_96(causal, head_size, generator):
    _, split = grid_for(80)
    for len_q, len_k in ((2 * split + 77, 2 * split + 77), (65, 300), (300, 65)):
        _, inputs = inputs_of((head_size, head_size), len_q, len_k, causal, generator)
        wanted = run(inputs, causal)
        spec = ForwardSpec(BF16, 80, causal, 80, padded=head_size != 80)
        for config in FORWARD_CONFIGS[80, 80]:
            found = torch.full_like(wanted[0], math.nan), torch.full_like(wanted[1], math.nan)
            ForwardLaunch.of(target_of(0), spec, config).run(*inputs, *found, head_size**-0.5)
            assert_same(found, wanted)


@SIZES
def test_chunks_batches_and_packing(sizes, generator):
    _, split = grid_for(*sizes)
    length = split + 200
    _, inputs = inputs_of(sizes, length, length, True, generator)
    out, lse = run(inputs, True)
    assert_same(run(Inputs(*(t[1:] for t in inputs)), True), (out[1:], lse[1:]))
    cuts = [0, 1, 65, split - 1, split + 1, length]
    for first, last in zip(cuts, cuts[1:], strict=False):
        found = run(Inputs(inputs.q[:, first:last], *(t[:, :last] for t in inputs[1:])), True)
        assert_same(found, (out[:, first:last], lse[..., first:last]))
    tensors, lengths = make_packed(
        Case(1, 1, 1, 4, 2, sizes[0], True, BF16, sizes[1]), (70, 0, 330), (90, 3, 330), generator
    )
    packed, of_packed = run(tensors, True, **lengths)
    for rows, keys in ((slice(0, 70), slice(0, 90)), (slice(70, 400), slice(93, 423))):
        one = run(Inputs(tensors.q[None, rows], *(t[None, keys] for t in tensors[1:])), True)
        assert_same((packed[None, rows], of_packed[None, :, rows]), one)
    poisoned = Inputs(*(t.clone() for t in tensors))
    for t in poisoned:
        t[93:] = math.nan
    again = run(poisoned, True, **lengths)
    assert_same((again[0][:70], again[1][:, :70]), (packed[:70], of_packed[:, :70]))


@pytest.mark.parametrize("sizes", PADDED, ids=str)
def test_sizes_between_run_as_the_next_larger(sizes, generator):
    d, dv = sizes
    case, inputs = inputs_of(sizes, 200, 300, True, generator)
    out, lse = run(inputs, True)
    wanted, of_rows = exact(case, inputs)
    assert rms(out.double() - wanted) <= 2.5 * rms(wanted.to(BF16).double() - wanted)
    torch.testing.assert_close(lse.double(), of_rows, atol=1e-5, rtol=1e-5)
    wide_d, wide_dv = kernel_sizes(d, dv)
    wide = Inputs(*(F.pad(t, (0, n - t.shape[3])) for t, n in zip(inputs, (wide_d, wide_d, wide_dv), strict=True)))
    found = run(wide, True, scale=d**-0.5)
    assert_same((found[0][..., :dv], found[1]), (out, lse))
    memory = torch.full((2, 200, 4, dv + 8), 7.0, dtype=BF16, device="cuda")
    assert_same(run(inputs, True, out=memory[..., :dv]), (out, lse))
    assert (memory[..., dv:] == 7).all()
