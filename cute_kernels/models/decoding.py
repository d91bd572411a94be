"""A step of ``generate``: a model's forward over a cache, and its capture in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cute_kernels.models.scoring import check_mask, hidden_states
from cute_kernels.runtime.checks import expect

OP = "models.generate"
PAGE_SIZE = 128
Results = TypeVar("Results")


class Prompts:
    """Prompts padded on the right, on the left, and how many tokens each has."""

    def __init__(self, input_ids: Tensor, attention_mask: Tensor | None, pad: int) -> None:
        batch, width = input_ids.shape
        self.right = self.left = input_ids
        self.present = torch.ones_like(input_ids)
        self.lengths = torch.full_like(input_ids[:, 0], width)
        if attention_mask is None:
            return
        check_mask(OP, attention_mask, input_ids)
        real = attention_mask.bool()
        self.lengths = real.sum(1)
        first, places = real.int().argmax(1, keepdim=True), torch.arange(width, device=input_ids.device)
        together = (places >= first) & (places < first + self.lengths[:, None])
        good = bool(((real == together).all(1) & (self.lengths > 0)).all())
        expect(good, OP, "attention_mask", "have tokens in each row, without a gap between them", "one that has not")
        self.right = input_ids.gather(1, (places + first).clamp(max=width - 1))
        padding = width - self.lengths[:, None]
        self.present = (places >= padding).to(input_ids.dtype)
        self.left = torch.where(self.present > 0, self.right.gather(1, (places - padding).clamp(min=0)), pad)


class Paged:
    """Forwards over a PagedCache: prompts padded right, whose padding is forgotten; no masks."""

    def __init__(self, model: Any, prompts: Prompts, steps: int) -> None:
        from cute_kernels.models.cache import PagedCache

        batch, width = prompts.right.shape
        self.model, self.prompts = model, prompts
        self.cache = PagedCache(model.config, batch * -(-(width + steps) // PAGE_SIZE), PAGE_SIZE)
        self.positions = prompts.lengths[:, None].clone()

    def begin(self) -> Tensor:
        ids, lengths = self.prompts.right, self.prompts.lengths
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        hidden = self.forward(ids, positions)
        self.cache.keep(lengths)
        return hidden[torch.arange(len(ids), device=ids.device), lengths - 1]

    def next(self, tokens: Tensor) -> Tensor:
        hidden = self.forward(tokens, self.positions)
        self.positions += 1
        return hidden[:, 0]

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return hidden_states(self.model, ids, position_ids=positions, past_key_values=self.cache, use_cache=True)


class Static:
    """Forwards over transformers' StaticCache: prompts padded left, by a mask."""

    def __init__(self, model: Any, prompts: Prompts, steps: int) -> None:
        from transformers import StaticCache

        self.model, self.prompts, self.mask = model, prompts, prompts.present
        self.cache = StaticCache(model.config, prompts.left.shape[1] + steps)
        self.positions = prompts.lengths[:, None].clone()

    def begin(self) -> Tensor:
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        return self._forward(self.prompts.left, positions)

    def next(self, tokens: Tensor) -> Tensor:
        self.mask = nn.functional.pad(self.mask, (0, 1), value=1)
        hidden = self._forward(tokens, self.positions)
        self.positions += 1
        return hidden

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        options = {"position_ids": positions, "past_key_values": self.cache, "use_cache": True}
        return hidden_states(self.model, ids, attention_mask=self.mask, **options)[:, -1]


class Captured:
    """Steps of decoding over a PagedCache: the first one runs, the second is captured in a CUDA graph, then replayed.

    ``draw``, a function of hidden states (B, C) and the places of the tokens to draw, is part of it.
    """

    def __init__(self, steps: Paged, draw: Callable[[Tensor, Tensor], Results]) -> None:
        self.steps, self.draw = steps, draw
        self.tokens = steps.prompts.right.new_empty(len(steps.prompts.right), 1)
        self.replay: Callable[[], Results] | None = None
        self.has_run = False

    def next(self, tokens: Tensor) -> Results:
        """What ``draw`` returns of the step behind tokens (B, 1); the next call writes it again."""
        self.tokens.copy_(tokens)
        if self.replay is None and self.has_run:
            self.replay = capture(self._step)
        if self.replay is not None:
            return self.replay()
        self.steps.cache.fill()
        self.has_run = True
        return self._step()

    def _step(self) -> Results:
        hidden = self.steps.next(self.tokens)
        return self.draw(hidden, self.steps.positions[:, 0])


def capture(step: Callable[[], Results]) -> Callable[[], Results]:
    """A function that replays ``step``, which is captured and does not run here."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def replay() -> Results:
        graph.replay()
        return results

    return replay
