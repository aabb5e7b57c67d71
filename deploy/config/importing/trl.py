"""Configurations of TRL's commands (`trl sft|dpo|grpo --config FILE`), by TRL 1.16's names and defaults."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.importing.fitting import finish
from offbeat.deploy.config.importing.report import Imported, KeyReport, Outcome
from offbeat.deploy.config.importing.rules import (
    Key,
    Rule,
    Rules,
    Tree,
    become,
    get,
    missing,
    name_run,
    rename,
    same,
    translate_all,
)
from offbeat.deploy.config.loader import readable
from offbeat.deploy.config.yaml_limits import load_yaml
from offbeat.trainer.config.aliases import ENGINE
from offbeat.trainer.config.issue import ConfigIssue

ARGS = "actor_train.training_args"
MODEL = "actor_train.model_args"
GRPO_KEYS = ("num_generations", "reward_funcs", "max_completion_length", "num_iterations", "epsilon", "scale_rewards")
DPO_KEYS = ("label_smoothing", "precompute_ref_log_probs", "f_divergence_type", "beta")
DECOUPLED = "normalize_then_sum"
PREFERENCES = ("sigmoid", "ipo", "hinge", "robust", "apo_zero", "apo_down")
COUNTS = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size",
          "num_iterations")  # fmt: skip
BATCH, STEPS, NUM_GENERATIONS, COMPLETION, PROMPT = 8, 1, 8, 512, 512
"""TRL's defaults of batch size, accumulation and generations, and lengths in tokens."""


def _batch(key: Key) -> Outcome | None:
    if not _are_counts(key.tree):
        return None
    size = _rollout_batch(key.tree)
    return Outcome("value", ("rollout_batch_size",), size, "with gradient_accumulation_steps, of one process")


def _are_counts(tree: Tree) -> bool:
    return all(isinstance(get(tree, name) or 1, int) for name in COUNTS)


def _count(tree: Tree, name: str, default: int) -> int:
    value = get(tree, name)
    return value if value and isinstance(value, int) else default


def _rollout_batch(tree: Tree) -> int:
    """Return a batch's trajectories: TRL counts completions, or rows; a pair has two responses."""
    size = _optimizer_batch(tree)
    match find_pipeline(tree):
        case "dpo":
            return 2 * size
        case "rlvr":
            per_step, steps = (
                _count(tree, "per_device_train_batch_size", BATCH),
                _count(tree, "steps_per_generation", 0),
            )
            return _count(tree, "generation_batch_size", per_step * steps or size)
        case _:
            return size


def _optimizer_batch(tree: Tree) -> int:
    return _count(tree, "per_device_train_batch_size", BATCH) * _count(tree, "gradient_accumulation_steps", STEPS)


def _optimizer_steps(tree: Tree) -> int:
    """Return the optimizer steps that use a batch, which is one step here; TRL's steps are of the optimizer."""
    if find_pipeline(tree) != "rlvr":
        return 1
    minibatches, rest = divmod(_rollout_batch(tree), _optimizer_batch(tree))
    return (1 if rest else minibatches) * _count(tree, "num_iterations", 1)


def _generation(key: Key) -> Outcome | None:
    """Convert a generation's size to optimizer steps."""
    if not key.value or not _are_counts(key.tree):
        return None
    steps, rest = divmod(_rollout_batch(key.tree), _optimizer_batch(key.tree))
    if rest:
        return Outcome("no counterpart", note=f"set rollout_batch_size to a multiple of {_optimizer_batch(key.tree)}")
    return Outcome("value", (*ARGS.split("."), "num_minibatches"), steps, "optimizer steps per batch")


def _in_batches(*target: str) -> Rule:
    """Convert optimizer steps to batches."""

    def rule(key: Key) -> Outcome | None:
        per_batch = _optimizer_steps(key.tree)
        if per_batch == 1 or not isinstance(key.value, int) or key.value <= 0:
            return None
        note = f"batches, of {per_batch} optimizer steps each"
        return Outcome("value", (*target, key.path[0]), math.ceil(key.value / per_batch), note)

    return rule


def _warmup(key: Key) -> Outcome | None:
    steps = get(key.tree, "max_steps")
    if get(key.tree, "warmup_steps"):
        return Outcome("no effect", note="warmup_steps counts")
    if not isinstance(key.value, float | int) or not isinstance(steps, int) or steps <= 0:
        return None
    value = math.ceil(steps * key.value / _optimizer_steps(key.tree))
    return Outcome("value", (*ARGS.split("."), "warmup_steps"), value, f"of {steps} optimizer steps")


def _only_with_peft(target: str) -> Rule:
    def rule(key: Key) -> Outcome:
        if not get(key.tree, "use_peft"):
            return Outcome("no effect", note="use_peft is not set")
        value = ",".join(key.value) if isinstance(key.value, list) else key.value
        return Outcome("renamed" if value == key.value else "value", tuple(target.split(".")), value)

    return rule


def _steps(key: Key) -> Outcome | None:
    return Outcome("same", note="num_train_epochs counts") if key.value == -1 else None


def _epochs(key: Key) -> Outcome:
    if (get(key.tree, "max_steps") or -1) > 0:
        return Outcome("no effect", note="max_steps counts")
    return Outcome("renamed", ("data", "num_train_epochs"), key.value)


def _kl(key: Key) -> Outcome:
    if find_pipeline(key.tree) == "dpo":
        return Outcome("renamed", ("dpo", "beta"), key.value)
    return Outcome("renamed", ("kl_loss_coef",), key.value) if key.value else Outcome("same", note="no KL")


AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "cispo": "token-mean",
    "sapo": "seq-mean-token-mean",
}


def _loss(key: Key) -> Outcome:
    name = key.value[0] if isinstance(key.value, list) and len(key.value) == 1 else key.value
    pipeline = find_pipeline(key.tree)
    if pipeline == "sft" and name == "nll":
        return Outcome("same", note="negative log-likelihood")
    if pipeline == "dpo" and name in PREFERENCES:
        return Outcome("renamed", ("dpo", "loss_type"), name)
    if pipeline == "rlvr" and name in AGGREGATIONS:
        return Outcome("value", ("loss_agg_mode",), AGGREGATIONS[name], f"that of {name}")
    return Outcome("no counterpart", note=f"no loss {name} here: see docs/algorithms.md and docs/pipelines.md")


def _scale(key: Key) -> Outcome:
    if get(key.tree, "multi_objective_aggregation") == DECOUPLED:
        return Outcome("no effect", note="normalize_then_sum divides each reward by its deviation")
    if key.value in (True, "group"):
        return Outcome("same", note="adv_estimator: grpo")
    if key.value in (False, "none"):
        return Outcome("value", ("adv_estimator",), "dr_grpo", "no division by the deviation")
    return Outcome("value", ("reward_normalization", "norm_std_type"), "batch")


def _trackers(key: Key) -> Outcome:
    names = [key.value] if isinstance(key.value, str) else list(key.value or ())
    return Outcome("renamed", ("track_with",), [name for name in names if name != "none"])


def _reward(key: Key) -> Outcome | None:
    """Take reward functions, by dotted path; built-in ones by kind."""
    names = [key.value] if isinstance(key.value, str) else key.value
    if not isinstance(names, list):
        return None
    weights = get(key.tree, "reward_weights") or [1.0] * len(names)
    rewards = [_one_reward(str(name), weight) for name, weight in zip(names, weights, strict=False)]
    return Outcome("value", ("rewards",), rewards, "a function takes (sample, **args) here (docs/pipelines.md)")


def _one_reward(name: str, weight: float) -> Tree:
    module, _, function = name.rpartition(".")
    chosen: Tree = {"name": function.replace("_", "-") or "reward"}
    if name == "accuracy_reward":
        chosen |= {"kind": "math_rule"}
    elif name == "think_format_reward":
        chosen |= {"kind": "regex", "pattern": "<think>.*?</think>.*", "match": "full"}
    else:
        chosen |= {"kind": "function", "path": f"{module or 'rewards'}:{function}"}
    return chosen if weight == 1 else {**chosen, "weight": weight}


RULES: Rules = (
    ("model_name_or_path", rename("pretrain")),
    ("model_revision", same("", "main")),
    ("dtype|torch_dtype", rename(f"{MODEL}.dtype")),
    ("bf16", become(f"{MODEL}.dtype", lambda on: "bfloat16" if on else None, "weights, too")),
    ("fp16", become(f"{MODEL}.dtype", lambda on: "float16" if on else None, "weights, too")),
    ("bf16|fp16", same("", False)),
    ("attn_implementation", rename(f"{MODEL}.attn_implementation")),
    ("gradient_checkpointing", become(f"{MODEL}.disable_gradient_checkpointing", lambda on: not on)),
    ("use_peft", same("lora_target")),
    ("lora_r", _only_with_peft(f"{MODEL}.lora_rank")),
    ("lora_alpha", _only_with_peft(f"{MODEL}.lora_alpha")),
    ("lora_target_modules", _only_with_peft(f"{MODEL}.lora_target")),
    ("lora_dropout", missing("adapters have no dropout")),
    ("dataset_name", rename("data.dataset_name", "a file or a folder of `datasets`: `load_dataset(...).save_to_disk(...)`")),
    ("dataset_train_split|dataset_test_split|dataset_config", missing("save the split as a file of its own")),
    ("dataset_num_proc", missing("rows are read as they are needed")),
    ("shuffle_dataset", rename("data.shuffle")),
    ("warmup_steps", _in_batches(*ARGS.split("."))),
    ("learning_rate|weight_decay|adam_beta1|adam_beta2|adam_epsilon|max_grad_norm|warmup_steps|lr_scheduler_type|"
     "lr_scheduler_kwargs", lambda key: Outcome("renamed", (*ARGS.split("."), key.path[0]), key.value)),
    ("warmup_ratio", _warmup),
    ("warmup_ratio", missing(f"set {ARGS}.warmup_steps")),
    ("optim", same("AdamW", "adamw_torch", "adamw_torch_fused")),
    ("per_device_train_batch_size", _batch),
    ("gradient_accumulation_steps", same("in rollout_batch_size")),
    ("deepspeed|fsdp|fsdp_config", missing("set actor_train.strategy_args (docs/learner.md)")),
    ("use_liger_kernel|use_liger_loss", missing("losses are ours")),
    ("per_device_eval_batch_size", missing(f"set {ARGS}.max_tokens_per_microbatch")),
    ("max_steps", _steps),
    ("num_train_epochs", _epochs),
    ("run_name", name_run),
    ("report_to", _trackers),
    ("save_total_limit", rename("max_ckpt_to_keep")),
    ("save_strategy|eval_strategy|logging_strategy", same("", "steps")),
    ("max_steps|save_steps|logging_steps|eval_steps", _in_batches()),
    ("output_dir|seed|save_steps|logging_steps|eval_steps|resume_from_checkpoint|max_steps",
     lambda key: Outcome("same", key.path, key.value)),
    ("logging_first_step|push_to_hub|remove_unused_columns|ddp_timeout|dataloader_*", missing("not needed here")),
    ("loss_type", _loss),
    ("beta", _kl),
    ("label_smoothing", rename("dpo.label_smoothing")),
    ("max_length", rename("sequence_length")),
    ("truncation_mode", become("data.too_long", lambda _: "truncate", "", "keep_start")),
    ("packing|padding_free", same("sequences are always packed")),
    ("assistant_only_loss", same("data.train_on: all", True)),
    ("assistant_only_loss", missing("the loss is on assistant tokens alone: data.train_on")),
    ("sync_ref_model", same("ref_model_sync_steps")),
    ("ref_model_sync_steps|ref_model_mixup_alpha", lambda key: Outcome("same", key.path, key.value)
     if get(key.tree, "sync_ref_model") else Outcome("no effect", note="sync_ref_model is not set")),
    ("precompute_ref_log_probs", same("", False)),
    # --- GRPO
    ("num_generations", rename("train_env_manager.group_size")),
    ("num_generations_eval", rename("val_env_manager.group_size")),
    ("max_completion_length", rename("actor_infer.generating_args.max_new_tokens")),
    ("max_prompt_length", rename("data.prompt_length")),
    ("temperature|top_p", lambda key: Outcome("renamed", ("actor_infer", "generating_args", key.path[0]), key.value)),
    ("top_k", become("actor_infer.generating_args.top_k", lambda value: value or -1, "-1 keeps all")),
    ("min_p", same("", None, 0, 0.0)),
    ("repetition_penalty", same("", 1, 1.0)),
    ("min_p|repetition_penalty", missing("logprobs would not be the policy's")),
    ("steps_per_generation|generation_batch_size", _generation),
    ("num_iterations", rename("ppo_epochs")),
    ("epsilon", rename("pg_clip")),
    ("epsilon_high", rename("pg_clip_high")),
    ("delta", rename("dual_clip")),
    ("top_entropy_quantile", same("", 1, 1.0)),
    ("top_entropy_quantile", missing("the loss is on all tokens")),
    ("importance_sampling_level", become("ratio_type", lambda value: value, "", "sequence")),
    ("importance_sampling_level", same("ratio_type: token", "token")),
    ("scale_rewards", _scale),
    ("mask_truncated_completions", rename("max_len_mask")),
    ("entropy_coef", rename("entropy_loss_coef")),
    ("reward_funcs", _reward),
    ("reward_weights", same("in rewards")),
    ("multi_objective_aggregation", become("adv_estimator", lambda _: "gdpo", "", DECOUPLED)),
    ("multi_objective_aggregation", same("adv_estimator: grpo", "sum_then_normalize")),
    ("use_vllm|vllm_mode|vllm_server_*", same("engines of the run's own sample all the time")),
    ("vllm_gpu_memory_utilization", rename(f"{ENGINE}.gpu_memory_utilization")),
    ("vllm_tensor_parallel_size", rename(f"{ENGINE}.tensor_parallel_size")),
    ("vllm_importance_sampling_correction|vllm_importance_sampling_mode|vllm_importance_sampling_c*",
     missing("see train_infer_correction")),
    ("log_completions|num_completions_to_print", same("logging_samples")),
)  # fmt: skip


def find_pipeline(tree: Tree) -> str:
    """Return a file's pipeline, which TRL's command names."""
    if any(key in tree for key in GRPO_KEYS):
        return "rlvr"
    loss = tree.get("loss_type")
    names = loss if isinstance(loss, list) else [loss]
    return "dpo" if any(key in tree for key in DPO_KEYS) or set(names) & set(PREFERENCES) else "sft"


def import_trl(path: Path) -> Imported:
    """Import a file of TRL's; raises `ConfigError`."""
    tree, reports = translate_trl(path)
    return finish(path, tree, reports)


def translate_trl(path: Path) -> tuple[Tree, list[KeyReport]]:
    """Return our unvalidated tree and the outcome of each key; raises `ConfigError`."""
    with readable(path):
        source: Any = load_yaml(path.read_text(encoding="utf-8"))
    if not isinstance(source, dict):
        raise ConfigError([ConfigIssue("", "expected a mapping of keys to values")], str(path))
    return translate_all(source, RULES, _defaults(source, find_pipeline(source)), whole=("*",))


def _defaults(source: Tree, pipeline: str) -> Iterator[tuple[str, Any]]:
    """Yield TRL's defaults that differ from ours."""
    yield "pipeline", pipeline
    yield f"{ARGS}.lr_scheduler_type", "linear"
    yield f"{ARGS}.adam_beta2", 0.999
    yield f"{ARGS}.learning_rate", 2e-5 if pipeline == "sft" else 1e-6
    yield f"{MODEL}.disable_gradient_checkpointing", False
    yield "rollout_batch_size", _rollout_batch(source)
    if (source.get("max_steps") or -1) < 0:
        yield "data.num_train_epochs", 3
    if source.get("use_peft"):
        yield f"{MODEL}.lora_rank", 16
        yield f"{MODEL}.lora_alpha", 32
        yield f"{MODEL}.lora_target", "all-linear"
    if pipeline != "rlvr":
        yield "sequence_length", 1024
        yield "data.too_long", "truncate"
        yield "data.shuffle", pipeline == "dpo"
        return
    yield from _grpo_defaults(source)


def _grpo_defaults(source: Tree) -> Iterator[tuple[str, Any]]:
    completion = source.get("max_completion_length") or COMPLETION
    yield "sequence_length", (source.get("max_prompt_length") or PROMPT) + completion
    yield "actor_infer.generating_args.max_new_tokens", completion
    yield "train_env_manager.group_size", NUM_GENERATIONS
    yield "loss_agg_mode", "token-mean"
    if source.get("loss_type") == "dr_grpo":
        yield "loss_agg_length", completion
    if source.get("loss_type") in ("cispo", "sapo"):
        yield "pg_variant", source["loss_type"]
    if source.get("scale_rewards") == "batch" and source.get("multi_objective_aggregation") != DECOUPLED:
        yield "reward_normalization.norm_mean_type", "group"
    yield "adv_estimator", "grpo"
    yield "old_logprobs", "recompute"
    yield "max_staleness", 0
    if source.get("beta"):
        yield "use_kl_loss", True
    yield "custom_envs", {"prompt": {"env_type": "prompt", "max_steps": 1, "max_tokens_per_step": completion}}
