"""``attention`` in models of the transformers package, under the name "cute_kernels".

transformers makes a mask once a forward and gives it to each layer's attention, together with keys and values as its
cache returns them. Ours says where a sequence's keys are among these columns, so that each sequence is attended to with
its own keys at places 0, 1, 2, ...: then padding, other sequences, a cache's free places and keys that a window's cache
has dropped change no bit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cute_kernels.attention import attention, attention_with_kv_cache
from cute_kernels.attention.config import grid_for
from cute_kernels.runtime.autograd import autocasts
from cute_kernels.runtime.checks import expect
from cute_kernels.runtime.operators import differentiates

NAME = "cute_kernels"
PAGES = "_cute_kernels_pages"  # the attribute by which keys of a PagedCache name their layer
SPLIT = grid_for(256).split  # keys, a multiple of every head size's split
# The parts of transformers' mask functions that are known here, by what they are called there
CAUSAL, BIDIRECTIONAL = "causal_mask_function", "bidirectional_mask_function"
WINDOW, PACKED = "sliding_window_overlay.<locals>.inner_mask", "packed_sequence_mask_function.<locals>.inner_mask"
BOTH = "and_masks.<locals>.and_mask"


def register_transformers() -> None:
    """Make ``attention`` known to transformers, version 5, as the attention implementation "cute_kernels".

    Then ``from_pretrained(..., attn_implementation="cute_kernels")``, or ``model.set_attn_implementation`` later on,
    has each layer call it. Known are: causal and bidirectional attention, sliding windows of causal attention, a
    softcap, sinks (``s_aux``), the config's scaling; padding on either side, by a 2-D ``attention_mask``; packed
    sequences, by ``cu_seq_lens_q`` and its relatives or by ``position_ids`` that begin again (gpt_oss, as of 5.17, does
    not look at these itself: give it the former); dynamic and static caches, those of sliding windows, too. Under
    ``"paged|cute_kernels"`` it is the attention of transformers' continuous batching (``generate_batch``), in blocks of
    16, 32, 64 or a multiple of 128 tokens; for the keys of deepseek_v3 only ``models.generate_batch`` makes room there.
    Calling it again changes nothing.

    A forward raises ValueError for masks of other kinds (4-D tensors, chunks, blocks, functions of the user's), for
    padding within a sequence, padding of packed sequences, dropout and position biases.

    Returns:
        None.

    Raises:
        ImportError: transformers is not installed, or older.

    Numerics:
        A token's result has the bits that its own sequence gives it: in a batch or alone, padded left, right or not,
        in one forward or token by token through a cache. The rest of a model has to keep them, too:
        ``batch_invariant`` is for that. Padded places hold anything.

        Padding on the left, and a window's cache that has dropped keys, cost a copy of keys and values in each layer;
        whether there is padding is asked once a forward, for which the host waits.

    Example:
        >>> from importlib.util import find_spec
        >>> from cute_kernels.models import register_transformers
        >>> if find_spec("transformers"):
        ...     register_transformers()
        ...     # model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="cute_kernels")
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    from cute_kernels.models.paged import PAGED_NAME, attend_paged

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    AttentionInterface.register(PAGED_NAME, attend_paged)  # of this name transformers makes no mask


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """(B, S, H, D) of query (B, H, S, D), key and value (B, Hkv, L, D), and ``mask``'s result; no weights."""
    check_options(NAME, dropout, position_bias, output_attentions)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    options = options_of(causal, scaling, sliding_window, softcap, s_aux)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if autocasts(q):  # rotary embeddings have made fp32 of queries and keys
        q, k, v = (t.to(torch.get_autocast_dtype(q.device.type)) for t in (q, k, v))
    pages = getattr(key, PAGES, None)
    if pages is not None:
        packed = cu_seq_lens_q is not None or (attention_mask is not None and _is_packed(attention_mask))
        expect(not packed, NAME, "packed sequences", "come without a PagedCache", "one")
        expect(causal, NAME, "is_causal", "be true with a PagedCache", causal)
        return pages.attend(q, k, v, _expect_keys(attention_mask), options), None
    starts = (cu_seq_lens_q, cu_seq_lens_k)
    if cu_seq_lens_q is not None:
        good = attention_mask is None or _is_packed(attention_mask)
        expect(good, NAME, "attention_mask", "be None with cu_seq_lens_q: packed rows have no padding", "both")
        lengths = (max_length_q, max_length_k)
    elif attention_mask is not None and _is_packed(attention_mask):
        starts, lengths = (attention_mask.flatten(),) * 2, (q.shape[1],) * 2
    else:
        return _attend_keys(q, k, v, attention_mask, options), None
    options |= {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
    options |= {"max_seqlen_q": lengths[0], "max_seqlen_k": lengths[1]}
    return attention(*(t.flatten(0, 1) for t in (q, k, v)), **options).unflatten(0, q.shape[:2]), None


def check_options(
    name: str, dropout: float, position_bias: Tensor | None = None, output_attentions: bool = False
) -> None:
    """Raise ValueError for what no kernel has."""
    for option, value, good in (
        ("dropout", dropout, not dropout),
        ("position_bias", "a tensor", position_bias is None),
        ("output_attentions", output_attentions, not output_attentions),
    ):
        expect(good, name, option, "be absent: the kernels have none", value)


def options_of(
    causal: bool, scaling: float | None, sliding_window: int | None, softcap: float | None, s_aux: Tensor | None
) -> dict[str, Any]:
    """``attention``'s names of transformers' options."""
    options: dict[str, Any] = {"causal": causal, "scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    if sliding_window is not None:
        expect(causal, NAME, "sliding_window", "be None without a causal mask", sliding_window)
        options["window"] = (sliding_window - 1, None)
    return options


def _attend_keys(q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, options: dict[str, Any]) -> Tensor:
    """Attention of sequences whose keys are where ``mask`` says."""
    count = None
    if _expect_keys(keys) is not None and keys.shape[3] == 1:
        count = keys.view(-1)
    elif keys is not None:
        count, columns = keys[:, 0, 0, 0].contiguous(), keys[:, 0, 0, 1:]
        rows = torch.arange(len(columns), device=columns.device).unsqueeze(1)
        k, v = k[rows, columns], v[rows, columns]
    elif q.shape[1] != k.shape[1]:
        count = torch.full((len(k),), k.shape[1], dtype=torch.int32, device=k.device)
    if count is None or differentiates(q, k, v):
        return attention(q, k, v, seqused_k=count, **options)
    return attention_with_kv_cache(q, k, v, cache_seqlens=count, **options)  # fast for few queries, too


def _expect_keys(keys: Tensor | None) -> Tensor | None:
    """Raise ValueError unless it is ``mask``'s, and no mask of the user's."""
    if keys is not None:
        good = keys.dim() == 4 and keys.dtype is torch.int32
        expect(good, NAME, "attention_mask", "be 2-D, (batch, tokens)", f"{keys.dtype} of shape {tuple(keys.shape)}")
    return keys


def _is_packed(found: Tensor) -> bool:
    return found.dim() == 4 and found.dtype is torch.int32 and found.shape[2] > 1


@torch.compiler.disable(reason="the host asks where sequences begin and end")  # once a forward: layers compile whole
def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    use_vmap: bool = False,
    **_: Any,
) -> Tensor | None:
    """Where the keys of each sequence are, among the columns of the tensors of keys that the layers will get.

    None: each sequence's are all columns, in order, from its first one. Else an int32 tensor of four dimensions, which
    transformers passes on as it is:

    - (B, 1, 1, 1 + L): of each sequence the number of its keys, and the column of each; without columns (L = 0) they
      are the first ones. Of a window's cache, which has dropped the first keys, a multiple of SPLIT of them are
      left out, which no query sees; in the place of the rest are others, which no query sees either.
    - (1, 1, N + 1, 1): where N packed sequences begin, and where the last one ends.
    """
    parts = dict(_parts(mask_function)) if mask_function is not None else {CAUSAL: None}
    known = {CAUSAL, BIDIRECTIONAL, WINDOW, PACKED}
    good = not use_vmap and parts.keys() <= known
    expect(good, NAME, "the mask", "be causal or none, of windows or packed", sorted(parts))
    if PACKED in parts:
        starts = _packed(inspect.getclosurevars(parts[PACKED]).nonlocals["packed_sequence_mask"])
        return None if starts.shape[2] == batch_size + 1 else starts  # in a graph transformers does not look
    causal = BIDIRECTIONAL not in parts
    # In places of the whole sequence, which the columns begin ``kv_offset`` behind the first one of
    end = q_offset + q_length if causal else kv_offset + kv_length
    complete = not isinstance(end, Tensor) and end == kv_offset + kv_length
    first: Tensor | int = 0
    if attention_mask is not None:
        begins, ends, padded_left, padded_right = _ends(attention_mask, end)
        if padded_left:
            first = begins
        if padded_right and not causal:  # else no query sees a key behind it
            end, complete = ends, False
    if isinstance(first, int) and not kv_offset:
        return None if complete else _broadcast(end, batch_size, device).view(-1, 1, 1, 1)
    first = _broadcast(first, batch_size, device)
    # Whole splits that the cache has dropped
    skipped = (kv_offset - first).clamp(min=0) // SPLIT * SPLIT
    length = kv_length + min(kv_offset, SPLIT - 1)
    columns = (first + skipped - kv_offset).unsqueeze(1) + torch.arange(length, device=device, dtype=torch.int32)
    count = (end - first - skipped).clamp(min=0).unsqueeze(1)
    return torch.cat([count, columns.clamp(0, kv_length - 1)], 1).to(torch.int32).view(batch_size, 1, 1, 1 + length)


def _parts(mask_function: Callable) -> Iterator[tuple[str, Callable]]:
    """The functions that a mask of transformers is made of, by name."""
    name = mask_function.__qualname__
    if name == BOTH:
        for part in inspect.getclosurevars(mask_function).nonlocals["mask_functions"]:
            yield from _parts(part)
    else:
        yield name, mask_function


def _packed(sequence: Tensor) -> Tensor:
    """(1, 1, N + 1, 1) of (B, S), which sequence of its row each token is in."""
    begins = F.pad(sequence.diff(dim=1) != 0, (1, 0), value=True).flatten()
    starts = begins.nonzero().flatten()
    return F.pad(starts, (0, 1), value=begins.numel()).to(torch.int32).view(1, 1, -1, 1)


def _ends(attention_mask: Tensor, end: int | Tensor) -> tuple[Tensor, Tensor, bool, bool]:
    """(first place, last place + 1) of each sequence's tokens before ``end``; is any padded left, is any right.

    Raises:
        ValueError: tokens of a sequence that do not follow each other.
    """
    here = torch.arange(attention_mask.shape[1], device=attention_mask.device) < end
    real = attention_mask.bool() & here
    count = real.sum(1)
    first = torch.where(count > 0, real.int().argmax(1), end)
    last = first + count
    if torch.compiler.is_compiling():
        return first, last, True, True
    begins = (real[:, 1:] & ~real[:, :-1]).sum(1) + real[:, 0]
    found = torch.stack([(begins > 1).any(), (first > 0).any(), (last < end).any()])
    gaps, padded_left, padded_right = found.tolist()
    expect(not gaps, NAME, "attention_mask", "have no gap between a sequence's tokens", "one that has")
    return first, last, padded_left, padded_right


def _broadcast(place: Tensor | int, batch_size: int, device: torch.device | str) -> Tensor:
    """(B,) int32 of a place, the same for all sequences or one of each."""
    place = torch.as_tensor(place, dtype=torch.int32, device=device)
    return place.expand(batch_size).contiguous()
