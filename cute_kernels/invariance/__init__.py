"""Batch invariance for whole models: kernels under torch's operators, the check, and what computed a product."""

from cute_kernels.invariance.audit import AuditReport, audit
from cute_kernels.invariance.blocks import batch_invariant
from cute_kernels.invariance.checker import Report, check_invariance
from cute_kernels.invariance.errors import UncoveredOperatorError
from cute_kernels.invariance.installation import install, is_installed, uninstall
from cute_kernels.invariance.operators import declare_invariant
from cute_kernels.invariance.provenance import Provenance, provenance

__all__ = [
    "AuditReport",
    "Provenance",
    "Report",
    "UncoveredOperatorError",
    "audit",
    "batch_invariant",
    "check_invariance",
    "declare_invariant",
    "install",
    "is_installed",
    "provenance",
    "uninstall",
]
