"""The fake of sampling's kernel."""

from cute_kernels.sampling import reference
from cute_kernels.sampling.config import MAX_COLUMNS, Numbers, cluster_for


def sample_rows(static, logits, seeds, positions, tokens, scale, noisy, top_k, top_p, log_min_p) -> None:
    spec, numbers = static["spec"], Numbers(bool(noisy), scale, top_k, top_p, log_min_p)
    assert spec.cluster == cluster_for(logits.shape[1], logits.itemsize, spec.filtered)
    assert logits.shape[1] % spec.vec == 0
    assert spec.filtered == numbers.filters and 1 <= top_k <= MAX_COLUMNS and 0 <= top_p < 2**24 + 1
    tokens.copy_(reference.tokens_of(logits, seeds, positions, numbers))
