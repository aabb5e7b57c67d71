"""Checks before the start; issues name the remedy."""

import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from offbeat.deploy.config.checks.agents import check_agent, check_function, check_time
from offbeat.deploy.config.checks.data import check_data, check_online, check_rows
from offbeat.deploy.config.checks.devices import check_devices
from offbeat.deploy.config.checks.episodes import check_episodes
from offbeat.deploy.config.checks.experts import check_experts
from offbeat.deploy.config.checks.harbor import check_harbor
from offbeat.deploy.config.checks.hf_infer import check_hf_infer
from offbeat.deploy.config.checks.lora import check_lora, check_targets
from offbeat.deploy.config.checks.megatron import check_megatron
from offbeat.deploy.config.checks.model import (
    check_engine_arguments,
    check_model_split,
    check_resumed_model,
    check_synced_reference,
    check_weights,
)
from offbeat.deploy.config.checks.packing import check_packing
from offbeat.deploy.config.checks.prompts import OnStep, check_first_prompts, ignore_step
from offbeat.deploy.config.checks.recurrent import check_recurrent
from offbeat.deploy.config.checks.resume import check_resume
from offbeat.deploy.config.checks.rewards import check_rewards, check_rlvr
from offbeat.deploy.config.checks.sampling import check_own_arguments, check_sampling
from offbeat.deploy.config.checks.sglang import check_sglang, check_sglang_updates_and_cuts
from offbeat.deploy.config.checks.step_times import check_step_times
from offbeat.deploy.config.checks.teachers import check_teachers, check_tokenizers
from offbeat.deploy.config.checks.unused import check_unused
from offbeat.deploy.config.device_plan import ClusterNode
from offbeat.deploy.config.run import RunConfig
from offbeat.services.control.config import find_token_problem
from offbeat.services.ports import LOOPBACK_NAMES
from offbeat.services.redis.url import address_problem
from offbeat.services.rollout.config import EnvManagerConfig
from offbeat.trainer.checks.algorithm import check_algorithm, check_vtrace_weight
from offbeat.trainer.checks.function_keys import user_functions
from offbeat.trainer.checks.learner import check_learner, check_staleness_controller
from offbeat.trainer.config.aliases import ENGINE
from offbeat.trainer.config.issue import ConfigIssue

logger = logging.getLogger(__name__)

MAX_NAME_BYTES = 255
"""Longest path component."""
MIN_CPU_HEAD_DIM = 32
"""Of vLLM's attention on CPU."""


def check_run(
    config: RunConfig,
    *,
    cores: float | None = None,
    nodes: Sequence[ClusterNode] | None = None,
    on_step: OnStep = ignore_step,
    trial: bool = True,
    started: bool = False,
) -> list[ConfigIssue]:
    """Return every issue; runs user code (envs, agents, trackers, ...).

    cores, nodes: of the machine or cluster; None: detected. on_step: called before user code. trial: as in
    `check_first_prompts`. started: of a run that a build has accepted, as with `resume_from_checkpoint`: keys without
    effect, some that end the run at a later step, limits that exceed a step's, V-trace without its weight, and what sglang
    records wrongly are logged, because later builds find more of them.
    """
    on_step("group_filter_cls, track_with", "import of classes")
    issues = [
        *_check_static(config, cores, nodes, on_step, started=started),
        *check_packing(config),  # not of settings, for which torch would be imported
        *check_rows(config, on_step),
        *check_rewards(config, on_step),
        *_check_env(config, on_step),
        *check_episodes(config, on_step),
        *_of_new_runs(config, [*check_harbor(config), *check_step_times(config)], started=started),
        *_check_functions(config, on_step),
    ]
    samples = bool(config.custom_envs) or config.uses_engine
    return issues or (check_first_prompts(config, on_step, trial=trial) if samples else [])


def check_settings(
    config: RunConfig, *, cores: float | None = None, nodes: Sequence[ClusterNode] | None = None
) -> list[ConfigIssue]:
    classes = {"group_filter_cls": None, "track_with": (), "tracker_kwargs": {}}
    return _check_static(config.model_copy(update=classes), cores, nodes)


def _check_functions(config: RunConfig, on_step: OnStep) -> Iterator[ConfigIssue]:
    if not user_functions(config):
        return
    from offbeat.trainer.checks.user_functions import check_user_functions  # torch takes seconds

    on_step("adv_estimator, pg_variant, reward_shaping, train_infer_correction", "trial of functions")
    yield from check_user_functions(config)


def _check_static(
    config: RunConfig,
    cores: float | None,
    nodes: Sequence[ClusterNode] | None,
    on_step: OnStep = ignore_step,
    *,
    started: bool = False,
) -> list[ConfigIssue]:
    if cores is None:
        cores = float(len(os.sched_getaffinity(0)))
    return [
        *_check_batch(config),
        *_check_cpu(config, cores, "this machine" if nodes is None else "the cluster"),
        *_check_algorithm(config),
        *check_data(config),
        *check_online(config),
        *check_teachers(config),
        *check_tokenizers(config),
        *check_rlvr(config),
        *check_devices(config, nodes),
        *_check_model(config),
        *check_engine_arguments(config),
        *check_sglang(config),
        *check_experts(config),
        *_check_architecture(config, on_step),
        *check_sampling(config),
        *check_lora(config),
        *_of_new_runs(config, check_targets(config), started=started),
        *_check_paths_and_addresses(config),
        *_check_tracing(config),
        *_of_new_runs(config, _check_unused(config), started=started),
        *_of_new_runs(config, _check_tokens(config), started=started),
    ]


def _check_architecture(config: RunConfig, on_step: OnStep) -> Iterator[ConfigIssue]:
    """Yield issues of the policy's architecture; the tiny policy's depends on words that the envs' code declares."""
    on_step("custom_envs", "reading the envs' words for the tiny policy")
    yield from check_hf_infer(config)
    yield from check_recurrent(config)
    yield from check_resumed_model(config)
    yield from check_model_split(config)
    yield from check_megatron(config)


def _check_unused(config: RunConfig) -> Iterator[ConfigIssue]:
    yield from check_unused(config)
    yield from check_own_arguments(config)
    yield from check_synced_reference(config)
    yield from check_sglang_updates_and_cuts(config)
    if not config.reads_data:
        yield from check_vtrace_weight(config)


def _of_new_runs(config: RunConfig, issues: Iterable[ConfigIssue], *, started: bool) -> Iterator[ConfigIssue]:
    """Yield what earlier builds accepted; log it for a run that one of them started."""
    if not (started or config.resume_from_checkpoint):
        yield from issues
        return
    for issue in issues:
        logger.warning("%s (accepted, because the run was started with it)", issue)


def _check_tracing(config: RunConfig) -> Iterator[ConfigIssue]:
    if config.telemetry.otlp_endpoint is None:
        return
    try:
        found = find_spec("opentelemetry.sdk") and find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        found = None
    if found is None:
        yield ConfigIssue(
            "telemetry.otlp_endpoint", "needs OpenTelemetry's SDK and exporter: pip install 'offbeat[otel]'"
        )


def _check_batch(config: RunConfig) -> Iterator[ConfigIssue]:
    manager, rollout = config.train_env_manager, config.rollout
    batch, size = config.rollout_batch_size, manager.group_size
    if batch % size:
        below, above = batch // size * size, (batch // size + 1) * size
        fitting = f"{below} or {above}" if below else f"{above}"
        yield ConfigIssue(
            "rollout_batch_size",
            f"{batch} trajectories are not a multiple of {size} (train_env_manager.group_size): take {fitting}",
        )
        return
    groups_per_step = batch // size
    if manager.num_env_groups < groups_per_step:
        yield ConfigIssue(
            "train_env_manager.num_env_groups",
            f"a lookahead of {manager.num_env_groups} groups is below one batch of {groups_per_step} "
            f"(rollout_batch_size {batch} / group_size {size}): take at least {groups_per_step}, "
            f"or a rollout_batch_size of at most {manager.num_env_groups * size}",
        )
    num_episodes = size + manager.group_size_redundancy + config.num_baselines
    limits = {
        "rollout.max_env_num_per_worker": rollout.max_env_num_per_worker,
        "train_env_manager.max_env_num_per_worker": manager.max_env_num_per_worker or rollout.max_env_num_per_worker,
    }
    key, limit = min(limits.items(), key=lambda item: item[1])
    if limit * rollout.num_workers < num_episodes:
        yield ConfigIssue(
            key,
            f"{rollout.num_workers} worker(s) of {limit} episodes can't run {num_episodes} at once "
            f"(group_size + group_size_redundancy, and {config.num_baselines} greedy): take at least "
            f"{-(-num_episodes // rollout.num_workers)}",
        )


def _check_env(config: RunConfig, on_step: OnStep) -> Iterator[ConfigIssue]:
    from offbeat.envs.registry import check_env_config

    if not config.custom_envs and not config.reads_data:
        yield ConfigIssue("custom_envs", "no env: name at least one tag, `custom_envs.MyTag.env_type`")
    for tag, env in config.custom_envs.items():
        on_step(f"custom_envs.{tag}.env_type", f"import of {env.env_type}")
        for message in check_env_config(env.env_type, env.env_config):
            key, colon, rest = message.partition(": ")
            named = bool(colon) and " " not in key and key.startswith(("env_config", "env_type"))
            yield (
                ConfigIssue(f"custom_envs.{tag}.{key}", rest)
                if named
                else ConfigIssue(f"custom_envs.{tag}.env_type", message)
            )
        if env.agent_runner:
            on_step(f"custom_envs.{tag}.agent_runner", f"import of {env.agent_runner.path}")
            yield from check_agent(tag, env.agent_runner)
            yield from check_time(tag, env)
        if env.max_tokens_per_step >= config.sequence_length:
            yield ConfigIssue(
                f"custom_envs.{tag}.max_tokens_per_step",
                f"{env.max_tokens_per_step} tokens per answer leave no room for a prompt in a sequence_length of "
                f"{config.sequence_length}: make one smaller or the other larger",
            )
    managers: list[tuple[str, EnvManagerConfig]] = [
        ("train_env_manager", config.train_env_manager),
        ("val_env_manager", config.val_env_manager),
    ]
    for name, manager in managers:
        for position, tag in enumerate(manager.tags):
            if tag not in config.custom_envs:
                yield ConfigIssue(f"{name}.tags.{position}", _no_such_tag(tag, config))
    if config.warm_start:
        if config.warm_start.tag not in config.custom_envs:
            yield ConfigIssue("warm_start.tag", _no_such_tag(config.warm_start.tag, config))
        on_step("warm_start.demos", f"import of {config.warm_start.demos}")
        yield from check_function("warm_start.demos", config.warm_start.demos)


def _no_such_tag(tag: str, config: RunConfig) -> str:
    return f"no tag {tag!r} in custom_envs; there is {', '.join(sorted(config.custom_envs)) or 'none'}"


def _check_cpu(config: RunConfig, cores: float, whose: str) -> Iterator[ConfigIssue]:
    infer, rollout, train = config.actor_infer, config.rollout, config.actor_train
    has_cpu_engines = config.uses_engine and infer.device == "cpu"
    engines = infer.num_replicas * infer.engine.world_size * infer.cpus_per_replica if has_cpu_engines else 0.0
    workers = rollout.num_workers * rollout.cpus_per_worker
    rewards = sum(reward.num_replicas * reward.cpus_per_replica for reward in config.rewards)
    if engines + workers + rewards > cores:
        room = max(int((cores - engines - rewards) / rollout.cpus_per_worker), 0)
        advice = f"take rollout.num_workers <= {room}" if room else "reserve fewer CPUs for engines or workers"
        more = f", and rewards of {rewards:g} CPUs," if rewards else ""
        yield ConfigIssue(
            "rollout.num_workers",
            f"{infer.num_replicas} engine(s) with {infer.cpus_per_replica:g} CPUs and {rollout.num_workers} worker(s) with "
            f"{rollout.cpus_per_worker:g}{more} need {engines + workers + rewards:g} CPUs, {whose} has {cores:g}: {advice}",
        )
    processes = train.num_processes + config.num_critic_processes
    threads = processes * train.num_threads
    if train.device == "cpu" and threads > cores:
        yield ConfigIssue(
            "actor_train.num_processes",
            f"{processes} learner process(es) of {train.num_threads} thread(s) need {threads} CPUs, {whose} "
            f"has {cores:g}: their product must not exceed {int(cores)}",
        )


def _check_algorithm(config: RunConfig) -> Iterator[ConfigIssue]:
    tags = config.train_env_manager.tags_of(config.custom_envs)
    for tag in config.query_filter_config:
        if tag not in config.custom_envs:
            yield ConfigIssue(f"query_filter_config.{tag}", _no_such_tag(tag, config))
    groups_per_step = config.rollout_batch_size // config.train_env_manager.group_size
    algorithm = (
        ()
        if config.reads_data
        else check_algorithm(
            config,
            group_size=config.train_env_manager.group_size,
            groups_per_step=groups_per_step,
            max_steps=config.max_steps,
            tags=tags,
        )
    )
    controller = check_staleness_controller(
        config, groups_per_step=groups_per_step, num_env_groups=config.train_env_manager.num_env_groups
    )
    yield from (*algorithm, *check_learner(config), *controller)


def _check_model(config: RunConfig) -> Iterator[ConfigIssue]:
    longest = config.actor_infer.engine.max_model_len
    if longest is not None and config.sequence_length > longest:
        yield ConfigIssue(
            "sequence_length",
            f"{config.sequence_length} tokens exceed the engine's context of {longest} ({ENGINE}.max_model_len): "
            f"take at most {longest}, or a larger max_model_len",
        )
    if config.pretrain == "tiny":
        yield from _check_context(config, config.tiny.max_position_embeddings, "tiny.max_position_embeddings")
        return
    folder = Path(config.pretrain)
    if not folder.is_dir():
        yield ConfigIssue(
            "pretrain",
            f"no such folder: {folder}; set it to a local Hugging Face folder, or `tiny` (hub ids are resolved by `offbeat "
            "train` and `offbeat runs start`)",
        )
        return
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        yield ConfigIssue("pretrain", f"{folder} has no tokenizer (tokenizer.json or tokenizer_config.json)")
    architecture = _hf_config(folder)
    if architecture is None:
        yield ConfigIssue("pretrain", f"{folder} has no readable config.json: it is not a Hugging Face model folder")
        return
    yield from check_weights(folder)
    text = architecture.get("text_config") or architecture  # models with image input nest it
    yield from _check_context(config, text.get("max_position_embeddings"), f"{folder}/config.json")
    heads, width = text.get("num_attention_heads"), text.get("hidden_size")
    if isinstance(heads, int) and isinstance(width, int):
        head_dim = text.get("head_dim") or width // heads
        infer = config.actor_infer
        if infer.device == "cpu" and infer.strategy_args.strategy_name == "vllm" and head_dim < MIN_CPU_HEAD_DIM:
            yield ConfigIssue(
                "pretrain", f"head dimension {head_dim} is too small for vLLM on a CPU: at least {MIN_CPU_HEAD_DIM}"
            )


def _hf_config(folder: Path) -> dict[str, Any] | None:
    try:
        tree = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return tree if isinstance(tree, dict) else None


def _check_context(config: RunConfig, positions: object, source: str) -> Iterator[ConfigIssue]:
    if not isinstance(positions, int):
        return
    length = config.actor_infer.engine.max_model_len or config.sequence_length
    path = f"{ENGINE}.max_model_len" if config.actor_infer.engine.max_model_len else "sequence_length"
    if length > positions:
        yield ConfigIssue(
            path, f"{length} tokens exceed the model's context of {positions} ({source}): take at most {positions}"
        )


def _check_tokens(config: RunConfig) -> Iterator[ConfigIssue]:
    control = config.control
    others = {f"tokens.{place}.token": each.token for place, each in enumerate(control.tokens)}
    for name, token in {"token": control.token, "read_token": control.read_token, **others}.items():
        if token is not None and not token.strip():
            yield ConfigIssue(
                f"control.{name}", "is empty, so that calls would need none: set its variable, or leave the key out"
            )
        elif token is not None and (problem := find_token_problem(token)):
            yield ConfigIssue(f"control.{name}", problem)


def _check_paths_and_addresses(config: RunConfig) -> Iterator[ConfigIssue]:
    if config.control.tokens and config.control.token is None:
        yield ConfigIssue("control.tokens", "the command itself calls with control.token: set it, too")
    if config.control.read_token is not None and config.control.token is None:
        yield ConfigIssue(
            "control.read_token", "has no effect without control.token, the token of operators: set it too"
        )
    if config.control.host not in LOOPBACK_NAMES and not config.control.token:
        yield ConfigIssue(
            "control.host",
            f"{config.control.host} is reachable from other machines: set control.token, or take 127.0.0.1",
        )
    for name in config.system_envs:
        if not name or "=" in name:
            yield ConfigIssue(
                "system_envs", f"{name!r} is no name of an environment variable: it is empty, or has an `=`"
            )
    if (longest := max((len(os.fsencode(part)) for part in config.output_dir.parts), default=0)) > MAX_NAME_BYTES:
        yield ConfigIssue("output_dir", f"a folder name has at most {MAX_NAME_BYTES} bytes, not {longest}")
    url = config.redis.url
    if url is not None and (problem := address_problem(url)):
        yield ConfigIssue("redis.url", problem)
    if config.redis.server is not None and not config.redis.server.is_file():
        yield ConfigIssue("redis.server", f"no such file: {config.redis.server}")
    yield from check_resume(config)
