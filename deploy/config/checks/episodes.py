"""Checks of images, agents, step-wise prompts, evaluation and task sampler."""

from collections.abc import Iterator
from pathlib import Path

from offbeat.deploy.config.checks.lora import KEY as MAX_LORA_RANK
from offbeat.deploy.config.checks.model import has_vision
from offbeat.deploy.config.checks.prompts import OnStep
from offbeat.deploy.config.run import RunConfig
from offbeat.services.chat.vision import FAMILIES, IMAGE_INPUT_ADVICE, TEXT_UNLESS_ASKED, reads_images
from offbeat.services.rollout.config import EnvManagerConfig
from offbeat.services.rollout.tasks import train_task
from offbeat.trainer.config.issue import ConfigIssue

IMAGE_INPUT = "actor_train.model_args.image_input"
AGENT_IMAGES = (
    "agents are given the env's observations as text only: leave {image} out of agent_template; an agent can send images "
    "of its own"
)


def check_episodes(config: RunConfig, on_step: OnStep) -> Iterator[ConfigIssue]:
    for tag, env in config.custom_envs.items():
        if env.env_manager_cls != "TrajEnvManager" and env.agent_runner:
            yield ConfigIssue(f"custom_envs.{tag}.env_manager_cls", "an agent manages its own history: leave it out")
    yield from _check_evaluation(config.val_env_manager)
    yield from _check_sampler(config, on_step)
    yield from _check_vision(config)


def _check_evaluation(manager: EnvManagerConfig) -> Iterator[ConfigIssue]:
    """Yield keys of training alone."""
    if manager.task_sampler is not None:
        yield ConfigIssue(
            "val_env_manager.task_sampler", "evaluations always use the same tasks: set it in train_env_manager"
        )
    if manager.group_size_redundancy:
        yield ConfigIssue(
            "val_env_manager.group_size_redundancy", "evaluation keeps every episode: set it in train_env_manager"
        )
    if manager.num_env_groups != EnvManagerConfig().num_env_groups and not manager.num_groups_partition:
        yield ConfigIssue(
            "val_env_manager.num_env_groups",
            "of evaluation, it is the sum of num_groups_partition, which is empty: set val_batch_size, or "
            "max_env_num_per_worker for the episodes at a time",
        )


def _check_sampler(config: RunConfig, on_step: OnStep) -> Iterator[ConfigIssue]:
    """Draw one task."""
    if config.train_env_manager.task_sampler is None:
        return
    on_step("train_env_manager.task_sampler", f"drawing a task of {config.train_env_manager.task_sampler.path}")
    try:
        train_task(config, config.seed, 0)
    except Exception as error:  # a user's class may raise anything
        yield ConfigIssue("train_env_manager.task_sampler", str(error))


def _check_vision(config: RunConfig) -> Iterator[ConfigIssue]:
    yield from _check_image_input(config)
    sees_images = has_vision(config)
    for tag, env in config.custom_envs.items():
        if not env.shows_images:
            continue
        key = f"custom_envs.{tag}"
        if not sees_images:
            yield ConfigIssue(
                f"{key}.agent_template",
                f"{{image}} needs a policy with image input: {IMAGE_INPUT_ADVICE}",
            )
        if env.agent_runner:
            yield ConfigIssue(f"{key}.agent_runner", AGENT_IMAGES)
    if sees_images:
        yield from _check_training(config)


def _check_image_input(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield an `image_input` that the policy, or an env, contradicts."""
    asked, served = config.actor_train.model_args.image_input, config.actor_infer.model_args.image_input
    if served != asked:
        message = f"{served}, and that of actor_train.model_args is {asked}: leave it out"
        yield ConfigIssue("actor_infer.model_args.image_input", message)
    if asked is None or asked == has_vision(config):
        return
    if not asked:
        families = " and ".join(TEXT_UNLESS_ASKED)
        yield ConfigIssue(IMAGE_INPUT, f"of {families} alone; others have image input always: leave it out")
    elif not any(env.shows_images for env in config.custom_envs.values()):  # which have an issue of their own
        message = f"the policy has no image input: take a folder of {', '.join(FAMILIES)}, or leave it out"
        yield ConfigIssue(IMAGE_INPUT, message)


def _check_training(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield keys unsupported for images."""
    train = config.actor_train
    rejections = (
        (
            config.actor_infer.engine.max_lora_rank is not None,
            MAX_LORA_RANK,
            "its engine takes merged weights: leave it out",
        ),
        (
            config.adv_estimator == "gae",
            "adv_estimator",
            "the critic has no image input: take another estimator than gae",
        ),
        *((True, key, "full does not support images: take k3") for key in config.full_kls),
        (
            train.model_args.shared_prefix,
            "actor_train.model_args.shared_prefix",
            "shared prefixes are compared by tokens only: leave it out",
        ),
        (
            train.strategy_args.strategy_name == "megatron_train",
            "actor_train.strategy_args.strategy_name",
            "Megatron's model has none: take deepspeed_train or fsdp2_train",
        ),
        (
            config.actor_infer.engine.tensor_parallel_size > 1,
            "actor_infer.strategy_args.strategy_config.tensor_parallel_size",
            "its engine runs in one process: take 1",
        ),
    )
    for applies, path, message in rejections:
        if applies:
            yield ConfigIssue(path, f"the policy has image input; {message}")
    others = {f"teacher.{name}": teacher.model_args for name, teacher in config.teacher.items()}
    others |= {"reference": config.reference.model_args} if config.needs_reference else {}
    for key, args in others.items():
        if (folder := args.own_folder) and not reads_images(Path(folder), train.model_args.image_input):
            yield ConfigIssue(
                f"{key}.model_args.model_name_or_path", f"{folder} has no image input, but the policy has"
            )
