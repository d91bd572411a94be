"""batch_invariant on tensors that are not its concern, and by its tables."""

import threading
import warnings

import pytest
import torch

from cute_kernels import batch_invariant
from cute_kernels.invariance import aten, installation, scopes


def test_cpu_tensors_are_left_alone():
    x = torch.randn(8, 8)
    with batch_invariant() as uncovered:
        assert torch.equal(x.cumprod(0), torch.cumprod(x, 0)) and (x @ x).dtype is x.dtype
    assert not uncovered


def test_a_block_that_changes_nothing_warns_once(monkeypatch):
    """Where there is no CUDA device, when it begins."""
    monkeypatch.setattr(installation, "_warned_of_cpu", False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with batch_invariant("off"):
            pass
    with pytest.warns(UserWarning, match="^batch_invariant: there is no CUDA device") as found, batch_invariant("warn"):
        pass
    assert len(found) == 1 and found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with batch_invariant():
            pass


def test_products_of_one_k(monkeypatch):
    """Nothing is added up, but halves are not rounded before they become fp32, and no other dtype becomes fp32."""

    def product(a, b, d, *options):
        d.copy_(a.float() @ b.float())

    monkeypatch.setattr(aten, "gemm", product)
    a, b = torch.tensor([[300.0], [1.01]]), torch.tensor([[300.0, 1.03]])
    for dtype in (torch.float16, torch.bfloat16):
        exact = a.to(dtype).float() * b.to(dtype).float()
        assert torch.equal(aten._mm(a.to(dtype), b.to(dtype), torch.float32), exact)
        half = aten._addmm(torch.zeros(2, 2, dtype=dtype), a.to(dtype), b.to(dtype), alpha=0.5)
        assert torch.equal(half, (exact / 2).to(dtype)) and half.isfinite().all()
    assert torch.equal(aten._mm(a, b), a * b) and torch.equal(aten._addmm(torch.ones(2, 2), a, b), a * b + 1)
    for dtype in (torch.float64, torch.complex64):
        assert torch.equal(aten._mm(a.to(dtype), b.to(dtype)), a.to(dtype) * b.to(dtype))
        assert aten._addmm(torch.zeros(2, 2, dtype=dtype), a.to(dtype), b.to(dtype)) is NotImplemented


def stance() -> str:
    """The user's, or "ours"."""
    found = torch._dynamo.eval_frame._stance
    return "ours" if found.backend in (scopes._refusing_backend, scopes._warning_backend) else found.stance


def test_blocks_of_two_threads():
    """torch.compile's stance is one of the process: the last block to end gives the user's back."""
    inside, ended = threading.Event(), threading.Event()

    def other():
        with batch_invariant():
            inside.set()
            ended.wait(60)

    thread = threading.Thread(target=other)
    with torch.compiler.set_stance("eager_on_recompile"):
        with batch_invariant():
            thread.start()
            assert inside.wait(60)
        assert stance() == "ours"
        ended.set()
        thread.join()
        assert stance() == "eager_on_recompile"


def test_a_block_inside_of_a_compiled_function_changes_nothing():
    """torch refuses the change of its stance there; blocks that follow are as ever."""

    @torch.compile(backend="eager")
    def function(x):
        with batch_invariant():
            return x + 1

    for _ in range(2):
        with pytest.raises(Exception, match="stance"):
            function(torch.ones(2))
        assert stance() == "default"
        with batch_invariant():
            assert stance() == "ours"
        assert stance() == "default"


def test_a_block_that_is_off_leaves_the_stance():
    with torch.compiler.set_stance("eager_on_recompile"):
        with batch_invariant("off"):
            assert stance() == "eager_on_recompile"
            with batch_invariant("warn"):
                assert stance() == "ours"
                with batch_invariant("off"):
                    assert stance() == "eager_on_recompile"
                assert stance() == "ours"
            assert stance() == "eager_on_recompile"
        with pytest.raises(KeyError), batch_invariant():
            raise KeyError
        assert stance() == "eager_on_recompile"
    assert stance() == "default"
