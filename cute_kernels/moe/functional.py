"""For modules, beside the public ops: what kernels of experts are limited to."""

from cute_kernels.moe.config import MAX_EXPERTS, MAX_K

__all__ = ["MAX_EXPERTS", "MAX_K"]
