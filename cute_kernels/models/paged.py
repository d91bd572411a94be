"""``attention`` in transformers' continuous batching, under the name "paged|cute_kernels".

A forward has the new tokens of all requests in one row: prompts, chunks of them and single tokens. A layer's keys lie
in blocks of transformers' PagedAttentionCache. Of full attention all are there, and the blocks are the pages of
``attention_with_kv_cache``, which appends the new keys. Of a sliding window the last ones are there, which the cache
returns, one request behind the other; they are copied to pages, so that each has its place in its sequence's splits.

The interfaces are those of transformers 5.17.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cute_kernels.attention import attention, attention_with_kv_cache
from cute_kernels.models.attention import NAME, SPLIT, check_options, options_of
from cute_kernels.runtime.checks import expect

PAGED_NAME = f"paged|{NAME}"
PLACES = "_cute_kernels_places"  # the attribute of a cache that has the ``Places`` of its groups of layers
WINDOW_PAGE = 16  # keys of a page that a window's keys are copied to


class Places(NamedTuple):
    """Where the keys of N requests are in a forward.

    Args:
        lengths: (N,) int32: keys of each request in pages: of full attention those before the forward; of a window all.
        page_table: (N, pages) int32.
        columns: of a window, which of the keys that the cache returns stands at each place of the pages.
    """

    lengths: Tensor
    page_table: Tensor
    columns: Tensor | None = None


def attend_paged(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | dict[str, Tensor] | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int | dict[str, int] = 0,
    read_index: list[Tensor] | None = None,
    write_index: list[Tensor] | None = None,
    position_ids: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """(1, tokens, H, D) of query (1, H, tokens, D), key and value (1, Hkv, tokens, D) of a forward's requests."""
    batching = cache is not None and cu_seq_lens_q is not None and attention_mask is None
    expect(batching, PAGED_NAME, "the forward", "be one of transformers' continuous batching", "another")
    check_options(PAGED_NAME, dropout, position_bias)
    group, layer = cache.layer_index_to_group_indices[module.layer_idx]
    is_window = cache.sliding_windows[module.layer_idx] > 1
    expect(not is_window or sliding_window is not None, PAGED_NAME, "sliding_window", "be the cache's", None)
    if isinstance(cu_seq_lens_k, dict):
        kind = "sliding_attention" if is_window else "full_attention"
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k[kind], max_seqlen_k[kind]  # type: ignore[index]
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    options = options_of(True, scaling, sliding_window, softcap, s_aux)
    options |= {"cu_seqlens_q": cu_seq_lens_q, "max_seqlen_q": max_seqlen_q}
    read = read_index[group]  # type: ignore[index]
    # Where latents were expanded, heads of keys and of values differ, and the cache has the larger size for both
    caches = [cache.key_cache[layer][..., : k.shape[-1]], cache.value_cache[layer][..., : v.shape[-1]]]
    for kept, new in zip(caches, (k, v), strict=True):
        wanted, got = tuple(new.shape[1:]), tuple(kept.shape[1:])
        expect(
            wanted == got, PAGED_NAME, "the cache", f"have heads of {wanted}, as models.generate_batch makes it", got
        )
    if not read.numel():
        for kept, new in zip(caches, (k, v), strict=True):
            kept.index_copy_(0, write_index[group], new)  # type: ignore[index]
        options |= {"cu_seqlens_k": cu_seq_lens_k, "max_seqlen_k": max_seqlen_k}
        return attention(q, k, v, **options).unsqueeze(0), None
    if is_window:  # all keys of one request after the other
        k, v = cache.update(key, value, module.layer_idx, read_index=read_index, write_index=write_index)
    found = cache.__dict__.setdefault(PLACES, {})
    if layer == 0:  # those of the group behind it are the same
        starts = cu_seq_lens_q, cu_seq_lens_k
        if is_window:
            found[group] = window_places(*starts, max_seqlen_k, position_ids, len(k))  # type: ignore[arg-type]
        else:
            found[group] = block_places(*starts, max_seqlen_k, read, cache.block_size)  # type: ignore[arg-type]
    places = found[group]
    options |= {"cache_seqlens": places.lengths, "page_table": places.page_table}
    if is_window:
        pages = [t[places.columns].unflatten(0, (-1, WINDOW_PAGE)) for t in (k, v)]
    else:
        pages = [t.unflatten(0, (-1, cache.block_size)) for t in caches]
        options |= {"k": k, "v": v, "max_seqlen_k": max_seqlen_k}
    return attention_with_kv_cache(q, *pages, **options).unsqueeze(0), None


def block_places(starts: Tensor, starts_k: Tensor, longest: int, read: Tensor, block_size: int) -> Places:
    """Places of keys in a cache's blocks, whose numbers ``read`` has, at which place each key is in the cache."""
    lengths = starts_k.diff() - starts.diff()
    of_blocks = torch.arange(0, longest, block_size, device=read.device)
    first = (starts_k[:-1, None] + of_blocks).clamp(max=len(read) - 1)  # key of each block
    return Places(lengths, (read[first] // block_size).to(torch.int32))


def window_places(
    starts: Tensor, starts_k: Tensor, longest: int, positions: Tensor, count: int, split: int = SPLIT
) -> Places:
    """Places in pages for ``count`` keys of requests one after the other, whose first keys the cache has dropped.

    Whole splits of them are left out, which no query sees; in the place of the rest are others, which no query sees
    either.
    """
    device, keys = starts.device, starts_k.diff()
    first = positions[0][starts[:-1].clamp(max=positions.shape[1] - 1)] + starts.diff() - keys  # position of its key
    skipped = first.clamp(min=0) % split
    rest = skipped % WINDOW_PAGE
    ends = ((rest + keys + WINDOW_PAGE - 1) // WINDOW_PAGE).cumsum(0)  # pages of the requests up to each
    begins = torch.nn.functional.pad(ends[:-1], (1, 0))
    num_pages = (count + 2 * (WINDOW_PAGE - 1) * len(keys)) // WINDOW_PAGE
    page = torch.arange(num_pages, device=device)
    request = torch.searchsorted(ends, page, right=True).clamp(max=len(keys) - 1)
    places = (page - begins[request]).unsqueeze(1) * WINDOW_PAGE + torch.arange(WINDOW_PAGE, device=device)
    columns = places - rest[request].unsqueeze(1)
    columns = torch.minimum(columns.clamp(min=0), keys[request].unsqueeze(1) - 1) + starts_k[request].unsqueeze(1)
    of_request = torch.arange(-(-(longest + split - 1) // WINDOW_PAGE), device=device)
    table = begins.unsqueeze(1) + of_request - (skipped // WINDOW_PAGE).unsqueeze(1)
    table = table.clamp(0, num_pages - 1).to(torch.int32)
    return Places((skipped + keys).to(torch.int32), table, columns.flatten().clamp(0, count - 1))
