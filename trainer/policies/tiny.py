"""The built-in policy: a small Qwen2 with a word-level tokenizer, written as a Hugging Face folder without weights.

Invariants: nothing here imports torch or transformers, so that the command line stays fast; the chat template is
append-only (a longer conversation's tokens start with the shorter one's); the vocabulary has no id without a word.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from trainer.config import TinyPolicyConfig

TURN_START, TURN_END, PAD, UNKNOWN = "<|im_start|>", "<|im_end|>", "<pad>", "<unk>"
SPECIAL_TOKENS = (PAD, UNKNOWN, TURN_START, TURN_END)
ROLES = ("system", "user", "assistant")

_READ_TOKENIZER_JSON_AS_IT_IS = {"AutoTokenizer": [None, None]}
"""transformers 5 gives each Qwen2 folder Qwen2's byte-level tokenizer, whatever its files say, unless an `auto_map` is
there; an empty one runs no code, and then `tokenizer_class` counts."""

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def vocabulary(words: Sequence[str]) -> dict[str, int]:
    """Token -> id: special tokens, roles, then `words` in their order, each once.

    Raises:
        ValueError: a word is empty, holds whitespace, or is a special token.
    """
    for word in words:
        if not word or len(word.split()) != 1 or word != word.strip():
            raise ValueError(f"{word!r} is not one word: the tiny policy's tokenizer splits at whitespace")
        if word in SPECIAL_TOKENS:
            raise ValueError(f"{word!r} is a special token, not a word")
    return {token: i for i, token in enumerate(dict.fromkeys((*SPECIAL_TOKENS, *ROLES, *words)))}


def build_tokenizer(words: Sequence[str]) -> Tokenizer:
    """Split at whitespace, one token per word; line ends cost nothing, unknown words are `<unk>`."""
    tokenizer = Tokenizer(WordLevel(vocab=vocabulary(words), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def write_tiny_policy(folder: Path, config: TinyPolicyConfig, words: Sequence[str]) -> None:
    """Write `config.json`, `generation_config.json`, `tokenizer.json` and `tokenizer_config.json` into `folder`.

    The same arguments write the same bytes, each file atomically, so a folder that is in use may be written again.

    words: every word that the envs' texts hold, in a stable order.

    Raises:
        ValueError: see `vocabulary`.
    """
    tokenizer = build_tokenizer(words)
    ids = vocabulary(words)
    folder.mkdir(parents=True, exist_ok=True)
    ends = {"bos_token_id": None, "eos_token_id": ids[TURN_END], "pad_token_id": ids[PAD]}
    _write(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(config))
    _write_json(folder / "generation_config.json", ends)
    # No pad id for the model itself: transformers would start that row at zero, where norms amplify 1,000 times
    _write_json(folder / "config.json", _model_config(config, len(ids)) | ends | {"pad_token_id": None})


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


def _tokenizer_config(config: TinyPolicyConfig) -> dict[str, object]:
    return {
        "tokenizer_class": "TokenizersBackend",
        "auto_map": _READ_TOKENIZER_JSON_AS_IT_IS,
        "eos_token": TURN_END,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "additional_special_tokens": [TURN_START],
        "chat_template": CHATML_TEMPLATE,
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    _write(path, json.dumps(content, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
