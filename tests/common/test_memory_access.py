"""By their PTX: when kernels begin to read and to write, and which ask L2 to make room first for what they read."""

import re

import pytest

from cute_kernels.common.cache_hints import EVICT_FIRST, EVICT_LAST, EVICT_NORMAL, LAST_BYTES
from tests.marks import first_of
from tests.mhc.test_compile import BUILDERS, BY_WARPGROUPS
from tests.ptx import compile_in, kernels_in, left_to_ptxas

pytestmark = pytest.mark.exhaustive  # a kernel or two of each builder is compiled again, for its PTX

BULK_LOAD = re.compile(r"cp\.async\.bulk\.\S*shared::\w+\.global\S*")
CHOICE = re.compile(rf"selp\.b64\s+(?P<policy>\S+), {EVICT_FIRST}, {EVICT_NORMAL}, (?P<condition>%p\d+);")

# The PTX of a kernel or two of each builder, named after it
PROGRAM = """
import pathlib
import torch
from cute_kernels.gemm.config import DECODE_32
from cute_kernels.gemm.kernel import gemm
from cute_kernels.reduction import prewarm
from tests.mhc import cases as mhc_cases
from tests.mxfp8 import cases as mxfp8_cases
from tests.norm import cases as norm_cases
from tests.reduction import cases as reduction_cases
from tests.gemm.test_compile import arguments
from tests.mhc.test_compile import BY_WARPGROUPS, jobs_of

case, eight = mhc_cases.Case(4, 1280), mhc_cases.Case(8, 512)
jobs = [
    *norm_cases.kernels_of([norm_cases.Case("rms", 1024)], {arch!r}),
    *mxfp8_cases.kernels_of([mxfp8_cases.Case("rowwise", (96, 160))], {arch!r}),
    *jobs_of({arch!r}, ("projection", case), ("pre", case), ("expand_combine", case)),
    (gemm, arguments({arch!r}, (DECODE_32, True))),
]
off_16_bytes, with_bias = mhc_cases.Case(4, 1281), mhc_cases.Case(4, 1280, bias=True)
wgrad = dict(out=torch.float32, a_major="m", b_major="n", accumulate=True, has_valid_k=True)
others = [
    (gemm, arguments({arch!r}, (None, False))),
    (gemm, arguments({arch!r}, (DECODE_32, False), **wgrad)),
    *norm_cases.kernels_of([norm_cases.Case("layer", 16384)], {arch!r}),
    *reduction_cases.kernels_of([reduction_cases.SoftmaxCase("log_softmax", n) for n in (100, 32768)], {arch!r}),
    *{{job[0].__name__: job for job in prewarm.specializations({arch!r}) if "sum" in job[0].__name__}}.values(),
    *jobs_of({arch!r}, *[(op, case) for op in ("sinkhorn", "head", "aggregate", "expand")]),
    *jobs_of({arch!r}, ("projection", off_16_bytes), ("expand_combine", with_bias)),
    *[job for job in jobs_of({arch!r}, ("hyper_connection", eight)) if job[0].__name__ in BY_WARPGROUPS],
]
for index, (builder, arguments) in enumerate(dict.fromkeys([*jobs, *others])):
    assert builder.obtain(*arguments).origin == "compiled"
    name = builder.__name__ + "_mixes" * (builder.__name__ == "pre_forward" and arguments[1].constants is not None)
    name = name if (builder, arguments) in jobs else f"other_{{name}}"
    for path in pathlib.Path.cwd().glob("*.ptx"):
        path.rename(f"{{name}}.{{index}}.text")
"""
# Builder -> when its loads make room first. A case's rows of x are of 5120 bf16, a norm's of 1024, a tile of 128 x 128
LAST_TOKENS = ("<=", LAST_BYTES // (2 * 5120))
CHOOSE = {
    "gemm": ("==", 1),
    "norm_forward": ("<=", LAST_BYTES // (2 * 1024)),
    "norm_backward": ("<=", LAST_BYTES // (2 * 1024)),
    "mxfp8_quantize": ("<=", LAST_BYTES // (128 * 128)),
    "pre_forward": (">", LAST_TOKENS[1]),
    "projection_backward": LAST_TOKENS,
    "expand_combine_forward": LAST_TOKENS,
    "expand_combine_backward": LAST_TOKENS,
}


def conditions(ptx: str) -> set[tuple[str, int]]:
    """For each choice between the two priorities: how an integer must compare to which constant for evict_first."""
    found, lines = set(), ptx.splitlines()
    for at, line in enumerate(lines):
        if choice := CHOICE.search(line):
            defined = next(before for before in reversed(lines[:at]) if re.search(rf"\t{choice['condition']},", before))
            how, constant = re.search(r"setp\.(\w+)\.\w+\s.*, (-?\d+);", defined).groups()
            sign = {"lt": ("<=", -1), "le": ("<=", 0), "gt": (">", 0), "ge": (">", -1), "eq": ("==", 0)}[how]
            found.add((sign[0], int(constant) + sign[1]))
    return found


@pytest.fixture(scope="module", params=first_of(["sm_90a", "sm_100a"]))
def texts(request, tmp_path_factory) -> dict[str, str]:
    """Name and number of each of PROGRAM's kernels -> its PTX."""
    folder = tmp_path_factory.mktemp(request.param)
    compile_in(folder, PROGRAM.format(arch=request.param))
    return {path.stem: path.read_text() for path in folder.glob("*.text")}


def test_who_chooses_a_priority_and_when(texts):
    found = {name.split(".")[0]: text for name, text in texts.items() if not name.startswith("other")}
    assert set(found) > {*CHOOSE, "pre_forward_mixes"}
    for load in BULK_LOAD.findall("".join(found.values())):
        assert "L2::cache_hint" in load
    for name, text in found.items():
        assert conditions(text) == ({CHOOSE[name]} if name in CHOOSE else set()), name
        assert name not in CHOOSE or "L2::cache_hint" in text


def test_sums_that_are_read_again_stay(texts):
    """The projection's backward writes its partial sums of dphi with evict_last, a quantizer its scales: other CTAs
    complete their sectors. Nothing else has a policy."""
    hinted = re.compile(r"st\.global\S*L2::cache_hint\S*\s[^;]*, (?P<policy>%rd\d+|\d+);")
    for name, text in texts.items():
        policies = {match["policy"] for match in hinted.finditer(text)}
        if name.startswith(("projection_backward.", "mxfp8_quantize.")):
            assert policies, name
            for policy in policies - {str(EVICT_LAST)}:
                assert re.search(rf"mov\.b64\s+{policy}, {EVICT_LAST};", text), name
        elif "projection_backward" not in name and "mxfp8_quantize" not in name:
            assert not policies, name


def test_no_sum_of_a_product_is_left_to_ptxas(texts):
    """Its choice depends on what is around; kernels that differ there must agree bit by bit."""
    found = {name: left_to_ptxas(text) for name, text in texts.items()}
    assert not {name: (len(lines), lines[:3]) for name, lines in found.items() if lines}


REMOTE_ARRIVAL = re.compile(r"mbarrier\.arrive\S*\.shared::cluster\S*")


def test_arrivals_at_other_ctas_have_the_clusters_scope(texts):
    """But for those of the DSL's pipelines (gemm), which order what the tensor cores read by its having been read."""
    found = {name: set(REMOTE_ARRIVAL.findall(text)) for name, text in texts.items() if "gemm" not in name}
    for name, arrivals in found.items():
        assert arrivals <= {"mbarrier.arrive.relaxed.cluster.shared::cluster.b64"}, name
        assert not arrivals or "fence.release.sync_restrict::shared::cta.cluster" in texts[name], name
    of_pairs = {name.removeprefix("other_").partition(".")[0] for name, arrivals in found.items() if arrivals}
    assert of_pairs == (BY_WARPGROUPS if any("sm_90a" in text for text in texts.values()) else set())


def test_all_wait_for_the_kernel_before(texts):
    """Before they touch memory or let the next one begin: they may be launched while that one still runs.

    A kernel that has ended has so seen the end of all before it.
    """
    state_space = r"(\w+\.)*global|(v[24]\.)?[busf]\d"  # none: any
    touches = re.compile(rf"\b(ld|st|red|atom)\.({state_space})|cp\.(async|reduce)|multimem|\bldu\b")
    kernels = [(name, kernel) for name, text in texts.items() for kernel in text.split(".entry ")[1:]]
    builders = {name.removeprefix("other_").partition(".")[0] for name in texts}
    of_sm90 = BY_WARPGROUPS if any("sm_90a" in text for text in texts.values()) else set()
    assert builders >= BUILDERS - BY_WARPGROUPS | of_sm90 | {"gemm", "mxfp8_quantize", "mxfp8_dequantize"}
    assert builders >= {
        "norm_forward",
        "norm_backward",
        "softmax_forward",
        "softmax_backward",
        "row_sums",
        "column_sums",
    }
    for name, kernel in kernels:
        waits, touched = kernel.find("griddepcontrol.wait"), [match.start() for match in touches.finditer(kernel)]
        if "phi_gradient" in name and "SumRows" in kernel.partition("(")[0]:
            assert waits > max(touched)  # what it adds was there when the kernel before began: it only ends after it
            continue
        assert 0 < waits < min(touched), name
        assert "griddepcontrol.launch_dependents" not in kernel[:waits], name


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("arch", first_of(["sm_90a", "sm_100a"]))
def test_of_a_product_the_weights_make_room(arch, transposed, tmp_path):
    """A step asks for operand A, then for B; the weights are A where the product is computed transposed."""
    program = f"""
from cute_kernels.gemm.config import DECODE_32
from cute_kernels.gemm.kernel import gemm
from tests.gemm.test_compile import arguments
assert gemm.obtain(*arguments({arch!r}, (DECODE_32, {transposed}))).origin == "compiled"
"""
    compile_in(tmp_path, program)
    (kernel,) = kernels_in(tmp_path)
    policies = [line.split()[-1].rstrip(";") for line in kernel.splitlines() if BULK_LOAD.search(line)]
    chosen = CHOICE.search(kernel)["policy"]
    assert (policies[0] == chosen, policies[-1] == chosen) == (transposed, not transposed)
