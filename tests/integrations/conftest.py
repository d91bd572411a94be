"""vLLM's stubs where its modules would be."""

import sys

import pytest

from cute_kernels import is_installed, uninstall
from cute_kernels.integrations import vllm as plugin
from tests.integrations import vllm_stubs


@pytest.fixture
def vllm(monkeypatch):
    """Stubs in the place of vLLM, and the variable that turns the plugin on."""
    for name, module in vllm_stubs.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("CUTE_KERNELS_VLLM", "1")
    yield sys.modules["vllm"]
    if is_installed():
        uninstall()
    for name in ("attention", "covered", "experts", "layers", "log_prob"):  # they hold the stubs' classes
        if sys.modules.pop(f"{plugin.__name__}.{name}", None):
            delattr(plugin, name)
