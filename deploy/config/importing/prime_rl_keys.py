"""Rules for the keys of prime-rl's files, by the names, meanings and defaults of its configuration classes."""

from typing import Any

from offbeat.deploy.config.importing.prime_rl_batches import (
    batch,
    take_bound,
    take_devices,
    take_ratio,
    take_replicas,
    take_slots,
)
from offbeat.deploy.config.importing.prime_rl_envs import ENVIRONMENTS, sequence_length, take_longest
from offbeat.deploy.config.importing.prime_rl_learning import (
    ARGS,
    TRAINER,
    take_algorithm,
    take_gate,
    take_teacher,
    take_zero_advantages,
)
from offbeat.deploy.config.importing.prime_rl_sources import if_inherited, take_own
from offbeat.deploy.config.importing.report import Outcome
from offbeat.deploy.config.importing.rules import (
    Key,
    Rules,
    Tree,
    become,
    get,
    get_table,
    missing,
    name_run,
    no_effect,
    rename,
    same,
)
from offbeat.services.generation.config import VllmConfig
from offbeat.trainer.config.aliases import ENGINE

SAMPLING = "actor_infer.generating_args"
WANDB = "tracker_kwargs.wandb"
MODEL_NAMES = ("trainer.model.name", "model.name", "orchestrator.model.name", "inference.vllm.model")
"""prime-rl's names of the policy, from the trained weights on."""
BEYOND_ONE_NODE = "an engine fits one node: docs/devices.md"


def policy_name(tree: Tree) -> Any:
    return next((name for each in MODEL_NAMES if (name := get(tree, each))), None)


def _model_name(key: Key) -> Outcome:
    """Take the trained weights' name; engines sample with these."""
    if key.value == policy_name(key.tree):
        return Outcome("renamed", ("pretrain",), key.value)
    return Outcome("no counterpart", note="engines sample with the trained weights, pretrain")


def _seq_len(key: Key) -> Outcome:
    if key.value == sequence_length(key.tree):
        return Outcome("renamed", ("sequence_length",), key.value)
    if key.path[:2] == ("trainer", "model"):
        return Outcome("value", (*ARGS.split("."), "max_tokens_per_microbatch"), key.value, "tokens of a packed pass")
    return Outcome("no effect", note="orchestrator.seq_len counts")


def _output_dir(key: Key) -> Outcome:
    name = get(key.tree, "run.dir") or get(key.tree, "run.name")
    if not name:
        return Outcome("renamed", ("output_dir",), key.value)
    return Outcome("value", ("output_dir",), f"{str(key.value).rstrip('/')}/{name}", "the run's own folder")


def _wandb(key: Key) -> Outcome:
    name = key.path[-1]
    if name == "offline":
        return Outcome("value", (*WANDB.split("."), "mode"), "offline") if key.value else Outcome("same")
    return Outcome("renamed", (*WANDB.split("."), name), key.value)


def _engine(key: Key) -> Outcome:
    name = key.path[-1]
    if name in VllmConfig.model_fields and name not in ("max_lora_rank", "max_loras"):
        return Outcome("renamed", (*ENGINE.split("."), name), key.value)
    if "lora" in name:
        return Outcome(
            "no effect", note=f"adapters are merged into the engines' weights, unless {ENGINE}.max_lora_rank"
        )
    return Outcome("no counterpart", note=f"{ENGINE}.{name}, if vLLM has it and your run needs it")


LENGTH = "reward_shaping.response_length_penalty_coef is a constant one per token"
ANEW = "a run with an output_dir of its own starts anew, another one resumes (resume_from_checkpoint)"
STORE = "checkpoint_config copies checkpoints to a store"
RENDERER = "the policy's own chat template renders conversations (chat_template)"

SERVERS = "ports and processes of prime-rl's servers"
OLD_NAMES = {
    "orchestrator.env": "[[orchestrator.train.source]], whose env.taskset.id is of verifiers 0.4",
    "orchestrator.rollouts_per_example": "orchestrator.group_size",
    "orchestrator.max_async_level": "orchestrator.max_off_policy_steps",
    "orchestrator.sampling.**": "[orchestrator.train.sampling]",
    "orchestrator.buffer.**": "curriculum of [[orchestrator.train.source]]",
    "orchestrator.filters": "curriculum.gates of [[orchestrator.train.source]]",
    "orchestrator.advantage.**": "[orchestrator.algo]",
    "wandb.**": "[monitors.wandb]",
    "*.wandb.**": "[monitors.wandb]",
}
SHARED: Rules = (
    *((name, _model_name) for name in MODEL_NAMES),
    ("*.seq_len", _seq_len),
    ("seq_len", _seq_len),
    ("trainer.model.seq_len", _seq_len),
    ("max_steps", rename("max_steps")),
    ("*.max_steps", rename("max_steps")),
    ("run.name", name_run),
    ("run.dir", lambda key: Outcome("same", note="part of output_dir") if get(key.tree, "output_dir")
     else Outcome("value", ("output_dir",), f"outputs/{key.value}")),
    ("output_dir", _output_dir),
    ("*.output_dir", rename("output_dir")),
    ("clean|dry_run", no_effect(ANEW)),
    ("resume", same(ANEW)),
    ("resume.**", missing(f"resume_from_checkpoint takes a checkpoint of Offbeat's; {ANEW}")),
    ("*.resume.**", missing(f"resume_from_checkpoint takes a checkpoint of Offbeat's; {ANEW}")),
    ("*.resume", same(ANEW)),
    ("ckpt", same("every save_steps, and at the end")),
    ("*.ckpt", same("every save_steps, and at the end")),
    *((f"{prefix}ckpt.{name}", rule) for prefix in ("", "*.") for name, rule in (
        ("interval", rename("save_steps")),
        ("keep_last", rename("max_ckpt_to_keep")),
        ("keep_interval|output_dir", missing(STORE)),
        ("*", missing("a run resumes with all of its state")),
    )),
    *((f"{prefix}{pattern}", rule) for prefix in ("", "*.") for pattern, rule in (
        ("monitors.wandb.project|name|entity|group|tags|offline", _wandb),
        ("monitors.wandb", become("track_with", lambda _: ["wandb"])),
        ("monitors.file.**", no_effect("metrics.jsonl is always written")),
        ("monitors.file", no_effect("metrics.jsonl is always written")),
        ("monitors.prime.**", missing("docs/tracking.md has the trackers")),
        ("monitors.prime", missing("docs/tracking.md has the trackers")),
        ("log.**", no_effect("logs are Offbeat's own (logging_dir)")),
        ("weight_broadcast.**", no_effect("the transport of weights is chosen by the devices (weights)")),
        ("rollout_transport.**", no_effect("trajectories are in Redis")),
        ("heartbeat.**", missing("`GET /health` of the control service (docs/monitoring.md)")),
        ("heartbeat", same("", None)),
    )),
    ("env_vars.*", lambda key: Outcome("renamed", ("system_envs", key.path[-1]), key.value)),
    ("*.env_vars.*", lambda key: Outcome("renamed", ("system_envs", key.path[-1]), key.value, "of all processes")),
    ("slurm.**", missing("docs/deployment.md says how Offbeat is started on a cluster")),
    ("slurm", missing("docs/deployment.md says how Offbeat is started on a cluster")),
    ("deployment.type", same("devices are numbered over all nodes")),
    ("deployment.gpus_per_node", rename("num_gpus_per_node")),
    ("deployment.num_*", take_devices),
    ("deployment.**", missing("docs/devices.md")),
    ("tokenizer.chat_template", rename("chat_template")),
    ("*.tokenizer.chat_template", rename("chat_template")),
    *((f"{prefix}tokenizer.**", lambda key: Outcome("same", note="the policy's") if key.value == policy_name(key.tree)
       else Outcome("no counterpart", note="the tokenizer is the policy folder's")) for prefix in ("", "*.")),
)  # fmt: skip

OF_SOURCES: Rules = (
    ("orchestrator.algo.type", take_algorithm),
    ("orchestrator.algo.teacher.**", take_teacher),
    ("orchestrator.algo.length_penalty.**", missing(LENGTH)),
    ("orchestrator.algo.sampling.source", same("", "policy")),
    ("orchestrator.algo.**", missing("docs/algorithms.md")),
    ("orchestrator.group_size", rename("train_env_manager.group_size")),
    ("orchestrator.train.sampling.temperature", rename(f"{SAMPLING}.temperature")),
    ("orchestrator.train.sampling.max_completion_tokens", take_longest),
    ("orchestrator.train.sampling.extra_body.top_k", rename(f"{SAMPLING}.top_k")),
    ("orchestrator.train.sampling.extra_body.top_p", rename(f"{SAMPLING}.top_p")),
    ("orchestrator.train.sampling.**", missing(f"{SAMPLING} has temperature, top_p, top_k and stop_strings")),
)  # fmt: skip
"""Keys that sources share."""
SOURCE = "orchestrator.train.source.*"
ORCHESTRATOR: Rules = (
    ("orchestrator", same("prime-rl's defaults")),
    *((pattern, if_inherited(rule)) for pattern, rule in OF_SOURCES),
    ("orchestrator.batch_size", rename("rollout_batch_size")),
    ("orchestrator.token_batch_size", lambda key: Outcome("value", ("rollout_batch_size",), batch(key.tree),
                                                          "trajectories, not tokens: set your own")),
    ("orchestrator.max_off_policy_steps", take_bound),
    ("orchestrator.concurrency.max_inflight|initial_inflight", take_slots),
    ("orchestrator.concurrency.**", no_effect("slots are constant; rollout.kv_usage_target adapts the episodes in play")),
    ("orchestrator.train.filter_zero_advantages", take_zero_advantages),
    (f"{SOURCE}.curriculum.gates.**", take_gate),
    (f"{SOURCE}.curriculum.sampler.type", same("", "standard")),
    (f"{SOURCE}.curriculum.**", missing("train_env_manager.task_sampler draws the tasks (docs/environments.md)")),
    (f"{SOURCE}.ratio", take_ratio),
    *ENVIRONMENTS,
    (f"{SOURCE}.algo.**", take_own(OF_SOURCES, "one algorithm for all tags: import a file for each")),
    (f"{SOURCE}.group_size", take_own(OF_SOURCES, "one size for all tags: train_env_manager.group_size")),
    (f"{SOURCE}.sampling.**", take_own(OF_SOURCES, f"sampling of all tags: {SAMPLING}")),
    ("orchestrator.model.lora.rank|alpha", same("the trainer's")),
    ("orchestrator.model.lora.**", no_effect("an adapter has no name of its own")),
    ("orchestrator.model.client.**", no_effect("engines are the run's own")),
    ("orchestrator.model.**", no_effect("engines are the run's own")),
    ("orchestrator.renderer.**", missing(RENDERER)),
    ("renderer.**", missing(RENDERER)),
    ("orchestrator.tasks_per_minute", missing("max_env_step_concurrent of custom_envs bounds starts")),
    ("orchestrator.env_server_base_port|num_train_workers|pad_to_multiple_of|inference_metrics_roles|"
     "collect_inference_metrics|rollout_transport", no_effect("ports and processes of prime-rl's orchestrator")),
    *((name, missing(f"the name of an older prime-rl: write {new}")) for name, new in OLD_NAMES.items()),
)  # fmt: skip

INFERENCE: Rules = (
    ("inference", same("prime-rl's defaults")),
    ("inference.vllm.data_parallel_size", take_replicas),
    ("inference.vllm.data_parallel_*|api_server_count", no_effect("each engine is a replica of its own")),
    ("inference.vllm.trust_remote_code", same("", False)),
    ("inference.vllm.*", _engine),
    ("inference.vllm.**", missing(f"{ENGINE} has vLLM's arguments")),
    ("inference.deployment.type", same("", "single_node")),
    ("inference.deployment.**", missing(BEYOND_ONE_NODE)),
    ("inference.enable_fp32_lm_head|enable_fp32_router_logits|use_deep_gemm", missing("engines have vLLM's own kernels")),
    ("inference.slurm.**", missing("docs/deployment.md says how Offbeat is started on a cluster")),
    ("inference.kv_cache_offload.**", missing("engines have vLLM's own cache")),
    ("inference.server.**", no_effect(SERVERS)),
    ("inference.router.**", no_effect(SERVERS)),
    ("inference.backend_port|use_pd_kv_transfer|output_dir|dry_run", no_effect(SERVERS)),
)  # fmt: skip


def _dataset(key: Key) -> Outcome:
    """Take a dataset with its only subset and split."""
    at = get_table(key.tree, key.path[:-1])
    subsets, splits = at.get("subsets") or [], at.get("splits") or []
    name = str(key.value)
    target = ("data", "dataset_name" if key.path[0] == "data" else "val_dataset_name")
    if len(subsets) > 1 or len(splits) > 1:
        return Outcome("renamed", target, name, "one subset and split: put them into one file")
    part = "/".join([*map(str, subsets), *map(str, splits)])
    return Outcome("value" if part else "renamed", target, f"{name}:{part}" if part else name)


def _part(key: Key) -> Outcome:
    if isinstance(key.value, list) and len(key.value) > 1:
        return Outcome("no counterpart", note="one subset and split: put them into one file")
    return Outcome("same", note="part of the dataset's name")


SFT: Rules = (
    ("data.name", _dataset),
    ("val.data.name", _dataset),
    ("*.subsets|splits", _part),
    ("*.*.subsets|splits", _part),
    ("data.batch_size", rename("rollout_batch_size", "packed sequences there, rows here")),
    ("data.type", same("", "sft")),
    ("data.type", missing("made-up rows")),
    ("data.shuffle", rename("data.shuffle")),
    ("data.seed", rename("seed")),
    ("data.loss_mask.assistant", same("", True)),
    ("data.loss_mask.*", same("", False)),
    ("data.loss_mask.*", missing("the loss is on the assistant's tokens (data.train_on)")),
    ("data.micro_batch_size", missing(f"passes are packed: {ARGS}.max_tokens_per_microbatch")),
    ("data.num_workers", no_effect("env workers read the rows")),
    ("data.probabilities|stopping_strategy", missing("one file: mix the rows there")),
    ("data.**", missing("docs/pipelines.md#data")),
    ("val.interval", rename("eval_steps")),
    ("val.eval_on_start", same("rows are evaluated before training, too")),
    ("val.data.**", missing("validation rows are read as those of training")),
)  # fmt: skip
RULES: Rules = (*SHARED, *TRAINER, *ORCHESTRATOR, *INFERENCE, *SFT)
