from pathlib import Path

import pytest

from offbeat.deploy.config.checks.model import has_vision
from offbeat.deploy.config.checks.run import check_run
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import compose_tree, validate_tree
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.saving import to_saved_tree
from offbeat.deploy.config.vocabulary import collect_words
from offbeat.deploy.play.target import load_config
from offbeat.trainer.config.aliases import ENGINE
from tests.families import write_vision_policy
from tests.paths import CONFIGS

TAG = "custom_envs.FrozenLake"


def problems(config: str, *overrides: str) -> dict[str, str]:
    checked = validate_tree(compose_tree(CONFIGS / config, overrides))
    return {problem.path: problem.message for problem in check_run(checked, cores=2)}


def test_tiny_policy_with_images_is_accepted():
    assert problems("frozen_lake_vision.yaml") == {}


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (["group_size_redundancy=1"], "group_size_redundancy", "evaluation keeps every episode"),
        (["num_env_groups=400"], "num_env_groups", "set val_batch_size"),
        (["task_sampler.path=offbeat.envs.task_samplers:Levels"], "task_sampler", "always use the same tasks"),
        (["num_env_groups=3", "num_groups_partition=[3]"], "", ""),
        (["max_env_num_per_worker=4"], "", ""),
    ],
)
def test_keys_of_training_alone_are_refused_for_evaluation(overrides: list[str], key: str, says: str):
    found = problems("quickstart.yaml", *(f"+val_env_manager.{each}" for each in overrides))
    assert found.keys() == ({f"val_env_manager.{key}"} if key else set())
    assert says in found.get(f"val_env_manager.{key}", "")


@pytest.mark.parametrize(
    ("overrides", "path", "says"),
    [
        (["tiny.vision=null"], f"{TAG}.agent_template", "set tiny.vision to {}"),
        ([f"{TAG}.env_config.render_mode=ansi"], f"{TAG}.env_type", "render_mode rgb_array"),
        (
            ["+actor_train.model_args.lora_target=q_proj", f"+{ENGINE}.max_lora_rank=8"],
            f"{ENGINE}.max_lora_rank",
            "merged weights",
        ),
        (
            ["+actor_train.model_args.lora_target=qkv"],
            "actor_train.model_args.lora_target",
            "the model has no layer qkv",
        ),
        (["adv_estimator=gae"], "adv_estimator", "critic has no image input"),
        (["+actor_train.model_args.shared_prefix=true"], "actor_train.model_args.shared_prefix", "tokens only"),
        (
            ["+actor_train.strategy_args.strategy_name=megatron_train"],
            "actor_train.strategy_args.strategy_name",
            "take deepspeed_train or fsdp2_train",
        ),
        (["+actor_infer.tensor_parallel_size=2"], f"{ENGINE}.tensor_parallel_size", "take 1"),
        (["+use_kl_loss=true", "+kl_loss_coef=0.1", "+kl_loss_type=full"], "kl_loss_type", "take k3"),
        (["warm_start.demos=offbeat.envs.frozen_lake.demos:blind_wandering"], "warm_start.demos", "careful_wandering"),
        (
            [f"+{TAG}.agent_runner.path=offbeat.deploy.agents.walker:play"],
            f"{TAG}.agent_runner",
            "text only",
        ),
        (["sequence_length=12", "tiny.vision.patch_size=16"], "sequence_length", "the first prompt of FrozenLake"),
    ],
)
def test_invalid_combinations_with_images_are_rejected(overrides: list[str], path: str, says: str):
    assert says in problems("frozen_lake_vision.yaml", *overrides).get(path, "")


def test_a_reference_without_image_input_is_refused(folder: Path):
    overrides = [
        "+use_kl_loss=true",
        "kl_loss_coef=0.1",
        f"+reference.model_args.model_name_or_path={folder / 'policy'}",
    ]
    key = "reference.model_args.model_name_or_path"
    assert "policy has no image input, but the policy has" in problems("frozen_lake_vision.yaml", *overrides).get(
        key, ""
    )


@pytest.mark.parametrize("strategy", ["{strategy_name: fsdp2_train}", "{zero_stage: 2}", "{zero_stage: 3}"])
def test_a_policy_with_images_trains_in_several_processes(strategy: str):
    overrides = ["+actor_train.num_processes=2", f"+actor_train.strategy_args={strategy}"]
    assert problems("frozen_lake_vision.yaml", *overrides) == {}
    assert problems("frozen_lake_vision.yaml", *overrides, "+actor_train.model_args.lora_target=all-linear") == {}


def qwen3_vl(folder: Path, *overrides: str) -> RunConfig:
    """Return a run on images by a policy that is trained on text unless it is asked."""
    config = validate_tree(compose_tree(CONFIGS / "frozen_lake_vision.yaml"))
    write_vision_policy(folder, "qwen3_vl", collect_words(config))
    return validate_tree(compose_tree(CONFIGS / "frozen_lake_vision.yaml", [f"pretrain={folder}", *overrides]))


def test_a_policy_has_image_input_if_an_env_shows_images(tmp_path: Path):
    """The learner and the engines are told; what is saved says it again."""
    config = qwen3_vl(tmp_path)
    assert config.actor_train.model_args.image_input is config.actor_infer.model_args.image_input is True
    assert check_run(config, cores=2) == []
    assert validate_tree(to_saved_tree(config)) == config
    text = qwen3_vl(tmp_path, f"{TAG}.agent_template='{{observation}}'", "warm_start=null")
    assert text.actor_train.model_args.image_input is text.actor_infer.model_args.image_input is None
    assert not has_vision(text)
    assert check_run(text, cores=2) == []


@pytest.mark.parametrize(
    ("overrides", "path", "says"),
    [
        (["+actor_train.model_args.image_input=false"], f"{TAG}.agent_template", "model_args.image_input to true"),
        (["+actor_infer.model_args.image_input=false"], "actor_infer.model_args.image_input", "leave it out"),
        (["adv_estimator=gae"], "adv_estimator", "critic has no image input"),
    ],
)
def test_a_contradicted_image_input_is_refused(overrides: list[str], path: str, says: str, tmp_path: Path):
    found = {issue.path: issue.message for issue in check_run(qwen3_vl(tmp_path, *overrides), cores=2)}
    assert says in found.get(path, "")


@pytest.mark.parametrize(
    ("config", "value", "says"),
    [("quickstart.yaml", "true", "no image input"), ("frozen_lake_vision.yaml", "false", "image input always")],
)
def test_an_image_input_that_the_model_contradicts_is_refused(config: str, value: str, says: str):
    key = "actor_train.model_args.image_input"
    assert says in problems(config, f"+{key}={value}")[key]


@pytest.mark.parametrize(
    ("overrides", "path", "says"),
    [
        (
            [
                f"+{TAG}.env_manager_cls=StepConcatEnvManager",
                f"+{TAG}.agent_runner.path=offbeat.deploy.agents.walker:play",
                "warm_start=null",
            ],
            f"{TAG}.env_manager_cls",
            "its own history",
        ),
        (
            [f"+{TAG}.agent_runner={{path: 'offbeat.deploy.agents.walker:play', tool_call_parser: hermes}}"],
            f"{TAG}.agent_runner.tool_call_parser",
            "has no tools",
        ),
    ],
)
def test_invalid_combinations_with_agents_are_rejected(overrides: list[str], path: str, says: str):
    assert says in problems("quickstart.yaml", *overrides).get(path, "")


def test_an_agent_of_a_vision_policy_is_valid():
    overrides = [
        f"+{TAG}.agent_runner.path=offbeat.deploy.agents.walker:play",
        f"{TAG}.agent_template='{{observation}}'",
    ]
    assert problems("frozen_lake_vision.yaml", *overrides, "warm_start=null") == {}


def test_play_rejects_agents_with_images():
    assert load_config(CONFIGS / "frozen_lake_vision.yaml").custom_envs["FrozenLake"].shows_images
    with pytest.raises(ConfigError, match="as text only"):
        load_config(
            CONFIGS / "frozen_lake_vision.yaml", [f"+{TAG}.agent_runner={{path: 'offbeat.deploy.agents.walker:play'}}"]
        )
