"""HyperConnectionConfig and TransformerConfig: what they refuse, and how they say so."""

import dataclasses
import math
import re

import pytest

from cute_kernels.mhc import VARIANTS
from cute_kernels.nn import HyperConnectionConfig, LayerNorm, RMSNorm, TransformerConfig, optimal_recompute_layers

MODEL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "ffn_hidden_size": 64,
    "max_sequence_length": 16,
}
CONNECTIONS = [
    ({"hidden_size": 4}, ValueError, "hidden_size must be at least 8, got 4"),
    ({"hidden_size": True}, TypeError, "hidden_size must be an int, got True of type bool"),
    ({"hidden_size": 32.0}, TypeError, "hidden_size must be an int, got 32.0 of type float"),
    ({"num_streams": 0}, ValueError, "num_streams must be one of (1, 2, 4, 8) (for none: hyper_connections=None"),
    ({"num_streams": 3}, ValueError, "num_streams must be one of (1, 2, 4, 8) (for none"),
    ({"num_streams": True}, TypeError, "num_streams must be an int, got True of type bool"),
    ({"sinkhorn_iterations": 0}, ValueError, "sinkhorn_iterations must be from 1 to 100, got 0"),
    ({"sinkhorn_iterations": 101}, ValueError, "sinkhorn_iterations must be from 1 to 100, got 101"),
    ({"sinkhorn_iterations": True}, TypeError, "sinkhorn_iterations must be an int, got True of type bool"),
    ({"init_gating_factor": -0.01}, ValueError, "init_gating_factor must be finite and not negative, got -0.01"),
    ({"init_gating_factor": math.nan}, ValueError, "init_gating_factor must be finite and not negative, got nan"),
    ({"init_gating_factor": math.inf}, ValueError, "init_gating_factor must be finite and not negative, got inf"),
    ({"init_gating_factor": "1"}, TypeError, "init_gating_factor must be a float, got '1' of type str"),
    ({"init_gating_factor": False}, TypeError, "init_gating_factor must be a float, got False of type bool"),
    ({"variant": "deepseek"}, ValueError, "variant must be one of ('deepseek_v4', "),
    ({"variant": None}, TypeError, "variant must be a name or a Variant, got NoneType"),
    ({"eps": 0.0}, ValueError, "eps must be finite and positive in fp32, or None, got 0.0"),
    ({"eps": 1e-60}, ValueError, "eps must be finite and positive in fp32, or None, got 1e-60"),
    ({"eps": math.nan}, ValueError, "eps must be finite and positive in fp32, or None, got nan"),
    ({"eps": True}, TypeError, "eps must be a float, got True of type bool"),
    ({"recompute": 1}, TypeError, "recompute must be a bool, got int"),
    ({"offload": None}, TypeError, "offload must be a bool, got NoneType"),
    ({"recompute_layers": 2}, ValueError, "recompute_layers must be None unless recompute=True, got 2"),
    ({"recompute_layers": "optimal"}, ValueError, "recompute_layers must be None unless recompute=True, got 'optimal'"),
    ({"recompute": True, "recompute_layers": 0}, ValueError, "recompute_layers must be at least 1, got 0"),
    (
        {"recompute": True, "recompute_layers": True},
        TypeError,
        "layers must be an int, got True of type bool",
    ),
    ({"recompute": True, "recompute_layers": 1.5}, TypeError, "recompute_layers must be an int, got 1.5 of type float"),
    ({"recompute": True, "recompute_layers": "best"}, ValueError, "must be an int, 'optimal' or None, got 'best'"),
]
TRANSFORMERS = [
    *[({f: 0}, ValueError, f"{f} must be at least 1, got 0") for f in (*MODEL, "num_kv_heads")],
    *[({f: True}, TypeError, f"{f} must be an int, got True of type bool") for f in (*MODEL, "num_kv_heads")],
    ({"hidden_size": 36}, ValueError, "hidden_size must be a multiple of 2 * num_heads = 8, got 36"),
    ({"num_kv_heads": 3}, ValueError, "num_kv_heads must divide num_heads = 4, got 3"),
    ({"rope_theta": 0.0}, ValueError, "rope_theta must be finite and positive, got 0.0"),
    ({"norm_eps": -1e-6}, ValueError, "norm_eps must be finite and positive, got -1e-06"),
    ({"norm_eps": None}, TypeError, "norm_eps must be a float, got None of type NoneType"),
    ({"dropout_p": 1.0}, ValueError, "dropout_p must be in [0, 1), got 1.0"),
    ({"dropout_p": True}, TypeError, "dropout_p must be a float, got True of type bool"),
    ({"backend": "torch"}, ValueError, "backend must be None or 'reference', got 'torch'"),
    ({"attention_backend": "flash"}, ValueError, "attention_backend must be None or 'torch', got 'flash'"),
    ({"hyper_connections": True}, TypeError, "hyper_connections must be a HyperConnectionConfig or None, got bool"),
    (
        {"hyper_connections": HyperConnectionConfig(64)},
        ValueError,
        "hyper_connections.hidden_size must be the model's hidden_size = 32, got 64",
    ),
    (
        {"hyper_connections": HyperConnectionConfig(32, recompute=True, recompute_layers=5)},
        ValueError,
        "hyper_connections.recompute_layers must be at most num_layers = 4, got 5",
    ),
]


@pytest.mark.parametrize(("fields", "error", "message"), CONNECTIONS, ids=[str(case[0]) for case in CONNECTIONS])
def test_hyper_connection_guards(fields, error, message):
    with pytest.raises(error, match="HyperConnectionConfig: .*" + re.escape(message)):
        HyperConnectionConfig(**{"hidden_size": 32, **fields})


@pytest.mark.parametrize(("fields", "error", "message"), TRANSFORMERS, ids=[str(case[0]) for case in TRANSFORMERS])
def test_transformer_guards(fields, error, message):
    with pytest.raises(error, match="TransformerConfig: " + re.escape(message)):
        TransformerConfig(**{**MODEL, **fields})


@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
def test_a_bool_is_no_size(norm):
    for size in (True, (True,)):
        with pytest.raises(ValueError, match=f"^{norm.__name__}: normalized_shape must be one positive size, got "):
            norm(size)


@pytest.mark.parametrize("config", [HyperConnectionConfig(32), TransformerConfig(**MODEL)], ids=["hc", "model"])
def test_every_field_is_frozen_and_documented(config):
    described = type(config).__doc__
    for field in dataclasses.fields(config):
        assert re.search(rf"^ +(\w+, )*{field.name}(, \w+)*: ", described, re.MULTILINE), field.name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field.name, 1)


def test_the_memory_of_streams_is_documented():
    text = " ".join(HyperConnectionConfig.__doc__.split())
    assert "Memory inside of the block of layers grows linearly with ``num_streams``" in text


def test_the_variant_of_a_config():
    assert HyperConnectionConfig(32).resolved_variant() == VARIANTS["deepseek_v4"]
    assert HyperConnectionConfig(32, eps=1).resolved_variant().rms_eps == 1.0
    config = HyperConnectionConfig(32, variant="transformer_engine", sinkhorn_iterations=7, eps=1e-3)
    expected = dataclasses.replace(VARIANTS["transformer_engine"], iterations=7, rms_eps=1e-3)
    assert config.resolved_variant() == expected
    assert HyperConnectionConfig(32, variant=expected, sinkhorn_iterations=7).resolved_variant() == expected


@pytest.mark.parametrize("name", VARIANTS)
def test_a_preset_is_the_systems_own_unless_told(name):
    """With its number of Sinkhorn's iterations, too: "tilekernels" has 10."""
    assert HyperConnectionConfig(32, variant=name).resolved_variant() == VARIANTS[name]


@pytest.mark.parametrize(
    ("streams", "layers", "expected"), [(4, 4, 2), (4, 16, 3), (4, 24, 4), (4, 61, 6), (1, 1, 1), (1, 2, 1), (8, 64, 7)]
)
def test_optimal_layers_a_block(streams, layers, expected):
    """Equation 20: round(sqrt(n L / (n + 2)))."""
    assert optimal_recompute_layers(streams, layers) == expected


def test_how_near_the_least_it_is():
    assert "are together within 7 % of their least there" in optimal_recompute_layers.__doc__
    for streams in (1, 2, 4, 8):
        for layers in range(1, 100):
            numbers = [streams * math.ceil(layers / block) + (streams + 2) * block for block in range(1, layers + 1)]
            assert numbers[optimal_recompute_layers(streams, layers) - 1] <= 1.07 * min(numbers)


@pytest.mark.parametrize(
    ("numbers", "error", "message"),
    [
        ((4, -3), ValueError, "num_layers must be at least 1, got -3"),
        ((4, 0), ValueError, "num_layers must be at least 1, got 0"),
        ((-2, 4), ValueError, "num_streams must be at least 1, got -2"),
        ((4, True), TypeError, "num_layers must be an int, got True of type bool"),
        ((4.0, 4), TypeError, "num_streams must be an int, got 4.0 of type float"),
    ],
    ids=str,
)
def test_optimal_layers_of_no_number(numbers, error, message):
    with pytest.raises(error, match=f"^optimal_recompute_layers: {message}$"):
        optimal_recompute_layers(*numbers)


def test_layers_per_block():
    on = {"hidden_size": 32, "recompute": True}
    assert HyperConnectionConfig(**on).layers_per_block(24) == 4
    assert HyperConnectionConfig(**on, recompute_layers="optimal").layers_per_block(24) == 4
    assert HyperConnectionConfig(**on, recompute_layers=3).layers_per_block(24) == 3
