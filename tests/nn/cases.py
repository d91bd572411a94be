"""Small models for the tests of nn, and the kernels that a model needs."""

from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor

from cute_kernels.nn import HyperConnectionConfig, MHCTransformer, TransformerConfig
from tests.fakes import fake_kernels

BF16, FP32 = torch.bfloat16, torch.float32


def make_config(
    hidden: int = 32,
    layers: int = 4,
    length: int = 16,
    *,
    streams: int | None = 4,
    dropout_p: float = 0.0,
    backend: str | None = None,
    vocab: int = 64,
    heads: int = 4,
    **connections,
) -> TransformerConfig:
    """A model of ``streams`` streams; None: without hyper-connections."""
    return TransformerConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads // 2,
        ffn_hidden_size=2 * hidden,
        max_sequence_length=length,
        dropout_p=dropout_p,
        backend=backend,
        attention_backend="torch" if hidden // heads % 8 else None,  # sizes that ``attention`` lacks
        hyper_connections=None if streams is None else HyperConnectionConfig(hidden, streams, **connections),
    )


def with_connections(config: TransformerConfig, **fields) -> TransformerConfig:
    """The config with other fields of its hyper-connections."""
    return replace(config, hyper_connections=replace(config.hyper_connections, **fields))


def make_model(config: TransformerConfig, device: str = "cpu", dtype: torch.dtype = BF16) -> MHCTransformer:
    """The same parameters for all configs of one size; the hyper-connections' far from where training begins."""
    torch.manual_seed(0)
    model = MHCTransformer(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".alpha", ".beta", ".scale", ".base")):
                parameter.copy_(torch.randn(parameter.shape))
    return model.to(device)


def make_tokens(config: TransformerConfig, batch: int = 2, device: str = "cpu", seed: int = 1) -> tuple[Tensor, Tensor]:
    """(tokens, targets)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, batch, config.max_sequence_length)
    tokens, targets = torch.randint(config.vocab_size, shape, generator=generator).to(device)
    return tokens, targets


def gradients(model: MHCTransformer, tokens: Tensor, targets: Tensor, seed: int = 2) -> dict[str, Tensor]:
    """The loss and the gradient of every parameter by name."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = None
    loss = model.loss(tokens, targets)
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(g is not None for g in found.values()), [name for name, g in found.items() if g is None]
    return {"loss": loss.detach(), **found}


def assert_same_bits(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    different = [name for name in one if not torch.equal(one[name], two[name])]
    assert one.keys() == two.keys() and not different, different


def relative_errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """The error of each gradient relative to its norm, the largest first.

    Those of alpha and scale are sums of terms of both signs over all tokens, next to nothing now and then: they are
    measured by those of beta and base, which sum the same terms with other factors, too.
    """
    errors = {}
    for name, g in wanted.items():
        size, other = g.float().norm(), name.replace(".alpha", ".beta").replace(".scale", ".base")
        if other != name:
            size = torch.maximum(size, wanted[other].float().norm())
        errors[name] = ((found[name] - g).float().norm() / size).item()
    return dict(sorted(errors.items(), key=lambda pair: -pair[1]))


def kernels_of(
    configs: list[TransformerConfig], arch: str, batch: int = 2, dtypes=(BF16,), main_grad: bool = False
) -> list[tuple]:
    """(builder, arguments) of what training and inference with these models need; little is computed.

    ``main_grad``: all parameters have one, but for the embedding's, which torch differentiates.
    """
    attention = mock.patch("torch.nn.functional.scaled_dot_product_attention", lambda q, k, v, **options: q * 1)
    with fake_kernels(arch, computes=False) as jobs, attention:
        for config in configs:
            # Elsewhere attention has no gradients
            trained = config if arch == "sm_90a" else replace(config, attention_backend="torch")
            for dtype in dtypes:
                model, (tokens, targets) = MHCTransformer(trained, dtype=dtype), make_tokens(config, batch)
                for name, parameter in model.named_parameters():
                    if main_grad and not name.startswith("embedding"):
                        parameter.main_grad = torch.zeros(parameter.shape)
                model.loss(tokens, targets).backward()
                with torch.no_grad():
                    (model if trained is config else MHCTransformer(config, dtype=dtype))(tokens)
    return list(dict.fromkeys(jobs))
