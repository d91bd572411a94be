"""bench_attention on the CPU: providers against its own truth, what is counted."""

import re

import pytest
import torch

from bench import bench_attention, forward_backward
from bench.bench_attention import Attention, Product
from cute_kernels.attention.config import FORWARD_CONFIGS, ForwardSpec
from tests.bench.test_harness import FakeDevice
from tests.fakes import fake_kernels


def test_cases():
    names = [case.case(d).name for case in bench_attention.attentions() for d in case.directions]
    assert len(set(names)) == len(names) == 2 * 3 * 6 + 3 + 2 + 2 + 2 + 1 + 3
    quick = {case.case(d).name for case in bench_attention.attentions(quick=True) for d in case.directions}
    assert quick < set(names)
    assert bench_attention.every_case()[0].case("fwd").name == "mm.fwd.8192x8192x8192.bfloat16.limit"


def test_what_is_counted():
    full, causal = (Attention(2, 100, 4, 2, 64, variant).case("fwd") for variant in ("full", "causal"))
    assert full.flops == 2 * causal.flops == 4 * 2 * 4 * 100 * 100 * 64
    assert full.bytes == 2 * 100 * 64 * 2 * (4 + 2 + 2 + 4)
    window = Attention(1, 300, 4, 2, 64, "window128_sinks")
    assert window.seen_keys(300) == 300 * 128 - 128 * 128 // 2 and window.seen_keys(10) == 50
    assert Attention(1, 300, 4, 2, 192, "causal", 128).case("fwd").flops == 2 * 4 * 300 * 150 * (192 + 128)


def test_packed_lengths():
    lengths = bench_attention.packed_lengths(16384)
    assert sum(lengths) == 16384 and len(lengths) > 5 and max(lengths) <= 8192


def test_parts():
    """The filters that the module names take every case once, the product each time."""
    parts = re.findall(r"'([^']*\|mm)'", bench_attention.__doc__)
    names = forward_backward.names(bench_attention.every_case())
    taken = [name for part in parts for name in names if re.search(part, name) and not name.startswith("mm")]
    assert sorted(taken) == sorted(names[1:]) and len(parts) == 5


def test_a_product_is_a_case():
    (found,) = bench_attention.measure_attention(
        Product(64), ["fwd"], ["torch"], FakeDevice(), repetitions=3, breakdown=False
    )
    assert found.failures == {} and set(found.results) == {"torch"} and found.case.flops == 2 * 64**3


def test_which_cases_have_a_price_of_splits():
    specs = {bench_attention.spec_of_one_split(case) for case in bench_attention.attentions()} - {None}
    assert specs == {ForwardSpec(torch.bfloat16, d, causal, d) for d in (64, 128, 256) for causal in (False, True)} | {
        ForwardSpec(torch.bfloat16, 96, causal, 96) for causal in (False, True)
    } | {ForwardSpec(torch.bfloat16, 192, True, 128)}


@pytest.mark.parametrize("variant", ["causal", "full", "packed", "window128_sinks"])
def test_providers_are_right(variant):
    batch, length = (1, 300) if variant == "packed" else (2, 140)
    case, providers = Attention(batch, length, 4, 2, 64, variant), ["cute_kernels", "torch"]
    providers += ["torch_flex"] if variant in ("causal", "full") else []
    (found,) = bench_attention.measure_attention(
        case, case.directions, providers, FakeDevice(), repetitions=3, breakdown=False
    )
    assert found.failures == {} and set(found.results) == set(providers)


@pytest.mark.parametrize("head_size", [80, 96])
def test_providers_of_configs(head_size):
    """Each runs the kernel of its own config; those of 80 channels are behind those of 96."""
    case, providers = Attention(1, 70, 2, 1, head_size, "causal"), ["torch", *(f"config_{i}" for i in range(5))]
    with fake_kernels("sm_90a") as jobs:
        (found,) = bench_attention.measure_attention(
            case, case.directions, providers, FakeDevice(), repetitions=3, breakdown=False
        )
    wanted = [((96, 96), config) for config in FORWARD_CONFIGS[96, 96]]
    wanted += [((80, 80), config) for config in FORWARD_CONFIGS[80, 80]] if head_size == 80 else []
    assert found.failures == {} and set(found.results) == set(providers[: 1 + len(wanted)])
    assert [(spec.sizes, config) for _, (_, spec, config) in jobs] == wanted
