"""A random Qwen3 mixture of experts with a tokenizer and Qwen2.5's chat template."""

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.qwen2 import END, STOP, write_tokenizer

LAYERS, TOP_K, EXPERTS = 4, 4, 32


def write_qwen3_moe(folder: Path, texts: Iterable[str]) -> None:
    """Write the model's files, in bfloat16. texts: those of its tokenizer."""
    tokenizer = write_tokenizer(folder, texts)
    stop, end = tokenizer.convert_tokens_to_ids([STOP, END])
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=-(-len(tokenizer) // 128) * 128,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=32_768,
        tie_word_embeddings=False,
        bos_token_id=end,
        eos_token_id=stop,
        dtype="bfloat16",
    )
    model = Qwen3MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, 0, 0.15)  # so that experts differ
    model.bfloat16().save_pretrained(folder)
