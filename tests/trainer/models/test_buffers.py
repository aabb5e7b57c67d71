"""Numbers that transformers keeps in buffers are weights, too: of checkpoints, and of versions for engines."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offbeat.services.generation.adapter_settings import PREFIX
from offbeat.trainer.config.actor_train import ModelArgs, StrategyArgs, TrainingArgs
from offbeat.trainer.engines.base import TrainEngine
from offbeat.trainer.engines.deepspeed import DeepSpeedEngine
from offbeat.trainer.engines.frozen import FrozenModel
from offbeat.trainer.engines.fsdp2 import FSDP2Engine
from offbeat.trainer.engines.process_group import Ranks, process_group, ranks_of_environment
from offbeat.trainer.models.export import copy_model_files, export_weights
from offbeat.trainer.models.loading import load_critic, load_policy
from offbeat.trainer.models.lora import named_weights
from offbeat.trainer.models.policy import PackedPolicy, Sampled
from tests.families import pack, write_family

NAMES = {
    "gemma4_text": "model.layers.0.layer_scalar",
    "glm4_moe": "model.layers.1.mlp.gate.e_score_correction_bias",
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    torch.set_num_threads(1)
    with process_group(alone := ranks_of_environment("cpu")):
        yield alone


@pytest.fixture(params=NAMES)
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> PackedPolicy:
    write_family(tmp_path, request.param)
    return changed(load_policy(tmp_path, ModelArgs(), seed=0))


def changed(policy: PackedPolicy) -> PackedPolicy:
    """Give the buffers values that no new model has."""
    state = policy.model.state_dict()
    for name in NAMES.values():
        if name in state:
            state[name].copy_(torch.linspace(0.3, 0.7, len(state[name])))
    return policy


def logprobs(policy: PackedPolicy) -> torch.Tensor:
    with torch.no_grad():
        return policy.eval()(pack([torch.arange(3, 40)])).logprobs


def make_engine(kind: str, policy: PackedPolicy, ranks: Ranks) -> TrainEngine[Sampled]:
    if kind == "fsdp2":
        return FSDP2Engine(policy, TrainingArgs(), ranks)
    return DeepSpeedEngine(policy, TrainingArgs(), StrategyArgs.model_validate({"zero_stage": int(kind)}), ranks)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["0", "3", "fsdp2"])
def test_a_checkpoint_has_them(kind: str, policy: PackedPolicy, ranks: Ranks, tmp_path: Path) -> None:
    before, out = logprobs(policy), tmp_path / "out"
    out.mkdir()
    copy_model_files(tmp_path, out)
    export_weights(out, make_engine(kind, policy, ranks).tensors())
    torch.testing.assert_close(logprobs(load_policy(out, ModelArgs(), seed=1)), before)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["0", "fsdp2"])
def test_they_keep_their_type_beside_16_bit_weights(kind: str, ranks: Ranks, tmp_path: Path) -> None:
    """Routers' biases stay in float32, or other experts would be chosen."""
    write_family(tmp_path, "glm4_moe")
    policy = load_policy(tmp_path, ModelArgs(dtype="bfloat16"), seed=0)
    dict(policy.model.named_buffers())[NAMES["glm4_moe"]].data = torch.linspace(0.3, 0.7, 4)
    tensors = dict(make_engine(kind, policy, ranks).tensors())
    assert torch.equal(tensors[NAMES["glm4_moe"]], torch.linspace(0.3, 0.7, 4))
    assert tensors["lm_head.weight"].dtype == torch.bfloat16


@pytest.mark.slow
def test_they_belong_to_the_base_of_adapters(ranks: Ranks, tmp_path: Path) -> None:
    write_family(tmp_path, "glm4_moe")
    policy = load_policy(tmp_path, ModelArgs(lora_target="q_proj"), seed=0)
    engine = make_engine("0", policy, ranks)
    for form in ("merged", "parts"):
        assert NAMES["glm4_moe"] in dict(engine.tensors(form))
    assert all(name.startswith(PREFIX) for name, _ in engine.tensors("adapter"))


def test_a_checkpoint_of_an_earlier_build_without_them_is_refused(policy: PackedPolicy, tmp_path: Path) -> None:
    """It would be trained on with zeros or ones, which the next checkpoint then has."""
    export_weights(tmp_path, policy.model.named_parameters())
    for load in (load_policy, load_critic):
        with pytest.raises(ValueError, match=r"lacks .*(layer_scalar|e_score_correction_bias).*build before 0\.2"):
            load(tmp_path, ModelArgs(), seed=0)


def test_a_reference_follows_a_policy_that_has_them(policy: PackedPolicy, ranks: Ranks, tmp_path: Path) -> None:
    reference = FrozenModel(load_policy(tmp_path, ModelArgs(), seed=1), ranks)
    reference.follow(named_weights(policy.model), 1.0)
    assert [name for name, _ in reference.tensors()] == [name for name, _ in named_weights(policy.model)]
    torch.testing.assert_close(logprobs(reference._model), logprobs(policy))
