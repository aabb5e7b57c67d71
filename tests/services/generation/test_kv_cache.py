"""Memory of keys, values and recurrent states, by the names of transformers and of published folders."""

from typing import Any

import pytest

from offbeat.services.generation.hf.limits import architecture_problem
from offbeat.services.generation.kv_cache import bytes_per_sequence, bytes_per_token, layer_kinds

SIZES = {"num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64}
GATED = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_n_groups": 1, "mamba_d_conv": 4}
ONE_IN_FOUR = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, []),
        (GATED | {"layer_types": ONE_IN_FOUR}, ONE_IN_FOUR),
        (GATED, ONE_IN_FOUR),
        (GATED | {"full_attention_interval": 2}, ["linear_attention", "full_attention"] * 4),
        ({"full_attn_idxs": [1, 3]}, ["conv", "full_attention", "conv", "full_attention", *["conv"] * 4]),
        ({"attn_layer_indices": [0], "num_hidden_layers": 2}, ["full_attention", "mamba"]),
        ({"hybrid_override_pattern": "M-*E"}, ["mamba", "mlp", "full_attention", "moe"]),
        ({"model_type": "falcon_h1", "num_hidden_layers": 2}, ["hybrid", "hybrid"]),
    ],
)
def test_layers_have_kinds_by_the_names_of_each_family(changes: dict[str, Any], kinds: list[str]):
    assert layer_kinds(SIZES | changes) == kinds
    assert layer_kinds({"text_config": SIZES | changes}) == kinds
    assert (architecture_problem(SIZES | changes) is None) == (not kinds), "hf_infer keeps no states"


@pytest.mark.parametrize(
    ("changes", "num_attention", "state"),
    [
        ({}, 8, 0),
        (GATED, 2, 6 * (3 * 1024 * 2 + 4 * 128 * 128 * 4)),
        ({"layer_types": ["conv"] * 6 + ["full_attention"] * 2, "conv_L_cache": 3}, 2, 6 * 3 * 64 * 2),
        (MAMBA | {"layer_types": ["mamba"] * 7 + ["attention"]}, 1, 7 * (3 * (128 + 64) * 2 + 128 * 32 * 4)),
        (MAMBA | {"model_type": "falcon_h1"}, 8, 8 * (3 * (128 + 64) * 2 + 128 * 32 * 4)),
    ],
)
def test_only_layers_of_attention_hold_keys_and_recurrent_ones_a_state(
    changes: dict[str, Any], num_attention: int, state: int
):
    assert bytes_per_token(SIZES | changes, 2) == 2 * num_attention * 2 * 16 * 2
    assert bytes_per_sequence(SIZES | changes, 2) == state
