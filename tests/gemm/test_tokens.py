"""The choice for 17 to 512 tokens: what it waits for, who gets it, and that other calls get what they got."""

import itertools
import random

from cute_kernels.common.gemm_config import SHARED_MEMORY, GemmConfig
from cute_kernels.gemm.config import EPILOGUE_K, candidates, choose
from cute_kernels.gemm.config_tokens import FEWEST, MOST, SOME_TOKENS, choose_for_tokens, estimate

PAIR = GemmConfig((64, 128, 64), (1, 2), 9, 1), True


def random_shapes(count: int) -> list[tuple[int, int, int]]:
    """Tokens, weights, K: none of them listed anywhere."""
    draw = random.Random(55)
    return [(draw.randint(FEWEST, MOST), 8 * draw.randint(64, 20000), 64 * draw.randint(8, 450)) for _ in range(count)]


def test_rows_beyond_the_end_cost_more_than_rows():
    """A single tile has some, a CTA's share of it nothing else; two tiles overlap instead."""
    times = [estimate(PAIR, tokens, 4096, 14336, 132) for tokens in (65, 80, 96, 112, 128)]
    assert times == sorted(times, reverse=True) and times[0] > 1.2 * times[-1]
    assert estimate(PAIR, 129, 4096, 14336, 132) < 1.05 * estimate(PAIR, 128, 4096, 14336, 132)


def test_tiles_fit_the_tokens():
    """Rows beyond the tokens' end are at most as many as the tokens, of shapes that nobody listed, too."""
    for tokens, weights, k in random_shapes(400):
        config, along_n = choose_for_tokens(tokens, weights, k, 132)
        tile = config.tile[1] if along_n else config.tile[0]
        assert tile - tokens <= max(47, tokens), (tokens, weights, k)


def test_more_work_takes_no_less_time():
    """Twice the weights or twice the K."""
    for (tokens, weights, k), kernel in itertools.product(random_shapes(20), SOME_TOKENS):
        time = estimate(kernel, tokens, weights, k, 132)
        assert estimate(kernel, tokens, 2 * weights, k, 132) >= time
        assert estimate(kernel, tokens, weights, 2 * k, 132) > time


def test_kernels_fit():
    assert len(set(SOME_TOKENS)) == len(SOME_TOKENS)
    for config, along_n in SOME_TOKENS:
        assert config.ring_bytes <= SHARED_MEMORY and config.stages > 1
        assert along_n or config.stores_by_tma("sm_90a", False)


def test_tokens_may_be_either_operand():
    for tokens, weights, k in random_shapes(50):
        if tokens != weights:
            config, transposed = choose("sm_90a", tokens, weights, k, 132)
            assert choose("sm_90a", weights, tokens, k, 132) == (config, not transposed)
            parts = 2 * 64 * (128 if config.ping_pong else config.tile[0])
            staged = config.stores_by_tma("sm_90a", False)  # of both, one is stored so
            assert config.ring_bytes + staged * parts <= SHARED_MEMORY
            assert (config, transposed) == choose_for_tokens(tokens, weights, k, 132)


def test_who_gets_it():
    """Both operands along k, K in whole blocks, no batch; more than 256 tokens if their sums are only stored."""
    estimated = {config for config, _ in SOME_TOKENS}
    shape = 160, 4096, 14336
    for tokens, (_, weights, k) in itertools.product((FEWEST, 33, 160, MOST), random_shapes(20)):
        for epilogue in EPILOGUE_K:
            chosen = choose_for_tokens(tokens, weights, k, 132, epilogue == "activate")
            gets = epilogue == "store" or epilogue == "activate" and tokens <= 256
            found = choose("sm_90a", tokens, weights, k, 132, epilogue)
            assert not gets or found == chosen
    others = [("sm_100a", *shape, 148), ("sm_90a", *shape, 132, "store", 2), ("sm_90a", *shape, 132, "accumulate")]
    others += [("sm_90a", *shape, 132, "store", 1, False), ("sm_90a", 160, 4096, 14344, 132)]
    assert choose("sm_90a", *shape, 132)[0] in estimated <= set(candidates("sm_90a"))
    assert all(choose(*call) == PAIR for call in others)


def test_other_calls_get_what_they_got():
    """Up to 16 tokens and more than 512: as before this choice."""
    found = [choose("sm_90a", *shape, 132) for shape in ((1, 1024, 4096), (16, 4096, 14336), (16, 12288, 4096))]
    assert [(config.tile, along_n) for config, along_n in found] == [
        ((16, 8, 256), True),
        ((64, 16, 256), True),
        ((64, 16, 256), True),
    ]
    found = [choose("sm_90a", *shape, 132)[0] for shape in ((513, 4096, 4096), (2048, 2048, 2048), (4096, 14336, 4096))]
    assert [(config.tile, config.cluster, config.ping_pong) for config in found] == [
        ((128, 192, 64), (2, 1), False),
        ((128, 256, 64), (2, 1), False),
        ((128, 160, 64), (2, 1), True),
    ]
