"""Launches of attention: a Spec of the call's tensors, what launches it, and the operator of the same name."""

from cute_kernels.attention.launch.append import attention_append
from cute_kernels.attention.launch.backward import attention_backward
from cute_kernels.attention.launch.decode import attention_decode
from cute_kernels.attention.launch.forward import ForwardCall, attention_forward, attention_into

__all__ = [
    "ForwardCall",
    "attention_append",
    "attention_backward",
    "attention_decode",
    "attention_forward",
    "attention_into",
]
