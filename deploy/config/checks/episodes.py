"""Episodes that can't be told to the policy or trained on (pictures, an agent played step-wise), refused before a start."""

from collections.abc import Iterator
from pathlib import Path

from offbeat.deploy.config.run import RunConfig
from offbeat.services.chat.vision import FAMILIES, model_family
from offbeat.services.rollout.tasks import train_task
from offbeat.trainer.config.issue import ConfigIssue


def check_episodes(config: RunConfig) -> Iterator[ConfigIssue]:
    """Every impossible combination with pictures and with step-wise episodes."""
    for tag, env in config.custom_envs.items():
        if env.env_manager_cls != "TrajEnvManager" and env.agent_runner:
            yield ConfigIssue(f"custom_envs.{tag}.env_manager_cls", "an agent keeps its own history: leave it out")
    yield from _check_sampler(config)
    yield from _check_vision(config)


def _check_sampler(config: RunConfig) -> Iterator[ConfigIssue]:
    """A task sampler is made and drawn from once, so that a mistake in it does not wait for the first group."""
    key = "val_env_manager.task_sampler"
    if config.val_env_manager.task_sampler is not None:
        yield ConfigIssue(key, "evaluations play the same tasks each time: set it in train_env_manager")
    if config.train_env_manager.task_sampler is None:
        return
    try:
        train_task(config, config.seed, 0)
    except Exception as error:  # a class of the user's may raise anything
        yield ConfigIssue("train_env_manager.task_sampler", str(error))


def _check_vision(config: RunConfig) -> Iterator[ConfigIssue]:
    sees = (
        config.tiny.vision is not None if config.pretrain == "tiny" else model_family(Path(config.pretrain)) is not None
    )
    for tag, env in config.custom_envs.items():
        if not env.shows_pictures:
            continue
        key = f"custom_envs.{tag}"
        if not sees:
            yield ConfigIssue(
                f"{key}.agent_template",
                "{image} shows pictures, which the policy can't read: set tiny.vision to {} or pretrain to a "
                f"folder of one of {', '.join(FAMILIES)}",
            )
        if env.agent_runner:
            yield ConfigIssue(f"{key}.agent_runner", "agents are told text alone: leave {image} out of agent_template")
    if sees:
        yield from _check_training(config)


def _check_training(config: RunConfig) -> Iterator[ConfigIssue]:
    """What the learner and the engines can't do with a model that reads pictures."""
    train = config.actor_train
    refused = (
        (
            train.model_args.lora_target is not None,
            "actor_train.model_args.lora_target",
            "adapters are for text models",
        ),
        (
            config.adv_estimator == "gae",
            "adv_estimator",
            "the critic reads no pictures: take another estimator than gae",
        ),
        *((True, key, "full reads no pictures: take k3") for key in config.full_kls),
        (train.num_processes > 1, "actor_train.num_processes", "it is trained by one process"),
        (
            train.model_args.shared_prefix,
            "actor_train.model_args.shared_prefix",
            "what sequences share is found in tokens alone",
        ),
        (
            train.strategy_args.strategy_name != "deepspeed_train",
            "actor_train.strategy_args.strategy_name",
            "it is trained by deepspeed_train alone",
        ),
        (train.strategy_args.zero_stage == 3, "actor_train.strategy_args.zero_stage", "3 is not built for it: take 2"),
        (
            config.actor_infer.tensor_parallel_size > 1,
            "actor_infer.tensor_parallel_size",
            "its engine is one process: take 1",
        ),
    )
    for holds, path, message in refused:
        if holds:
            yield ConfigIssue(path, f"the policy reads pictures, and {message}")
    for name, teacher in config.teacher.items():
        if model_family(Path(teacher.pretrain)) is None:
            yield ConfigIssue(f"teacher.{name}.pretrain", f"{teacher.pretrain} reads no pictures, and the policy does")
