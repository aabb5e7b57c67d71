"""Rules for the keys of TRL's commands, by TRL 1.16's names, meanings and defaults."""

from typing import Any

from offbeat.deploy.config.importing.report import Outcome
from offbeat.deploy.config.importing.rules import (
    Key,
    Rule,
    Rules,
    Tree,
    become,
    get,
    missing,
    name_run,
    no_effect,
    rename,
    same,
)
from offbeat.deploy.config.importing.trl_batches import (
    ARGS,
    in_batches,
    take_batch,
    take_generation,
    take_warmup,
)
from offbeat.deploy.config.importing.trl_commands import PREFERENCES, find_command, find_pipeline
from offbeat.deploy.config.importing.trl_data import take_dataset, take_part, take_test_split
from offbeat.trainer.config.aliases import ENGINE

MODEL = "actor_train.model_args"
CORRECTION = "train_infer_correction"
DECOUPLED = "normalize_then_sum"
AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "cispo": "token-mean",
    "sapo": "seq-mean-token-mean",
}
ADAMW_8BIT = ("adamw_8bit", "adamw_bnb_8bit")
OVERLONG = "get_soft_overlong_punishment"
MATH_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward")
"""They compare with the column `solution`."""
THINK_FORMAT = r"<think>(?!.*<think>).*?</think>.*"
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
IS_MODE, IS_MAX, IS_MIN = (f"vllm_importance_sampling_{name}" for name in ("mode", "clip_max", "clip_min"))
DEFAULT_MODE, DEFAULT_MAX = "sequence_mask", 3.0
NO_CORRECTION = 1e9
"""Upper bound of a weight without one."""


def _only_with_peft(target: str) -> Rule:
    def rule(key: Key) -> Outcome:
        if not get(key.tree, "use_peft"):
            return Outcome("no effect", note="use_peft is not set")
        value = ",".join(key.value) if isinstance(key.value, list) else key.value
        return Outcome("renamed" if value == key.value else "value", tuple(target.split(".")), value)

    return rule


def _only_in_4_bits(key: Key) -> Outcome:
    if not get(key.tree, "use_peft") or not get(key.tree, "load_in_4bit"):
        return Outcome("no effect", note="no weights are loaded in 4 bits")
    return Outcome("renamed", (*MODEL.split("."), key.path[0]), key.value)


def _four_bits(key: Key) -> Outcome | None:
    if not key.value or get(key.tree, "use_peft"):
        return None
    return Outcome("no counterpart", note="4-bit weights are trained by adapters alone: set use_peft")


def _dtype(key: Key) -> Outcome:
    """Take the precision of the passes: bf16 and fp16, which default to bf16, over that of the loaded weights."""
    on = next((name for name in ("bf16", "fp16") if get(key.tree, name)), None)
    if on is not None or key.value == "auto" or get(key.tree, "bf16") is not False:
        return Outcome(
            "no effect", note=f"passes are in {on or 'bf16 by default'}, weights of the optimizer in float32"
        )
    return Outcome("renamed", tuple(f"{MODEL}.dtype".split(".")), key.value)


def _without_warmup(key: Key) -> Outcome | None:
    """Report the warm-up of transformers' constant schedule, which has none."""
    if not key.value or get(key.tree, "lr_scheduler_type") != "constant":
        return None
    return Outcome("no effect", note="transformers' lr_scheduler_type: constant has none; constant_with_warmup has")


def _steps(key: Key) -> Outcome | None:
    return Outcome("same", note="num_train_epochs counts") if key.value == -1 else None


def _epochs(key: Key) -> Outcome:
    if (get(key.tree, "max_steps") or -1) > 0:
        return Outcome("no effect", note="max_steps counts")
    return Outcome("renamed", ("data", "num_train_epochs"), key.value)


def _sampling(key: Key) -> Outcome | None:
    """Take the order of rows, which is the file's in `trl kto` alone."""
    if key.value not in ("random", "sequential"):
        return None
    is_default = (key.value == "sequential") == (find_command(key.tree).name == "kto")
    return Outcome("same" if is_default else "value", ("data", "shuffle"), key.value == "random")


def _shuffle(key: Key) -> Outcome:
    if find_pipeline(key.tree) == "rlvr":
        return Outcome("renamed", ("data", "shuffle"), key.value)
    return Outcome("no effect", note="the trainer draws rows in random order")


def _kl(key: Key) -> Outcome:
    if find_pipeline(key.tree) == "dpo":
        return Outcome("renamed", ("dpo", "beta"), key.value)
    if find_command(key.tree).name == "rloo" and key.value:
        return Outcome("renamed", ("init_kl_coef",), key.value, "per token, subtracted from rewards")
    return Outcome("renamed", ("kl_loss_coef",), key.value) if key.value else Outcome("same", note="no KL")


def loss_name(tree: Tree) -> Any:
    name = get(tree, "loss_type")
    return name[0] if isinstance(name, list) and len(name) == 1 else name


def _loss(key: Key) -> Outcome:
    name, command = loss_name(key.tree), find_command(key.tree).name
    if command == "sft" and name == "nll":
        return Outcome("same", note="negative log-likelihood")
    if (command == "dpo" and name in PREFERENCES) or (command, name) == ("kto", "kto"):
        return Outcome("renamed", ("dpo", "loss_type"), name)
    if command == "kto":
        return Outcome("no counterpart", note=f"no loss {name} here: dpo.loss_type: kto is written in its place")
    if command == "grpo" and name in AGGREGATIONS:
        note = f"that of {name}"
        if name == "cispo" and get(key.tree, "epsilon_high") is None:
            note += (
                "; TRL clips weights at epsilon, below 1, if epsilon_high is not set: here at 1 + cispo_epsilon_high"
            )
        return Outcome("value", ("loss_agg_mode",), AGGREGATIONS[name], note)
    return Outcome("no counterpart", note=f"no loss {name} here: see docs/algorithms.md and docs/pipelines.md")


def _take_stops(key: Key) -> Outcome | None:
    """Take the stop strings, which an answer keeps in any case."""
    given: Tree = key.value if isinstance(key.value, dict) else {}
    stops = given.get("stop") or given.get("stop_strings")
    if not stops:
        return None
    others = sorted(given.keys() - {"stop", "stop_strings", "include_stop_str_in_output"})
    note = f"stop strings; no counterpart: {', '.join(others)}" if others else "stop strings"
    texts = [stops] if isinstance(stops, str) else stops
    return Outcome("value", ("actor_infer", "generating_args", "stop_strings"), texts, note)


def _clip(target: str) -> Rule:
    """Take a bound of the ratio by the loss that reads it; CISPO's `epsilon_high` is the largest weight itself."""

    def rule(key: Key) -> Outcome | None:
        match loss_name(key.tree):
            case "cispo" if key.path == ("epsilon_high",) and isinstance(key.value, int | float):
                return _largest_weight(key.value)
            case "cispo" | "sapo" | "vespo" as loss:
                return Outcome("no effect", note=f"TRL's {loss} does not read it")
            case _:
                return Outcome("renamed", (target,), key.value)

    return rule


def _largest_weight(largest: float) -> Outcome:
    if largest <= 1:
        note = f"weights of at most {largest}, below 1: set cispo_epsilon_high (weights up to 1 + cispo_epsilon_high)"
        return Outcome("no counterpart", note=note)
    return Outcome("value", ("cispo_epsilon_high",), round(largest - 1, 6), "weights of at most 1 + cispo_epsilon_high")


def _temperature(key: Key) -> Outcome:
    if loss_name(key.tree) != "sapo":
        return Outcome("no effect", note="of loss_type sapo")
    return Outcome("same", key.path, key.value)


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


def reward_names(tree: Tree) -> list[str]:
    names = get(tree, "reward_funcs")
    return [str(name) for name in ([names] if isinstance(names, str) else names if isinstance(names, list) else [])]


def _reward(key: Key) -> Outcome | None:
    """Take reward functions, by dotted path; built-in ones by kind."""
    names = reward_names(key.tree)
    if not names:
        return None
    rewards = [
        _one_reward(name, weight) for name, weight in zip(names, _weights(key.tree), strict=False) if name != OVERLONG
    ]
    has_functions = any(reward["kind"] == "function" for reward in rewards)
    note = "a function takes (sample, **args) here (docs/rewards.md#kinds)" if has_functions else ""
    return Outcome("value", ("rewards",), rewards, note)


def _weights(tree: Tree) -> list[float]:
    return get(tree, "reward_weights") or [1.0] * len(reward_names(tree))


def overlong_weight(tree: Tree) -> float | None:
    """Return the weight of TRL's overlong punishment, if it is a reward."""
    return dict(zip(reward_names(tree), _weights(tree), strict=False)).get(OVERLONG)


def _one_reward(name: str, weight: float) -> Tree:
    module, _, function = name.rpartition(".")
    chosen: Tree = {"name": function.replace("_", "-") or "reward"}
    if name in MATH_REWARDS:
        chosen |= {"kind": "math_rule"}
    elif name == "think_format_reward":
        chosen |= {"kind": "regex", "pattern": THINK_FORMAT, "match": "full"}
    else:
        chosen |= {"kind": "function", "path": f"{module or 'rewards'}:{function}"}
    return chosen if weight == 1 else {**chosen, "weight": weight}


def importance_correction(tree: Tree) -> Tree:
    """Return the weights and masks by which TRL corrects vLLM's logprobs; empty without vLLM."""
    mode = get(tree, IS_MODE) or DEFAULT_MODE
    if not get(tree, "use_vllm") or get(tree, "vllm_importance_sampling_correction") is False or mode not in MODES:
        return {}
    unit, kind = mode.split("_")
    low = get(tree, IS_MIN)
    high = get(tree, IS_MAX, get(tree, "vllm_importance_sampling_cap") or DEFAULT_MAX)
    weight: Tree = {"weight_type": unit, "upper_bound": high or NO_CORRECTION}
    if kind == "truncate":
        return {"is_weight": weight | ({"lower_bound": low} if low else {})}
    bounds = {name: bound for name, bound in (("ratio_low", low), ("ratio_high", high)) if bound}
    return {"is_weight": weight} | ({"filters": [{"agg_type": unit, **bounds}]} if bounds else {})


def _correction(key: Key) -> Outcome:
    if not get(key.tree, "use_vllm"):
        return Outcome("no effect", note="use_vllm is not set")
    if get(key.tree, "vllm_importance_sampling_correction") is False:
        return Outcome("same", note="no train_infer_correction")
    if get(key.tree, IS_MODE) not in (None, *MODES):
        return Outcome("no counterpart", note="see train_infer_correction")
    return Outcome("same", note=f"in {CORRECTION}")


RULES: Rules = (
    ("model_name_or_path", rename("pretrain")),
    ("model_revision", same("", "main")),
    ("dtype|torch_dtype", _dtype),
    ("bf16", become(f"{MODEL}.dtype", lambda on: "bfloat16" if on else None)),
    ("fp16", become(f"{MODEL}.dtype", lambda on: "float16" if on else None)),
    ("bf16|fp16", same("", False)),
    ("attn_implementation", rename(f"{MODEL}.attn_implementation")),
    ("gradient_checkpointing", become(f"{MODEL}.disable_gradient_checkpointing", lambda on: not on)),
    ("use_peft", same("lora_target")),
    ("lora_r", _only_with_peft(f"{MODEL}.lora_rank")),
    ("lora_alpha", _only_with_peft(f"{MODEL}.lora_alpha")),
    ("use_rslora", _only_with_peft(f"{MODEL}.use_rslora")),
    ("lora_target_modules", _only_with_peft(f"{MODEL}.lora_target")),
    ("load_in_4bit", _four_bits),
    ("load_in_4bit", _only_with_peft(f"{MODEL}.load_in_4bit")),
    ("bnb_4bit_quant_type|use_bnb_nested_quant", _only_in_4_bits),
    ("bnb_4bit_quant_storage", no_effect("the 4 bits are kept in bytes, whatever they stand for")),
    ("load_in_8bit", same("", False)),
    ("load_in_8bit", missing("its layers round activations, too, as no engine does: take load_in_4bit")),
    ("lora_dropout", missing("adapters have no dropout")),
    ("dataset_name", take_dataset),
    ("dataset_train_split|dataset_config", take_part),
    ("dataset_test_split", take_test_split),
    ("dataset_text_field", missing("rows are conversations: columns messages, or prompt and completion")),
    ("dataset_num_proc", missing("rows are read as they are needed")),
    ("shuffle_dataset", _shuffle),
    ("train_sampling_strategy", _sampling),
    ("train_sampling_strategy", missing("rows are in random order (data.shuffle)")),
    ("warmup_steps|warmup_ratio", _without_warmup),
    ("warmup_steps|warmup_ratio", take_warmup),
    ("warmup_steps", in_batches(*ARGS.split("."))),
    ("learning_rate|weight_decay|adam_beta1|adam_beta2|adam_epsilon|max_grad_norm|warmup_steps|lr_scheduler_type|"
     "lr_scheduler_kwargs", lambda key: Outcome("renamed", (*ARGS.split("."), key.path[0]), key.value)),
    ("optim", same("AdamW", "adamw_torch", "adamw_torch_fused")),
    ("optim", become(f"{ARGS}.optim", lambda name: "adamw_8bit" if name in ADAMW_8BIT else None)),
    ("per_device_train_batch_size", take_batch),
    ("gradient_accumulation_steps", same("in rollout_batch_size")),
    ("num_processes", same("in rollout_batch_size")),
    ("accelerate_config|deepspeed|fsdp|fsdp_config", missing("set actor_train.strategy_args (docs/learner.md)")),
    ("use_liger_kernel|use_liger_loss", missing("losses are ours")),
    ("per_device_eval_batch_size", missing(f"set {ARGS}.max_tokens_per_microbatch")),
    ("max_steps", _steps),
    ("num_train_epochs", _epochs),
    ("run_name", name_run),
    ("report_to", _trackers),
    ("save_total_limit", rename("max_ckpt_to_keep")),
    ("save_strategy|eval_strategy|logging_strategy", same("", "steps")),
    ("eval_strategy", same("without validation rows", "no", False)),
    ("save_strategy|eval_strategy|logging_strategy", missing("by steps: save_steps, eval_steps, logging_steps")),
    ("max_steps|save_steps|logging_steps|eval_steps", in_batches()),
    ("output_dir|seed|save_steps|logging_steps|eval_steps|resume_from_checkpoint|max_steps",
     lambda key: Outcome("same", key.path, key.value)),
    ("logging_first_step|push_to_hub|remove_unused_columns|ddp_timeout|dataloader_*", missing("not needed here")),
    ("loss_type", _loss),
    ("beta", _kl),
    ("label_smoothing", rename("dpo.label_smoothing")),
    ("desirable_weight|undesirable_weight", lambda key: Outcome("renamed", ("dpo", key.path[0]), key.value)),
    ("center_rewards_coefficient", rename("center_rewards_coefficient")),
    ("max_length", rename("sequence_length")),
    ("truncation_mode", become("data.too_long", lambda _: "truncate", "", "keep_start")),
    ("packing", missing("rollout_batch_size is in rows; TRL's batches are of packed sequences of max_length", True)),
    ("packing|padding_free", same("sequences are always packed")),
    ("packing_strategy", same("sequences are always packed", "bfd")),
    ("assistant_only_loss", same("data.train_on: all", True)),
    ("assistant_only_loss", missing("the loss is on assistant tokens alone: data.train_on")),
    ("completion_only_loss", same("data.train_on: all", True)),
    ("completion_only_loss", missing("the loss is on assistant tokens alone: data.train_on", False)),
    ("sync_ref_model", same("ref_model_sync_steps")),
    ("ref_model_sync_steps|ref_model_mixup_alpha", lambda key: None if get(key.tree, "sync_ref_model")
     else Outcome("no effect", note="sync_ref_model is not set")),
    ("ref_model_sync_steps", in_batches()),
    ("ref_model_sync_steps|ref_model_mixup_alpha", lambda key: Outcome("same", key.path, key.value)),
    ("precompute_ref_log_probs", same("", False)),
    ("precompute_ref_log_probs", rename("dpo.precompute_ref_log_probs")),
    ("f_divergence_type", same("", "reverse_kl")),
    # --- GRPO
    ("num_generations", rename("train_env_manager.group_size")),
    ("num_generations_eval", rename("val_env_manager.group_size")),
    ("max_completion_length", rename("actor_infer.generating_args.max_new_tokens")),
    ("max_prompt_length", rename("data.prompt_length")),
    ("temperature|top_p", lambda key: Outcome("renamed", ("actor_infer", "generating_args", key.path[0]), key.value)),
    ("top_k", become("actor_infer.generating_args.top_k", lambda value: value or -1, "-1 keeps all")),
    ("generation_kwargs", _take_stops),
    ("min_p", same("", None, 0, 0.0)),
    ("repetition_penalty", same("", 1, 1.0)),
    ("min_p|repetition_penalty", missing("logprobs would not be the policy's")),
    ("steps_per_generation|generation_batch_size", take_generation),
    ("num_iterations", rename("ppo_epochs")),
    ("epsilon", _clip("pg_clip")),
    ("epsilon_high", _clip("pg_clip_high")),
    ("delta", rename("dual_clip")),
    ("sapo_temperature_pos|sapo_temperature_neg", _temperature),
    ("vespo_*", no_effect("of loss_type vespo, which has no counterpart")),
    ("top_entropy_quantile", same("", 1, 1.0)),
    ("top_entropy_quantile", missing("the loss is on all tokens")),
    ("importance_sampling_level", become("ratio_type", lambda value: value, "", "sequence")),
    ("importance_sampling_level", same("ratio_type: token", "token")),
    ("scale_rewards", _scale),
    ("normalize_advantages", become("whiten_advantages", lambda _: True, "over tokens; TRL's over responses", True)),
    ("normalize_advantages", same("", False)),
    ("reward_clip_range", missing("clip in the reward function: reward_clip bounds rewards less their baseline")),
    ("mask_truncated_completions", rename("max_len_mask")),
    ("entropy_coef", rename("entropy_loss_coef")),
    ("reward_funcs", _reward),
    ("reward_weights", same("in rewards")),
    ("reward_model_name_or_path", missing("rewards: [{name: score, kind: reward_model, model_args: ...}]")),
    ("multi_objective_aggregation", become("adv_estimator", lambda _: "gdpo", "", DECOUPLED)),
    ("multi_objective_aggregation", same("adv_estimator: grpo", "sum_then_normalize")),
    ("use_vllm|vllm_mode|vllm_server_*", same("engines of the run's own sample all the time")),
    ("vllm_gpu_memory_utilization", rename(f"{ENGINE}.gpu_memory_utilization")),
    ("vllm_tensor_parallel_size", rename(f"{ENGINE}.tensor_parallel_size")),
    ("vllm_importance_sampling_correction|vllm_importance_sampling_mode|vllm_importance_sampling_c*", _correction),
    ("log_completions|num_completions_to_print", same("logging_samples")),
)  # fmt: skip
