"""Models of the transformers package: attention, cache, norms, log-probabilities and roll-outs by this library."""

from typing import TYPE_CHECKING

from cute_kernels.models.attention import register_transformers
from cute_kernels.models.batching import generate_batch
from cute_kernels.models.generation import Generation, generate
from cute_kernels.models.preparation import prepare
from cute_kernels.models.scoring import log_prob

if TYPE_CHECKING:
    from cute_kernels.models.cache import PagedCache

__all__ = [
    "Generation",
    "PagedCache",
    "generate",
    "generate_batch",
    "log_prob",
    "prepare",
    "register_transformers",
]


def __getattr__(name: str) -> object:
    """``PagedCache`` derives from a class of transformers, which is imported with it."""
    if name != "PagedCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cute_kernels.models.cache import PagedCache

    return PagedCache
