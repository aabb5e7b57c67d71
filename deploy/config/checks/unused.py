"""Checks for keys that another key leaves without effect.

Invariant: their values are valid, so a run that was started with them can be read and resumed.
"""

from collections.abc import Iterator

from pydantic import BaseModel

from offbeat.deploy.config.run import RunConfig
from offbeat.services.reward.kinds.model_config import LlmJudgeConfig
from offbeat.services.rollout.config import CustomEnv, EnvManagerConfig
from offbeat.trainer.checks.effects import check_controller_effect, check_effects
from offbeat.trainer.config.issue import ConfigIssue
from offbeat.trainer.config.staleness import StalenessControllerConfig

SERVED_ONLY = ("queue_timeout_s", "cpus_per_replica")
"""Of `rewards`, used only by replicas."""
CALLS = ("max_generation_retry_s", "coalesce_s", "max_turns_per_call")
"""Of `rollout`, used only by calls of engines."""
TASKS = ("tags", "num_groups_partition", "task_sampler", "group_size_redundancy")
"""Of `train_env_manager`, used only by tasks of envs: a row's group has as many members as its pipeline."""
VERDICTS = {"max_score": ("score", "rubric"), "rubric_key": ("rubric",), "compared_key": ("pairwise",)}
"""Keys of a judge -> verdicts that use them."""
ENGINE_KEYS = (
    "cpus_per_replica",
    "kv_cache_gib",
    "on_weight_update",
    "keep_sessions",
    "request_timeout_s",
    "update_timeout_s",
)
"""Of `actor_infer`, used only by engines."""
MISMATCH_KEYS = ("max_mismatch_kl", "min_ess", "staleness_step")
"""Of `staleness_controller`, used only with the mismatch of engine and trainer, which pairs do not measure."""
LEAVE_OUT = "leave it out"


def check_unused(config: RunConfig) -> Iterator[ConfigIssue]:
    yield from check_effects(config, group_size=config.train_env_manager.group_size)
    yield from check_controller_effect(
        config, groups_per_step=config.groups_per_step, num_env_groups=config.train_env_manager.num_env_groups
    )
    yield from _check_attention(config)
    yield from _check_online_pairs(config)
    yield from _check_replay(config)
    yield from _check_evaluation(config)
    yield from _check_tags(config)
    yield from _check_lengths(config)
    yield from _check_answers(config)
    yield from _check_envs(config)
    yield from _check_sessions(config)
    yield from _check_slots(config)
    yield from _check_data_pipeline(config)
    yield from _check_rewards(config)
    yield from _check_mesh(config)


def changed_keys(table: BaseModel, default: BaseModel) -> Iterator[str]:
    """Yield the keys, dotted for nested tables, whose values differ."""
    for name in type(table).model_fields:
        value, unset = getattr(table, name), getattr(default, name)
        if value == unset:
            continue
        if isinstance(value, BaseModel) and isinstance(unset, BaseModel):
            yield from (f"{name}.{key}" for key in changed_keys(value, unset))
        else:
            yield name


def _unused(path: str, reason: str, remedy: str) -> ConfigIssue:
    return ConfigIssue(path, f"has no effect {reason}: {remedy}")


def _check_attention(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield another attention of a role whose micro-batches are prefix trees, which packed attention alone reads."""
    if not config.actor_train.model_args.shared_prefix:
        return
    roles = {f"teacher.{name}": teacher.model_args for name, teacher in config.teacher.items()}
    roles |= {"critic": config.critic.model_args} if config.has_own_critic else {}
    roles |= {"reference": config.reference.model_args} if config.needs_reference else {}
    for role, args in roles.items():
        if args.attn_implementation not in (None, "auto"):
            reason = "with actor_train.model_args.shared_prefix, which needs packed attention (auto) of every role"
            yield _unused(f"{role}.model_args.attn_implementation", reason, LEAVE_OUT)


def _check_online_pairs(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield keys of losses per token, which a loss of pairs lacks."""
    if config.pipeline != "online_dpo":
        return
    if config.replay.sampler == "prioritized" and config.replay.importance_sampling_exponent:
        yield ConfigIssue(
            "replay.sampler",
            "prioritized replay of pairs is biased, as importance_sampling_exponent weights none of them: take uniform, or "
            "set that to 0",
        )
    control, unset = config.staleness_controller, StalenessControllerConfig()
    for key in MISMATCH_KEYS if control is not None else ():
        if getattr(control, key) != getattr(unset, key):
            reason = "with pipeline: online_dpo, whose steps measure neither actor/mismatch_kl nor actor/ess"
            yield _unused(f"staleness_controller.{key}", reason, LEAVE_OUT)


def _check_replay(config: RunConfig) -> Iterator[ConfigIssue]:
    is_async = config.max_staleness > 0 or config.staleness_controller is not None  # else `check_effects` has it
    if is_async and config.replay.max_staleness == 0:
        yield ConfigIssue(
            "replay.max_staleness",
            "0 replays nothing, as a group of an earlier step lags a version or more: take 1 or more, or leave it out",
        )


def _check_evaluation(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield keys of evaluation by sampling, and its interval, in runs without any."""
    has_rows = config.data is not None and config.data.val_dataset_name is not None
    if config.plays and (has_rows or not config.plays_prompts):
        return
    if config.plays:
        reason, remedy = (
            f"with pipeline: {config.pipeline} without data.val_dataset_name",
            "set that, or leave this out",
        )
    else:
        reason = f"with pipeline: {config.pipeline} without custom_envs"
        remedy = "set them to evaluate by sampling, or leave this out"
    unset = RunConfig()
    unset_table = set(changed_keys(config.val_env_manager, unset.val_env_manager))
    for key in changed_keys(config.val_env_manager, EnvManagerConfig()):  # of a table that is written
        if key in unset_table:
            yield _unused(f"val_env_manager.{key}", reason, remedy)
    keys = ["render_save_dir", "render_episodes"]
    keys += [] if config.plays else ["val_batch_size", "final_val_batch_size"]  # `check_rlvr` refuses those of prompts
    for key in keys:
        if getattr(config, key) != getattr(unset, key):
            yield _unused(key, reason, remedy)
    if not has_rows and config.eval_steps not in (0, unset.eval_steps):
        yield _unused("eval_steps", "without data.val_dataset_name", "set that, take 0, or leave this out")


def _check_tags(config: RunConfig) -> Iterator[ConfigIssue]:
    tags = config.train_env_manager.tags_of(config.custom_envs)
    for tag in config.query_filter_config:
        if tag in config.custom_envs and tag not in tags:
            reason = f"as train_env_manager.tags are {', '.join(tags)}"
            yield _unused(f"query_filter_config.{tag}", reason, "add the tag, or leave this out")


def _check_lengths(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield limits of an episode's tokens that no episode of one sequence reaches."""
    longest, shaping = config.sequence_length, config.reward_shaping
    limit = shaping.overlong_max_length
    if limit is not None and shaping.overlong_buffer > limit:
        yield ConfigIssue(
            "reward_shaping.overlong_buffer",
            f"{shaping.overlong_buffer} exceeds overlong_max_length, {limit}, so that even an empty answer is penalized: "
            "take at most that",
        )
    tags = config.train_env_manager.tags_of(config.custom_envs)
    envs = [config.custom_envs[tag] for tag in tags if tag in config.custom_envs]
    if not all(env.env_manager_cls == "TrajEnvManager" and env.agent_runner is None for env in envs):
        return
    if config.error_max_len_clip and config.error_max_len_threshold >= longest:
        yield ConfigIssue(
            "error_max_len_threshold",
            f"{config.error_max_len_threshold} is never exceeded within a sequence_length of {longest}: take less, or leave "
            "error_max_len_clip out",
        )
    if limit is not None and (start := limit - shaping.overlong_buffer) >= longest:
        reason = f"as the penalty starts at {start} tokens, and sequence_length is {longest}"
        yield _unused("reward_shaping.overlong_max_length", reason, "take less, or leave it out")


def _check_answers(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield limits of a tag's answers, unless they are the default, above those of all samplings that play it."""
    train = config.actor_infer.generating_args
    samplings = {"val_env_manager": config.val_env_manager.generating_args.for_evaluation(train)}
    samplings |= {} if config.reads_data else {"train_env_manager": train}
    for tag, env in config.custom_envs.items():
        limits: list[tuple[int, str]] = []
        for name, sampling in samplings.items():
            manager: EnvManagerConfig = getattr(config, name)
            role = "actor_infer" if manager.generating_args.max_new_tokens is None else name
            if tag in manager.tags_of(config.custom_envs):
                limits.append((sampling.max_new_tokens, f"{role}.generating_args.max_new_tokens"))
        limit, key = max(limits, default=(env.max_tokens_per_step, ""))
        is_default = env.max_tokens_per_step == CustomEnv.model_fields["max_tokens_per_step"].default
        if env.max_tokens_per_step > limit and not is_default:
            message = (
                f"{env.max_tokens_per_step} exceeds {key}, {limit}, where answers end: take less, or leave that out"
            )
            yield ConfigIssue(f"custom_envs.{tag}.max_tokens_per_step", message)


def _check_envs(config: RunConfig) -> Iterator[ConfigIssue]:
    for tag, env in config.custom_envs.items():
        key, fields = f"custom_envs.{tag}", type(env).model_fields
        if env.execution != "process" and env.memory_gib != fields["memory_gib"].default:
            remedy = "leave it out, or take execution=process"
            yield _unused(f"{key}.memory_gib", f"with execution={env.execution}", remedy)
        if env.agent_runner is not None and env.tool_call_parser is not None:
            remedy = "set agent_runner.tool_call_parser"
            yield _unused(f"{key}.tool_call_parser", "with agent_runner", remedy)
    has_threads = any(env.execution == "thread" for env in config.custom_envs.values())
    if not has_threads and config.rollout.num_threads != type(config.rollout).model_fields["num_threads"].default:
        yield _unused("rollout.num_threads", "as no env has execution=thread", LEAVE_OUT)


def _check_sessions(config: RunConfig) -> Iterator[ConfigIssue]:
    if config.actor_infer.keep_sessions and config.actor_infer.strategy_args.strategy_name == "hf_infer":
        yield _unused(
            "actor_infer.keep_sessions", "with hf_infer: sessions stay in vLLM alone", "leave it out, or take vllm"
        )


def _check_slots(config: RunConfig) -> Iterator[ConfigIssue]:
    total = config.rollout.max_env_num_per_worker
    for name, manager in (("train_env_manager", config.train_env_manager), ("val_env_manager", config.val_env_manager)):
        yield from _check_partition(f"{name}.num_groups_partition", manager)
        limit = manager.max_env_num_per_worker
        if limit is not None and limit > total:
            reason = f"above rollout.max_env_num_per_worker, {total}"
            yield _unused(f"{name}.max_env_num_per_worker", reason, "leave it out, or raise that")


def _check_partition(path: str, manager: EnvManagerConfig) -> Iterator[ConfigIssue]:
    """Yield shares of which tags are never played, or that are not the groups; of a run that has begun they are shares."""
    partition, groups = manager.num_groups_partition, manager.num_env_groups
    for tag, share in zip(manager.tags, partition, strict=True) if partition else ():
        if share < 1:
            yield ConfigIssue(
                path, f"{tag} with {share} groups is never played: take 1 or more, or leave it out of tags"
            )
            return
    if partition and sum(partition) != groups:
        yield ConfigIssue(path, f"its sum is {sum(partition)}, num_env_groups is {groups}: make them equal")


def _check_data_pipeline(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield keys of tasks and engines in pipelines whose rows are the tasks."""
    if not config.reads_data:
        return
    unset, reason = RunConfig(), f"with pipeline: {config.pipeline}"
    for key in TASKS:
        if getattr(config.train_env_manager, key) != getattr(unset.train_env_manager, key):
            yield _unused(f"train_env_manager.{key}", reason, LEAVE_OUT)
    if config.uses_engine:
        return
    samples_nothing = f"{reason}, which samples nothing without custom_envs"
    for key in changed_keys(config.weights, unset.weights):
        yield _unused(f"weights.{key}", samples_nothing, LEAVE_OUT)
    for key in ENGINE_KEYS:
        if getattr(config.actor_infer, key) != getattr(unset.actor_infer, key):
            yield _unused(f"actor_infer.{key}", samples_nothing, LEAVE_OUT)
    for key in CALLS:
        if getattr(config.rollout, key) != getattr(unset.rollout, key):
            yield _unused(f"rollout.{key}", samples_nothing, LEAVE_OUT)


def _check_rewards(config: RunConfig) -> Iterator[ConfigIssue]:
    for index, reward in enumerate(config.rewards):
        fields = type(reward).model_fields
        for key in SERVED_ONLY if not reward.num_replicas else ():
            if getattr(reward, key) != fields[key].default:
                remedy = "leave it out, or take num_replicas above 0"
                yield _unused(f"rewards.{index}.{key}", "in env workers (num_replicas=0)", remedy)
        if reward.threshold is not None and reward.weight != fields["weight"].default:
            reason = "with a threshold, which makes the reward a condition"
            yield _unused(f"rewards.{index}.weight", reason, "leave one of them out")
        if isinstance(reward, LlmJudgeConfig):
            yield from _check_judge(f"rewards.{index}", reward)


def _check_judge(path: str, judge: LlmJudgeConfig) -> Iterator[ConfigIssue]:
    for key, verdicts in VERDICTS.items():
        if getattr(judge, key) == type(judge).model_fields[key].default:
            continue
        if judge.verdict not in verdicts:
            remedy = f"leave it out, or take {' or '.join(verdicts)}"
            yield _unused(f"{path}.{key}", f"with verdict: {judge.verdict}", remedy)
        elif key == "rubric_key" and judge.criteria:
            yield _unused(f"{path}.{key}", "with criteria", "leave one of them out")


def _check_mesh(config: RunConfig) -> Iterator[ConfigIssue]:
    telemetry, redis = config.telemetry, config.redis
    if telemetry.otlp_endpoint is None and telemetry.sample_rate != type(telemetry).model_fields["sample_rate"].default:
        yield _unused("telemetry.sample_rate", "without telemetry.otlp_endpoint", "set that, or leave this out")
    for key in ("server", "appendfsync"):
        if redis.url is not None and getattr(redis, key) != type(redis).model_fields[key].default:
            yield _unused(f"redis.{key}", "with redis.url, a server of its own", "leave one of them out")
    if config.weights.url is not None and config.weights.transport != "fs":
        remedy = "leave it out, or take transport=fs"
        yield _unused("weights.url", f"with weights.transport={config.weights.transport}", remedy)
    if 0 < config.record_batches <= config.console.keep_steps:
        reason = f"as console.keep_steps keeps {config.console.keep_steps} steps"
        yield _unused("record_batches", reason, "leave it out, or take more")
