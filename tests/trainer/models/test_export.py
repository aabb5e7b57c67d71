"""Weights as a Hugging Face folder."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.models.export import copy_model_files, export_weights
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.tiny import write_tiny_policy


@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000])
def test_an_exported_folder_is_loaded_by_transformers(tmp_path: Path, shard_bytes: int) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    write_tiny_policy(source, TinyPolicyConfig(num_hidden_layers=2), ["a", "b"])
    target.mkdir()
    policy = load_policy(source, ModelArgs(), seed=1).model
    copy_model_files(source, target)
    export_weights(target, policy.named_parameters(), shard_bytes)
    shards = sorted(path.name for path in target.glob("*.safetensors"))
    assert (shards == ["model.safetensors"]) == (shard_bytes == 1 << 30)
    loaded = AutoModelForCausalLM.from_pretrained(target)
    for name, parameter in policy.state_dict().items():
        assert torch.equal(parameter, loaded.state_dict()[name]), name


def test_an_exported_folder_carries_no_weights_of_its_source(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    write_tiny_policy(source, TinyPolicyConfig(), ["a"])
    (source / "model.safetensors").write_bytes(b"old")
    target.mkdir()
    copy_model_files(source, target)
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
