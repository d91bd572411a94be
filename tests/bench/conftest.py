"""Shared by tests of benchmarks beside batch_invariant_ops."""

import sys
from types import SimpleNamespace

import pytest

from bench import whole_models


@pytest.fixture
def their_modes(monkeypatch):
    """A package of that name, which replaces no operator: what it was told. In few rounds."""
    monkeypatch.setattr(whole_models, "ROUNDS", 2)
    told = []
    package = SimpleNamespace(
        enable_batch_invariant_mode=lambda: told.append("on"), disable_batch_invariant_mode=lambda: told.append("off")
    )
    monkeypatch.setitem(sys.modules, whole_models.THEIRS, package)
    return told
