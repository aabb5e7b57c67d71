"""A random Qwen2 with Qwen2.5's chat template, special tokens and files."""

import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (
    *(END, START, STOP, "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
    *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>"),
    "<|video_pad|>",
)
ADDED = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>"),
)
"""Not special to the tokenizer: they are decoded as text."""
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def chat_template(name: str = "qwen2_5") -> str:
    """Return a family's, from the copy in TRL."""
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


def write_tokenizer(folder: Path, texts: Iterable[str], template: str = "qwen2_5") -> Any:
    """Write a tokenizer and return it. texts: what the byte-level BPE is trained on."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False))
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    bpe.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=STOP, pad_token=END)
    tokenizer.chat_template = chat_template(template)
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_qwen2(folder: Path, texts: Iterable[str]) -> None:
    """Write the model's files. texts: those of its tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = write_tokenizer(folder, texts)
    stop, end = tokenizer.convert_tokens_to_ids([STOP, END])
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=-(-len(tokenizer) // 128) * 128 + 128,  # as Qwen2.5's, more rows than the tokenizer has tokens
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=stop,
        dtype="bfloat16",
    )
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder)
    sampling = {"bos_token_id": end, "pad_token_id": end, "do_sample": True, "eos_token_id": [stop, end]}
    sampling |= {"repetition_penalty": 1.1, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(sampling))
