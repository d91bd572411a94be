"""The module with batch_invariant_ops' names: what is enabled where, results, and the shim."""

import subprocess
import sys
import threading
import types

import pytest
import torch

from cute_kernels import compat, is_installed
from cute_kernels.compat import batch_invariant_ops as ops

BF16 = torch.bfloat16
# As its __init__ exports them
NAMES = {
    "AttentionBlockSize",
    "disable_batch_invariant_mode",
    "enable_batch_invariant_mode",
    "get_batch_invariant_attention_block_size",
    "is_batch_invariant_mode_enabled",
    "log_softmax",
    "matmul_persistent",
    "mean_dim",
    "set_batch_invariant_mode",
}


def test_the_nine_names():
    assert set(ops.__all__) == NAMES and all(hasattr(ops, name) for name in NAMES)


def test_enabled_in_blocks_and_in_the_process():
    enabled = ops.is_batch_invariant_mode_enabled
    of_thread = []

    def ask():
        thread = threading.Thread(target=lambda: of_thread.append(enabled()))
        thread.start()
        thread.join()

    assert not enabled()
    with ops.set_batch_invariant_mode():
        assert enabled()
        with ops.set_batch_invariant_mode(False):
            assert not enabled()
        ask()
        assert enabled()
    ops.enable_batch_invariant_mode()
    try:
        ops.enable_batch_invariant_mode()
        assert enabled() and is_installed()
        ask()
        with ops.set_batch_invariant_mode(False):
            assert not enabled()
        assert enabled()
    finally:
        ops.disable_batch_invariant_mode()
    ops.disable_batch_invariant_mode()
    assert not enabled() and of_thread == [False, True]


def test_a_block_ends_by_an_exception():
    with pytest.raises(ZeroDivisionError), ops.set_batch_invariant_mode():
        raise ZeroDivisionError
    assert not ops.is_batch_invariant_mode_enabled()


def test_results(generator):
    a, b, bias = (torch.randn(s, generator=generator).to(BF16) for s in ((5, 16), (16, 24), (24,)))
    wanted = a.double() @ b.double()
    close = dict(atol=0.05, rtol=0.02)
    torch.testing.assert_close(ops.matmul_persistent(a, b).double(), wanted, **close)
    torch.testing.assert_close(ops.matmul_persistent(a, b, bias).double(), wanted + bias.double(), **close)
    torch.testing.assert_close(ops.log_softmax(a, dim=-1).double(), a.double().log_softmax(-1), **close)
    found = ops.mean_dim(a, 0, keepdim=True, dtype=torch.float32)
    assert found.shape == (1, 16) and found.dtype is torch.float32
    torch.testing.assert_close(found.double(), a.double().mean(0, keepdim=True))
    assert ops.get_batch_invariant_attention_block_size() == (16, 16)


def test_shim(monkeypatch):
    monkeypatch.delitem(sys.modules, compat.NAME, raising=False)
    compat.shim()
    compat.shim()
    from batch_invariant_ops import enable_batch_invariant_mode

    assert enable_batch_invariant_mode is ops.enable_batch_invariant_mode
    theirs = types.ModuleType(compat.NAME)
    theirs.__file__ = "/theirs.py"
    monkeypatch.setitem(sys.modules, compat.NAME, theirs)
    with pytest.raises(RuntimeError, match="shim: batch_invariant_ops has been imported already, from /theirs.py"):
        compat.shim()


def test_importing_installs_nothing():
    program = "import sys; import cute_kernels.compat.batch_invariant_ops; print('batch_invariant_ops' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
