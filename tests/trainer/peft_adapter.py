"""Adapters as PEFT writes them."""

from pathlib import Path

import torch

from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.models.loading import load_policy


def write_adapter(model: Path, folder: Path, args: ModelArgs, *, std: float = 0.1, seed: int = 5) -> Path:
    """Write an adapter of a model's folder, with random factors; return its folder."""
    from peft import LoraConfig, get_peft_model

    targets = args.lora_targets
    config = LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.adapter_alpha,  # pyright: ignore[reportArgumentType]
        use_rslora=args.use_rslora,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(load_policy(model, ModelArgs(), seed=1).model, config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=std, generator=generator)
    adapted.save_pretrained(str(folder), save_embedding_layers=False)
    return folder
