"""Tensor, pipeline, sequence and data parallelism: four processes learn what one learns, in every layout."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.stages import cut_stage
from offbeat.trainer.models.tiny import write_tiny_policy
from tests.integration.layout_rank import (
    ADAPTED,
    ADAPTED_RESUMED,
    ADAPTER,
    CRITICS,
    HALF,
    LAYOUTS,
    RESUMED,
    STEPS,
    TARGETS,
    adapted_of,
    adapters_learned,
    critic_learned,
    engine_of,
    half_learned,
    learn,
)
from tests.integration.rank_processes import run_ranks
from tests.trainer.peft_adapter import write_adapter

pytestmark = pytest.mark.timeout(600)  # four ranks beside the tests of the mesh, on two cores
ONE = (1, 1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Qwen2, its vocabulary a multiple of 2 alone, and an untied Qwen3 with grouped keys and norms of heads, whose
    adapters start from those of a folder.
    """
    from transformers import Qwen3Config

    folder = tmp_path_factory.mktemp("models")
    (folder / "tied").mkdir()
    sizes = TinyPolicyConfig(hidden_size=128, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=4)
    write_tiny_policy(folder / "tied", sizes, list("abcdefg"))
    Qwen3Config(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(folder / "untied")
    args = ModelArgs(lora_target=TARGETS["untied"], lora_rank=3)
    write_adapter(folder / "untied", folder / "untied" / ADAPTER, args)
    return folder


@pytest.fixture(scope="module")
def out(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the four ranks wrote."""
    folder = tmp_path_factory.mktemp("out")
    run_ranks("layout_rank.py", 4, models, folder)
    return folder


def read(out: Path, name: str) -> dict[str, Tensor]:
    return load_file(out / f"{name}.safetensors")


def assert_learned_same(one: dict[str, Tensor], two: dict[str, Tensor], atol: float = 2e-5) -> None:
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=1e-5, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_ranks_learn_what_one_process_learns(model: str, models: Path, out: Path, ranks: Ranks):
    alone = learn(engine_of(models / model, ranks, ONE), STEPS)
    for name in LAYOUTS[model]:
        assert_learned_same(alone, read(out, f"{model}-{name}"))
    critic = critic_learned(models / model, ranks, ONE)
    assert critic["said"].abs().min() > 0.01
    for name in CRITICS[model]:
        assert_learned_same(critic, read(out, f"{model}-{name}-critic"))


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_a_checkpoint_resumes_in_another_layout(model: str, models: Path, out: Path, ranks: Ranks):
    """Written by four processes, read by four in another layout and by one."""
    expected = learn(engine_of(models / model, ranks, ONE), STEPS + 1)
    expected["norms"] = expected["norms"][-1:]
    for name in LAYOUTS[model]:
        one = engine_of(models / model, ranks, ONE)
        one.load(out / f"{model}-{name}-state")
        assert_learned_same(expected, learn(one, 1))
    for name in RESUMED[model]:
        assert_learned_same(expected, read(out, f"{model}-{name}"))


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_adapters_learn_what_one_process_learns(model: str, models: Path, out: Path, ranks: Ranks):
    engine, reference = adapted_of(models / model, ranks, ONE)
    start = {name: tensor.clone() for name, tensor in engine.tensors()}
    alone = adapters_learned(engine, reference)
    assert torch.equal(alone["reference"], alone["reference_after"])
    targets = TARGETS[model].split(",")
    for name, tensor in start.items():
        is_adapted = "_proj.weight" in name if model == "tied" else name.split(".")[-2] in targets
        assert torch.equal(tensor, alone[name]) != is_adapted, name
    for name in ADAPTED[model]:
        assert_learned_same(alone, read(out, f"{model}-{name}-lora"))


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_a_checkpoint_of_adapters_resumes_in_another_layout(model: str, models: Path, out: Path, ranks: Ranks):
    expected = adapters_learned(*adapted_of(models / model, ranks, ONE), STEPS + 1)
    expected["norms"] = expected["norms"][-1:]
    for name in ADAPTED[model]:
        one, reference = adapted_of(models / model, ranks, ONE)
        one.load(out / f"{model}-{name}-lora-state")
        assert_learned_same(expected, adapters_learned(one, reference, 1))
    for name in ADAPTED_RESUMED[model]:
        assert_learned_same(expected, read(out, f"{model}-{name}-lora"))


@pytest.mark.parametrize("name", HALF)
def test_a_base_in_bfloat16_stays_as_it_is_under_its_adapters(name: str, models: Path, out: Path, ranks: Ranks):
    start = {each: tensor.clone() for each, tensor in engine_of(models / "tied", ranks, ONE, "bfloat16").tensors()}
    alone, learned = (
        adapters_learned(*adapted_of(models / "tied", ranks, ONE, "bfloat16")),
        read(out, f"{name}-lora-bfloat16"),
    )
    for each, tensor in start.items():
        assert learned[each].dtype == torch.bfloat16
        assert torch.equal(tensor, learned[each]) != ("_proj.weight" in each), each
    assert torch.equal(learned["reference"], learned["reference_after"])
    torch.testing.assert_close(alone["said"][0], learned["said"][0], rtol=0, atol=3e-2)
    assert float((learned["said"][0] - learned["reference"]).min()) > 1


def test_a_stage_without_adapters_is_refused(models: Path):
    policy = load_policy(models / "tied", ModelArgs(lora_target="layers.0.self_attn.q_proj"), seed=1)
    with pytest.raises(ValueError, match="pp_size 2: lora_target names nothing in layers 3 to 4, stage 1"):
        cut_stage(policy, 0, 2)


@pytest.mark.parametrize("name", HALF)
def test_float16_skips_a_step_that_overflows_on_one_copy(name: str, models: Path, out: Path, ranks: Ranks):
    alone, split = half_learned(engine_of(models / "tied", ranks, ONE, "float16"), 1e6), read(out, f"{name}-half")
    (scale, applied), _ = split.pop("scales").tolist(), alone.pop("scales")
    assert (scale > 1, applied) == (True, 0)
    assert_learned_same(alone, split, atol=5e-3)


def test_ranks_that_make_no_copy_is_refused(models: Path, ranks: Ranks):
    with pytest.raises(ValueError, match="does not divide"):
        engine_of(models / "tied", ranks, (3, 1))
