"""A general plugin of vLLM, read against version 0.33.0 and tested against stubs of it alone: it never ran in vLLM."""

from __future__ import annotations

import os
import warnings

from cute_kernels import install, is_installed

__all__ = ["register"]
VARIABLE = "CUTE_KERNELS_VLLM"
READ = "0.33.0"  # the version of vLLM that this was written against
BACKEND = "cute_kernels.integrations.vllm.attention.CuteKernelsBackend"


def register() -> None:
    """With CUTE_KERNELS_VLLM=1 in the environment, let vLLM run these kernels; else nothing.

    vLLM calls it in each of its processes: it is the entry point ``cute_kernels`` of ``vllm.general_plugins``. It
    registers the attention backend CUSTOM and layers out of tree (RMSNorm, GemmaRMSNorm, SiluAndMul, GeluAndMul,
    RotaryEmbedding, Llama3RotaryEmbedding, GateLinear, UnquantizedFusedMoEMethod), takes the place of the function that
    computes log-probabilities of tokens, and calls ``install("warn")``. Called again it changes nothing. A model whose
    configuration is not covered is an error when it is built.

    Returns:
        None.

    Raises:
        ValueError: the variable is neither 0 nor 1; vLLM's own batch-invariant mode is on, too.
        RuntimeError: another plugin has registered the backend CUSTOM or one of the layers.
        ImportError: there is no vLLM, or one without the modules of the version that was read.

    Example:
        >>> from cute_kernels.integrations import vllm
        >>> vllm.register()
    """
    value = os.environ.get(VARIABLE) or "0"
    if value not in ("0", "1"):
        raise ValueError(f"register: {VARIABLE} must be 0 or 1, got {value!r}")
    if value == "1":
        _register()


def _register() -> None:
    import vllm
    from vllm import envs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if envs.VLLM_BATCH_INVARIANT:
        expected = f"be 0 with {VARIABLE}=1: both replace torch's products"
        raise ValueError(f"register: VLLM_BATCH_INVARIANT must {expected}, got 1")
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        raise RuntimeError(f"register: the attention backend CUSTOM is registered already: {custom.get_path()}")
    if vllm.__version__ != READ:
        warnings.warn(f"register: written against vLLM {READ}, this is {vllm.__version__}", stacklevel=3)
    # These import vLLM's own operators: install sees those that are there when it is called
    from cute_kernels.integrations.vllm import layers, log_prob

    layers.register()
    log_prob.replace()
    register_backend(custom, BACKEND)
    if not is_installed():
        install("warn")
