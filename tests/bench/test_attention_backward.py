"""bench_attention_backward on the CPU: providers against its own truth, what is counted."""

import pytest
import torch

from bench import bench_attention, bench_attention_backward, harness
from bench.bench_attention_backward import AttentionBackward
from cute_kernels.attention.config import BACKWARD_CONFIGS
from tests.bench.test_harness import FakeDevice
from tests.fakes import fake_kernels


def test_cases():
    names = [case.case(d).name for case in bench_attention_backward.backwards() for d in case.directions]
    assert len(set(names)) == len(names) == len(bench_attention.attentions()) + 4
    assert all(".bwd." in name for name in names)


def test_what_is_counted():
    full, causal = (AttentionBackward(2, 100, 4, 2, 64, variant).case("bwd") for variant in ("full", "causal"))
    assert full.flops == 2 * causal.flops == 10 * 2 * 4 * 100 * 100 * 64
    assert full.bytes == 2 * (2 * 2 * (4 + 2) * 100 * 64 * 2)


@pytest.mark.parametrize("variant", ["causal", "full"])
def test_providers_are_right(variant):
    case, providers = AttentionBackward(2, 70, 4, 2, 64, variant), ["cute_kernels", "torch"]
    (found,) = bench_attention_backward.measure_attention(
        case, case.directions, providers, FakeDevice(), repetitions=3, breakdown=False
    )
    assert found.failures == {} and set(found.results) == set(providers)


def test_providers_of_configs():
    """Each runs the kernels of its own config, the others those of the chosen one."""
    case, providers = AttentionBackward(1, 64, 2, 1, 128, "full"), ["cute_kernels", "config_2", "config_3", "torch"]
    with fake_kernels("sm_90a") as jobs:
        (found,) = bench_attention_backward.measure_attention(
            case, case.directions, providers, FakeDevice(), repetitions=3, breakdown=False
        )
    assert found.failures == {} and set(found.results) == set(providers)
    configs = [arguments[2] for builder, arguments in jobs if builder.__name__ == "backward_sm90"]
    assert configs == [BACKWARD_CONFIGS[128, 128][i] for i in (0, 2, 3)]
    case = AttentionBackward(1, 70, 2, 1, 256, "full")
    missing = len(BACKWARD_CONFIGS[256, 256])
    assert (
        bench_attention_backward.with_config(missing, case, bench_attention_backward.make_inputs(case, "cpu")) is None
    )


def test_flex_attention_keeps_what_its_backward_reads(monkeypatch):
    """Also where nobody has imported the module of the option yet: packed rows had no reference."""
    from torch._functorch import config

    monkeypatch.delattr(torch._functorch, "config")
    case = AttentionBackward(1, 70, 4, 2, 64, "packed")
    with config.patch(donated_buffer=True):
        bench_attention.PROVIDERS["torch"](case, bench_attention_backward.make_inputs(case, "cpu"))
        assert not config.donated_buffer


@pytest.mark.parametrize(
    "case",
    [
        AttentionBackward(2, 70, 4, 2, 64, "window128_sinks"),
        AttentionBackward(2, 70, 4, 2, 64, "window4096"),
        AttentionBackward(1, 70, 4, 2, 64, "packed"),
        AttentionBackward(2, 70, 2, 2, 192, "causal", 128),
    ],
    ids=lambda case: case.case("bwd").name,
)
def test_the_truth_is_ours(case, monkeypatch):
    """Torch has no backward of flex_attention on a CPU."""
    monkeypatch.setattr(bench_attention, "WINDOWS", {"window128_sinks": 20, "window4096": 50})
    monkeypatch.setattr(bench_attention, "packed_lengths", lambda tokens: [30, 17, tokens - 47])
    inputs = bench_attention_backward.make_inputs(case, "cpu")
    _, backward = bench_attention_backward.PROVIDERS["cute_kernels"](case, inputs)
    truth = bench_attention_backward.fp64_truth(case, inputs)["bwd"]
    for found, wanted in zip(backward()(), truth.values(), strict=True):
        found = bench_attention_backward.first_group(case, found)
        assert found.shape == wanted.shape and harness.relative_rms(found, wanted) < 0.01
