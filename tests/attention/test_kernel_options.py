"""Window, softcap and sinks on a GPU, of each head size."""

import itertools
import math

import pytest
import torch

from cute_kernels.attention import reference
from cute_kernels.attention.config import (
    FORWARD_CONFIGS,
    HEAD_SIZES,
    ForwardConfig,
    ForwardSpec,
    configs_for,
    forward_config,
    grid_for,
    window_bounds,
)
from cute_kernels.attention.launch.forward import ForwardLaunch
from cute_kernels.runtime.targets import target_of
from tests.attention.cases import BF16, FP16, SPLIT, Case, Inputs, exact, make_inputs, rms
from tests.attention.on_gpu import HOPPER, assert_same, forward_job, run
from tests.precompiled import precompile

pytestmark = HOPPER
HEADS = pytest.mark.parametrize("sizes", HEAD_SIZES, ids=str)
SINKS = torch.tensor([0.0, 3.0, -5.0, 40.0])
WINDOWS = [(0, 0), (5, 0), (127, 0), (128, 0), (130, 40), (None, 3), (1000, None), (SPLIT + 10, 0), (0, 700)]
OPTIONS = [
    *({"window": w} for w in WINDOWS),
    {"causal": True, "window": (200, None)},
    {"causal": True, "sinks": SINKS},
    {"window": (300, 0), "sinks": SINKS},
    {"softcap": 5.0},
    {"causal": True, "softcap": 5.0},
    {"window": (700, 10), "softcap": 20.0, "sinks": SINKS},
]
OWN_ROWS = [OPTIONS[3], OPTIONS[7], *OPTIONS[-5:]]
FEW = [OPTIONS[2], *OPTIONS[-5:]]  # each kernel once
MOST = (64, 64), (128, 128)  # head sizes with all options and configs; others with each kernel that a call takes
SIZES_AND_OPTIONS = [(sizes, options, BF16) for sizes in HEAD_SIZES for options in (OPTIONS if sizes in MOST else FEW)]
SIZES_AND_OPTIONS += [((128, 128), options, FP16) for options in FEW]


def on_cuda(options: dict) -> dict:
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def spec_of(options: dict, sizes: tuple[int, int], dtype: torch.dtype = BF16) -> ForwardSpec:
    left, right = window_bounds(options.get("causal", False), options.get("window"))
    window = max(left, 0) < 2**29 or 0 < right < 2**29
    flags = window, bool(options.get("softcap")), "sinks" in options
    return ForwardSpec(dtype, sizes[0], right == 0 and not window, sizes[1], *flags)


def case_of(sizes: tuple[int, int], len_q: int, len_k: int, causal: bool = False, dtype: torch.dtype = BF16) -> Case:
    return Case(2, len_q, len_k, 4, 2, sizes[0], causal, dtype, sizes[1])


@pytest.fixture(scope="module", autouse=True)
def precompiled():
    specs = [spec_of(options, sizes, dtype) for sizes, options, dtype in SIZES_AND_OPTIONS]
    specs += [
        ForwardSpec(BF16, d, causal, dv, sinks=sinks)
        for d, dv in HEAD_SIZES
        for causal in (False, True)
        for sinks in (False, True)
    ]
    own = [spec_of(options, sizes) for options in OWN_ROWS for sizes in HEAD_SIZES]
    jobs = [(spec, config) for spec in own for config in configs_of(spec)]
    precompile([forward_job(spec, config) for spec, config in dict.fromkeys([*((s, None) for s in specs), *jobs])])


def configs_of(spec: ForwardSpec) -> tuple[ForwardConfig, ...]:
    return FORWARD_CONFIGS[spec.sizes] if spec.sizes in MOST else configs_for("sm_90a", spec)


@pytest.mark.parametrize(("sizes", "options", "dtype"), SIZES_AND_OPTIONS, ids=str)
def test_is_the_contract_within_rounding(sizes, options, dtype, generator):
    options, split = on_cuda(options), grid_for(*sizes).split
    for len_q, len_k in ((300, 300), (70, 2 * split + 77), (split + 200, split + 200), (200, 90), (1, 1)):
        case = case_of(sizes, len_q, len_k, options.get("causal", False), dtype)
        inputs = make_inputs(case, generator)
        wanted = reference.kv_grid(*inputs, **options)
        full, of_rows = reference.attention(*(t.double() for t in inputs), **options, return_lse=True)
        out, lse = run(inputs, **options)
        assert not out.isnan().any(), f"{case}: {out.isnan().nonzero()[0].tolist()}"
        # tanh is the hardware's: 2^-11
        slack = 2.0 if options.get("softcap") else 0.5
        error, limit = rms(out.double() - wanted.out.double()), rms(full - wanted.out.double())
        assert error <= slack * limit + 1e-9, f"{case}: {error:.2e}, {limit:.2e}"
        empty = of_rows == -math.inf
        assert torch.equal(lse == -math.inf, empty), case
        tolerance = 2e-2 if options.get("softcap") else 1e-5
        torch.testing.assert_close(lse[~empty].double(), of_rows[~empty], atol=tolerance, rtol=1e-5)


@HEADS
def test_options_that_do_nothing(sizes, generator):
    """T14: a window of all keys, no softcap, sinks of -inf."""
    lengths = (300, 300), (70, grid_for(*sizes).split + 77), (200, 90)
    for causal, (len_q, len_k) in itertools.product((False, True), lengths):
        inputs = make_inputs(case_of(sizes, len_q, len_k, causal), generator)
        wanted = run(inputs, causal)
        for options in (
            {"window": (len_k, 0 if causal else len_q + len_k)},
            {"window": (2**31, None), "softcap": 0.0},
            {"sinks": torch.full((4,), -math.inf, device="cuda")},
        ):
            assert_same(run(inputs, causal, **options), wanted)


@HEADS
@pytest.mark.parametrize("options", OWN_ROWS, ids=str)
def test_rows_are_their_own(options, sizes, generator):
    """T1, T2, T5, T10 to T12: chunks, batch, place, heads, configs, CTAs."""
    options, (block, split) = on_cuda(options), grid_for(*sizes)
    length = 2 * split + 77
    inputs = make_inputs(case_of(sizes, length, length), generator)
    wanted = run(inputs, **options)
    one = run(Inputs(*(t[1:] for t in inputs)), **options)
    assert_same(one, tuple(t[1:] for t in wanted))
    repeated = Inputs(inputs.q, *(t.repeat_interleave(2, 2) for t in inputs[1:]))
    assert_same(run(repeated, **options), wanted)
    if options.get("causal") or (options.get("window") or (0, 1))[1] == 0:
        cuts = [0, 1, 65, 300, split - 1, split + 1, split + block, 2 * split, length]
        for first, last in zip(cuts, cuts[1:], strict=False):
            found = run(Inputs(inputs.q[:, first:last], *(t[:, :last] for t in inputs[1:])), **options)
            assert_same(found, (wanted[0][:, first:last], wanted[1][..., first:last]))
    spec = spec_of(options, sizes)
    left, right = window_bounds(options.get("causal", False), options.get("window"))
    for config in configs_of(spec):
        launch = ForwardLaunch.of(target_of(0), spec, config)
        for num_sms in (1, 50) if config == forward_config(spec) else (132,):
            found = torch.full_like(wanted[0], math.nan), torch.full_like(wanted[1], math.nan)
            sinks = options.get("sinks")
            launch._replace(num_sms=num_sms).run(
                *inputs, *found, sizes[0] ** -0.5, left, right, options.get("softcap", 0.0), sinks
            )
            assert_same(found, wanted)


def test_every_config_of_long_windows(generator):
    """Of several splits, which begin and end in any block of one."""
    length, left = 4 * SPLIT + 300, 2 * SPLIT - 1
    inputs = make_inputs(case_of((128, 128), length, length), generator)
    wanted = run(inputs, window=(left, 0))
    spec = spec_of({"window": (left, 0)}, (128, 128))
    for config in configs_of(spec):
        found = torch.full_like(wanted[0], math.nan), torch.full_like(wanted[1], math.nan)
        ForwardLaunch.of(target_of(0), spec, config).run(*inputs, *found, 128**-0.5, left, 0)
        assert_same(found, wanted)


def test_large_sinks(generator):
    """Beyond what an exponential holds."""
    inputs = make_inputs(Case(1, 200, 200, 4, 2, 64), generator)
    sinks = torch.tensor([200.0, 1e4, -1e4, 88.0], device="cuda")
    wanted, of_rows = exact(Case(1, 200, 200, 4, 2, 64), inputs, sinks=sinks)
    out, lse = run(inputs, True, sinks=sinks)
    torch.testing.assert_close(out.double(), wanted, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), of_rows, atol=1e-5, rtol=1e-5)
    assert_same(run(inputs, True, sinks=sinks.repeat_interleave(2)[::2]), (out, lse))
