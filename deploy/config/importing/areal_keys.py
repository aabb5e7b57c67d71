"""Rules for the keys of AReaL's experiments, by the names, meanings and defaults of `areal/api/cli_args.py`."""

from typing import Any

from offbeat.deploy.config.hub_datasets import is_dataset_id
from offbeat.deploy.config.importing.areal_batches import (
    SAMPLES,
    engine,
    evaluates_alone,
    find_pipeline,
    group_size,
    has_devices,
    has_kl,
    take_allocation,
    take_answer,
    take_backend,
    take_batch,
    take_eval_answer,
    take_longest,
    take_slots,
)
from offbeat.deploy.config.importing.areal_loss import LOSS
from offbeat.deploy.config.importing.areal_optimizer import ARGS, CRITIC, OPTIMIZER
from offbeat.deploy.config.importing.environment import ANY_REFERENCE
from offbeat.deploy.config.importing.report import Outcome
from offbeat.deploy.config.importing.rules import (
    NO_NAME,
    Key,
    Rule,
    Rules,
    Tree,
    become,
    get,
    missing,
    no_effect,
    rename,
    same,
    take_stops,
)
from offbeat.deploy.config.importing.verl_keys import MEGATRON_LAYERS
from offbeat.trainer.config.aliases import ENGINE

MODEL = "actor_train.model_args"
SAMPLING, EVALUATION = "actor_infer.generating_args", "val_env_manager.generating_args"
ALL_TOKENS = 100_000_000
"""AReaL's `top_k` that cuts nothing."""
KERNELS = "kernels and memory of AReaL's trainer (docs/learner.md)"
PROCESSES = "processes are Ray's (docs/deployment.md); their environment is system_envs"
SERVICE = "parts of AReaL's services"
SCRIPT = "of the script's own workflow: write it as an env, an agent or rewards (docs/environments.md, docs/agents.md)"
TRACKERS = ("wandb", "swanlab", "trackio")
WANDB = ("project", "entity", "name", "group", "job_type", "tags", "notes", "mode")
EPOCHS = "epochs: set {} to an epoch's steps, rows / train_dataset.batch_size"
GSM8K = "gsm8k"
"""In a dataset's name, for which AReaL has a config and columns."""


def trackers(tree: Tree) -> list[str]:
    """Return the trackers that AReaL starts."""
    modes = {name: get(tree, f"stats_logger.{name}.mode", "disabled") for name in TRACKERS}
    names = [name for name, mode in modes.items() if mode not in (None, "disabled")]
    return [*names, *(["tensorboard"] if get(tree, "stats_logger.tensorboard.path") else [])]


def _tracker(key: Key) -> Outcome:
    _, name, *rest = key.path
    if name not in trackers(key.tree):
        return Outcome("no effect" if key.path[-1] != "mode" else "same", note="disabled")
    if rest == ["mode"] and name == "wandb" and key.value == "offline":
        return Outcome("renamed", ("tracker_kwargs", name, "mode"), key.value)
    if rest == ["mode"] or name == "tensorboard":
        return Outcome("value", ("track_with",), trackers(key.tree))
    if rest[0] in WANDB:
        return Outcome("renamed", ("tracker_kwargs", name, rest[0]), key.value)
    return Outcome("no counterpart", note="docs/tracking.md has the arguments")


def _name(key: Key) -> Outcome:
    parts = [get(key.tree, name) for name in ("experiment_name", "trial_name")]
    whole = "-".join(str(part) for part in parts if part)
    name = NO_NAME.sub("-", whole).strip("-._")[:64].rstrip("-._")
    if not name or ANY_REFERENCE.search(whole):
        return Outcome("no counterpart", note="set exp_name")
    return Outcome("value", ("exp_name",), name)


def _output_dir(key: Key) -> Outcome:
    parts = [get(key.tree, name) for name in ("experiment_name", "trial_name")]
    folder = "/".join([str(key.value).rstrip("/"), *(str(part) for part in parts if part)])
    return Outcome("value", ("output_dir",), folder, "the trial's own folder")


def dataset_name(name: Any) -> Any:
    """Return a dataset's name with the config that AReaL takes."""
    is_plain = isinstance(name, str) and is_dataset_id(name) and ":" not in name
    return f"{name}:main" if is_plain and GSM8K in name else name


def _dataset(target: str) -> Rule:
    def rule(key: Key) -> Outcome:
        name = dataset_name(key.value)
        return Outcome("renamed" if name == key.value else "value", ("data", target), name)

    return rule


def _frequency(target: str) -> Rule:
    """Take an interval in steps, of those in epochs and seconds."""

    def rule(key: Key) -> Outcome:
        match key.path[-1]:
            case "freq_steps":
                return Outcome("renamed", (target,), key.value)
            case "freq_epochs":
                return Outcome("no counterpart", note=EPOCHS.format(target))
            case _:
                return Outcome("no counterpart", note=f"seconds: {target} counts steps")

    return rule


def _same_as(name: str, note: str) -> Rule:
    """Drop a value that another key of AReaL's has, too."""

    def rule(key: Key) -> Outcome | None:
        return Outcome("same", note=note) if key.value == get(key.tree, name) else None

    return rule


def _top_k(target: str) -> Rule:
    return lambda key: rename(target)(key) if cuts_top_k(key.value) else Outcome("same", note="all tokens")


def cuts_top_k(value: Any) -> bool:
    return value not in (None, -1, 0, ALL_TOKENS)


def _lora(key: Key) -> Outcome:
    if not get(key.tree, "actor.use_lora"):
        return Outcome("no effect", note="use_lora is false")
    if key.path[-1] != "target_modules":
        return Outcome("renamed", (*MODEL.split("."), key.path[-1]), key.value)
    names = key.value if isinstance(key.value, list) else [key.value]
    if not names:
        return Outcome("value", (*MODEL.split("."), "lora_target"), "all-linear")
    layers = ",".join(MEGATRON_LAYERS.get(str(name), str(name)) for name in names)
    return Outcome("value", (*MODEL.split("."), "lora_target"), layers)


def _epochs(key: Key) -> Outcome:
    if isinstance(get(key.tree, "total_train_steps"), int):
        return Outcome("no effect", note="total_train_steps counts, unless the epochs end before")
    return Outcome("renamed", ("data", "num_train_epochs"), key.value)


def _eval_samples(key: Key) -> Outcome:
    return Outcome("renamed", ("val_env_manager", "group_size"), key.value)


def _of_server(name: str, rule: Rule) -> Rule:
    return lambda key: (
        rule(key) if engine(key.tree) == name and find_pipeline(key.tree) == "rlvr"
        else Outcome("no effect", note=f"engines are {engine(key.tree)}'s" if find_pipeline(key.tree) == "rlvr"
                     else "nothing is sampled")
    )  # fmt: skip


def _not(target: str) -> Rule:
    return become(target, lambda value: not value)


def _argument(key: Key) -> Outcome:
    return Outcome("renamed", (*ENGINE.split("."), key.path[-1]), key.value)


EXPERIMENT: Rules = (
    ("experiment_name", _name),
    ("trial_name", lambda key: Outcome("same", note="part of exp_name") if _name(key).target else _name(key)),
    ("seed", rename("seed")),
    ("cluster.fileroot", _output_dir),
    ("cluster.n_gpus_per_node", lambda key: rename("num_gpus_per_node")(key) if has_devices(key.tree)
     else Outcome("same", note="on CPUs")),
    ("cluster.n_nodes", same("devices are numbered over all nodes")),
    ("cluster.**", no_effect(SERVICE)),
    ("*.experiment_name|trial_name|fileroot", same("the run's")),
    ("*.*.experiment_name|trial_name|fileroot", same("the run's")),
    ("tokenizer_path|model_path", _same_as("actor.path", "the policy's")),
    ("tokenizer_path|model_path", missing("the tokenizer is the policy folder's")),
    ("allocation_mode", take_allocation),
    ("actor|rollout.backend", lambda key: take_backend(key)
     if key.path[0] == "actor" or find_pipeline(key.tree) == "rlvr" else Outcome("no effect", note="nothing is sampled")),
    ("*.backend", _same_as("actor.backend", "the policy's devices")),
    ("*.backend", missing("its devices are the policy's; docs/devices.md has others")),
    ("*.scheduling_spec", no_effect(PROCESSES)),
    ("*.scheduling_strategy.**", same("devices are numbered: device_mapping")),
    ("scheduler.**", no_effect(PROCESSES)),
    ("launcher.**", no_effect(PROCESSES)),
    ("enable_offload", same("", False)),
    ("enable_offload", missing("actor_infer.strategy_args.strategy_config.enable_sleep_mode, for shared devices")),
    ("async_training", same("max_staleness", True)),
    ("total_train_epochs", _epochs),
    ("total_train_steps", rename("max_steps")),
    ("total_train_n_seqs", missing("set max_steps")),
    ("evaluator.freq_*", _frequency("eval_steps")),
    ("evaluator.eval_before_train", same("the policy is evaluated before training, too")),
    ("saver.freq_*", _frequency("save_steps")),
    ("saver.mode", no_effect("checkpoints are copied beside training (checkpoint_config)")),
    ("recover.freq_*", no_effect("a run resumes from a checkpoint of save_steps")),
    ("recover.**", same("a run resumes from its newest checkpoint")),
    ("stats_logger.*.**", _tracker),
    ("perf_tracer.enabled", same("", False)),
    ("perf_tracer.**", lambda key: None if get(key.tree, "perf_tracer.enabled")
     else Outcome("no effect", note="perf_tracer.enabled is false")),
    ("perf_tracer.**", missing("profiler_timeline and telemetry trace steps (docs/learner.md#profiling)")),
    ("memory_profiler.profile_steps", become("profiler_memory", bool, "of profiler_steps")),
    ("memory_profiler.**", missing("profiler_memory")),
    ("train_dataset.path", _dataset("dataset_name")),
    ("train_dataset.type", lambda key: Outcome("value", ("pipeline",), find_pipeline(key.tree))),
    ("train_dataset.batch_size", take_batch),
    ("train_dataset.shuffle", rename("data.shuffle")),
    ("train_dataset.max_length", take_longest),
    ("train_dataset.split", same("part of the dataset's name", "train")),
    ("valid_dataset.path", _dataset("val_dataset_name")),
    ("valid_dataset.split", same("part of the dataset's name", "test")),
    ("*.split", missing("part of the dataset's name: ORGANIZATION/NAME:CONFIG/SPLIT")),
    ("valid_dataset.batch_size|max_length|shuffle|type", no_effect("every validation row is taken")),
    ("train_dataset|valid_dataset.pin_memory|num_workers|num_dataset_workers|drop_last|setup_timeout",
     no_effect("env workers read the rows")),
    ("dynamic_bs", lambda key: Outcome("value", ("zero_variance",), "mask", "groups that your filter rejects") if key.value
     else Outcome("same", note="a filter of the script's: zero_variance: refill")),
)  # fmt: skip

TRAINING: Rules = (
    ("actor.path", rename("pretrain")),
    ("actor.is_critic", same("", False)),
    ("actor.is_critic", same("pipeline: reward_model")),
    ("actor.beta|loss_type", lambda key: Outcome("renamed", ("dpo", key.path[-1]), key.value)),
    ("actor.dtype", rename(f"{MODEL}.dtype")),
    ("actor.gradient_checkpointing", _not(f"{MODEL}.disable_gradient_checkpointing")),
    ("actor.disable_dropout", same("models have no dropout", True)),
    ("actor.disable_dropout", missing("models have no dropout")),
    ("*.init_from_scratch", same("", False)),
    ("actor.init_from_scratch", missing("pretrain: tiny is random; others are folders")),
    ("actor.temperature", lambda key: Outcome("same", note="the sampling's")
     if key.value == get(key.tree, "gconfig.temperature", 1.0) else None),
    ("actor.temperature", missing("logprobs are of the sampling's temperature")),
    ("actor.mb_spec.max_tokens_per_mb", rename(f"{ARGS}.max_tokens_per_microbatch")),
    ("actor.mb_spec.**", missing(f"{ARGS}.max_tokens_per_microbatch")),
    ("actor.use_lora", same("lora_target")),
    ("actor.lora_rank|lora_alpha|target_modules", _lora),
    ("actor.peft_type", same("", "lora")),
    *OPTIMIZER,
    ("actor.enable_tree_training", become(f"{MODEL}.shared_prefix", lambda value: True if value else None)),
    ("actor.enable_tree_training", same("", False)),
    *LOSS,
    ("actor.weight_update_mode", no_effect("the transport of weights is chosen by the devices (weights)")),
    ("actor.**", missing(KERNELS)),
    ("ref.path", lambda key: Outcome("no effect", note="no KL needs the reference") if not needs_reference(key.tree)
     else Outcome("same", note="the policy's first weights") if key.value == get(key.tree, "actor.path")
     else Outcome("renamed", ("reference", "model_args", "model_name_or_path"), key.value)),
    ("ref.dtype|disable_dropout|optimizer", same("the policy's")),
    ("ref.optimizer.**", no_effect("the reference is frozen")),
    ("ref.**", missing("passes are as the policy's")),
    *CRITIC,
)  # fmt: skip

ROLLOUT: Rules = (
    ("rollout.max_head_offpolicyness", rename("max_staleness")),
    ("rollout.max_concurrent_rollouts", take_slots),
    ("rollout.consumer_batch_size", _same_as("train_dataset.batch_size", "a batch's groups")),
    ("rollout.consumer_batch_size", missing("admission counts batches of rollout_batch_size")),
    ("rollout.request_timeout", become("actor_infer.request_timeout_s", float)),
    ("rollout.request_retries", rename("buffer.max_attempts", "attempts of an episode")),
    ("rollout.dump_to_file", become("rollout.keep_text", bool)),
    ("rollout.tokenizer_path", same("the policy's")),
    ("rollout.use_lora", no_effect("adapters are merged into the engines' weights, unless "
                                   f"{ENGINE}.max_lora_rank")),
    ("rollout.enable_rollout_tracing", same("", False)),
    ("rollout.enable_rollout_tracing", missing("telemetry records traces (docs/monitoring.md)")),
    ("rollout.agent.turn_discount", same("", 1, 1.0)),
    ("rollout.agent.session_timeout_seconds", missing("agent_runner.timeout_s of custom_envs (docs/agents.md)")),
    ("rollout.agent.**", missing("agent_runner of custom_envs (docs/agents.md)")),
    ("rollout.**", no_effect(SERVICE)),
    ("gconfig.n_samples", rename("train_env_manager.group_size")),
    ("gconfig.max_new_tokens", take_answer),
    ("gconfig.max_tokens", same("bounds sequence_length")),
    ("gconfig.temperature", rename(f"{SAMPLING}.temperature")),
    ("gconfig.top_p", rename(f"{SAMPLING}.top_p")),
    ("gconfig.top_k", _top_k(f"{SAMPLING}.top_k")),
    ("gconfig.stop", take_stops(f"{SAMPLING}.stop_strings")),
    ("gconfig.greedy", same("", False)),
    ("gconfig.greedy", missing(f"{SAMPLING}.temperature: 0")),
    ("gconfig.min_new_tokens", same("", 0)),
    ("gconfig.lora_name", no_effect("an adapter has no name of its own")),
    ("gconfig.**", missing(f"{SAMPLING} has temperature, top_p, top_k, max_new_tokens and stop_strings")),
    ("eval_gconfig.n_samples", _eval_samples),
    ("eval_gconfig.max_new_tokens", take_eval_answer),
    ("eval_gconfig.temperature|top_p", lambda key:
     Outcome("renamed", (*EVALUATION.split("."), key.path[-1]), key.value)),
    ("eval_gconfig.top_k", _top_k(f"{EVALUATION}.top_k")),
    ("eval_gconfig.max_tokens", same("bounds sequence_length")),
    ("eval_gconfig.greedy", same("", False)),
    ("eval_gconfig.min_new_tokens", same("", 0)),
    ("eval_gconfig.**", missing(f"{EVALUATION} has temperature, top_p, top_k and max_new_tokens")),
    *((f"{name}.{pattern}", rule) for name in ("vllm", "sglang") for pattern, rule in (
        ("model|model_path", no_effect("engines sample with the trained weights")),
        ("seed|random_seed", no_effect("the run's seed")),
        ("dtype", _same_as("actor.dtype", "the policy's")),
        ("skip_tokenizer_init|log_level|log_level_http|uvicorn_log_level", no_effect("Offbeat's own")),
        ("enable_lora|max_lora_rank|max_loras|lora_*", no_effect("adapters are merged into the engines' weights, unless "
                                                                f"{ENGINE}.max_lora_rank")),
    )),
    ("sglang.context_length", _of_server("sglang", rename(f"{ENGINE}.max_model_len"))),
    ("sglang.mem_fraction_static", _of_server("sglang", rename(f"{ENGINE}.gpu_memory_utilization"))),
    ("sglang.max_running_requests", _of_server("sglang", rename(f"{ENGINE}.max_num_seqs"))),
    ("sglang.disable_radix_cache", _of_server("sglang", _not(f"{ENGINE}.enable_prefix_caching"))),
    ("sglang.*", _of_server("sglang", _argument)),
    ("vllm.max_model_len|gpu_memory_utilization|max_num_seqs|enforce_eager|enable_sleep_mode",
     _of_server("vllm", _argument)),
    ("vllm.no_enable_prefix_caching", _of_server("vllm", _not(f"{ENGINE}.enable_prefix_caching"))),
    ("vllm.worker_extension_cls|distributed_executor_backend", no_effect(SERVICE)),
    ("vllm.*", _of_server("vllm", _argument)),
)  # fmt: skip

RULES: Rules = (*EXPERIMENT, *ROLLOUT, *TRAINING)


def needs_reference(tree: Tree) -> bool:
    return find_pipeline(tree) == "dpo" or has_kl(tree)


def eval_samples(tree: Tree) -> int:
    """Return the answers per row of evaluation: gconfig's without an `eval_gconfig`, which has defaults of its own."""
    if not evaluates_alone(tree):
        return group_size(tree)
    value = get(tree, "eval_gconfig.n_samples")
    return value if isinstance(value, int) else SAMPLES
