"""MHCTransformer: a decoder of n residual streams, or of one, from the same config."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cute_kernels import mhc
from cute_kernels.log_prob import linear_log_prob
from cute_kernels.moe.functional import MAX_EXPERTS, MAX_K
from cute_kernels.nn.attention import Attention, LayerCache, PagedCache, RotaryEmbedding
from cute_kernels.nn.hyper_connection import HyperConnection, HyperConnectionConfig, LearnedHead, expect_config
from cute_kernels.nn.linear import Linear
from cute_kernels.nn.moe import MoE
from cute_kernels.nn.norm import RMSNorm
from cute_kernels.nn.offload import ResidualOffload
from cute_kernels.nn.recompute import RecomputeManager, expect_manager
from cute_kernels.runtime.checks import (
    Backend,
    expect,
    expect_dtype,
    expect_float,
    expect_int,
    expect_like,
    expect_tensor,
)
from cute_kernels.runtime.real import as_float

BACKENDS = (None, "reference")
IGNORED = -100  # a target that does not count, as in torch's cross_entropy
NO_HOOKS = "needs recompute=False and offload=False: hooks cannot be traced"
NO_STAGES = "stages of a pipeline, which get a residual, are not supported yet; keep all layers in one process"


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder's sizes and options; frozen, and checked when it is made.

    Args:
        vocab_size, hidden_size, num_layers: sizes, from 1.
        num_heads: hidden_size must be a multiple of 2 * num_heads.
        ffn_hidden_size: channels inside of the MLP, or of each expert, from 1.
        max_sequence_length: the longest sequence, from 1.
        num_kv_heads: heads of keys and values; must divide num_heads; num_heads if None.
        rope_theta: base of the rotary embedding's wavelengths, > 0.
        norm_eps: eps of all RMSNorms, > 0.
        dropout_p: in [0, 1), for a sublayer's addition to the residual, in training; with hyper-connections each stream
            has a mask of its own.
        hyper_connections: a ``HyperConnectionConfig`` of the same hidden_size; None: one residual stream.
        num_experts: of an ``MoE`` in the place of each layer's MLP, from 1; None: an MLP.
        experts_per_token: of these, for each token, from 1.
        balance, z_loss: of each ``MoE``, from 0.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.
        attention_backend: None: ``attention``, in which a row does not depend on the batch. "torch": torch's own
            attention, of any head size and GPU; over a cache it is ``attention_with_kv_cache`` either way.

    Raises:
        TypeError, ValueError: a bad field; the message names it, the expected value and the given one.

    Example:
        >>> from cute_kernels.nn import TransformerConfig
        >>> config = TransformerConfig(
        ...     vocab_size=32, hidden_size=16, num_layers=1, num_heads=2, ffn_hidden_size=32, max_sequence_length=8
        ... )
        >>> config.kv_heads
        2
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_hidden_size: int
    max_sequence_length: int
    num_kv_heads: int | None = None
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    dropout_p: float = 0.0
    hyper_connections: HyperConnectionConfig | None = None
    num_experts: int | None = None
    experts_per_token: int = 2
    balance: float = 0.0
    z_loss: float = 0.0
    backend: Backend | None = None
    attention_backend: Literal["torch"] | None = None

    def __post_init__(self) -> None:
        name = "TransformerConfig"
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "ffn_hidden_size", "max_sequence_length")
        counts = [field for field in ("num_kv_heads", "num_experts") if getattr(self, field) is not None]
        for field in (*sizes, *counts, "experts_per_token"):
            expect_int(name, field, getattr(self, field))
            expect(getattr(self, field) >= 1, name, field, "be at least 1", getattr(self, field))
        good = self.hidden_size % (2 * self.num_heads) == 0
        expect(good, name, "hidden_size", f"be a multiple of 2 * num_heads = {2 * self.num_heads}", self.hidden_size)
        if self.num_experts is not None:
            most, k = min(self.num_experts, MAX_K), self.experts_per_token
            expect(self.num_experts <= MAX_EXPERTS, name, "num_experts", f"be at most {MAX_EXPERTS}", self.num_experts)
            expect(k <= most, name, "experts_per_token", f"be at most {most}", k)
        good = self.num_heads % self.kv_heads == 0
        expect(good, name, "num_kv_heads", f"divide num_heads = {self.num_heads}", self.num_kv_heads)
        for field in ("rope_theta", "norm_eps", "dropout_p", "balance", "z_loss"):
            object.__setattr__(self, field, as_float(getattr(self, field)))
            expect_float(name, field, getattr(self, field))
        for field in ("rope_theta", "norm_eps"):
            value = getattr(self, field)
            expect(0.0 < value < math.inf, name, field, "be finite and positive", value)
        expect(0.0 <= self.dropout_p < 1.0, name, "dropout_p", "be in [0, 1)", self.dropout_p)
        for field in ("balance", "z_loss"):
            value = getattr(self, field)
            expect(0.0 <= value < math.inf, name, field, "be finite and not negative", value)
        expect(self.backend in BACKENDS, name, "backend", "be None or 'reference'", repr(self.backend))
        good = self.attention_backend in (None, "torch")
        expect(good, name, "attention_backend", "be None or 'torch'", repr(self.attention_backend))
        hc = self.hyper_connections
        if hc is None:
            return
        good = isinstance(hc, HyperConnectionConfig)
        expected = "be a HyperConnectionConfig or None"
        expect(good, name, "hyper_connections", expected, type(hc).__name__, TypeError)
        expected = f"be the model's hidden_size = {self.hidden_size}"
        expect(hc.hidden_size == self.hidden_size, name, "hyper_connections.hidden_size", expected, hc.hidden_size)
        if isinstance(hc.recompute_layers, int):
            expected = f"be at most num_layers = {self.num_layers}"
            good = hc.recompute_layers <= self.num_layers
            expect(good, name, "hyper_connections.recompute_layers", expected, hc.recompute_layers)

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads


class MLP(nn.Module):
    """SwiGLU: ``down(silu(gate x) * up x)``, silu in the product's epilogue.

    Arguments as of ``MHCTransformer``. Source: Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202.
    """

    def __init__(self, config: TransformerConfig, **options: Any) -> None:
        super().__init__()
        c, f = config.hidden_size, config.ffn_hidden_size
        options = {"bias": False, "backend": config.backend, **options}
        self.gate = Linear(c, f, activation="silu", **options)
        self.up = Linear(c, f, **options)
        self.down = Linear(f, c, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x) * self.up(x))


class TransformerLayer(nn.Module):
    """Attention and MLP, or an ``MoE``, each behind a norm; with hyper-connections each in one of its own.

    Args:
        config: a ``TransformerConfig``.
        `**options`: ``device`` and ``dtype`` of the parameters; dtype torch.float32 or torch.bfloat16 (torch.float16:
            the same, untested).

    Raises:
        TypeError: config is no TransformerConfig.

    Example:
        >>> import torch
        >>> from cute_kernels.nn import TransformerBlock, TransformerConfig, TransformerLayer
        >>> config = TransformerConfig(
        ...     vocab_size=32, hidden_size=16, num_layers=1, num_heads=2, ffn_hidden_size=32, max_sequence_length=8
        ... )
        >>> rotation = TransformerBlock(config).rotary(4)
        >>> x = torch.ones(1, 4, 16, dtype=torch.bfloat16)
        >>> TransformerLayer(config)(x, rotation).shape
        torch.Size([1, 4, 16])
    """

    def __init__(self, config: TransformerConfig, **options: Any) -> None:
        super().__init__()
        expect_config("TransformerLayer", config, TransformerConfig)
        device = options.get("device")
        norm = {"eps": config.norm_eps, "backend": config.backend, **options}
        self.config = config
        self.attention_norm = RMSNorm(config.hidden_size, **norm)
        self.attention = Attention(config, **options)
        self.mlp_norm = RMSNorm(config.hidden_size, **norm)
        if config.num_experts is None:
            self.mlp: nn.Module = MLP(config, **options)
        else:
            sizes = config.hidden_size, config.ffn_hidden_size, config.num_experts, config.experts_per_token
            losses = {"balance": config.balance, "z_loss": config.z_loss}
            self.mlp = MoE(*sizes, **losses, backend=config.backend, **options)
        hc = config.hyper_connections
        if hc is not None:
            self.attention_connection = HyperConnection(hc, backend=config.backend, device=device)
            self.mlp_connection = HyperConnection(hc, backend=config.backend, device=device)

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        recompute: RecomputeManager | None = None,
        offload: ResidualOffload | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """The residual after the layer.

        Args:
            x: the residual before it: (B, S, C); with hyper-connections (B, S, n, C), or (B, S, C, n) by variant.
            rotation: the cosines and sines of ``TransformerBlock``'s rotary embedding.
            recompute: the manager of the block that the layer is in; with hyper-connections alone.
            offload: where residuals are kept, if not on the GPU; with hyper-connections alone, and not with
                ``recompute``, which keeps none in a layer.
            cache: keys and values of the tokens before these, in evaluation; ``MHCTransformer.generate`` makes it.

        Returns:
            The new residual, of x's shape and dtype.

        Raises:
            TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        """
        expect_manager("TransformerLayer", recompute)
        good = offload is None or isinstance(offload, ResidualOffload)
        got = type(offload).__name__
        expect(good, "TransformerLayer", "offload", "be a ResidualOffload or None", got, TypeError)
        both = recompute is not None and offload is not None
        expect(not both, "TransformerLayer", "offload", "be None with recompute, which keeps no residual", "both")
        if torch.compiler.is_compiling() and (recompute is not None or offload is not None):
            return _untraced(TransformerLayer.forward, self, x, rotation, recompute, offload, cache)
        dropout_p = self.config.dropout_p if self.training else 0.0
        if self.config.hyper_connections is None:
            for name, given in (("recompute", recompute), ("offload", offload)):
                got = type(given).__name__
                expect(given is None, "TransformerLayer", name, "be None without hyper-connections", got)
            f = self.attention(self.attention_norm(x), rotation, cache)
            y, x = self.mlp_norm(F.dropout(f, dropout_p) if dropout_p else f, x)
            f = self.mlp(y)
            return x + (F.dropout(f, dropout_p) if dropout_p else f)
        for connection, norm, sublayer, arguments in (
            (self.attention_connection, self.attention_norm, self.attention, (rotation, cache)),
            (self.mlp_connection, self.mlp_norm, self.mlp, ()),
        ):
            layer_input, mix = connection(x, recompute)
            y = norm(layer_input) if recompute is None else norm.recomputed(layer_input, recompute)
            f = sublayer(y, *arguments)
            out = connection.combine(f, x, mix, dropout_p=dropout_p, recompute=recompute)
            if offload is not None and out.requires_grad:
                offload.keep(x, out)
            x = out
        return x


class TransformerBlock(nn.Module):
    """All layers: the streams' expansion before them, the learned head and a norm after them.

    Args:
        config: a ``TransformerConfig``.
        `**options`: ``device`` and ``dtype`` of the parameters; dtype torch.float32 or torch.bfloat16 (torch.float16:
            the same, untested).

    Raises:
        TypeError: config is no TransformerConfig.

    Example:
        >>> import torch
        >>> from cute_kernels.nn import TransformerBlock, TransformerConfig
        >>> config = TransformerConfig(
        ...     vocab_size=32, hidden_size=16, num_layers=1, num_heads=2, ffn_hidden_size=32, max_sequence_length=8
        ... )
        >>> TransformerBlock(config)(torch.ones(1, 4, 16, dtype=torch.bfloat16)).shape
        torch.Size([1, 4, 16])
    """

    def __init__(self, config: TransformerConfig, **options: Any) -> None:
        super().__init__()
        expect_config("TransformerBlock", config, TransformerConfig)
        self.config = config
        self.layers = nn.ModuleList(TransformerLayer(config, **options) for _ in range(config.num_layers))
        self.rotary = RotaryEmbedding(config, device=options.get("device"))
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, backend=config.backend, **options)
        hc = config.hyper_connections
        if hc is not None:
            self.head = LearnedHead(hc, backend=config.backend, device=options.get("device"))
        # Before a trace or a capture, where no table can be made
        self.register_load_state_dict_post_hook(_leave_meta)

    def forward(self, h: Tensor, cache: PagedCache | None = None) -> Tensor:
        """All layers, the head and the norm.

        Args:
            h: (B, S, C) bf16 or fp16.
            cache: the tokens before these, in evaluation; ``MHCTransformer.generate`` makes it.

        Returns:
            (B, S, C) in h's dtype.

        Raises:
            TypeError: h is no tensor.
            ValueError: S is more than max_sequence_length.
            NotImplementedError: h is no (B, S, C), or layers are missing: the stage of a pipeline.
        """
        config = self.config
        expect_tensor("TransformerBlock", "h", h)
        if h.dim() != 3 or h.shape[2] != config.hidden_size or len(self.layers) != config.num_layers:
            raise NotImplementedError(
                f"TransformerBlock: {NO_STAGES}; expected {config.num_layers} layers and h of shape (B, S, "
                f"{config.hidden_size}), got {len(self.layers)} layers and {tuple(h.shape)}"
            )
        longest = config.max_sequence_length
        expect(
            h.shape[1] <= longest, "TransformerBlock", "h", f"have S of at most {longest}", f"shape {tuple(h.shape)}"
        )
        hc = config.hyper_connections
        self.rotary.leave_meta(h.device)
        rotation = self.rotary(h.shape[1], None if cache is None else cache.seqlens)
        caches = [None] * len(self.layers) if cache is None else cache.layers
        if hc is None:
            for layer, of_layer in zip(self.layers, caches, strict=True):
                h = layer(h, rotation, cache=of_layer)
            return self.norm(h)
        keeps = torch.is_grad_enabled()
        recomputes, offloads = keeps and hc.recompute, keeps and hc.offload
        if torch.compiler.is_compiling() and (recomputes or offloads):
            return _untraced(TransformerBlock.forward, self, h, cache)
        x = mhc.expand(h, hc.num_streams, layout=hc.resolved_variant().layout, backend=self.config.backend)
        offload = ResidualOffload() if offloads else None
        size = hc.layers_per_block(len(self.layers)) if recomputes else len(self.layers)
        for first in range(0, len(self.layers), size):
            recompute = RecomputeManager() if recomputes else None
            begin = x
            for layer, of_layer in zip(self.layers[first : first + size], caches[first : first + size], strict=True):
                x = layer(x, rotation, recompute, offload if recompute is None else None, of_layer)
            if recompute is not None and x.requires_grad:
                if offload is not None:  # before the replay, which reads what the block began with
                    offload.keep(begin, x)
                recompute.end_block(x)
        return self.norm(self.head(x))


def _leave_meta(block: TransformerBlock, _: object) -> None:
    block.rotary.leave_meta(block.norm.weight.device)


class _TokenEmbedding(nn.Embedding):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class _Output(Linear):
    """Logits; with targets their mean cross-entropy, through ``linear_log_prob``."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return super().forward(x)
        if x.shape[-1] % 8:  # rows that linear_log_prob's kernels cannot read
            logits = super().forward(x).flatten(0, 1)
            targets = targets.flatten()
            known = (targets >= 0) & (targets < logits.shape[1])
            loss = F.cross_entropy(logits, targets.where(known, IGNORED), ignore_index=IGNORED, reduction="sum")
            counts = targets != IGNORED
            return loss / counts.sum() + torch.where((known | ~counts).all(), 0.0, math.nan)
        return -self.log_prob(x, targets).sum() / (targets != IGNORED).sum()

    def log_prob(self, x: Tensor, targets: Tensor) -> Tensor:
        return linear_log_prob(x, self._weight_for(x), targets, backend=self.backend)[0]


class Generated(NamedTuple):
    """The results of ``MHCTransformer.generate``.

    Args:
        tokens: (B, new tokens) int64.
        log_probs: (B, new tokens) fp32: of each one's probability, in nats.

    Example:
        >>> import torch
        >>> from cute_kernels.nn import Generated
        >>> Generated(torch.tensor([[5]]), torch.tensor([[0.0]])).tokens.shape
        torch.Size([1, 1])
    """

    tokens: Tensor
    log_probs: Tensor


class MHCTransformer(nn.Module):
    """A decoder: token embedding, ``TransformerBlock``, and a linear head that shares no weight with the embedding.

    Args:
        config: a ``TransformerConfig``.
        device, dtype: of the parameters; dtype torch.float32 or torch.bfloat16 (torch.float16: the same, untested).

    Raises:
        TypeError: config is no TransformerConfig.

    Numerics:
        Activations and residual streams are bf16; in a model in fp16 they are fp16. Parameters may be fp32, then each
        use of a matrix makes a bf16 copy, while its gradient is fp32; or bf16. The parameters of the hyper-connections,
        and the rotary embedding's table, are fp32 whatever ``.to(dtype)`` says. Logits and loss are fp32.

        Attention is ``attention``: a token's logits do not depend on the batch. It has head sizes of a multiple of 8 up
        to 256, and gradients on a Hopper alone; anything else on a GPU is an error, unless the config's
        ``attention_backend`` is "torch". All else is deterministic, too.

    Under ``fully_shard``: wrap ``model.layers``. A group wants one dtype: keep the model in fp32, or wrap each
    ``HyperConnection`` and the ``LearnedHead``, which are small, before, with ``reshard_after_forward=False``. Layers
    want that, too, where blocks of recompute have several layers: all norms' weights of a block are read in its
    backward. There gradients go to ``.grad``, whatever ``main_grad`` a sharded parameter has, and a
    MixedPrecisionPolicy's param_dtype also rounds the fp32 parameters here: leave it None. Tensor, sequence and
    pipeline parallelism are refused.

    Example:
        >>> import torch
        >>> from cute_kernels.nn import MHCTransformer, TransformerConfig
        >>> config = TransformerConfig(
        ...     vocab_size=32, hidden_size=16, num_layers=1, num_heads=2, ffn_hidden_size=32, max_sequence_length=8
        ... )
        >>> model = MHCTransformer(config)
        >>> tokens = torch.arange(8).view(1, 8)
        >>> model(tokens).shape, model.loss(tokens[:, :-1], tokens[:, 1:]).shape
        (torch.Size([1, 8, 32]), torch.Size([]))
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        expect_config("MHCTransformer", config, TransformerConfig)
        options = {"device": device, "dtype": dtype}
        self.config = config
        self.embedding = _TokenEmbedding(config.vocab_size, config.hidden_size, **options)
        self.block = TransformerBlock(config, **options)
        self.output = _Output(
            config.hidden_size,
            config.vocab_size,
            bias=False,
            out_dtype=torch.float32,
            backend=config.backend,
            **options,
        )

    @property
    def layers(self) -> nn.ModuleList:
        """The layers, in order: what ``fully_shard`` wraps."""
        return self.block.layers

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits of the next token, or with targets the loss.

        Args:
            tokens: (B, S) int64.
            targets: (B, S) int64; those of -100 do not count. None: return logits.

        Returns:
            Logits (B, S, vocab_size), fp32; with targets the loss in their place.

        Raises:
            TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
            NotImplementedError: parameters that were split for tensor parallelism, or the input of a pipeline stage.
        """
        self._check(tokens, targets)
        return self.output(self.block(self._embedded(tokens)), targets)

    def log_prob(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Logarithms of the targets' probabilities, without logits in memory.

        Args:
            tokens: (B, S) int64.
            targets: (B, S) int64; of those of -100 it is 0.

        Returns:
            (B, S) fp32, differentiable.

        Raises:
            TypeError, ValueError: a bad argument, or a hidden_size that is no multiple of 8; the message names it, the
                expected value and the given one.
        """
        self._check(tokens, targets)
        expect_tensor("MHCTransformer", "targets", targets)
        return self.output.log_prob(self.block(self._embedded(tokens)), targets)

    @torch.no_grad()
    def generate(
        self,
        prompts: Tensor,
        max_new_tokens: int,
        *,
        lengths: Sequence[int] | None = None,
        choose: Callable[[Tensor], Tensor] | None = None,
    ) -> Generated:
        """Tokens behind each prompt, one after the other, through a paged cache of keys and values.

        Args:
            prompts: (B, S) int64; what stands behind a shorter one is not looked at.
            max_new_tokens: of each sequence, from 1; S + max_new_tokens may be the model's max_sequence_length.
            lengths: of the prompts, from 1 to S; S each if None.
            choose: gets logits (B, vocab_size) fp32, returns (B,) int64, the next tokens; the most probable ones if
                None.

        Returns:
            ``Generated``: tokens (B, max_new_tokens) int64, and the logarithms of their probabilities, fp32.

        Raises:
            TypeError, ValueError: a bad argument, dropout in training, or a hidden_size that is no multiple of 8; the
                message names it, the expected value and the given one.
            NotImplementedError: a head size without kernels.

        Numerics:
            On the kernels' path logits have the bits of one forward of the whole sequence without a gradient, and
            ``log_probs`` those of ``log_prob``, whatever the batch and the other prompts.

        Example:
            >>> import torch
            >>> from cute_kernels.nn import MHCTransformer, TransformerConfig
            >>> config = TransformerConfig(
            ...     vocab_size=32, hidden_size=16, num_layers=1, num_heads=2, ffn_hidden_size=32, max_sequence_length=8
            ... )
            >>> prompts = torch.tensor([[3, 4, 5], [6, 7, 0]])
            >>> tokens, log_probs = MHCTransformer(config).generate(prompts, 4, lengths=[3, 2])
            >>> tokens.shape, log_probs.shape
            (torch.Size([2, 4]), torch.Size([2, 4]))
        """
        op = "MHCTransformer.generate"
        self._check(prompts, None)
        batch, longest = prompts.shape
        expect_int(op, "max_new_tokens", max_new_tokens)
        most = self.config.max_sequence_length - longest
        good = 1 <= max_new_tokens <= most
        expect(good, op, "max_new_tokens", f"be from 1 to {most}, behind {longest} tokens", max_new_tokens)
        lengths = [longest] * batch if lengths is None else list(lengths)
        good = len(lengths) == batch and all(type(n) is int and 1 <= n <= longest for n in lengths)
        expect(good, op, "lengths", f"be {batch} ints from 1 to {longest}", lengths)
        random = self.training and self.config.dropout_p > 0
        expect(not random, op, "the model", "be in evaluation (model.eval()) if it has dropout", "one in training")
        h = self._embedded(prompts)
        cache = PagedCache(self.config, batch, longest + max_new_tokens, h.device, h.dtype)
        ends = torch.tensor(lengths, dtype=torch.int32).to(h.device)
        h = self.block(h, cache)[torch.arange(batch, device=h.device), ends.long() - 1].unsqueeze(1)
        cache.seqlens.copy_(ends)
        tokens, log_probs = [], []
        for _ in range(max_new_tokens - 1):
            self._choose(h, choose, tokens, log_probs)
            h = self.block(self._embedded(tokens[-1]), cache)
            cache.seqlens += 1
        self._choose(h, choose, tokens, log_probs)
        return Generated(torch.cat(tokens, 1), torch.cat(log_probs, 1))

    def _choose(self, h: Tensor, choose, tokens: list[Tensor], log_probs: list[Tensor]) -> None:
        """Append the next tokens, (B, 1), of hidden states (B, 1, C)."""
        logits = self.output(h).squeeze(1)
        found = logits.argmax(-1) if choose is None else choose(logits)
        expect_tensor("MHCTransformer.generate", "choose's result", found)
        good = found.shape == logits.shape[:1] and found.dtype is torch.int64
        got = f"{found.dtype} of shape {tuple(found.shape)}"
        expect(good, "MHCTransformer.generate", "choose's result", f"be int64 of shape ({len(h)},)", got)
        tokens.append(found.unsqueeze(1))
        log_probs.append(self.output.log_prob(h, tokens[-1]))

    def _embedded(self, tokens: Tensor) -> Tensor:
        """(B, S, C), in bf16 where the embedding is fp32."""
        try:
            h = self.embedding(tokens)
        except IndexError:
            # On a CPU alone: on a GPU the host would wait for the tokens, and torch's kernel asserts there
            self._check_vocabulary(tokens)
            raise
        return h.to(torch.bfloat16) if h.dtype is torch.float32 else h

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats.

        No logits are in memory on the kernels' path, but where hidden_size is no multiple of 8.

        Args:
            tokens: (B, S) int64.
            targets: (B, S) int64; those of -100 do not count.

        Returns:
            The loss, fp32. NaN where no target counts, or where one is neither a token nor -100.

        Raises:
            TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
            NotImplementedError: parameters that were split for tensor parallelism, or the input of a pipeline stage.
        """
        expect_tensor("MHCTransformer", "targets", targets)
        return self(tokens, targets)

    def _check(self, tokens: Tensor, targets: Tensor | None) -> None:
        op = "MHCTransformer"
        expect_tensor(op, "tokens", tokens)
        if tokens.is_floating_point():
            raise NotImplementedError(f"{op}: tokens must have dtype int64, got {tokens.dtype}: {NO_STAGES}")
        expect_dtype(op, "tokens", tokens.dtype, (torch.int64,))
        longest = self.config.max_sequence_length
        good = tokens.dim() == 2 and 1 <= tokens.shape[1] <= longest
        expect(good, op, "tokens", f"have shape (B, S) with S from 1 to {longest}", tuple(tokens.shape))
        if targets is not None:
            expect_tensor(op, "targets", targets)
            expect_dtype(op, "targets", targets.dtype, (torch.int64,))
            expect_like(op, "targets", targets, tokens.shape, tokens.device)

    def _check_vocabulary(self, tokens: Tensor) -> None:
        size = self.config.vocab_size
        beyond = tokens[(tokens < 0) | (tokens >= size)]
        if beyond.numel():
            expect(False, "MHCTransformer", "tokens", f"be from 0 to {size - 1} (vocab_size {size})", beyond[0].item())


def _untraced(forward: Callable[..., Tensor], *args: Any) -> Tensor:
    """``forward(*args)`` in eager mode: a graph would hold what is discarded, and no hook brings it back there.

    Raises:
        RuntimeError: in torch.export.
    """
    torch._dynamo.graph_break(msg=f"fullgraph {NO_HOOKS}")
    if torch.compiler.is_exporting():
        raise RuntimeError(f"{forward.__qualname__}: torch.export {NO_HOOKS}")
    return torch.compiler.disable(forward)(*args)
