"""Rules for the keys of verl's `ppo_trainer.yaml`, by verl 0.7's names, meanings and defaults."""

from math import ceil
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
    take_file,
)
from offbeat.trainer.config.aliases import ENGINE

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
MODEL, CORRECTION = "actor_rollout_ref.model", "algorithm.rollout_correction"
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"
ARGS = "actor_train.training_args"
PROMPTS, RESPONSES = 1024, 1
"""verl's defaults of train_batch_size and rollout.n."""
ESTIMATORS = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
MISSING_ESTIMATORS = ("grpo_passk", "gpg", "optimal_token_baseline", "tir_optimal_token_baseline")
KL_LOSSES = {"low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2", "abs": "abs", "full": "full"}
KL_PENALTIES = {**KL_LOSSES, "kl": "kl", "k1": "kl"}
LOSSES = {"gspo": ("ratio_type", "sequence-token"), "sapo": ("pg_variant", "sapo"), "cispo": ("pg_variant", "cispo")}
PER_SEQUENCE = ("gspo", "sapo")
"""Losses that verl always aggregates by seq-mean-token-mean."""
SHARDED = "fsdp2_train shards over all processes; deepspeed_train can offload"
MEGATRON = "each device becomes a data-parallel process; fsdp2_train has tp_size and pp_size (docs/learner.md)"
PROFILED = "see docs/performance.md for what Offbeat measures"


def is_set(tree: Tree, name: str) -> bool:
    return bool(get(tree, name))


def loss_mode(tree: Tree) -> str:
    return get(tree, f"{ACTOR}.policy_loss.loss_mode") or "vanilla"


def _only_with(switch: str, rule: Rule) -> Rule:
    """Apply a rule only if another key is set."""
    name = switch.rpartition(".")[2]
    return lambda key: rule(key) if is_set(key.tree, switch) else Outcome("no effect", note=f"{name} is not set")


def _batch(key: Key) -> Outcome | None:
    if not isinstance(key.value, int) or not isinstance(_responses(key.tree), int):
        return None
    return Outcome("value", ("rollout_batch_size",), key.value * _responses(key.tree), "responses, not prompts")


def _responses(tree: Tree) -> Any:
    return get(tree, f"{ROLLOUT}.n") or RESPONSES


def _minibatch(key: Key) -> Outcome | None:
    prompts = get(key.tree, "data.train_batch_size") or PROMPTS
    if not isinstance(key.value, int) or not isinstance(prompts, int):
        return None
    steps = max(1, ceil(prompts / key.value))
    return Outcome("value", (*ARGS.split("."), "num_minibatches"), steps, "optimizer steps per batch")


def _estimator(key: Key) -> Outcome | None:
    if key.value in MISSING_ESTIMATORS:
        return Outcome("no counterpart", note=f"no {key.value} here: see docs/algorithms.md")
    name = ESTIMATORS.get(key.value, key.value)
    if name == "grpo" and get(key.tree, "algorithm.norm_adv_by_std_in_grpo") is False:
        return Outcome("value", ("adv_estimator",), "dr_grpo", "norm_adv_by_std_in_grpo: false")
    return Outcome("renamed" if name == key.value else "value", ("adv_estimator",), name)


def _loss(key: Key) -> Outcome:
    if key.value == "vanilla":
        return Outcome("same", note="pg_variant: ppo")
    if key.value not in LOSSES:
        return Outcome("no counterpart", note=f"no loss {key.value} here: see docs/algorithms.md")
    name, value = LOSSES[key.value]
    return Outcome("value", (name,), value)


def _aggregation(key: Key) -> Outcome:
    if (loss := loss_mode(key.tree)) in PER_SEQUENCE:
        return Outcome("no effect", note=f"verl's {loss} takes seq-mean-token-mean")
    return Outcome("same", ("loss_agg_mode",), key.value)


def _clip(key: Key) -> Outcome | None:
    """Take a bound of the ratio by the loss that reads it."""
    side, loss = key.path[-1].removeprefix("clip_ratio_"), loss_mode(key.tree)
    if loss == "sapo":
        return Outcome("no effect", note="verl's sapo clips nothing")
    target = f"cispo_epsilon_{side}" if loss == "cispo" else f"pg_clip_{side}"
    return Outcome("renamed", (target,), key.value)


def _symmetric_clip(key: Key) -> Outcome:
    """Report that verl reads `clip_ratio` only in place of a null bound, and both bounds are 0.2 by default."""
    bounds = [get(key.tree, f"{ACTOR}.clip_ratio_{side}", 0.2) for side in ("low", "high")]
    if None not in bounds:
        low, high = bounds
        return Outcome("no effect", note=f"in verl clip_ratio_low ({low}) and clip_ratio_high ({high}) count")
    return Outcome("renamed", ("pg_clip",), key.value)


def _kl_loss(key: Key) -> Outcome:
    if key.path[-1] == "kl_loss_coef":
        return Outcome("renamed", ("kl_loss_coef",), key.value)
    if key.value not in KL_LOSSES:
        return Outcome("no counterpart", note="its mean gradient is 0: take kl_loss_type k3")
    return Outcome("value", ("kl_loss_type",), KL_LOSSES[key.value])


def _adaptive(target: str) -> Rule:
    def rule(key: Key) -> Outcome:
        if get(key.tree, "algorithm.kl_ctrl.type") != "adaptive":
            return Outcome("no effect", note="kl_ctrl.type is fixed")
        return Outcome("renamed", (target,), key.value)

    return _only_with("algorithm.use_kl_in_reward", rule)


def _weight(target: str) -> Rule:
    """Take a key of the importance weights, which verl's bypass mode with PPO's loss computes without applying."""

    def rule(key: Key) -> Outcome:
        if get(key.tree, f"{CORRECTION}.bypass_mode"):
            return Outcome("no effect", note="bypass_mode: the ratio is to the behavior policy")
        if not get(key.tree, f"{CORRECTION}.rollout_is"):
            return Outcome("no effect", note="rollout_is is not set")
        return Outcome("renamed", ("train_infer_correction", "is_weight", target), key.value)

    return rule


def _trackers(key: Key) -> Outcome:
    names = [key.value] if isinstance(key.value, str) else list(key.value or ())
    known = {"console": "stdout"}
    return Outcome("value", ("track_with",), [known.get(name, name) for name in names])


def _warmup(target: str) -> Rule:
    """Convert a share of the steps, which a positive number of steps overrides."""

    def rule(key: Key) -> Outcome | None:
        if (get(key.tree, (*key.path[:-1], "lr_warmup_steps")) or -1) > 0:
            return Outcome("no effect", note="lr_warmup_steps counts")
        if key.value == 0:
            return Outcome("same", note="no warm-up")
        steps = get(key.tree, "trainer.total_training_steps")
        if not isinstance(key.value, float | int) or not isinstance(steps, int):
            return Outcome("no counterpart", note=f"set {target}.warmup_steps")
        return Outcome("value", (*target.split("."), "warmup_steps"), int(steps * key.value), f"of {steps} steps")

    return rule


def _betas(key: Key) -> Outcome | None:
    if not isinstance(key.value, list) or len(key.value) != 2 or key.value[0] != 0.9:
        return Outcome("no counterpart", note=f"set {ARGS}.adam_beta1 and adam_beta2")
    return Outcome("value", (*ARGS.split("."), "adam_beta2"), key.value[1], "adam_beta1 is 0.9")


def _positive(target: str) -> Rule:
    """Take a number above 0; verl's -1 and 0 are off."""

    def rule(key: Key) -> Outcome:
        if not isinstance(key.value, int | float):
            return Outcome("no counterpart", note=f"no number: set {target}")
        return Outcome("renamed", tuple(target.split(".")), key.value) if key.value > 0 else Outcome("same", note="off")

    return rule


def _adapters(target: str) -> Rule:
    def rule(key: Key) -> Outcome:
        value = ",".join(key.value) if isinstance(key.value, list) else key.value
        return Outcome("renamed" if value == key.value else "value", tuple(target.split(".")), value)

    return _only_with(f"{MODEL}.lora_rank", rule)


def _resume(key: Key) -> Outcome:
    if key.value == "disable":
        return Outcome(
            "no counterpart", note="a run with an output_dir of its own starts anew: `offbeat train` says how"
        )
    return Outcome("same", note="a run resumes from its newest checkpoint; elsewhere: resume_from_checkpoint")


def _reward_model(key: Key) -> Outcome:
    reward = {"name": "reward-model", "kind": "reward_model", "model_args": {"model_name_or_path": key.value}}
    return Outcome("value", ("rewards",), [reward])


LOSS: Rules = (
    (f"{ACTOR}.policy_loss.loss_mode", _loss),
    (f"{ACTOR}.policy_loss.clip_cov_*|kl_cov_*|ppo_kl_coef", no_effect("of losses that are not here")),
    (f"{ACTOR}.tau_pos|tau_neg", lambda key: Outcome("no effect", note="of loss_mode sapo") if loss_mode(key.tree) != "sapo"
     else Outcome("renamed", (f"sapo_temperature_{key.path[-1].removeprefix('tau_')}",), key.value)),
    (f"{ACTOR}.clip_ratio", _symmetric_clip),
    (f"{ACTOR}.clip_ratio_low|clip_ratio_high", _clip),
    (f"{ACTOR}.clip_ratio_c", lambda key: Outcome("renamed", ("dual_clip",), key.value)
     if loss_mode(key.tree) == "vanilla" else Outcome("no effect", note="of loss_mode vanilla")),
    (f"{ACTOR}.loss_agg_mode", _aggregation),
    (f"{ACTOR}.loss_scale_factor", rename("loss_agg_length")),
    (f"{ACTOR}.entropy_coeff", rename("entropy_loss_coef")),
    (f"{ACTOR}.use_kl_loss", rename("use_kl_loss")),
    (f"{ACTOR}.kl_loss_coef|kl_loss_type", _only_with(f"{ACTOR}.use_kl_loss", _kl_loss)),
    ("algorithm.adv_estimator", _estimator),
    ("algorithm.norm_adv_by_std_in_grpo", same("adv_estimator")),
    ("algorithm.gamma", rename("gamma")),
    ("algorithm.lam", rename("lambd")),
    ("algorithm.use_kl_in_reward", same("init_kl_coef")),
    ("algorithm.kl_penalty", _only_with("algorithm.use_kl_in_reward", become("kl_penalty", KL_PENALTIES.get))),
    ("algorithm.kl_ctrl.kl_coef", _only_with("algorithm.use_kl_in_reward", rename("init_kl_coef"))),
    ("algorithm.kl_ctrl.type", same("adaptive: target_kl")),
    ("algorithm.kl_ctrl.target_kl", _adaptive("target_kl")),
    ("algorithm.kl_ctrl.horizon", _adaptive("kl_horizon")),
    ("algorithm.filter_groups.enable", become("zero_variance", lambda on: "refill" if on else None)),
    ("algorithm.filter_groups.**", missing("zero_variance: refill takes groups until a batch is full")),
    (f"{CORRECTION}.bypass_mode", become("old_logprobs", lambda on: "behavior" if on else None)),
    (f"{CORRECTION}.bypass_mode", same("old_logprobs: recompute")),
    (f"{CORRECTION}.rollout_is", _weight("weight_type")),
    (f"{CORRECTION}.rollout_is_threshold", _weight("upper_bound")),
    (f"{CORRECTION}.rollout_is_batch_normalize", same("", False)),
    (f"{CORRECTION}.rollout_is_batch_normalize", missing("weights are not divided by their mean")),
    (f"{CORRECTION}.loss_type", same("", "ppo_clip")),
    (f"{CORRECTION}.loss_type", missing("pg_variant: tis, with tis_upper_bound")),
    (f"{CORRECTION}.**", missing("set train_infer_correction.filters (docs/algorithms.md)")),
    (f"{OVERLONG}.enable|log", same("reward_shaping")),
    (f"{OVERLONG}.len", _only_with(f"{OVERLONG}.enable", rename("reward_shaping.overlong_buffer"))),
    (f"{OVERLONG}.penalty_factor", _only_with(f"{OVERLONG}.enable", rename("reward_shaping.overlong_penalty"))),
    ("reward_model.reward_kwargs.max_resp_len",
     _only_with(f"{OVERLONG}.enable", rename("reward_shaping.overlong_max_length"))),
)  # fmt: skip

TRAINING: Rules = (
    (f"{MODEL}.path", rename("pretrain")),
    (f"{MODEL}.enable_gradient_checkpointing",
     become("actor_train.model_args.disable_gradient_checkpointing", lambda on: not on)),
    ("*.model.use_remove_padding", same("sequences are always packed")),
    (f"{MODEL}.lora_rank", lambda key: Outcome("same", note="no adapters") if key.value == 0
     else _positive("actor_train.model_args.lora_rank")(key)),
    (f"{MODEL}.lora_alpha", _adapters("actor_train.model_args.lora_alpha")),
    (f"{MODEL}.target_modules", _adapters("actor_train.model_args.lora_target")),
    (f"{MODEL}.use_fused_kernels|use_liger|use_shm|external_lib|enable_activation_offload", no_effect("losses are ours")),
    (f"{ACTOR}.optim.lr", rename(f"{ARGS}.learning_rate")),
    (f"{ACTOR}.optim.weight_decay", rename(f"{ARGS}.weight_decay")),
    (f"{ACTOR}.optim.betas", _betas),
    (f"{ACTOR}.optim.lr_warmup_steps", _positive(f"{ARGS}.warmup_steps")),
    (f"{ACTOR}.optim.lr_warmup_steps_ratio", _warmup(ARGS)),
    (f"{ACTOR}.optim.lr_scheduler_type|warmup_style|lr_decay_style", rename(f"{ARGS}.lr_scheduler_type")),
    (f"{ACTOR}.grad_clip", rename(f"{ARGS}.max_grad_norm")),
    (f"{ACTOR}.optim.clip_grad", rename(f"{ARGS}.max_grad_norm")),
    (f"{ACTOR}.optim.override_optimizer_config.**", missing("AdamW; deepspeed_train can offload its state")),
    (f"{ACTOR}.ppo_mini_batch_size", _minibatch),
    (f"{ACTOR}.ppo_micro_batch_size_per_gpu|ppo_micro_batch_size", lambda key: no_effect("use_dynamic_bsz")(key)
     if get(key.tree, f"{ACTOR}.use_dynamic_bsz") else rename(f"{ARGS}.per_device_train_batch_size")(key)),
    (f"{ACTOR}.use_dynamic_bsz", same(f"{ARGS}.max_tokens_per_microbatch")),
    (f"{ACTOR}.ppo_max_token_len_per_gpu",
     _only_with(f"{ACTOR}.use_dynamic_bsz", rename(f"{ARGS}.max_tokens_per_microbatch"))),
    (f"{ACTOR}.ppo_epochs", rename("ppo_epochs")),
    (f"{ACTOR}.strategy", become("actor_train.strategy_args.strategy_name", lambda _: "fsdp2_train", "", "fsdp", "fsdp2")),
    (f"{ACTOR}.strategy", become("actor_train.strategy_args.strategy_name", lambda _: "fsdp2_train",
                                 MEGATRON, "megatron")),
    (f"{ACTOR}.fsdp_config.**", missing(SHARDED)),
    ("*.ulysses_sequence_parallel_size", same("", 1)),
    ("*.*.ulysses_sequence_parallel_size", same("", 1)),
    ("*.ulysses_sequence_parallel_size", missing("a sequence is on one device")),
    ("*.*.ulysses_sequence_parallel_size", missing("a sequence is on one device")),
    ("*.*.megatron.**", missing(MEGATRON)),
    ("*.megatron.**", missing(MEGATRON)),
    (f"{REF}.fsdp_config.**", missing("reference.strategy_args.strategy_name: deepspeed_infer shards it")),
    (f"{REF}.log_prob_micro_batch_size_per_gpu|log_prob_micro_batch_size", rename("reference.infer_batch_size")),
    (f"{REF}.strategy", same("the policy's engine")),
    ("actor_rollout_ref.*.log_prob_use_dynamic_bsz", same(f"{ARGS}.max_tokens_per_microbatch")),
    ("actor_rollout_ref.*.log_prob_max_token_len_per_gpu", missing(f"{ARGS}.max_tokens_per_microbatch bounds all passes")),
    ("actor_rollout_ref.*.use_torch_compile", no_effect("losses are ours")),
    (f"{ACTOR}.entropy_*", no_effect("losses are ours")),
    (f"{ACTOR}.checkpoint.**", missing("a checkpoint has all that a run resumes from, and the policy's folder")),
    ("critic.**", lambda key: None if get(key.tree, "algorithm.adv_estimator", "gae") == "gae"
     else Outcome("no effect", note="adv_estimator needs no critic")),
    ("critic.optim.lr", rename("critic.training_args.learning_rate")),
    ("critic.optim.lr_warmup_steps", _positive("critic.training_args.warmup_steps")),
    ("critic.optim.lr_warmup_steps_ratio", _warmup("critic.training_args")),
    ("critic.optim.**", missing("other settings of the critic's optimizer are the policy's")),
    ("critic.model.path", rename("critic.model_args.model_name_or_path")),
    ("critic.model.enable_gradient_checkpointing",
     become("critic.model_args.disable_gradient_checkpointing", lambda on: not on)),
    ("critic.model.fsdp_config.**", missing(SHARDED)),
    ("critic.cliprange_value", rename("value_clip")),
    ("critic.strategy|ppo_epochs|ppo_mini_batch_size|use_dynamic_bsz|shuffle", same("the policy's")),
    ("critic.ppo_micro_batch_size*|ppo_max_token_len*|forward_*", missing("the policy's micro-batches")),
)  # fmt: skip

SAMPLING: Rules = (
    (f"{ROLLOUT}.n", rename("train_env_manager.group_size")),
    (f"{ROLLOUT}.temperature|top_p|top_k", lambda key: Outcome("renamed", ("actor_infer", "generating_args", key.path[-1]),
                                                               key.value)),
    (f"{ROLLOUT}.name", become("actor_infer.strategy_args.strategy_name", lambda _: "vllm")),
    (f"{ROLLOUT}.tensor_model_parallel_size", rename(f"{ENGINE}.tensor_parallel_size")),
    (f"{ROLLOUT}.gpu_memory_utilization|max_num_batched_tokens|max_num_seqs|enforce_eager|max_model_len|"
     "enable_chunked_prefill|enable_prefix_caching",
     lambda key: Outcome("renamed", (*ENGINE.split("."), key.path[-1]), key.value)),
    (f"{ROLLOUT}.val_kwargs.temperature|top_p|top_k",
     lambda key: Outcome("renamed", ("val_env_manager", "generating_args", key.path[-1]), key.value)),
    (f"{ROLLOUT}.val_kwargs.n", rename("val_env_manager.group_size")),
    (f"{ROLLOUT}.val_kwargs.do_sample", no_effect("val_kwargs.temperature counts")),
    (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu|log_prob_micro_batch_size", rename("actor_train.infer_batch_size")),
    (f"{ROLLOUT}.mode", same("requests are asynchronous")),
    (f"{ROLLOUT}.calculate_log_probs", same("engines always return them")),
    (f"{ROLLOUT}.do_sample", same("", True)),
    (f"{ROLLOUT}.load_format|layered_summon|free_cache_engine|multi_stage_wake_up",
     missing("weights change under running requests (docs/devices.md)")),
    (f"{ROLLOUT}.prompt_length|response_length", no_effect("data.max_prompt_length and max_response_length count")),
    (f"{ROLLOUT}.engine_kwargs.vllm.*", lambda key: Outcome("renamed", (*ENGINE.split("."), key.path[-1]), key.value)
     if key.path[-1] != "disable_mm_preprocessor_cache" and not isinstance(key.value, dict) else None),
    (f"{ROLLOUT}.engine_kwargs.**", missing(f"{ENGINE} takes vLLM's arguments")),
    (f"{ROLLOUT}.multi_turn.**", missing("turns are those of an env: pipeline: agentic")),
    (f"{ROLLOUT}.agent.**", missing("agents are programs behind the gateway (docs/agents.md)")),
)  # fmt: skip

DATA: Rules = (
    ("data.train_files", take_file("data.dataset_name")),
    ("data.val_files", take_file("data.val_dataset_name")),
    ("data.train_batch_size", _batch),
    ("data.max_prompt_length", rename("data.prompt_length")),
    ("data.max_response_length", rename("actor_infer.generating_args.max_new_tokens")),
    ("data.prompt_key", rename("data.messages_key")),
    ("data.image_key", rename("data.images_key")),
    ("data.seed", rename("seed", "of the whole run")),
    ("data.shuffle", lambda key: Outcome("same", key.path, key.value)),
    ("data.filter_overlong_prompts", same("longer prompts are left out", True)),
    ("data.filter_overlong_prompts", missing("longer prompts are left out", False)),
    ("data.truncation", same("longer prompts are left out")),
    ("data.val_batch_size", no_effect("each evaluation takes every row once")),
    ("data.gen_batch_size", missing("prompts are taken as slots are free")),
    ("data.return_*", same("prompts are messages")),
    ("data.dataloader_num_workers|filter_overlong_prompts_workers", missing("rows are read as they are needed")),
    ("reward_model.model.path", _only_with("reward_model.enable", _reward_model)),
    ("reward_model.enable", same("rewards")),
    ("reward_model.reward_manager", same("score of each response", "naive", "dapo", "batch", "prime")),
    ("reward_model.**", missing("see rewards in docs/rewards.md")),
    ("custom_reward_function.path|name", missing("rewards: [{name: score, kind: function, path: module:function}]")),
)  # fmt: skip

RUN: Rules = (
    ("trainer.critic_warmup", rename("critic_warmup")),
    ("trainer.total_epochs", lambda key: no_effect("total_training_steps counts")(key)
     if get(key.tree, "trainer.total_training_steps") else rename("data.num_train_epochs")(key)),
    ("trainer.total_training_steps", rename("max_steps")),
    ("trainer.save_freq", _positive("save_steps")),
    ("trainer.test_freq", _positive("eval_steps")),
    ("trainer.experiment_name", name_run),
    ("trainer.project_name", missing("tracker_kwargs.wandb.project")),
    ("trainer.default_local_dir", rename("output_dir")),
    ("trainer.logger", _trackers),
    ("trainer.n_gpus_per_node", rename("num_gpus_per_node")),
    ("trainer.nnodes", missing("device_mapping says which devices a role has (docs/devices.md)")),
    ("trainer.val_before_train", same("evaluated before and after training")),
    ("trainer.val_only", missing("`offbeat rollout` plays episodes of a policy")),
    ("trainer.resume_mode", _resume),
    ("trainer.resume_from_path", rename("resume_from_checkpoint")),
    ("trainer.max_actor_ckpt_to_keep", rename("max_ckpt_to_keep")),
    ("trainer.log_val_generations|rollout_data_dir|validation_data_dir", missing("`offbeat inspect` shows episodes")),
    ("trainer.balance_batch", same("micro-batches have equal numbers of tokens")),
    ("trainer.use_legacy_worker_impl|device", no_effect("of verl's own workers")),
    ("actor_rollout_ref.hybrid_engine|nccl_timeout", missing("device_mapping says which roles share devices")),
    ("rollout.nnodes|n_gpus_per_node", missing("actor_infer.device_mapping (docs/devices.md)")),
    ("global_profiler.**", missing(PROFILED)),
    ("*.profiler.**", missing(PROFILED)),
    ("*.*.profiler.**", missing(PROFILED)),
)  # fmt: skip

RULES: Rules = (*LOSS, *TRAINING, *SAMPLING, *DATA, *RUN)
