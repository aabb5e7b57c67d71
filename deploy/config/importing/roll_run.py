"""ROLL's keys of the run and its algorithm, besides `trainer/config/aliases.py`."""

import re
from collections.abc import Iterator
from typing import Any

from offbeat.deploy.config.importing.report import Outcome
from offbeat.deploy.config.importing.rules import (
    ALL_CHECKPOINTS,
    Key,
    Rule,
    Tree,
    become,
    get,
    get_table,
    missing,
    no_effect,
    rename,
    same,
)
from offbeat.services.generation.config import GeneratingArgs

GROUPING = "batch"
"""ROLL's default of `reward_normalization.grouping`."""
SAMPLING = {"temperature": 0.95, "top_p": 0.7, "top_k": 50}
"""ROLL's defaults of `generating_args`."""


def _name(key: Key) -> Outcome | None:
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", str(key.value)).lstrip("_.-")[:64]
    return None if name == key.value or not name else Outcome("value", key.path, name, "letters, digits and _.-")


def _dual_clip(key: Key) -> Outcome:
    if not key.value:
        return Outcome("same", note="no dual clip")
    clip = get(key.tree, "pg_clip") or 0.2
    return Outcome("value", ("dual_clip",), round(1 + 2 * clip, 6), "1 + 2 pg_clip, which ROLL computes")


def _clip_range(key: Key) -> Outcome | None:
    if get(key.tree, "use_pg_clip_range"):
        return None
    return Outcome("no effect", note="use_pg_clip_range is not set")


def _kl_in_reward(key: Key) -> Outcome | None:
    if get(key.tree, "add_token_level_kl"):
        return None
    is_off = not key.value
    return Outcome("same" if is_off else "no effect", note="" if is_off else "add_token_level_kl is not set")


def _kl_estimator(key: Key) -> Outcome | None:
    return Outcome("value", key.path, "k2", "the same formula") if key.value == "mse" else None


def is_distillation(tree: Tree) -> bool:
    """Return whether teachers replace rewards; ROLL's on-policy distillation sets `is_pure_opd` itself."""
    return bool(get(tree, "is_pure_opd")) or ("teacher" in tree and not get(tree, "use_opd"))


def _estimator(key: Key) -> Outcome | None:
    """Convert estimators; ROLL's agentic `grpo` normalizes nothing by itself."""
    if is_distillation(key.tree):
        return Outcome("no effect", note="teachers alone: adv_estimator: opd")
    table = get_table(key.tree, "reward_normalization")
    is_off = table.get("method", "identity") == "identity" and not (
        table.get("norm_mean_type") or table.get("norm_std_type")
    )
    if key.value == "grpo" and is_off and "rewards" not in key.tree:
        return Outcome("value", key.path, "reinforce", "what it is in ROLL without reward_normalization")
    return None


def _variant(key: Key) -> Outcome:
    if not get(key.tree, "actor_train.worker_cls"):
        return Outcome("no effect", note="read by ROLL's pg workers alone (actor_train.worker_cls)")
    return Outcome("renamed", ("pg_variant",), key.value)


def _tracker(key: Key) -> Outcome | None:
    if key.value != "ml_tracker":
        return None
    return Outcome("no counterpart", note="no such tracker; trackers are in docs/tracking.md")


def _tracker_argument(key: Key) -> Outcome | None:
    tracker = get(key.tree, "track_with")
    if tracker == "ml_tracker":
        return Outcome("no counterpart", note="no such tracker")
    if key.path[-1] == "api_key":
        return Outcome("no counterpart", note="keys are read from the environment (WANDB_API_KEY), not from files")
    if isinstance(tracker, str) and key.path[1] != tracker:
        return Outcome("renamed", ("tracker_kwargs", tracker, *key.path[1:]), key.value)
    return None


def _filters(key: Key) -> Outcome | None:
    """Convert ROLL's switches to optional bounds."""
    if not isinstance(key.value, list):
        return None
    filters = [each for each in map(_filter, key.value) if each]
    return (
        Outcome("value", key.path, filters, "bounds that are on")
        if filters
        else Outcome("same", note="no filter is on")
    )


def _filter(each: Any) -> dict[str, Any]:
    if not isinstance(each, dict) or not each.get("enabled"):
        return {}
    unit = str(each.get("agg_type", "token"))
    result: dict[str, Any] = {"agg_type": "turn" if unit == "segment" else unit}
    if each.get("ratio_enabled", True):
        result |= {"ratio_low": each.get("ratio_low", 0.8), "ratio_high": each.get("ratio_high", 1.2)}
    if each.get("diff_enabled"):
        result |= {"diff_low": each.get("diff_low", -0.2), "diff_high": each.get("diff_high", 0.2)}
    return result if len(result) > 1 else {}


def _is_weight(key: Key) -> Outcome | None:
    table = get_table(key.tree, "train_infer_correction.is_weight")
    name = key.path[-1]
    if not table.get("enabled"):
        return Outcome("same" if name == "enabled" else "no effect", note="no importance weight")
    if name == "enabled":
        path = (*key.path[:-1], "upper_bound")
        return Outcome("value", path, table.get("upper_bound", 1.2))
    if name == "detach":
        return (
            Outcome("same", note="always detached") if key.value else Outcome("no counterpart", note="always detached")
        )
    return Outcome("value", key.path, "turn") if key.value == "segment" else None


def _checkpoints(key: Key) -> Outcome | None:
    if get(key.tree, "checkpoint_config.output_dir"):
        return None
    return Outcome("no effect", note="checkpoint_config names no output_dir")


RUN: tuple[tuple[str, Rule], ...] = (
    ("hydra.**", no_effect("Hydra's own")),
    ("system_envs.USE_MODELSCOPE", no_effect("ROLL never reads it; ids are of the Hugging Face hub here")),
    ("exp_name", _name),
    ("num_nodes", same("device_mapping says it")),
    ("local_rank", no_effect("unused")),
    ("rpc_timeout", missing("each wait has its own: custom_envs.*.step_timeout_s, actor_infer.request_timeout_s")),
    ("rollout_dump_dir", become("rollout.keep_text", lambda value: True if value else None, "texts in the run's folder")),
    ("checkpoint_config.*", _checkpoints),
    ("rollout_mock.**", missing("record_batches keeps batches for `offbeat learner reproduce`")),
    ("profiler_output_dir", missing("profiles are in profiler/ of the run's folder")),
    ("otlp_output_dir", missing("telemetry.otlp_endpoint (docs/monitoring.md)")),
    ("is_offload_states|is_offload_optimizer_states_in_train_step", missing("learner and engines work at the same time")),
    ("model_download_type|model_update_buffer_size_mb|base_dir", missing("see docs/configuration.md")),
    ("max_ckpt_to_keep", become("max_ckpt_to_keep", lambda _: ALL_CHECKPOINTS, "all", 0)),
    ("track_with", _tracker),
    ("tracker_kwargs.**", _tracker_argument),
    ("generate_opt_level|max_running_requests|router_args.**", missing("requests are routed by Ray Serve")),
    ("is_num_return_sequences_expand", same("each episode of a group is a request of its own")),
    ("is_use_additional_prompts|max_additional_running_prompts", missing("set train_env_manager.num_env_groups")),
    ("user_defined_rollout_loop_cls|transfer_backend.**|partial_gpu_mode|exp_mode", missing("no such switch")),
)  # fmt: skip
ALGORITHM: tuple[tuple[str, Rule], ...] = (
    ("dual_clip_loss", _dual_clip),
    ("use_pg_clip_range", same("pg_clip_low and pg_clip_high")),
    ("pg_clip_low|pg_clip_high", _clip_range),
    ("pg_clip", lambda key: no_effect("use_pg_clip_range is set")(key) if get(key.tree, "use_pg_clip_range") else None),
    ("add_token_level_kl", same("", False)),
    ("whiten_rewards", lambda key: Outcome("same", key.path, key.value, "divided by the deviation; ROLL also centers them")
     if key.value else None),
    ("init_kl_coef|target_kl|kl_horizon|kl_penalty", _kl_in_reward),
    ("kl_penalty", _kl_estimator),
    ("actor_train.pg_variant", _variant),
    ("actor_train.topr_positive_weight|topr_negative_weight", lambda key: Outcome("renamed", (key.path[-1],), key.value)),
    ("actor_train.model_update_frequency", rename("model_update_frequency")),
    ("enable_reference", same("the reference is loaded where a KL needs it")),
    ("enable_old_logprobs_recompute|force_disable_old_logprobs_recompute", same("old_logprobs: recompute")),
    ("train_infer_correction.filters", _filters),
    ("train_infer_correction.is_weight.*", _is_weight),
    ("l2|use_reward_scaling|add_len_reward|use_reward_norm", no_effect("ROLL never reads it")),
    ("is_pure_opd", same("adv_estimator: opd", True)),
    ("is_pure_opd", same("", False)),
    ("adv_estimator", _estimator),
    ("pure_opd_pipeline_type", same("`pipeline`")),
)  # fmt: skip


def estimator_default(tree: Tree) -> tuple[str, str, Any]:
    return ("", "adv_estimator", "opd") if is_distillation(tree) else ("adv_estimator", "adv_estimator", "gae")


def normalization_scopes(tree: Tree) -> tuple[Any, Any]:
    """Return the agentic scopes of mean and deviation, which ROLL derives from `method` where they are left out."""
    table = get_table(tree, "reward_normalization")
    scope = "batch" if table.get("grouping", GROUPING) == "batch" else "group"
    method = table.get("method")
    mean = scope if method in ("mean", "mean_std", "asym_clip") else None
    std = scope if method in ("mean_std", "asym_clip") else None
    return table.get("norm_mean_type") or mean, table.get("norm_std_type") or std


def trains_equal_rewards(tree: Tree) -> bool:
    """Return whether groups with equal rewards have a part in the step, and no filter leaves them out.

    They have a gradient of a KL or the entropy, or count in statistics of the batch.
    """
    kl = get(tree, "use_kl_loss") and get(tree, "kl_loss_coef")
    has_gradient = kl or get(tree, "entropy_loss_coef") or get(tree, "add_token_level_kl")
    domains = get_table(tree, "rewards").values()
    filters = [get(reward or {}, "query_filter_config.type") for reward in domains]
    is_filtered = (
        get(tree, "difficulty_mask")
        or get(tree, "train_env_manager.group_filter_cls")
        or any(each not in (None, "no_filter") for each in filters)
    )
    return bool(has_gradient or _has_batch_statistics(tree)) and not is_filtered


def _has_batch_statistics(tree: Tree) -> bool:
    """Return whether advantages within a group, or weights of the loss, depend on the other groups."""
    if get(tree, "adv_estimator", "gae") == "gae":
        return False
    is_rlvr = "rewards" in tree
    scopes = (get(tree, "norm_mean_type"), get(tree, "norm_std_type")) if is_rlvr else normalization_scopes(tree)
    keys = ("whiten_advantages", "whiten_rewards", "length_loss_weight")
    return scopes == ("group", "batch") or any(get(tree, key) for key in keys)


STEPS_DEFAULT = ("max_steps", "max_steps", 500)
"""Of pipelines whose length epochs do not determine."""


def evaluation_sampling(args: Tree) -> Iterator[tuple[str, str, Any]]:
    """Yield the sampling of evaluations by ROLL's `generating_args`, unless it is temperature 1 without truncation."""
    for name, default in SAMPLING.items():
        value = default if args.get(name) is None else args[name]
        if value != GeneratingArgs.model_fields[name].default:
            yield "", f"val_env_manager.generating_args.{name}", value


def defaults(tree: Tree) -> Iterator[tuple[str, str, Any]]:
    """Yield ROLL's key, ours and ROLL's default, if it differs."""
    if "actor_train" not in tree and "actor_infer" not in tree:
        return
    yield "save_steps", "save_steps", 50
    yield "max_ckpt_to_keep", "max_ckpt_to_keep", ALL_CHECKPOINTS
    args = "actor_train.training_args"
    yield f"{args}.learning_rate", f"{args}.learning_rate", 5e-5
    yield f"{args}.lr_scheduler_type", f"{args}.lr_scheduler_type", "linear"
    yield f"{args}.adam_beta2", f"{args}.adam_beta2", 0.999
    if get(tree, f"{args}.weight_decay") and get(tree, "actor_train.strategy_args.strategy_name") == "fsdp2_train":
        yield "", f"{args}.decay_all_weights", True  # as torch's AdamW does; Megatron's spares norms and biases
    model = "actor_train.model_args"
    yield f"{model}.dtype", f"{model}.dtype", "bfloat16"
    yield f"{model}.disable_gradient_checkpointing", f"{model}.disable_gradient_checkpointing", False
    if "critic" in tree and get(tree, "adv_estimator", "gae") == "gae" and not is_distillation(tree):
        yield "critic.training_args.learning_rate", "critic.training_args.learning_rate", 5e-5
    if trains_equal_rewards(tree):
        yield "", "zero_variance", "train"
    if get(tree, "add_token_level_kl"):
        yield "init_kl_coef", "init_kl_coef", 0.2
    for role in ("actor_train", "actor_infer"):
        if get(tree, f"{role}.device_mapping") is not None:
            yield "", f"{role}.device", "cuda"
    if get(tree, "actor_train.strategy_args.strategy_name") is None:
        yield "actor_train.strategy_args.strategy_name", "actor_train.strategy_args.strategy_name", "fsdp2_train"
