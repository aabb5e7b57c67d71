"""ROLL's keys of roles and engines, besides `trainer/config/aliases.py`."""

from math import ceil

from offbeat.deploy.config.importing.report import Outcome
from offbeat.deploy.config.importing.roll_batches import (
    SHARDING,
    TRAIN_CONFIG,
    keep_accumulation,
    keep_micro_batch,
    num_shards,
    read_devices,
    splits_tokens,
    steps_of_batch,
)
from offbeat.deploy.config.importing.rules import (
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
    take_stops,
)
from offbeat.services.chat.template_override import TEMPLATES, replaces
from offbeat.services.generation.vllm.engine_arguments import engine_argument_names
from offbeat.trainer.config.aliases import ENGINE

FROZEN = ("reference", "teacher.*")
NOT_SPLIT = (
    "fsdp2_train shards weights, gradients and moments over all processes; to split layers, set strategy_args.tp_size "
    "or pp_size"
)
PACKED = "sequences are always packed without padding"
WITH_IMAGE = "vl_traj_env_manager"


def shows_images(tree: Tree) -> bool:
    envs = get_table(tree, "custom_envs")
    return any(WITH_IMAGE in str((env or {}).get("env_manager_cls")) for env in envs.values())


# --- Training engine


def _train_strategy(key: Key) -> Outcome | None:
    if key.value != "megatron_train":
        return None
    is_split = num_shards(key.tree) > 1 or (get(key.tree, f"{TRAIN_CONFIG}.expert_model_parallel_size") or 1) > 1
    name = "fsdp2_train" if is_split else "deepspeed_train"
    why = "fsdp2_train shards the weights that Megatron splits" if is_split else "all its sizes are 1: data-parallel"
    return Outcome("value", key.path, name, why)


def _parallel_size(key: Key) -> Outcome:
    return (
        Outcome("same", note="no such split")
        if key.value == 1 or key.value is None
        else Outcome("no counterpart", note=NOT_SPLIT)
    )


def _sequence_parallel_size(key: Key) -> Outcome:
    if key.value in (1, None):
        return Outcome("same", note="no such split")
    if not splits_tokens(key.tree):
        return Outcome(
            "no counterpart", note="fsdp2_train divides the tokens of a micro-batch: strategy_args.ulysses_size"
        )
    return Outcome("renamed", ("actor_train", "strategy_args", "ulysses_size"), key.value)


def _distributed_optimizer(key: Key) -> Outcome:
    engine = _train_strategy(Key((), get(key.tree, "actor_train.strategy_args.strategy_name"), key.tree))
    if engine is None or engine.value != "deepspeed_train":
        return Outcome("same", note="fsdp2_train shards the optimizer's state")
    target = ("actor_train", "strategy_args", "zero_stage")
    return Outcome("value", target, 1 if key.value else 0, "ZeRO 1 shards the optimizer's state")


def _dynamic_tokens(key: Key) -> Outcome:
    if not get(key.tree, "actor_train.use_dynamic_batching_in_train"):
        return Outcome("no effect", note="use_dynamic_batching_in_train is not set")
    return Outcome("renamed", ("actor_train", "training_args", "max_tokens_per_microbatch"), key.value)


def _warmup_ratio(key: Key) -> Outcome | None:
    steps, ratio = get(key.tree, "max_steps"), key.value
    if not ratio or get(key.tree, (*key.path[:-1], "warmup_steps")):
        return Outcome("same" if not ratio else "no effect", note="warmup_steps counts" if ratio else "no warm-up")
    if not isinstance(steps, int) or not isinstance(ratio, int | float):
        return Outcome("no counterpart", note="set warmup_steps")
    return Outcome("value", (*key.path[:-1], "warmup_steps"), round(steps * ratio), "of max_steps")


def warmup_without_effect(key: Key) -> Outcome | None:
    """Report the warm-up of transformers' constant schedule, which has none; Megatron's has one."""
    role = key.path[0]
    if get(key.tree, (*key.path[:-1], "lr_scheduler_type")) != "constant" or not is_fsdp2(key.tree, role):
        return None
    return Outcome("no effect", note="ROLL's fsdp2_train has no warm-up with lr_scheduler_type: constant")


def is_fsdp2(tree: Tree, role: str = "actor_train") -> bool:
    return get(tree, f"{role}.strategy_args.strategy_name") == "fsdp2_train"


def _warmup_steps(key: Key) -> Outcome | None:
    """Convert optimizer steps, which ROLL counts, to batches; a critic has one pass per batch there."""
    if key.value and (without := warmup_without_effect(key)) is not None:
        return without
    minibatches, epochs = steps_of_batch(key.tree, key.path[0]), get(key.tree, "ppo_epochs") or 1
    if not isinstance(key.value, int) or key.value <= 0 or not isinstance(epochs, int):
        return None
    if minibatches is None:
        return None
    per_batch = minibatches * (epochs if key.path[0] == "actor_train" else 1)
    if per_batch == 1:
        return None
    return Outcome("value", key.path, ceil(key.value / per_batch), f"batches, of {per_batch} optimizer steps each")


def _lora_rank_of_engine(key: Key) -> Outcome | None:
    if not isinstance(key.value, int) or not get(key.tree, "actor_train.model_args.lora_target"):
        return Outcome("no effect", note="no actor_train.model_args.lora_target")
    if _keeps_sglang(key.tree):
        return Outcome("no effect", note="sglang is given merged weights")
    return Outcome("value", tuple(f"{ENGINE}.max_lora_rank".split(".")), key.value, "adapters are published alone")


PACKING: tuple[tuple[str, Rule], ...] = (
    ("use_dynamic_batching_in_train|use_dynamic_batching_in_infer|use_sequence_packing", same(PACKED)),
    ("sequence_length_round_in_train|sequence_length_round_in_infer", no_effect(PACKED)),
    ("max_tokens_per_microbatch_in_infer|max_tokens_per_microbatch_in_train", missing("set infer_batch_size")),
    ("sequence_packing_args.**", missing(f"{PACKED}, up to actor_train.training_args.max_tokens_per_microbatch")),
)  # fmt: skip
TRAINING: tuple[tuple[str, Rule], ...] = (
    ("actor_train.strategy_args.strategy_name", _train_strategy),
    ("actor_train.router_replay.mode", become("router_replay", lambda _: True, "", "R3")),
    ("*.router_replay.mode", same("", "disable")),
    ("*.router_replay.**", missing("router_replay replays the engine's experts (R3), not the learner's own (R2)")),
    (f"{TRAIN_CONFIG}.{'|'.join(SHARDING)}|virtual_pipeline_model_parallel_size", _parallel_size),
    (f"{TRAIN_CONFIG}.expert_model_parallel_size|ep_size|efsdp_size", _parallel_size),
    (f"{TRAIN_CONFIG}.use_distributed_optimizer", _distributed_optimizer),
    (f"{TRAIN_CONFIG}.recompute_granularity", same("disable_gradient_checkpointing: false recomputes whole layers")),
    (f"{TRAIN_CONFIG}.bf16|fp16|param_dtype", same("actor_train.model_args.dtype")),
    (f"{TRAIN_CONFIG}.reduce_dtype", same("gradients are reduced in float32", "float32", "fp32")),
    (f"{TRAIN_CONFIG}.reduce_dtype", missing("gradients are reduced in float32")),
    (f"{TRAIN_CONFIG}.fsdp_size", same("all processes share the shards")),
    (f"{TRAIN_CONFIG}.offload_policy|apply_tiled_mlp|apply_expert_patch", same("not done", False)),
    (f"{TRAIN_CONFIG}.offload_policy", missing(
        "take strategy_name: deepspeed_train, zero_stage: 3 and DeepSpeed's zero_optimization.offload_* in strategy_config"
    )),
    (f"{TRAIN_CONFIG}.reshard_after_forward", same("", True)),
    (f"{TRAIN_CONFIG}.max_grad_norm", same("actor_train.training_args.max_grad_norm")),
    (f"{TRAIN_CONFIG}.**", missing("a setting of that engine's speed or memory alone")),
    ("actor_train.training_args.per_device_train_batch_size", keep_micro_batch),
    ("actor_train.training_args.gradient_accumulation_steps", keep_accumulation),
    ("actor_train.training_args.warmup_ratio", _warmup_ratio),
    ("actor_train|critic.training_args.warmup_steps", _warmup_steps),
    ("actor_train.max_tokens_per_microbatch_in_train", _dynamic_tokens),
    *((f"{role}.{name}", rule) for role in ("*", "teacher.*") for name, rule in PACKING),
    ("actor_infer.model_args.lora_rank", _lora_rank_of_engine),
    ("actor_infer.model_args.lora_*", same("as actor_train")),
    ("actor_infer.model_args.lora_target|lora_alpha|lora_dropout|adapter_name_or_path", same("as actor_train")),
    ("*.model_args.lora_dropout", same("", 0.0, 0)),
    ("*.model_args.lora_dropout", missing("adapters have no dropout: sampled and trained logprobs would differ")),
    ("*.model_args.freeze_module_prefix", missing("freeze all but adapters by lora_target, or train all")),
    ("actor_train.model_args.ulysses_size", _sequence_parallel_size),
    ("*.model_args.ulysses_size", same("as actor_train")),
    ("actor_train.worker_cls", no_effect("pg_variant selects the loss")),
    ("*.training_args.num_train_epochs", no_effect("max_steps counts")),
    ("*.training_args.max_steps", no_effect("ROLL overwrites it")),
    ("*.training_args.bf16|fp16", missing("set model_args.dtype: bfloat16 or float16")),
    ("*.training_args.save_hf_model", same("every checkpoint has the model's Hugging Face folder")),
)  # fmt: skip

# --- Other roles


def _is_sglang(tree: Tree) -> bool:
    return get(tree, "actor_infer.strategy_args.strategy_name") == "sglang"


def _keeps_sglang(tree: Tree) -> bool:
    return _is_sglang(tree) and not shows_images(tree)


def _gpus_of_sglang(key: Key) -> Outcome | None:
    if not _is_sglang(key.tree) or key.value == 1:
        return None
    return Outcome("value", tuple(f"{ENGINE}.tensor_parallel_size".split(".")), key.value, "GPUs of an engine")


def _same_devices(key: Key) -> Outcome | None:
    """Drop devices of frozen models, which the learner's processes compute."""
    if key.value == get(key.tree, "actor_train.device_mapping"):
        return None
    return Outcome("no counterpart", note="the learner's processes compute this model, on actor_train's devices")


def _own_devices(key: Key) -> Outcome | None:
    """Keep the critic's devices if no other role has any of them."""
    others = {number for role in ("actor_train", "actor_infer") for number in read_devices(key.tree, role)}
    return _same_devices(key) if others.intersection(read_devices(key.tree, "critic")) else None


def _frozen_strategy(key: Key) -> Outcome | None:
    names = {"megatron_infer": "hf_infer", "fsdp2_infer": "deepspeed_infer"}
    if key.value not in names:
        return None
    shards = num_shards({"actor_train": get(key.tree, key.path[:-2])})
    name = "deepspeed_infer" if shards > 1 else names[key.value]
    return Outcome("value", key.path, name, "shards the weights" if name == "deepspeed_infer" else "a copy per process")


def _role_environment(key: Key) -> Outcome | None:
    if not isinstance(key.value, str | int | float | bool):
        return None
    return Outcome("renamed", ("system_envs", key.path[-1]), key.value, "of all components")


def _chat_template(key: Key) -> Outcome:
    """Take the policy's template for all roles."""
    if key.path[0] not in ("actor_train", "validation") and get(key.tree, "actor_train.data_args.template"):
        return Outcome("same", note="as actor_train")
    return template_outcome(key)


def template_outcome(key: Key) -> Outcome:
    name = None if key.value is None else str(key.value)
    if not replaces(name):
        return Outcome("same", note="the model's own template")
    if name in TEMPLATES:
        return Outcome("renamed", ("chat_template",), key.value)
    return Outcome("no counterpart", note=f"{key.value}: the model's own template is used, unless chat_template is set")


def _unused(key: Key) -> Outcome | None:
    """Drop the reference without a KL, and the critic without `gae`."""
    if key.path[0] in ("critic", "reward_pretrain"):
        is_used = get(key.tree, "adv_estimator", "gae") == "gae"
        return None if is_used else Outcome("no effect", note="adv_estimator needs no critic")
    is_used = get(key.tree, "use_kl_loss") or get(key.tree, "add_token_level_kl")
    return None if is_used else Outcome("no effect", note="no KL needs the reference")


def _policy_folder(key: Key) -> Outcome | None:
    return Outcome("same", note="pretrain") if key.value == get(key.tree, "pretrain") else None


SCORED: tuple[tuple[str, Rule], ...] = (("reference.**", _unused), ("critic.**", _unused), ("reward_pretrain", _unused))
ROLES: tuple[tuple[str, Rule], ...] = (
    ("critic.device_mapping", _own_devices),
    *((f"{role}.device_mapping", _same_devices) for role in FROZEN),
    *((f"{role}.strategy_args.strategy_name", _frozen_strategy) for role in FROZEN),
    *((f"{role}.strategy_args.strategy_config.**", missing("no setting of the frozen model's engine")) for role in FROZEN),
    *((f"{role}.training_args.**", no_effect("the model is frozen")) for role in FROZEN),
    ("actor_train.model_args.model_name_or_path", _policy_folder),
    ("critic.model_args.model_type", lambda key: Outcome("same", note="a new value head, if the folder has none")
     if key.value == "trl" else None),
    ("critic.strategy_args.**", same("the policy's engine")),
    ("critic.training_args.per_device_train_batch_size|gradient_accumulation_steps|weight_decay|lr_scheduler_type",
     missing("the policy's batches and optimizer")),
    *((f"{role}.data_args.template", _chat_template) for role in ("actor_train", "actor_infer", "critic", *FROZEN)),
    ("actor_infer.num_gpus_per_worker", _gpus_of_sglang),
    ("*.num_gpus_per_worker|world_size", no_effect("ROLL derives it from device_mapping")),
    ("*.offload_nccl", no_effect("ROLL sets it to false")),
    ("*.name|worker_cls|max_concurrency", missing("no such workers here")),
    ("actor_train.backend_timeout", lambda key: Outcome("same", key.path, key.value)),
    ("*.backend_timeout", missing("actor_train.backend_timeout holds for all")),
    *((f"{role}.system_envs.*", _role_environment) for role in
      ("actor_train", "actor_infer", "critic", "reference", "train_env_manager", "val_env_manager")),
)  # fmt: skip

# --- Engines


def _engine(key: Key) -> Outcome | None:
    if not _is_sglang(key.tree):
        return None
    if not _keeps_sglang(key.tree):
        return Outcome("value", key.path, "vllm", "sglang is given text, and the policy has image input")
    return Outcome("same", key.path, key.value, "a server per replica, on GPUs: pip install sglang where engines run")


def _server_argument(target: str) -> Rule:
    """Take an argument of SGLang's under vLLM's name."""
    take = rename(f"{ENGINE}.{target}")
    return lambda key: take(key) if _is_sglang(key.tree) else None


def _server_context(key: Key) -> Outcome | None:
    target = Key(tuple(f"{ENGINE}.max_model_len".split(".")), key.value, key.tree)
    return (_context(target) or Outcome("renamed", target.path, key.value)) if _is_sglang(key.tree) else None


def _server_cache(key: Key) -> Outcome | None:
    take = become(f"{ENGINE}.enable_prefix_caching", lambda disabled: not disabled)
    return take(key) if _is_sglang(key.tree) else None


def _engine_argument(key: Key) -> Outcome | None:
    return None if _keeps_sglang(key.tree) else engine_argument(key)


def engine_argument(key: Key) -> Outcome | None:
    known = engine_argument_names()
    if not known or key.path[-1] in known or key.path[-1] in ("tp_size", "pp_size"):
        return None
    return Outcome("no counterpart", note="vLLM has no such engine argument")


def _context(key: Key) -> Outcome | None:
    """Widen an engine's context to a trajectory."""
    lengths = (get(key.tree, "prompt_length"), get(key.tree, "response_length"))
    total = get(key.tree, "sequence_length") or (sum(lengths) if all(isinstance(each, int) for each in lengths) else 0)
    if not isinstance(key.value, int) or key.value >= total:
        return None
    return Outcome("value", key.path, total, "sequence_length")


ENGINES: tuple[tuple[str, Rule], ...] = (
    ("actor_infer.strategy_args.strategy_name", _engine),
    (f"{ENGINE}.mem_fraction_static", rename(f"{ENGINE}.gpu_memory_utilization")),
    (f"{ENGINE}.max_running_requests", _server_argument("max_num_seqs")),
    (f"{ENGINE}.context_length", _server_context),
    (f"{ENGINE}.disable_radix_cache", _server_cache),
    (f"{ENGINE}.grpc_mode", same("the server speaks HTTP", False)),
    (f"{ENGINE}.grpc_mode", missing("the server speaks HTTP")),
    (f"{ENGINE}.max_model_len", _context),
    (f"{ENGINE}.load_format", same("engines always get their weights from the learner")),
    (f"{ENGINE}.sleep_level|enable_memory_saver", missing("engines keep their memory: they sample all the time")),
    (f"{ENGINE}.*", _engine_argument),
    (f"{ENGINE}.*.*", lambda key: _engine_argument(Key(key.path[:-1], key.value, key.tree))),
    ("actor_infer.infer_batch_size", no_effect("the engine batches by itself: max_num_seqs")),
    ("actor_infer.model_args.attn_implementation|model_name_or_path", no_effect("the engine chooses; its model: pretrain")),
    ("actor_infer.model_args.disable_gradient_checkpointing", no_effect("inference has no backward pass")),
)  # fmt: skip
GENERATING: tuple[tuple[str, Rule], ...] = tuple(
    (f"actor_infer|train_env_manager|val_env_manager.generating_args.{name}", rule)
    for name, rule in (
        ("do_sample", same("tokens are sampled", True)),
        ("repetition_penalty|length_penalty", same("", 1, 1.0)),
        ("repetition_penalty|length_penalty|num_beams|do_sample", missing("logprobs would not be the policy's")),
        ("logprobs", same("logprobs of sampled tokens are always recorded")),
        ("max_length", missing("sequence_length bounds a trajectory, max_new_tokens an answer")),
        ("stop_strings", take_stops("*.*.stop_strings")),
        ("include_stop_str_in_output", same("the tokens of a stop string are the answer's", True)),
        ("include_stop_str_in_output", no_effect("tokens are trained, and those of a stop string are the answer's")),
    )
)
