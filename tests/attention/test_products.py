"""Products of a group run one after the other without a wait between them, in one kernel of each class."""

import pytest

from cute_kernels.attention.config import (
    BACKWARD_CONFIGS,
    HEAD_SIZES,
    WARPGROUP_ROWS,
    BackwardConfig,
    BackwardSpec,
    DecodeConfig,
    DecodeSpec,
    ForwardSpec,
    backward_block,
    backward_config,
    configs_for,
    forward_config,
    grid_for,
    prefill_spec,
)
from tests.attention.cases import BF16
from tests.marks import half_of
from tests.norm.test_compile import check_record
from tests.sass import exponentials_beside_products, is_serialized, products_of

EVERY = [pytest.mark.slow, pytest.mark.exhaustive]
PACKED = {"packed_q": True, "packed_k": True}


def forward(spec: ForwardSpec):
    from cute_kernels.attention.kernel_forward_sm90 import forward_sm90

    return forward_sm90.obtain("sm_90a", spec, forward_config(spec))


def decode(spec: DecodeSpec, config: DecodeConfig):
    from cute_kernels.attention.kernel_decode_sm90 import decode_sm90

    return decode_sm90.obtain("sm_90a", spec, config)


def backward(spec: BackwardSpec, config: BackwardConfig | None = None):
    from cute_kernels.attention.kernel_backward_sm90 import backward_sm90

    return backward_sm90.obtain("sm_90a", spec, config or backward_config(spec))


def marked(cases: list, quick: list) -> list:
    return [pytest.param(case, marks=() if case in quick else EVERY, id=str(case)) for case in cases]


FORWARD = half_of(
    [
        ForwardSpec(BF16, d, causal, dv, **packing)
        for d, dv in HEAD_SIZES
        for causal in (True, False)
        for packing in ({}, PACKED)
    ]
)
FORWARD += [ForwardSpec(BF16, d, False, dv, window=True, softcap=True, **PACKED) for d, dv in HEAD_SIZES]
MOST_OPTIONS = ForwardSpec(BF16, 64, False, 64, window=True, sinks=True, **PACKED)
FORWARD.append(MOST_OPTIONS)


@pytest.mark.parametrize("spec", marked(FORWARD, [MOST_OPTIONS]))
def test_forward(spec):
    """Products run on, those with v beside the next block's exponentials: a thread has half a block of them."""
    kernel = forward(spec)
    assert not is_serialized(kernel)
    found = exponentials_beside_products(kernel)
    assert found and min(found) >= grid_for(*spec.sizes).block // 2


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", HEAD_SIZES, ids=str)
def test_other_configs_of_the_forward(sizes):
    from cute_kernels.attention.kernel_forward_sm90 import forward_sm90

    spec = ForwardSpec(BF16, sizes[0], True, sizes[1])
    for config in configs_for("sm_90a", spec):
        assert not is_serialized(forward_sm90.obtain("sm_90a", spec, config))


# Neither packed nor in pages, and both: the two change no product
QUICK_DECODE = DecodeSpec(BF16, 128, 128, True, 16)
DECODE = [DecodeSpec(BF16, d, dv, both, 16 if both else 0) for d, dv in HEAD_SIZES for both in (False, True)]


@pytest.mark.parametrize("spec", marked(DECODE, [QUICK_DECODE]))
def test_decode(spec):
    kernel = decode(spec, DecodeConfig(few_rows=True))
    assert not is_serialized(kernel)
    found = exponentials_beside_products(kernel)
    assert found and min(found) >= grid_for(spec.head_size, spec.head_size_v).block // 4


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("spec", DECODE, ids=str)
def test_decode_of_many_rows(spec):
    assert not is_serialized(decode(spec, DecodeConfig()))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("spec", [spec for spec in DECODE if spec.head_size_v <= 192], ids=str)
def test_decode_of_all_splits(spec):
    """In 48 products of 128 channels 48 were waited for; 6 are."""
    kernel = decode(spec, DecodeConfig(sequential=True))
    assert not is_serialized(kernel)
    check_record(kernel.record)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("spec", [spec for spec in DECODE if spec.head_size_v <= 192], ids=str)
def test_chunks_of_a_prompt(spec):
    assert not is_serialized(forward(prefill_spec(spec)))


def backward_spec(sizes: tuple[int, int], causal: bool, grouped: bool, **options) -> BackwardSpec:
    d, dv = sizes
    return BackwardSpec(BF16, d, causal, grouped, head_size_v=0 if d == dv else dv, **options)


BACKWARD = half_of(
    [
        backward_spec(sizes, causal, grouped, window=window, **packing)
        for sizes in BACKWARD_CONFIGS
        for grouped in (False, True)
        for causal, window in ((True, False), (False, False), (False, True))
        for packing in ({}, PACKED)
    ]
)
# One of all sizes, the others of those where registers are scarcest: half of the queries a tile, and 256 channels
RARE = [{"softcap": True, **PACKED}, {"softcap": True}, {"used_k": True}, {"padded": True}]
BACKWARD += [
    backward_spec(sizes, True, True, **options)
    for sizes in BACKWARD_CONFIGS
    for options in (RARE if sizes in ((128, 128), (256, 256)) else RARE[:1])
]
QUICK = [backward_spec(sizes, True, True) for sizes in ((128, 128), (256, 256))]
QUICK.append(backward_spec((128, 128), False, True, window=True, **PACKED))
BACKWARD += [spec for spec in QUICK if spec not in BACKWARD]


def expected_products(spec: BackwardSpec, config: BackwardConfig) -> int:
    """Products of the loop's step, and of the first tile's scores where a step finds those of the next tile."""
    (d, dv), block = spec.sizes, backward_block(spec.head_size)
    ahead = config.scores_ahead or block == WARPGROUP_ROWS
    return (d // 16) * (2 if ahead else 1) + dv // 16 + block // 16 + 2 * config.tile_rows // 16


@pytest.mark.parametrize("spec", marked(BACKWARD, QUICK))
def test_backward(spec):
    kernel = backward(spec)
    assert not is_serialized(kernel)
    assert len(products_of(kernel)) == expected_products(spec, backward_config(spec))
    check_record(kernel.record)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("config", [(s, c) for s, found in BACKWARD_CONFIGS.items() for c in found[1:]], ids=str)
def test_other_configs_of_the_backward(config):
    sizes, config = config
    spec = backward_spec(sizes, True, False)
    kernel = backward(spec, config)
    assert not is_serialized(kernel)
    assert len(products_of(kernel)) == expected_products(spec, config)
