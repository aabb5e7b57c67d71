"""Which layers a stage keeps, and which models are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.models.loading import load_policy, load_reward_model
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.stages import cut_stage, stage_layers
from offbeat.trainer.models.tiny import write_tiny_policy
from tests.copying import replace
from tests.families import pack, write_family

HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "max_position_embeddings": 256,
}
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_policy(tmp_path, TinyPolicyConfig(num_hidden_layers=3), list("abcd"))
    return tmp_path


@pytest.mark.parametrize(("layers", "stages"), [(5, 2), (5, 4), (4, 4), (7, 3)])
def test_every_layer_is_on_one_stage_and_no_stage_is_empty(layers: int, stages: int):
    ranges = [stage_layers(layers, stage, stages) for stage in range(stages)]
    assert [layer for each in ranges for layer in each] == list(range(layers))
    sizes = [len(each) for each in ranges]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


def test_stages_in_turn_are_the_whole_model(folder: Path):
    x = PackedInput.of(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 2, 5]), torch.tensor([1, 4]))
    whole = load_policy(folder, ModelArgs(), seed=1)
    names = dict(whole.named_parameters()).keys()
    expected = whole(x)
    stages = [cut_stage(load_policy(folder, ModelArgs(), seed=1), stage, 2) for stage in range(2)]
    assert torch.equal(stages[1](replace(x, hidden=stages[0](x))).logprobs, expected.logprobs)
    first, last = ({name for name, _ in stage.named_parameters()} for stage in stages)
    assert first | last == names
    assert first & last == {"model.model.embed_tokens.weight"}


def test_stages_of_recurrent_layers_are_the_whole_model(tmp_path: Path):
    write_family(tmp_path, "qwen3_5_text", **HYBRID)
    x = pack([torch.arange(length) % 60 for length in (150, 3, 70)])
    expected = load_policy(tmp_path, ModelArgs(), seed=1)(x)
    first, last = (cut_stage(load_policy(tmp_path, ModelArgs(), seed=1), stage, 2) for stage in range(2))
    assert torch.equal(last(replace(x, hidden=first(x))).logprobs, expected.logprobs)
    kinds = [{type(layer).__name__ for layer in stage.modules()} for stage in (first, last)]
    assert all("Qwen3_5GatedDeltaNet" in each for each in kinds)


def test_a_reward_models_head_is_on_the_last_stage(folder: Path):
    x = PackedInput.of(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 2, 5]), torch.tensor([1, 4]))
    expected = load_reward_model(folder, ModelArgs(), seed=1)(x)
    first, last = (cut_stage(load_reward_model(folder, ModelArgs(), seed=1), stage, 2) for stage in range(2))
    assert torch.equal(last(replace(x, hidden=first(x))), expected)
    assert "model.score.weight" in dict(last.named_parameters())
    assert not first.state_dict().keys() & last.state_dict().keys()


def test_more_stages_than_layers_are_refused(folder: Path):
    with pytest.raises(ValueError, match="pp_size 4: the model's num_hidden_layers, 3, are fewer: take at most 3"):
        cut_stage(load_policy(folder, ModelArgs(), seed=1), 0, 4)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("GPT2Config", "transformers has no plan for gpt2"),
        ("GraniteConfig", "granite changes hidden states between its layers"),
    ],
)
def test_a_model_that_stages_would_change_is_refused(config: str, problem: str, tmp_path: Path):
    import transformers

    settings = {"vocab_size": 16, "num_hidden_layers": 2, "attn_implementation": "eager", **SIZES}
    if config == "GraniteConfig":
        settings["embedding_multiplier"] = 12.0
    getattr(transformers, config)(**settings).save_pretrained(tmp_path)
    policy = load_policy(tmp_path, ModelArgs(attn_implementation="eager"), seed=1)
    with pytest.raises(ValueError, match=problem):
        cut_stage(policy, 0, 2)
