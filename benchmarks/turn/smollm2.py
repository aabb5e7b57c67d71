"""Random weights of SmolLM2-135M's shape, with the tiny policy's tokenizer."""

# pyright: basic
import shutil
from pathlib import Path
from typing import Any

from offbeat.benchmarks.harness.environment import BenchEnvironment
from offbeat.deploy.run_setup import prepare_folder

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template*", "generation_config.json")


def make_smollm2(base: BenchEnvironment) -> Path:
    """Write the folder of a model; return it."""
    import torch
    from transformers import LlamaForCausalLM

    tiny = base.run_config("bench-tokenizer")
    prepare_folder(tiny)
    folder = base.folder / "smollm2"
    torch.manual_seed(0)
    LlamaForCausalLM(smollm2_config()).save_pretrained(folder)
    for pattern in TOKENIZER_FILES:
        for file in (tiny.output_dir / "policy").glob(pattern):
            shutil.copy(file, folder)
    return folder


def smollm2_config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True, initializer_range=0.04,
    )  # fmt: skip
