"""Each kernel class compiles once for each architecture, without a GPU.

`make test` compiles these kernels; tests that are marked `exhaustive` compile half of the others for SM90, and a fourth
for SM100.
"""

import importlib
import inspect
import pkgutil

import pytest

import cute_kernels
from cute_kernels.cli.demo import ARCHS, representatives
from cute_kernels.gemm.config import BLOCK
from cute_kernels.gemm.config_grouped import GroupedSpec, sums
from cute_kernels.mxfp8.config import DualConfig
from jit_cache.prewarm import discover
from tests.gemm import test_compile as test_gemm_compile
from tests.mhc import test_compile as test_mhc_compile
from tests.norm.cases import BF16, Case, kernels_of
from tests.norm.test_compile import check_record

FAMILIES = ("attention", "gemm", "log_prob", "mhc", "moe", "mxfp8", "norm", "reduction", "sampling", "scatter")
# By a class's name
ONE_ARCH = {"Sm90": "sm_90a", "Sm100": "sm_100a", "Append": "sm_90a", "QuantizeDual": "sm_90a", "Wgmma": "sm_90a"}


def shipped(family: str, arch: str) -> list:
    return [job for job in discover("cute_kernels", [arch]) if job[0].kernel.startswith(f"cute_kernels.{family}.")]


def others(family: str, arch: str) -> list:
    """Kernels of classes that are not the first of a builder: products by any strides, in turns, transposed, in blocks;
    the quantizers' ring; hyper-connections that the tables do not have; the norms' sums of few, wide rows; filters.
    """
    if family == "gemm":
        from cute_kernels.gemm.kernel import gemm

        first = {}
        for config, transposed in test_gemm_compile.kernels(arch):
            multi_block_tma = config is not None and config.multi_block_tma(arch, ("k", "k"), BLOCK)
            kind = config is None, config is not None and config.ping_pong, transposed, multi_block_tma
            first.setdefault(kind, (config, transposed))
        products = [(gemm, test_gemm_compile.arguments(arch, kernel)) for kernel in first.values()]
        return products + grouped_products(arch)
    if family == "mhc":
        calls = [call for calls in test_mhc_compile.CALLS.values() for call in calls]
        table = {builder for builder, _ in shipped("mhc", arch)}
        return [job for job in representatives(test_mhc_compile.jobs_of(arch, *calls)) if job[0] not in table]
    if family == "mxfp8":
        rings = (job for job in shipped("mxfp8", arch) if any(isinstance(value, DualConfig) for value in job[1]))
        return list(rings)[:1]
    if family == "norm":
        return kernels_of([Case("rms", 262144)], arch)[1:]
    if family == "sampling":
        return [job for job in shipped("sampling", arch) if job[1][1].filtered][:1]
    return []


def grouped_products(arch: str) -> list:
    """By any strides, and sums, beside the rows that the builder's first kernel is of."""
    from cute_kernels.gemm.kernel_grouped import grouped

    of_any = GroupedSpec(BF16, BF16, "rows", a_major=None, b_major=None), None, False, False
    of_sums = GroupedSpec(BF16, BF16, "sums", False, "m", "n"), sums(arch)[0], False, False
    return [(grouped, (arch, *call)) for call in (of_any, of_sums)]


def chosen(family: str, arch: str) -> list:
    return list(dict.fromkeys([*representatives(shipped(family, arch)), *others(family, arch)]))


def kernel_classes(family: str, arch: str) -> set[type]:
    """The classes with a `@cute.kernel`, their own or a base's; norms and products have what all families share."""
    common = {"norm": ("column", "row", "reduce"), "gemm": ("gemm",)}.get(family, ())
    places = (f"cute_kernels.{family}.kernel", *(f"cute_kernels.common.{name}" for name in common))
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(cute_kernels.__path__, "cute_kernels.")
        if found.name.startswith(places)
    ]
    classes = [
        value
        for module in modules
        for value in vars(module).values()
        if inspect.isclass(value) and value.__module__ == module.__name__
    ]
    return {
        found
        for found in classes
        if all(arch == only for part, only in ONE_ARCH.items() if part in found.__name__)
        and any("@cute.kernel" in inspect.getsource(base) for base in found.__mro__ if base.__module__ != "builtins")
    }


def is_of(kernel: dict, found: type) -> bool:
    """Whether a compiled kernel's name says that it is a class's."""
    return f"{found.__module__.replace('.', '')}{found.__name__}_object" in kernel["name"]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_class_compiles(family, arch):
    kernels = []
    for builder, arguments in chosen(family, arch):
        record = builder.obtain(*arguments).record
        assert record["key"]["arch"] == arch
        check_record(record)
        kernels += record["kernels"]
    classes = kernel_classes(family, arch)
    assert classes or not shipped(family, arch)
    assert {found for found in classes if any(is_of(kernel, found) for kernel in kernels)} == classes


@pytest.mark.parametrize("arch", ARCHS)
def test_each_builder_that_is_shipped_is_among_them(arch):
    jobs = [job for family in FAMILIES for job in chosen(family, arch)]
    assert {builder for builder, _ in discover("cute_kernels", [arch])} <= {builder for builder, _ in jobs}
    assert len(jobs) < 100


@pytest.mark.parametrize("family", FAMILIES)
def test_each_kernel_is_shipped_once(family):
    jobs = [job for arch in ARCHS for job in shipped(family, arch)]
    assert jobs and len(set(jobs)) == len(jobs)
