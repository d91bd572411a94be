"""PagedCache: a transformers cache whose keys and values lie in pages, which ``attention_with_kv_cache`` reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from cute_kernels.attention import attention_with_kv_cache
from cute_kernels.models.attention import NAME, PAGES
from cute_kernels.runtime.checks import expect, expect_int, expect_tensor, fail

OP = "PagedCache"
PAGE_SIZES = 16, 32, 64  # and multiples of 128


class PagedLayer(CacheLayerMixin):
    """One layer's keys and values, (pages, page size, heads of keys, D); page j of sequence b is page j B + b."""

    is_croppable = True
    is_sliding = False  # a window's keys stay

    def __init__(self, pages: int, page_size: int) -> None:
        super().__init__()
        self.pages, self.page_size = pages, page_size
        self.columns = 0  # of the inputs so far, padding among them
        self.unread = False  # whether keys came that ``attend`` has not seen
        self.is_full = False  # whether columns are those of all pages, whatever comes

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        batch = key_states.shape[0]
        count = self.pages // batch * batch
        self.keys, self.values = (
            t.new_empty(count, self.page_size, t.shape[1], t.shape[3]) for t in (key_states, value_states)
        )
        self._begin(batch, torch.zeros(batch, dtype=torch.int32, device=self.device))
        self.is_initialized = True

    def _begin(self, batch: int, lengths: Tensor) -> None:
        """Begin with ``batch`` sequences that have ``lengths`` keys, and distribute the pages among them."""
        self.batch_size, self.lengths = batch, lengths
        pages = torch.arange(len(self.keys), dtype=torch.int32, device=self.device)
        self.page_table = pages.view(-1, batch).t().contiguous()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new keys and values, by which ``attend`` finds this layer; it appends them."""
        if self.unread:
            raise RuntimeError(f"{OP}: keys of the forward before were not attended to by {NAME!r}; reset the cache")
        batch, _, new, _ = key_states.shape
        before = self.batch_size if self.is_initialized else batch
        expect(batch == before, OP, "the batch", f"have {before} sequences, as before", batch)
        expect(self.pages >= batch, OP, "pages", f"be at least {batch}, one for each sequence", self.pages)
        needed = -(-(self.columns + (0 if self.is_full else new)) // self.page_size) * batch
        count = self.pages // batch * batch
        expect(needed <= count, OP, "pages", f"be at least {needed}", count)
        self.unread = True
        key_states = key_states.view_as(key_states)  # a tensor of its own, to be told by its attribute
        setattr(key_states, PAGES, self)
        return key_states, value_states

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        """Append keys and values (B, S, heads of keys, D), and attend to all; of left padding nothing is kept."""
        if not self.is_initialized:  # here the keys have the size that attention sees, of latent ones, too
            self.lazy_initialization(k.transpose(1, 2), v.transpose(1, 2))
        for name, new_ones, kept in (("keys", k, self.keys), ("values", v, self.values)):
            if new_ones.shape[2:] != kept.shape[2:]:
                heads, size = kept.shape[2:]
                expected = f"have {heads} heads of {size}, as before: a cache is one model's"
                fail(OP, name, expected, " heads of ".join(map(str, new_ones.shape[2:])))
        self.unread = False
        new = q.shape[1]
        self.columns += 0 if self.is_full else new
        if mask is None or new == 1:
            out = self._attend(q, k, v, options)
            self.lengths += new
            return out
        kept = mask[:, 0, 0, 0] - self.lengths  # of the new tokens of each sequence; padding is before them
        padding, places = (new - kept).unsqueeze(1), torch.arange(new, device=q.device)
        rows = torch.arange(len(q), device=q.device).unsqueeze(1)
        q, k, v = (t[rows, (places + padding).clamp(max=new - 1)] for t in (q, k, v))
        out = self._attend(q, k, v, options)
        self.lengths += kept
        return out[rows, (places - padding).clamp(min=0)]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        lengths = {"cache_seqlens": self.lengths, "page_table": self.page_table, "max_seqlen_k": self.columns}
        return attention_with_kv_cache(q, self.keys, self.values, k=k, v=v, **lengths, **options)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return len(self.page_table[0]) * self.page_size if self.is_initialized else -1

    def reset(self) -> None:
        self.columns, self.unread, self.is_full = 0, False, False
        if self.is_initialized:
            self.lengths.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        expect_int(OP, "tokens_to_remove", tokens_to_remove)
        expect(tokens_to_remove <= 0, OP, "tokens_to_remove", "be a negative number of tokens", tokens_to_remove)
        expect(-tokens_to_remove <= self.columns, OP, "tokens_to_remove", f"leave {self.columns}", tokens_to_remove)
        if self.is_initialized:
            self.columns += tokens_to_remove
            self.lengths.add_(tokens_to_remove).clamp_(min=0)

    def select(self, rows: Tensor) -> None:
        """Sequence i becomes what sequence ``rows[i]`` was, with pages of its own."""
        if not self.is_initialized:
            return
        rows = rows.to(self.device)
        self.keys, self.values = (
            t.unflatten(0, (-1, self.batch_size)).index_select(1, rows).flatten(0, 1) for t in (self.keys, self.values)
        )
        self._begin(len(rows), self.lengths[rows])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.select(torch.arange(self.batch_size, device=self.device).repeat_interleave(repeats))


class PagedCache(Cache):
    """A cache of transformers that keeps keys and values in pages, for models that attend by "cute_kernels".

    Nothing is copied from step to step but new keys and values. Sequences lie at place 0 of their pages: padding on the
    left is not stored, padding on the right is until ``keep``. Layers of a sliding window keep all keys. It grows by no
    page: a batch of B sequences has room for ``pages // B * page_size`` tokens of each, padding among them.

    Args:
        config: the model's config.
        pages: pages of each layer.
        page_size: keys of a page: 16, 32, 64 or a multiple of 128.

    Raises:
        TypeError, ValueError: a bad argument; another attention implementation; a forward that needs more pages, comes
            with another batch or of another model, or wants a gradient.
        RuntimeError: keys of the forward before were not read, since it failed or another attention ran.

    Numerics:
        A token's row has the bits of one forward over its whole sequence: the contract ``kv_grid`` of ``attention``.

    Example:
        >>> import torch
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from cute_kernels.models import PagedCache, prepare
        >>> config = LlamaConfig(
        ...     vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1
        ... )
        >>> model = prepare(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
        >>> cache = PagedCache(model.config, pages=2, page_size=16)
        >>> with torch.no_grad():
        ...     logits = model(torch.ones(2, 5, dtype=torch.int64), past_key_values=cache).logits
        >>> cache.get_seq_length(), cache.get_max_length()
        (5, 16)
    """

    def __init__(self, config: Any, pages: int, page_size: int = 128) -> None:
        config = config.get_text_config(decoder=True)
        expect_int(OP, "pages", pages)
        expect_int(OP, "page_size", page_size)
        expect(pages > 0, OP, "pages", "be positive", pages)
        good = page_size in PAGE_SIZES or (page_size > 0 and page_size % 128 == 0)
        expect(good, OP, "page_size", "be 16, 32, 64 or a multiple of 128", page_size)
        implementation = config._attn_implementation
        expect(implementation == NAME, OP, "config", f"be of a model that attends by {NAME!r}", repr(implementation))
        super().__init__(layers=[PagedLayer(pages, page_size) for _ in range(config.num_hidden_layers)])

    def fill(self) -> None:
        """Take its pages for full on the host, so that a step that a CUDA graph has captured may come again.

        Lengths on the device go on to count. The host does not see when they pass the pages: the caller does.

        Returns:
            None.

        Raises:
            ValueError: an empty cache.
        """
        for layer in self.layers:
            expect(layer.is_initialized, OP, "the cache", "have tokens", "an empty one")
            layer.columns, layer.is_full = layer.get_max_length(), True

    def keep(self, lengths: Tensor, longest: int | None = None) -> None:
        """Forget what lies behind the first tokens of each sequence, as padding on the right does after a prompt.

        Args:
            lengths: (B,) int32 or int64: tokens of each sequence, at most those that it has. Values are not checked.
            longest: the largest of them, behind which there is room again; None: what was forgotten keeps its room.

        Returns:
            None.

        Raises:
            TypeError, ValueError: a bad argument, or an empty cache.
        """
        expect_tensor(OP, "lengths", lengths)
        for layer in self.layers:
            expect(layer.is_initialized, OP, "the cache", "have tokens", "an empty one")
            if lengths.shape != layer.lengths.shape or lengths.is_floating_point():
                got = f"{lengths.dtype} of shape {tuple(lengths.shape)}"
                fail(OP, "lengths", f"be integers of shape ({layer.batch_size},)", got)
            layer.lengths.copy_(lengths)
            layer.columns = layer.columns if longest is None else longest
