"""Tiny reward models with random weights."""

from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

from tests.qwen2 import write_qwen2


def write_reward_model(folder: Path, num_labels: int = 1) -> None:
    """Write a Qwen2 with a score head; its padding is its end token, which chat templates use."""
    write_qwen2(folder, ["Why is the sky blue? Because of the air. " * 3])
    config = Qwen2Config.from_pretrained(folder)
    config.num_labels = num_labels
    torch.manual_seed(1)
    model = Qwen2ForSequenceClassification(config)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
