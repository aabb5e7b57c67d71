"""Checks for keys without effect in the run; conditions within a table are on its fields."""

import difflib
from collections.abc import Iterator

from offbeat.trainer.checks.overruled import advantage_is_of_the_episode, check_overruled
from offbeat.trainer.config.actor_train import ActorTrainConfig, StrategyArgs
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.estimators import DECOUPLED, GREEDY_BASELINE, TURN_WISE
from offbeat.trainer.config.issue import ConfigIssue
from offbeat.trainer.config.learner import LearnerConfig

DEEPSPEED_KEYS = (
    "activation_checkpointing", "aio", "amp", "autotuning", "bf16", "bfloat16", "checkpoint", "comet", "comms_logger",
    "communication_data_type", "compile", "compression_training", "csv_monitor", "data_efficiency", "data_types",
    "dataloader_drop_last", "disable_allgather", "disable_python_gc", "dump_state", "eigenvalue", "elasticity",
    "flops_profiler", "fp16", "gradient_allreduce_op", "gradient_predivide_factor", "hybrid_engine", "log_level",
    "memory_breakdown", "nebula", "pipeline", "prescale_gradients", "progressive_layer_drop",
    "seq_parallel_communication_data_type", "sparse_attention", "sparse_gradients", "steps_per_print", "tensor_parallel",
    "tensorboard", "timers", "torch_autocast", "use_data_before_expert_parallelism", "use_node_local_storage",
    "vocabulary_size", "wall_clock_breakdown", "wandb", "weight_quantization", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "zero_optimization",
)  # fmt: skip
"""DeepSpeed's keys (https://www.deepspeed.ai/docs/config-json/, 0.19) that a run may set."""
DEEPSPEED_REMEDIES = {
    "gradient_clipping": "set training_args.max_grad_norm",
    "optimizer": "set training_args.adam_*",
    "scheduler": "set training_args.lr_scheduler_type",
    "train_batch_size": "set rollout_batch_size",
    "train_micro_batch_size_per_gpu": "set training_args.max_tokens_per_microbatch",
    "gradient_accumulation_steps": "set training_args.max_tokens_per_microbatch",
}
"""Keys that follow from ours."""


def check_effects(config: LearnerConfig, *, group_size: int) -> Iterator[ConfigIssue]:
    yield from _check_unit_ratio(config)
    yield from _check_selection(config, group_size)
    yield from _check_discounts(config)
    yield from check_overruled(config)
    yield from _check_on_policy(config)
    yield from _check_filters(config)
    yield from _check_preferences(config)
    yield from _check_strategy(config.actor_train.strategy_args)
    yield from _check_zero(config.actor_train)
    if config.actor_train.training_args.decay_all_weights and not config.actor_train.training_args.weight_decay:
        yield ConfigIssue(
            "actor_train.training_args.decay_all_weights",
            "has no effect without actor_train.training_args.weight_decay: set it, or leave this out",
        )
    yield from _check_minibatches(config, group_size)


def _check_minibatches(config: LearnerConfig, group_size: int) -> Iterator[ConfigIssue]:
    num_parts, parts = config.rollout_batch_size, "trajectories"
    if config.reads_data or config.pipeline == "online_dpo":  # of which a minibatch holds whole groups
        num_parts, parts = num_parts // group_size, "rows" if config.reads_data else "groups"
    num_minibatches = config.actor_train.training_args.num_minibatches
    if num_minibatches > max(num_parts, 1):
        yield ConfigIssue(
            "actor_train.training_args.num_minibatches",
            f"{num_minibatches} is more than the {num_parts} {parts} of a step: take at most {num_parts}",
        )


def check_controller_effect(
    config: LearnerConfig, *, groups_per_step: int, num_env_groups: int
) -> Iterator[ConfigIssue]:
    """Yield bounds of the staleness controller that leave nothing to change."""
    control = config.staleness_controller
    if control is None or control.min_staleness < control.max_staleness:
        return
    min_groups = groups_per_step if control.min_env_groups is None else control.min_env_groups
    max_groups = num_env_groups if control.max_env_groups is None else control.max_env_groups
    if min_groups == max_groups:
        yield ConfigIssue(
            "staleness_controller",
            f"has no effect, because its bounds leave one value each, {control.max_staleness:g} versions and {max_groups} "
            "groups: leave it out, or widen them",
        )
    elif control.staleness_step != type(control).model_fields["staleness_step"].default:
        yield ConfigIssue(
            "staleness_controller.staleness_step",
            f"has no effect with min_staleness and max_staleness of {control.max_staleness:g}: leave it out, or widen them",
        )


def _check_unit_ratio(config: LearnerConfig) -> Iterator[ConfigIssue]:
    """Yield keys of a ratio that is always 1: one optimizer step per batch on recomputed logprobs."""
    if config.ppo_epochs > 1 or config.actor_train.training_args.num_minibatches > 1:
        return
    one_step = "one optimizer step per batch: leave it out, or raise ppo_epochs or num_minibatches"
    if config.value_clip is not None:
        yield ConfigIssue(
            "value_clip", f"has no effect, because a value equals its prediction before the step with {one_step}"
        )
    if config.old_logprobs != "recompute":
        return
    if config.ratio_type == "sequence-token" or (
        config.ratio_type in ("sequence", "turn") and advantage_is_of_the_episode(config)
    ):
        equal = f"has no effect: {config.ratio_type} equals token"
        yield ConfigIssue("ratio_type", f"{equal}, because the ratio is 1 with old_logprobs=recompute and {one_step}")
    keys = [
        "pg_clip",
        "pg_clip_low",
        "pg_clip_high",
        "dual_clip",
        "kimi15_tau",
        "cispo_epsilon_low",
        "cispo_epsilon_high",
        "cispo_use_unified_mask",
        "sapo_temperature_pos",
        "sapo_temperature_neg",
    ]
    keys += ["tis_upper_bound"] if config.tis_upper_bound >= 1 else []
    keys += ["tis_lower_bound"] if config.tis_lower_bound <= 1 else []
    for key in keys:
        if _is_changed(config, key):
            yield ConfigIssue(key, f"has no effect, because the ratio is 1 with old_logprobs=recompute and {one_step}")


def _check_selection(config: LearnerConfig, group_size: int) -> Iterator[ConfigIssue]:
    filters = config.difficulty_mask or config.query_filter_config or config.group_filter_cls is not None
    if config.zero_variance == "refill" and not config.compares_siblings and not filters:
        yield ConfigIssue(
            "zero_variance",
            f"has no effect: adv_estimator {config.adv_estimator} does not compare the members of a group, so that none is "
            "without signal and refill replaces none; leave it out, or set difficulty_mask, query_filter_config or "
            "group_filter_cls",
        )
    if config.variance_filter_ratio < 1 and group_size < 2:
        yield ConfigIssue(
            "variance_filter_ratio",
            "groups of one have no reward deviation: take a larger train_env_manager.group_size",
        )


def _check_discounts(config: LearnerConfig) -> Iterator[ConfigIssue]:
    for key in ("lambd", "vtrace_c_bar"):
        if config.gamma == 0 and _is_changed(config, key):
            yield ConfigIssue(key, "has no effect with gamma=0: leave it out, or raise gamma")
    if config.gamma > 0 and config.lambd == 0 and _is_changed(config, "vtrace_c_bar"):
        yield ConfigIssue("vtrace_c_bar", "has no effect with lambd=0: leave it out, or raise lambd")
    if config.adv_estimator == "gigpo" and not config.step_reward_weight and _is_changed(config, "step_reward_gamma"):
        yield ConfigIssue("step_reward_gamma", "has no effect with step_reward_weight=0: leave it out")


def _check_on_policy(config: LearnerConfig) -> Iterator[ConfigIssue]:
    if config.max_staleness > 0 or config.staleness_controller is not None:
        return
    if config.old_logprobs == "loglinear":
        yield ConfigIssue(
            "old_logprobs",
            "has no effect: loglinear equals behavior with max_staleness=0, where every token is of the current version; "
            "leave it out, or raise max_staleness",
        )
    if config.replay.samples_per_insert is not None and not config.replay.max_staleness:
        yield ConfigIssue(
            "replay.samples_per_insert",
            "replays nothing at a maximum staleness of 0: leave it out, or set replay.max_staleness",
        )


def _check_filters(config: LearnerConfig) -> Iterator[ConfigIssue]:
    """Yield filters that pass no group, or only drop groups that carry no signal anyway."""
    for tag, query_filter in config.query_filter_config.items():
        low, high = query_filter.filter_args.threshold_down, query_filter.filter_args.threshold_up
        if query_filter.type == "mean_filter" and low >= high:
            yield ConfigIssue(
                f"query_filter_config.{tag}.filter_args",
                f"threshold_down {low:g} is not below threshold_up {high:g}, so that no group is trained",
            )
    compares_totals = config.adv_estimator not in (*TURN_WISE, *DECOUPLED, *GREEDY_BASELINE)
    if not config.compares_siblings or not compares_totals or config.reward_shaping.is_on:
        return
    for tag, query_filter in config.query_filter_config.items():
        if query_filter.type == "std_filter" and not query_filter.filter_args.std_threshold:
            yield ConfigIssue(
                f"query_filter_config.{tag}",
                f"has no effect with a std_threshold of 0: groups of equal rewards carry no signal with adv_estimator "
                f"{config.adv_estimator}; leave it out, or raise filter_args.std_threshold",
            )


def _check_preferences(config: LearnerConfig) -> Iterator[ConfigIssue]:
    if config.dpo.loss_type == "robust" and not config.dpo.label_smoothing:
        yield ConfigIssue(
            "dpo.loss_type",
            "has no effect: robust without label_smoothing equals sigmoid; set dpo.label_smoothing, or take sigmoid",
        )
    if config.replay.sampler == "prioritized" and not config.replay.priority_exponent:
        yield ConfigIssue(
            "replay.sampler",
            "has no effect: prioritized with priority_exponent=0 equals uniform; raise the exponent, or take uniform",
        )


def _check_zero(train: ActorTrainConfig) -> Iterator[ConfigIssue]:
    """Yield ZeRO settings that `zero_stage` decides, or whose stage is another one."""
    settings = train.strategy_args.strategy_config.get("zero_optimization")
    if not isinstance(settings, dict):
        return
    stage = train.strategy_args.zero_stage
    lowest = int(train.model_args.dtype != "float32")  # 16 bits always have a sharded optimizer
    for key in settings:
        path = f"actor_train.strategy_args.strategy_config.zero_optimization.{key}"
        if key == "stage" and settings[key] not in (stage, max(stage, lowest)):
            yield ConfigIssue(path, f"{settings[key]} disagrees with zero_stage {stage}: set that alone")
        elif stage != 3 and (key.startswith("stage3_") or key == "offload_param"):
            yield ConfigIssue(path, f"has no effect with zero_stage={stage}: leave it out, or take zero_stage=3")
        elif key == "offload_optimizer" and max(stage, lowest) == 0:
            yield ConfigIssue(path, "has no effect with zero_stage=0: leave it out, or take zero_stage=1")


def _check_strategy(strategy: StrategyArgs) -> Iterator[ConfigIssue]:
    for key in strategy.strategy_config:
        path = f"actor_train.strategy_args.strategy_config.{key}"
        if key in DEEPSPEED_REMEDIES:
            yield ConfigIssue(path, f"follows from the run's own keys: {DEEPSPEED_REMEDIES[key]}")
        elif key not in DEEPSPEED_KEYS:
            near = difflib.get_close_matches(key, DEEPSPEED_KEYS, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(DEEPSPEED_KEYS)}"
            yield ConfigIssue(path, f"not a key of DeepSpeed's configuration; {hint}")
        elif key == "gradient_allreduce_op" and str(strategy.strategy_config[key]).lower() == "sum":
            message = "sum multiplies gradients by the number of processes: leave it out, for their mean"
            yield ConfigIssue(path, message)


def _is_changed(config: AlgorithmConfig, key: str) -> bool:
    return getattr(config, key) != AlgorithmConfig.model_fields[key].default
