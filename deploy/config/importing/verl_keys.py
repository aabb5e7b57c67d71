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
    take_stops,
)
from offbeat.deploy.config.importing.verl_loss import LOSS, has_reference, only_with
from offbeat.deploy.config.importing.verl_trainers import (
    ACTOR,
    ARGS,
    OFF,
    RESPONSES,
    ROLLOUT,
    TRAINERS,
    count_prompts,
    count_versions,
)
from offbeat.trainer.config.aliases import ENGINE

REF, MODEL = "actor_rollout_ref.ref", "actor_rollout_ref.model"
SHARDED = "fsdp2_train shards over all processes; deepspeed_train can offload"
MEGATRON = "each device becomes a data-parallel process; fsdp2_train has tp_size and pp_size (docs/learner.md)"
MEGATRON_LAYERS = {
    "linear_qkv": "q_proj,k_proj,v_proj", "linear_proj": "o_proj", "linear_fc1": "gate_proj,up_proj",
    "linear_fc2": "down_proj",
}  # fmt: skip
LORA_TARGET = ("actor_train", "model_args", "lora_target")
WITH_ADAPTER = "a KL's reference has it, too; verl's is the model without"
ULYSSES = ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size")
PROFILED = "global_profiler.steps and tool torch or torch_memory are taken (docs/learner.md)"
PROFILERS = {"torch": "profiler_timeline", "torch_memory": "profiler_memory"}


def _batch(key: Key) -> Outcome | None:
    if not isinstance(key.value, int) or not isinstance(_responses(key.tree), int):
        return None
    return Outcome("value", ("rollout_batch_size",), key.value * _responses(key.tree), "responses, not prompts")


def _responses(tree: Tree) -> Any:
    return get(tree, f"{ROLLOUT}.n") or RESPONSES


def _token_budget(key: Key) -> Outcome | None:
    """Count the tokens of all devices that divide a micro-batch."""
    sizes = [size for name in ULYSSES if isinstance(size := get(key.tree, f"{ACTOR}.{name}"), int)]
    if not isinstance(key.value, int):
        return None
    note = "of all devices that divide a micro-batch" if max(sizes, default=1) > 1 else ""
    target = (*ARGS.split("."), "max_tokens_per_microbatch")
    return Outcome("value" if note else "renamed", target, key.value * max(sizes, default=1), note)


def _minibatch(key: Key) -> Outcome | None:
    if not isinstance(key.value, int) or isinstance(get(key.tree, "data.train_batch_size"), str):
        return None
    steps = max(1, ceil(count_prompts(key.tree) / key.value))
    return Outcome("value", (*ARGS.split("."), "num_minibatches"), steps, "optimizer steps per batch")


def _micro_batch(key: Key) -> Outcome:
    """Take the size of a pass; without `_per_gpu` it is that of all GPUs."""
    if get(key.tree, f"{ACTOR}.use_dynamic_bsz"):
        return Outcome("no effect", note="use_dynamic_bsz")
    target = (*ARGS.split("."), "per_device_train_batch_size")
    if key.path[-1].endswith("_per_gpu"):
        return Outcome("renamed", target, key.value)
    gpus = [get(key.tree, f"trainer.{name}", default) for name, default in (("n_gpus_per_node", 8), ("nnodes", 1))]
    if not all(isinstance(each, int) for each in (key.value, *gpus)):
        return Outcome("no counterpart", note=f"of all GPUs: set {'.'.join(target)}")
    return Outcome("value", target, max(1, key.value // (gpus[0] * gpus[1])), f"of {gpus[0] * gpus[1]} GPUs")


def _truncation(key: Key) -> Outcome:
    if get(key.tree, "data.filter_overlong_prompts") or key.value == "error":
        return Outcome("same", note="longer prompts are left out")
    return Outcome("no counterpart", note=f"prompts are not cut ({key.value}): longer ones are left out")


def _schedule(key: Key) -> Outcome:
    """Take a schedule; a cosine that ends above 0 has a name of its own."""
    ratio = get(key.tree, (*key.path[:-1], "min_lr_ratio"))
    name = "cosine_with_min_lr" if key.value == "cosine" and ratio else key.value
    return Outcome("renamed" if name == key.value else "value", (*ARGS.split("."), "lr_scheduler_type"), name)


def _lowest_rate(key: Key) -> Outcome:
    names = [get(key.tree, (*key.path[:-1], name)) for name in ("lr_scheduler_type", "warmup_style")]
    if not key.value or "cosine" not in names:
        return Outcome("same" if not key.value else "no effect", note="of a cosine schedule" if key.value else "0")
    return Outcome("value", (*ARGS.split("."), "lr_scheduler_kwargs"), {"min_lr_rate": key.value})


def _as_policy(key: Key) -> Outcome:
    """Take a critic's key that is the policy's here."""
    default = {"ppo_epochs": 1, "ppo_mini_batch_size": 256, "grad_clip": 1.0}.get(key.path[-1])
    policy = get(key.tree, f"{ACTOR}.{key.path[-1]}", default)
    if policy is None or key.value == policy:
        return Outcome("same", note="the policy's")
    return Outcome("no counterpart", note=f"the policy's, {policy}, is the critic's, too")


def _megatron_layers(key: Key) -> Outcome:
    names = key.value if isinstance(key.value, list) else [key.value]
    if not get(key.tree, f"{MODEL}.lora.rank"):
        return Outcome("no effect", note="lora.rank is not set")
    if unknown := [name for name in names if name not in MEGATRON_LAYERS]:
        return Outcome("no counterpart", note=f"{', '.join(map(str, unknown))}: set actor_train.model_args.lora_target")
    return Outcome("value", LORA_TARGET, ",".join(MEGATRON_LAYERS[name] for name in names))


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
        steps = count_versions(key.tree)
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

    return only_with(f"{MODEL}.lora_rank", rule)


def _of_adapter(key: Key) -> Outcome | None:
    return Outcome("no effect", note="the adapter's own") if get(key.tree, f"{MODEL}.lora_adapter_path") else None


def _resume(key: Key) -> Outcome:
    if key.value == "disable":
        return Outcome(
            "no counterpart", note="a run with an output_dir of its own starts anew: `offbeat train` says how"
        )
    return Outcome("same", note="a run resumes from its newest checkpoint; elsewhere: resume_from_checkpoint")


def _profiler(key: Key) -> Outcome:
    tool, steps = (get(key.tree, f"global_profiler.{name}") for name in ("tool", "steps"))
    if not tool or not steps:
        return Outcome("no effect", note="nothing is profiled without global_profiler.steps and tool")
    if tool not in PROFILERS:
        return Outcome("no counterpart", note=PROFILED)
    if key.path[-1] == "steps":
        return Outcome("renamed", ("profiler_steps",), key.value)
    return Outcome("value", (PROFILERS[tool],), True, "of profiler_steps")


def _reward_model(key: Key) -> Outcome:
    """Take the reward model, which verl computes in bfloat16 on whole responses, in micro-batches of rows or tokens."""
    reward: Tree = {
        "name": "reward-model", "kind": "reward_model", "includes_thoughts": True,
        "model_args": {"model_name_or_path": key.value, "dtype": "bfloat16"},
    }  # fmt: skip
    tokens = get(key.tree, "reward_model.forward_max_token_len_per_gpu")
    if get(key.tree, "reward_model.use_dynamic_bsz") and isinstance(tokens, int):
        reward["max_batch_tokens"] = tokens
    if isinstance(longest := get(key.tree, "reward_model.max_length"), int):
        reward["max_length"] = longest
    return Outcome("value", ("rewards",), [reward], "on CPUs: set its device and device_mapping (docs/rewards.md)")


TRAINING: Rules = (
    (f"{MODEL}.path", rename("pretrain")),
    (f"{MODEL}.enable_gradient_checkpointing",
     become("actor_train.model_args.disable_gradient_checkpointing", lambda on: not on)),
    ("*.model.use_remove_padding", same("sequences are always packed")),
    (f"{MODEL}.lora_adapter_path", same("no adapter", None)),
    (f"{MODEL}.lora_adapter_path", rename("actor_train.model_args.adapter_name_or_path", WITH_ADAPTER)),
    (f"{MODEL}.lora_rank|lora_alpha|target_modules", _of_adapter),
    (f"{MODEL}.lora_rank", lambda key: Outcome("same", note="no adapters") if key.value == 0
     else _positive("actor_train.model_args.lora_rank")(key)),
    (f"{MODEL}.lora_alpha", _adapters("actor_train.model_args.lora_alpha")),
    (f"{MODEL}.target_modules", _adapters("actor_train.model_args.lora_target")),
    (f"{MODEL}.lora.rank", _positive("actor_train.model_args.lora_rank")),
    (f"{MODEL}.lora.alpha", lambda key: rename("actor_train.model_args.lora_alpha")(key)
     if get(key.tree, f"{MODEL}.lora.rank") else Outcome("no effect", note="lora.rank is not set")),
    (f"{MODEL}.lora.target_modules", _megatron_layers),
    (f"{MODEL}.lora.dropout", same("", 0, 0.0)),
    (f"{MODEL}.lora.**", missing("adapters have rank, alpha and layers alone")),
    (f"{MODEL}.use_fused_kernels|use_liger|use_shm|external_lib|enable_activation_offload", no_effect("losses are ours")),
    (f"{ACTOR}.optim.lr", rename(f"{ARGS}.learning_rate")),
    (f"{ACTOR}.optim.weight_decay", rename(f"{ARGS}.weight_decay")),
    (f"{ACTOR}.optim.betas", _betas),
    (f"{ACTOR}.optim.lr_warmup_steps", _positive(f"{ARGS}.warmup_steps")),
    (f"{ACTOR}.optim.lr_warmup_steps_ratio", _warmup(ARGS)),
    (f"{ACTOR}.optim.lr_scheduler_type|warmup_style|lr_decay_style", _schedule),
    (f"{ACTOR}.optim.min_lr_ratio", _lowest_rate),
    (f"{ACTOR}.optim.num_cycles", same("half a cosine", 0.5)),
    (f"{ACTOR}.grad_clip", rename(f"{ARGS}.max_grad_norm")),
    (f"{ACTOR}.optim.clip_grad", rename(f"{ARGS}.max_grad_norm")),
    (f"{ACTOR}.optim.override_optimizer_config.**", missing("AdamW; deepspeed_train can offload its state")),
    (f"{ACTOR}.ppo_mini_batch_size", _minibatch),
    (f"{ACTOR}.ppo_micro_batch_size_per_gpu|ppo_micro_batch_size", _micro_batch),
    (f"{ACTOR}.use_dynamic_bsz", same(f"{ARGS}.max_tokens_per_microbatch")),
    (f"{ACTOR}.ppo_max_token_len_per_gpu", only_with(f"{ACTOR}.use_dynamic_bsz", _token_budget)),
    *((f"{ACTOR}.{name}", rename("actor_train.strategy_args.ulysses_size")) for name in ULYSSES),
    (f"{ACTOR}.ppo_epochs", rename("ppo_epochs")),
    (f"{ACTOR}.router_replay.mode", same("", "disabled")),
    (f"{ACTOR}.router_replay.mode", become("router_replay", lambda _: True, "", "R3")),
    (f"{ACTOR}.router_replay.**", missing("router_replay replays the engine's experts (R3), not the learner's own (R2)")),
    (f"{ACTOR}.strategy", become("actor_train.strategy_args.strategy_name", lambda _: "fsdp2_train", "", "fsdp", "fsdp2")),
    (f"{ACTOR}.strategy", become("actor_train.strategy_args.strategy_name", lambda _: "fsdp2_train",
                                 MEGATRON, "megatron")),
    (f"{ACTOR}.fsdp_config.dtype", rename("actor_train.model_args.dtype")),
    (f"{ACTOR}.fsdp_config.model_dtype", same("float32 weights of the optimizer", "fp32")),
    (f"{ACTOR}.fsdp_config.model_dtype", missing("the optimizer has float32 weights")),
    (f"{ACTOR}.fsdp_config.**", missing(SHARDED)),
    ("*.ulysses_sequence_parallel_size", same("the policy's")),
    ("*.*.ulysses_sequence_parallel_size", same("the policy's")),
    ("*.*.*.ulysses_sequence_parallel_size", same("the policy's")),
    ("*.*.megatron.**", missing(MEGATRON)),
    ("*.megatron.**", missing(MEGATRON)),
    (f"{REF}.fsdp_config.**", missing("reference.strategy_args.strategy_name: deepspeed_infer shards it")),
    (f"{REF}.log_prob_micro_batch_size_per_gpu|log_prob_micro_batch_size", lambda key:
     rename("reference.infer_batch_size")(key) if has_reference(key.tree) else no_effect("no KL needs the reference")(key)),
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
    ("critic.ppo_epochs|ppo_mini_batch_size|grad_clip", _as_policy),
    ("critic.strategy|use_dynamic_bsz|shuffle", same("the policy's")),
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
    (f"{ROLLOUT}.stop", take_stops("actor_infer.generating_args.stop_strings")),
    (f"{ROLLOUT}.include_stop_str_in_output", no_effect("an answer keeps its stop string")),
    (f"{ROLLOUT}.val_kwargs.n", rename("val_env_manager.group_size")),
    (f"{ROLLOUT}.val_kwargs.do_sample", no_effect("val_kwargs.temperature counts")),
    (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu|log_prob_micro_batch_size", rename("actor_train.infer_batch_size")),
    (f"{ROLLOUT}.enable_rollout_routing_replay", same("router_replay has the engine return experts")),
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
    ("data.filter_overlong_prompts", no_effect("longer prompts are left out", False)),
    ("data.truncation", _truncation),
    ("data.val_batch_size", no_effect("each evaluation takes every row once")),
    ("data.gen_batch_size", missing("prompts are taken as slots are free")),
    ("data.return_*", same("prompts are messages")),
    ("data.dataloader_num_workers|filter_overlong_prompts_workers", missing("rows are read as they are needed")),
    ("reward_model.enable", same("rewards")),
    ("reward_model.reward_manager", same("score of each response", "naive", "dapo", "batch", "prime")),
    ("reward_model.sandbox_fusion.**", missing("kind: code_sandbox runs programs in a sandbox of its own")),
    ("reward_model.model.**", only_with("reward_model.enable", lambda _: None)),
    ("reward_model.strategy|micro_batch_size*|max_length|use_dynamic_bsz|forward_max_token_len_per_gpu|num_workers|"
     "enable_resource_pool|n_gpus_per_node|nnodes", only_with("reward_model.enable", lambda _: None)),
    ("reward_model.rollout.**", only_with("reward_model.enable", lambda _: None)),
    ("reward_model.model.path", _reward_model),
    ("reward_model.model.input_tokenizer", same("conversations are rendered by the reward model's own template")),
    ("reward_model.model.use_fused_kernels|use_shm|external_lib", no_effect("transformers computes the model")),
    ("reward_model.model.fsdp_config.param_offload", no_effect("verl always offloads it; a replica has a copy")),
    ("reward_model.model.fsdp_config.**", missing("each replica has a copy of the reward model")),
    ("reward_model.model.trust_remote_code", same("", False)),
    ("reward_model.strategy", same("a copy per replica", "fsdp", "fsdp2")),
    ("reward_model.micro_batch_size*", missing("passes are bounded in tokens: rewards.0.max_batch_tokens")),
    ("reward_model.max_length", same("rewards.0.max_length, the earliest tokens cut")),
    ("reward_model.use_dynamic_bsz", same("passes are bounded in tokens: max_batch_tokens", True)),
    ("reward_model.use_dynamic_bsz", missing("passes are bounded in tokens: rewards.0.max_batch_tokens")),
    ("reward_model.forward_max_token_len_per_gpu", lambda key: Outcome("same", note="rewards.0.max_batch_tokens")
     if get(key.tree, "reward_model.use_dynamic_bsz") else Outcome("no effect", note="use_dynamic_bsz is not set")),
    ("reward_model.use_reward_loop|launch_reward_fn_async", same("responses are scored as they end")),
    ("reward_model.num_workers", missing("rewards.0.num_replicas and max_concurrent")),
    ("reward_model.enable_resource_pool|n_gpus_per_node|nnodes", missing("rewards.0.device_mapping: GPUs of its own")),
    ("reward_model.rollout.dtype", same("rewards.0.model_args.dtype", "bfloat16")),
    ("reward_model.rollout.**", missing("transformers computes the scores, vLLM does not: rewards.0.num_replicas")),
    ("reward_model.**", missing("see rewards in docs/rewards.md")),
    ("custom_reward_function.path|name", missing("rewards: [{name: score, kind: function, path: module:function}]")),
)  # fmt: skip

RUN: Rules = (
    ("trainer.critic_warmup", rename("critic_warmup")),
    ("trainer.total_epochs", lambda key: no_effect("total_training_steps counts")(key)
     if get(key.tree, "trainer.total_training_steps") else rename("data.num_train_epochs")(key)),
    ("trainer.total_training_steps", rename("max_steps")),
    ("trainer.save_freq", lambda key: missing("checkpoints are saved every save_steps, 20: runs resume from them")(key)
     if key.value in OFF else rename("save_steps")(key)),
    ("trainer.test_freq", lambda key: Outcome("value", ("eval_steps",), 0, "off")
     if key.value in OFF else rename("eval_steps")(key)),
    ("trainer.experiment_name", name_run),
    ("trainer.project_name", missing("tracker_kwargs.wandb.project")),
    ("trainer.default_local_dir", rename("output_dir")),
    ("trainer.logger", _trackers),
    ("trainer.n_gpus_per_node", rename("num_gpus_per_node")),
    ("trainer.nnodes", missing("device_mapping says which devices a role has (docs/devices.md)")),
    ("trainer.val_before_train", same("evaluated before and after training", True)),
    ("trainer.val_before_train", missing("evaluated before and after training, with validation rows")),
    ("trainer.val_only", same("", False)),
    ("trainer.val_only", missing("`offbeat rollout CONFIG --engine config` evaluates without training")),
    ("trainer.resume_mode", _resume),
    ("trainer.resume_from_path", lambda key: rename("resume_from_checkpoint")(key)
     if get(key.tree, "trainer.resume_mode") == "resume_path" else no_effect("of resume_mode resume_path")(key)),
    ("trainer.max_actor_ckpt_to_keep", rename("max_ckpt_to_keep")),
    ("trainer.log_val_generations|rollout_data_dir|validation_data_dir", missing("`offbeat inspect` shows episodes")),
    ("trainer.balance_batch", same("micro-batches have equal numbers of tokens")),
    ("trainer.use_legacy_worker_impl|device", no_effect("of verl's own workers")),
    ("actor_rollout_ref.hybrid_engine|nccl_timeout", missing("device_mapping says which roles share devices")),
    ("rollout.nnodes|n_gpus_per_node", missing("actor_infer.device_mapping (docs/devices.md)")),
    ("global_profiler.steps|tool", _profiler),
    ("global_profiler.**", missing(PROFILED)),
    ("*.profiler.**", missing(PROFILED)),
    ("*.*.profiler.**", missing(PROFILED)),
)  # fmt: skip

RULES: Rules = (*TRAINERS, *LOSS, *TRAINING, *SAMPLING, *DATA, *RUN)
