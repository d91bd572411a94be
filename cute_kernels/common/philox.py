"""Philox-4x32-10: random words that are a function of a key and a counter, so that a mask can be made again.

Source: Salmon, Moraes, Dror and Shaw, Parallel Random Numbers: As Easy as 1, 2, 3, 2011.
"""

from cutlass import Uint32, Uint64

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(counter0: Uint32, counter1: Uint32, seed: Uint64) -> list[Uint32]:
    """Four random words for the counter (counter0, counter1, 0, 0) under the key ``seed``."""
    words = [counter0, counter1, Uint32(0), Uint32(0)]
    keys = [Uint32(seed), Uint32(seed >> Uint64(32))]
    for _ in range(ROUNDS):
        products = [Uint64(words[2 * i]) * Uint64(MULTIPLIERS[i]) for i in range(2)]
        high, low = [Uint32(p >> Uint64(32)) for p in products], [Uint32(p) for p in products]
        words = [high[1] ^ words[1] ^ keys[0], low[1], high[0] ^ words[3] ^ keys[1], low[0]]
        keys = [keys[i] + Uint32(KEY_STEPS[i]) for i in range(2)]
    return words
