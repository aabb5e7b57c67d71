"""Combinations of keys that can't work, each refused before anything starts, saying what would be right."""

import importlib
import inspect
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offbeat.deploy.config.checks.episodes import episode_problems
from offbeat.deploy.config.checks.lora import adapter_problems
from offbeat.deploy.config.checks.prompts import first_prompt_problems
from offbeat.deploy.config.errors import Problem
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.run_folder import holds_run
from offbeat.envs.class_path import current_path
from offbeat.services.redis.url import address_problem
from offbeat.services.rollout.config import AgentRunner, EnvManagerConfig
from offbeat.trainer.checks.algorithm import algorithm_complaints
from offbeat.trainer.checks.learner import learner_complaints, staleness_complaints

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LONGEST_NAME = 255
"""Bytes of one part of a path, on every file system that matters."""
MIN_CPU_HEAD_DIM = 32
"""vLLM's attention on a CPU needs heads at least this wide."""


def check_run(config: RunConfig, *, cores: float | None = None, gpus: float | None = None) -> list[Problem]:
    """Every impossible combination in `config`; empty if it can run.

    cores: CPUs of the machine or cluster that will run it; None counts those that this process may use.
    gpus: its GPUs; None looks for this machine's.
    """
    if cores is None:
        cores = float(len(os.sched_getaffinity(0)))
    if gpus is None:
        gpus = float(_has_gpu())
    problems = [
        *_batch_problems(config),
        *_env_problems(config),
        *_cpu_problems(config, cores),
        *_algorithm_problems(config),
        *_device_problems(config, gpus),
        *_model_problems(config),
        *episode_problems(config),
        *adapter_problems(config),
        *_place_problems(config),
    ]
    return problems or first_prompt_problems(config)


def _batch_problems(config: RunConfig) -> Iterator[Problem]:
    manager, rollout = config.train_env_manager, config.rollout
    batch, size = config.rollout_batch_size, manager.group_size
    if batch % size:
        below, above = batch // size * size, (batch // size + 1) * size
        fitting = f"{below} or {above}" if below else f"{above}"
        yield Problem(
            "rollout_batch_size",
            f"{batch} trajectories are no whole number of groups of {size} (train_env_manager.group_size): take {fitting}",
        )
        return
    groups_per_step = batch // size
    if manager.num_env_groups < groups_per_step:
        yield Problem(
            "train_env_manager.num_env_groups",
            f"a lookahead of {manager.num_env_groups} groups is below one batch of {groups_per_step} "
            f"(rollout_batch_size {batch} / group_size {size}): take at least {groups_per_step}, "
            f"or a rollout_batch_size of at most {manager.num_env_groups * size}",
        )
    played = size + manager.group_size_redundancy + config.num_baselines
    if rollout.max_env_num_per_worker * rollout.num_workers < played:
        yield Problem(
            "rollout.max_env_num_per_worker",
            f"{rollout.num_workers} worker(s) of {rollout.max_env_num_per_worker} episodes can't play one group of {played} "
            f"(group_size + group_size_redundancy, and {config.num_baselines} greedy): take at least "
            f"{-(-played // rollout.num_workers)}",
        )


def _env_problems(config: RunConfig) -> Iterator[Problem]:
    from offbeat.envs.registry import check_env_config

    if not config.custom_envs:
        yield Problem("custom_envs", "no env: name at least one tag, `custom_envs.MyTag.env_type`")
    for tag, env in config.custom_envs.items():
        for message in check_env_config(env.env_type, env.env_config):
            key, colon, rest = message.partition(": ")
            named = bool(colon) and " " not in key and key.startswith(("env_config", "env_type"))
            yield (
                Problem(f"custom_envs.{tag}.{key}", rest) if named else Problem(f"custom_envs.{tag}.env_type", message)
            )
        if env.agent_runner:
            yield from _agent_problems(tag, env.agent_runner)
        if env.max_tokens_per_step >= config.sequence_length:
            yield Problem(
                f"custom_envs.{tag}.max_tokens_per_step",
                f"{env.max_tokens_per_step} tokens of one answer leave no room for a prompt in a sequence_length of "
                f"{config.sequence_length}: make one smaller or the other larger",
            )
    managers: list[tuple[str, EnvManagerConfig]] = [
        ("train_env_manager", config.train_env_manager),
        ("val_env_manager", config.val_env_manager),
    ]
    for name, manager in managers:
        for position, tag in enumerate(manager.tags):
            if tag not in config.custom_envs:
                yield Problem(f"{name}.tags.{position}", _no_such_tag(tag, config))
    if config.warm_start:
        if config.warm_start.tag not in config.custom_envs:
            yield Problem("warm_start.tag", _no_such_tag(config.warm_start.tag, config))
        yield from _function_problems("warm_start.demos", config.warm_start.demos)


def _no_such_tag(tag: str, config: RunConfig) -> str:
    return f"no tag {tag!r} in custom_envs; there is {', '.join(sorted(config.custom_envs)) or 'none'}"


def _agent_problems(tag: str, runner: AgentRunner) -> Iterator[Problem]:
    key = f"custom_envs.{tag}.agent_runner"
    if runner.path:
        yield from _function_problems(f"{key}.path", runner.path)
    elif shutil.which(runner.command[0]) is None:
        yield Problem(f"{key}.command", f"there is no program {runner.command[0]!r} on the PATH")


def _function_problems(key: str, path: str) -> Iterator[Problem]:
    module, _, function = current_path(path).partition(":")
    if not module or not function:
        yield Problem(key, f"expected `module:function`, got {path!r}")
        return
    try:
        found = importlib.import_module(module)
    except Exception as error:  # the module may be the user's own: a mistake in it is told
        yield Problem(key, f"can't import {module!r}: {type(error).__name__}: {error}")
        return
    if not callable(getattr(found, function, None)):
        known = [name for name, value in inspect.getmembers(found, inspect.isfunction) if value.__module__ == module]
        yield Problem(key, f"{module} has no function {function!r}; it has {', '.join(known) or 'none'}")


def _cpu_problems(config: RunConfig, cores: float) -> Iterator[Problem]:
    infer, rollout, train = config.actor_infer, config.rollout, config.actor_train
    engines = infer.num_replicas * infer.tensor_parallel_size * infer.cpus_per_replica if infer.device == "cpu" else 0.0
    workers = rollout.num_workers * rollout.cpus_per_worker
    if engines + workers > cores:
        room = max(int((cores - engines) / rollout.cpus_per_worker), 0)
        advice = f"take rollout.num_workers <= {room}" if room else "reserve fewer CPUs for engines or workers"
        yield Problem(
            "rollout.num_workers",
            f"{infer.num_replicas} engine(s) with {infer.cpus_per_replica:g} CPUs and {rollout.num_workers} worker(s) with "
            f"{rollout.cpus_per_worker:g} need {engines + workers:g} CPUs, this machine has {cores:g}: {advice}",
        )
    threads = train.num_processes * train.num_threads
    if train.device == "cpu" and threads > cores:
        yield Problem(
            "actor_train.num_processes",
            f"{train.num_processes} learner process(es) of {train.num_threads} thread(s) want {threads} CPUs, this machine "
            f"has {cores:g}: their product must not exceed {int(cores)}",
        )


def _algorithm_problems(config: RunConfig) -> Iterator[Problem]:
    if config.actor_infer.generating_args.temperature == 0:
        yield Problem(
            "actor_infer.generating_args.temperature",
            "0 (greedy) has no probabilities to train on: take a positive one; greedy evaluation is done in any case",
        )
    groups_per_step = config.rollout_batch_size // config.train_env_manager.group_size
    complaints = algorithm_complaints(
        config,
        group_size=config.train_env_manager.group_size,
        groups_per_step=groups_per_step,
        max_steps=config.max_steps,
        tags=config.train_env_manager.tags or tuple(config.custom_envs),
    )
    controller = staleness_complaints(
        config, groups_per_step=groups_per_step, num_env_groups=config.train_env_manager.num_env_groups
    )
    for path, message in (*complaints, *learner_complaints(config), *controller):
        yield Problem(path, message)


def _has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def _device_problems(config: RunConfig, gpus: float) -> Iterator[Problem]:
    infer, train = config.actor_infer, config.actor_train
    transport = config.weights.transport
    if transport in ("ipc", "nccl") and "cpu" in (infer.device, train.device):
        yield Problem(
            "weights.transport", f"{transport} moves tensors between GPUs: on a CPU take shm, or fs across hosts"
        )
    for path, device in (("actor_infer.device", infer.device), ("actor_train.device", train.device)):
        if device == "cuda" and not gpus:
            yield Problem(path, "there is no NVIDIA GPU here: take cpu")


def _model_problems(config: RunConfig) -> Iterator[Problem]:
    longest = config.actor_infer.max_model_len
    if longest is not None and config.sequence_length > longest:
        yield Problem(
            "sequence_length",
            f"{config.sequence_length} tokens do not fit the engine's context of {longest} (actor_infer.max_model_len): "
            f"take at most {longest}, or a larger max_model_len",
        )
    if config.pretrain == "tiny":
        yield from _context_problems(config, config.tiny.max_position_embeddings, "tiny.max_position_embeddings")
        return
    folder = Path(config.pretrain)
    if not folder.is_dir():
        yield Problem("pretrain", f"no such folder: {folder}; give a local Hugging Face folder, or `tiny`")
        return
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        yield Problem("pretrain", f"{folder} holds no tokenizer (tokenizer.json or tokenizer_config.json)")
    architecture = _hf_config(folder)
    if architecture is None:
        yield Problem("pretrain", f"{folder} holds no readable config.json: it is no Hugging Face model folder")
        return
    text = architecture.get("text_config") or architecture  # of a model that reads pictures
    yield from _context_problems(config, text.get("max_position_embeddings"), f"{folder}/config.json")
    heads, width = text.get("num_attention_heads"), text.get("hidden_size")
    if isinstance(heads, int) and isinstance(width, int):
        head_dim = text.get("head_dim") or width // heads
        if config.actor_infer.device == "cpu" and head_dim < MIN_CPU_HEAD_DIM:
            yield Problem(
                "pretrain", f"heads of {head_dim} are too narrow for vLLM on a CPU: at least {MIN_CPU_HEAD_DIM}"
            )


def _hf_config(folder: Path) -> dict[str, Any] | None:
    try:
        tree = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return tree if isinstance(tree, dict) else None


def _context_problems(config: RunConfig, positions: object, where: str) -> Iterator[Problem]:
    if not isinstance(positions, int):
        return
    wanted = config.actor_infer.max_model_len or config.sequence_length
    path = "actor_infer.max_model_len" if config.actor_infer.max_model_len else "sequence_length"
    if wanted > positions:
        yield Problem(
            path, f"{wanted} tokens exceed the model's context of {positions} ({where}): take at most {positions}"
        )


def _place_problems(config: RunConfig) -> Iterator[Problem]:
    if config.control.read_token is not None and config.control.token is None:
        yield Problem("control.read_token", "has no effect without control.token, the token that operates: set it too")
    if config.control.host not in LOOPBACK and config.control.token is None:
        yield Problem(
            "control.host",
            f"{config.control.host} can be reached from other machines: set control.token, or take 127.0.0.1",
        )
    if (longest := max((len(os.fsencode(part)) for part in config.output_dir.parts), default=0)) > LONGEST_NAME:
        yield Problem("output_dir", f"a folder's name has at most {LONGEST_NAME} bytes, not {longest}")
    url = config.redis.url
    if url is not None and (problem := address_problem(url)):
        yield Problem("redis.url", problem)
    if config.redis.server is not None and not config.redis.server.is_file():
        yield Problem("redis.server", f"no such file: {config.redis.server}")
    resume = config.resume_from_checkpoint
    if resume is True and not holds_run(config.output_dir):
        yield Problem("resume_from_checkpoint", f"there is no run in {config.output_dir} to go on with: leave it out")
    if isinstance(resume, Path) and not resume.is_dir():
        yield Problem("resume_from_checkpoint", f"no such folder: {resume}; `true` takes the newest one of output_dir")
