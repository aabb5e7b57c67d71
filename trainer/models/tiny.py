"""Built-in policy: a small Qwen2 with a word-level tokenizer, without weights.

Invariants: torch and transformers are not imported; the chat template is append-only; every vocabulary id has a word.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from offbeat.trainer.config.tiny_policy import TinyPolicyConfig, TinyVisionConfig

TURN_START, TURN_END, PAD, UNKNOWN = "<|im_start|>", "<|im_end|>", "<pad>", "<unk>"
SPECIAL_TOKENS = (PAD, UNKNOWN, TURN_START, TURN_END)
VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
VISION_TOKENS = (VISION_START, VISION_END, IMAGE, VIDEO)
"""Qwen2-VL's."""
MERGE = 2
"""Patches per side of an image token."""
MAX_SIDE_PIXELS = 1024
"""Largest square without downscaling."""
ROLES = ("system", "user", "assistant")

_EMPTY_AUTO_MAP = {"AutoTokenizer": [None, None]}
"""transformers 5 ignores `tokenizer_class` of Qwen2 folders without an `auto_map`; an empty one runs no code."""

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

VISION_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def vocabulary(words: Sequence[str], special: Sequence[str] = SPECIAL_TOKENS) -> dict[str, int]:
    """Return token -> id: special tokens, roles, distinct `words`.

    Raises:
        ValueError: a word is empty, special, or has whitespace.
    """
    for word in words:
        if not word or len(word.split()) != 1 or word != word.strip():
            raise ValueError(f"{word!r} is not one word: the tiny policy's tokenizer splits at whitespace")
        if word in special:
            raise ValueError(f"{word!r} is a special token, not a word")
    return {token: i for i, token in enumerate(dict.fromkeys((*special, *ROLES, *words)))}


def build_tokenizer(words: Sequence[str], special: Sequence[str] = SPECIAL_TOKENS) -> Tokenizer:
    tokenizer = Tokenizer(WordLevel(vocab=vocabulary(words, special), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def write_tiny_policy(folder: Path, config: TinyPolicyConfig, words: Sequence[str]) -> None:
    """Write a tiny policy's configuration and tokenizer, deterministically and atomically.

    words: all of the envs' texts, in a stable order.

    Raises:
        ValueError: as `vocabulary`.
    """
    special = SPECIAL_TOKENS if config.vision is None else (*SPECIAL_TOKENS, *VISION_TOKENS)
    tokenizer = build_tokenizer(words, special)
    ids = vocabulary(words, special)
    folder.mkdir(parents=True, exist_ok=True)
    special_ids = {"bos_token_id": None, "eos_token_id": ids[TURN_END], "pad_token_id": ids[PAD]}
    _write(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(config))
    _write_json(folder / "generation_config.json", special_ids)
    # No pad id for the model itself: transformers would start that row at zero, where norms amplify 1,000 times
    model = _model_config(config, len(ids)) | special_ids | {"pad_token_id": None}
    if config.vision is not None:
        model = _vision_model_config(model, config.vision, config, ids)
        _write_json(folder / "preprocessor_config.json", _image_config(config.vision))
    _write_json(folder / "config.json", model)


def _model_config(config: TinyPolicyConfig, vocab_size: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "dtype": "float32",
    }


def _vision_model_config(
    text: dict[str, object], vision: TinyVisionConfig, config: TinyPolicyConfig, ids: dict[str, int]
) -> dict[str, object]:
    half_dim = config.hidden_size // config.num_attention_heads // 2
    sections = [
        half_dim - 2 * (3 * half_dim // 8),
        3 * half_dim // 8,
        3 * half_dim // 8,
    ]  # time, rows, columns, as Qwen2-VL's 16, 24, 24
    rope = {"rope_type": "default", "rope_theta": config.rope_theta, "mrope_section": sections}
    tower = {
        "model_type": "qwen2_vl",
        "depth": vision.depth,
        "embed_dim": vision.embed_dim,
        "hidden_size": config.hidden_size,
        "num_heads": vision.num_heads,
        "mlp_ratio": 4,
        "in_channels": 3,
        "patch_size": vision.patch_size,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "initializer_range": config.initializer_range,
    }
    text_settings = {key: value for key, value in text.items() if key != "architectures"}
    return {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "text_config": text_settings | {"model_type": "qwen2_vl_text", "rope_parameters": rope},
        "vision_config": tower,
        "image_token_id": ids[IMAGE],
        "video_token_id": ids[VIDEO],
        "vision_start_token_id": ids[VISION_START],
        "vision_end_token_id": ids[VISION_END],
        **{key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "dtype")},
    }


def _image_config(vision: TinyVisionConfig) -> dict[str, object]:
    side = vision.patch_size * MERGE
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": vision.patch_size,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": side**2, "longest_edge": MAX_SIDE_PIXELS**2},
        # White maps to zero: envs render on a light background, which would dominate every patch
        "image_mean": [1.0, 1.0, 1.0],
        "image_std": [0.5, 0.5, 0.5],
    }


def _tokenizer_config(config: TinyPolicyConfig) -> dict[str, object]:
    return {
        "tokenizer_class": "TokenizersBackend",
        "auto_map": _EMPTY_AUTO_MAP,
        "eos_token": TURN_END,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "additional_special_tokens": [TURN_START, *(() if config.vision is None else VISION_TOKENS)],
        "chat_template": CHATML_TEMPLATE if config.vision is None else VISION_TEMPLATE,
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    _write(path, json.dumps(content, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
