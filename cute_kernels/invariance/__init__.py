"""Batch invariance for whole models: the mode, the check, and what computed a product."""

from cute_kernels.invariance.checker import Report, check_invariance
from cute_kernels.invariance.modes import UncoveredOperatorError, batch_invariant
from cute_kernels.invariance.operators import declare_invariant
from cute_kernels.invariance.provenance import Provenance, provenance

__all__ = [
    "Provenance",
    "Report",
    "UncoveredOperatorError",
    "batch_invariant",
    "check_invariance",
    "declare_invariant",
    "provenance",
]
