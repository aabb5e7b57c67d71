"""Tiny models of transformers' families, with random weights."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from offbeat.trainer.config.tiny_policy import TinyPolicyConfig, TinyVisionConfig
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.tiny import write_tiny_policy

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
ROUTED = EXPERTS | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 64}
CONV = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
SHARED_EXPERT = EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32}
CHANGES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "qwen2_moe": EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": None},
    "qwen3_moe": EXPERTS | {"num_experts": 4, "head_dim": 16},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 8},
    "vaultgemma": {"head_dim": 16, "sliding_window": 8},
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": None,
    },
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 64,
        "num_kv_shared_layers": 0,
    },
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4_moe": ROUTED | {"head_dim": 16},
    "deepseek_v2": ROUTED | LATENT | {"num_key_value_heads": 4},
    "deepseek_v3": ROUTED | LATENT | {"num_key_value_heads": 4},
    "qwen3_5_text": LINEAR | {"head_dim": 16},
    "qwen3_5_moe_text": LINEAR | SHARED_EXPERT | {"head_dim": 16},
    "qwen3_next": LINEAR | SHARED_EXPERT | {"head_dim": 16},
    "olmo_hybrid": LINEAR,
    "lfm2": CONV | {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": CONV | EXPERTS | {"num_experts": 4, "num_dense_layers": 1},
    "granitemoehybrid": MAMBA
    | {
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
    },
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128, "head_dim": 16},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "head_dim": 16,
        "chunk_size": 64,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1]},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 64},
    "bloom": {"n_layer": 2, "n_head": 2},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 2, "max_seq_len": 128},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "codegen": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 8},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 8},
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
}
DEEPSTACK = QWEN_VISION | {"deepstack_visual_indexes": [0]}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 16,
    "image_size": 64,
}
M_ROPE = {
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.5,
    },
}
QWEN_TOKENS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "qwen3_5": QWEN_TOKENS | {"text_config": CHANGES["qwen3_5_text"] | M_ROPE, "vision_config": QWEN_VISION},
    "qwen3_5_moe": QWEN_TOKENS | {"text_config": CHANGES["qwen3_5_moe_text"] | M_ROPE, "vision_config": QWEN_VISION},
    "qwen3_vl": QWEN_TOKENS | {"text_config": M_ROPE, "vision_config": DEEPSTACK},
    "qwen3_vl_moe": QWEN_TOKENS
    | {
        "text_config": CHANGES["qwen3_moe"] | M_ROPE | {"moe_intermediate_size": 48},
        "vision_config": DEEPSTACK,
    },
    "gemma3": {
        "text_config": CHANGES["gemma3_text"],
        "vision_config": VISION | {"model_type": "siglip_vision_model"},
        "image_token_index": 60,
        "boi_token_index": 61,
        "eoi_token_index": 62,
        "mm_tokens_per_image": 4,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", "head_dim": 16},
        "vision_config": VISION | {"model_type": "pixtral"},
        "image_token_index": 60,
    },
}


SEEING: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        "text_config": {
            "num_hidden_layers": 3,  # what is added after the last one changes no later token
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [8, 4, 4],
                "mrope_interleaved": True,
            },
        },
        "vision_config": QWEN_VISION | {"depth": 3, "deepstack_visual_indexes": [0, 2]},
    },
    "qwen3_5": {
        "text_config": LINEAR
        | {
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
                "partial_rotary_factor": 0.5,
            },
        },
        "vision_config": QWEN_VISION,
    },
}
"""Sizes are those that vLLM takes on a CPU."""
for _family, _experts in (
    ("qwen3_vl", EXPERTS | {"num_experts": 4, "moe_intermediate_size": 48, "norm_topk_prob": True}),
    ("qwen3_5", SHARED_EXPERT),
):
    SEEING[f"{_family}_moe"] = SEEING[_family] | {"text_config": SEEING[_family]["text_config"] | _experts}
VISION_FAMILIES = ("qwen2_vl", *SEEING)
"""Families of `write_vision_policy`."""


def write_vision_policy(folder: Path, family: str, words: Sequence[str], **tiny: Any) -> None:
    """Write a tiny policy with image input and the words of envs, of another family than its own Qwen2-VL.

    tiny: settings of the tiny policy, whose sizes are the language model's.
    """
    write_tiny_policy(folder, TinyPolicyConfig(**{"num_hidden_layers": 2, "vision": TinyVisionConfig()} | tiny), words)
    if family == "qwen2_vl":
        return
    path = folder / "config.json"
    own, settings = json.loads(path.read_text()), SEEING[family]
    kept = set(SIZES) | {"initializer_range", "rms_norm_eps", "tie_word_embeddings"}
    text = {key: value for key, value in own["text_config"].items() if key in kept} | settings["text_config"]
    vision = settings["vision_config"] | {"out_hidden_size": text["hidden_size"], "initializer_range": 0.1}
    top = {key: own[key] for key in ("tie_word_embeddings", *(key for key in own if key.endswith("token_id")))}
    config = AutoConfig.for_model(family, **top, text_config=text, vision_config=vision, dtype="float32")
    config.architectures = [AutoModelForImageTextToText._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)


def write_multimodal(folder: Path, model_type: str, **changes: Any) -> None:
    """Write the `config.json` of a whole multimodal model. changes: of its language model."""
    settings = MULTIMODAL[model_type]
    text = SIZES | settings["text_config"] | changes
    config = AutoConfig.for_model(model_type, **settings | {"text_config": text, "tie_word_embeddings": False})
    kind: Any = AutoModelForImageTextToText._model_mapping[type(config)]
    config.architectures = [kind.__name__]
    config.save_pretrained(folder)


def write_family(folder: Path, model_type: str, **changes: Any) -> None:
    """Write the `config.json` of a model, whose weights are then random."""
    AutoConfig.for_model(model_type, **SIZES | CHANGES.get(model_type, {}) | changes).save_pretrained(folder)


def pack(sequences: Sequence[Tensor]) -> PackedInput:
    """Pack sequences, and score all tokens but the first of each."""
    borders = torch.tensor([0, *map(len, sequences)]).cumsum(0)
    tokens = torch.cat(list(sequences))
    positions = torch.tensor([n for n in range(len(tokens)) if n not in borders.tolist()])
    return PackedInput.of(tokens, borders, positions)
