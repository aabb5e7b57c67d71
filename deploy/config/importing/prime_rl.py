"""Configurations of prime-rl: TOML files of `rl` and `sft`, or of a run's trainer, orchestrator and inference."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.importing.fitting import finish
from offbeat.deploy.config.importing.prime_rl_batches import (
    batch,
    devices,
    eval_size,
    group_size,
    max_off_policy,
    slots,
    staleness,
)
from offbeat.deploy.config.importing.prime_rl_envs import (
    all_tags,
    env_defaults,
    eval_tags,
    longest_of_training,
    partition,
    sequence_length,
    train_tags,
)
from offbeat.deploy.config.importing.prime_rl_files import PrimeFile, read_run, sources
from offbeat.deploy.config.importing.prime_rl_keys import RULES, WANDB
from offbeat.deploy.config.importing.prime_rl_learning import (
    ARGS,
    DISTILLED,
    MODEL,
    PEFT_NAMES,
    UNCLIPPED,
    algorithm,
    is_unclipped,
    rejects_zero,
    schedule,
)
from offbeat.deploy.config.importing.report import Imported, KeyReport, Outcome
from offbeat.deploy.config.importing.rules import (
    ABSENT,
    ALL_CHECKPOINTS,
    UNKNOWN,
    Key,
    Tree,
    WrongTypeError,
    add_defaults,
    apply,
    get,
    get_table,
    translate,
)
from offbeat.trainer.config.issue import ConfigIssue

DATASET, POLICY = "PrimeIntellect/Reverse-Text-SFT", "Qwen/Qwen3-0.6B"
"""prime-rl's defaults of `data.name` and `model.name`."""
ENDLESS = 1_000_000
"""Steps of a run without `max_steps`, which prime-rl trains until it is stopped."""
SFT_LENGTH = 128
"""prime-rl's default of `data.seq_len`, in tokens."""
MASKED = (
    "prime-rl's loss is a mean over tokens with an advantage; here tokens of groups with equal rewards count in the mean, "
    "so that steps are smaller by their share (docs/algorithms.md#which-groups-and-episodes)"
)
DECREASES = (
    "prime-rl's loss of distillation drops every token whose probability decreased by more than 0.2; here those with a "
    "negative advantage alone"
)
LIMIT = "sampling.max_completion_tokens"
UNLIMITED = (
    "without max_completion_tokens prime-rl's evaluations sample until the context ends, here as many tokens as training: "
    "val_env_manager.generating_args.max_new_tokens, and max_tokens_per_step of custom_envs"
)
IN_ORDER = "tasks are drawn at random here; prime-rl takes them in the taskset's order"
EVALUATED = (
    "without a temperature prime-rl's evaluations sample as the model's generation_config says, here at temperature 1: "
    "val_env_manager.generating_args"
)
COPIED = "values of env_vars are copied into the file: write secrets as references, ${oc.env:NAME}"
PACKED = "prime-rl packs rows into sequences of seq_len tokens, of which it counts a batch; here a batch counts rows"


def import_prime_rl(paths: Sequence[Path]) -> Imported:
    """Import a file of prime-rl's, or the parts of one run; raises `ConfigError`."""
    file = read_run(paths)
    try:
        return finish(file.path, *translate_prime_rl(file))
    except WrongTypeError as error:
        raise ConfigError([ConfigIssue(error.key, str(error))], str(file.path)) from error


def translate_prime_rl(file: PrimeFile) -> tuple[Tree, list[KeyReport], list[str]]:
    """Return our unvalidated tree, the outcome of each key, and remarks."""
    keys = ((shown, Key(name, value, file.tree)) for shown, name, value in file.keys)
    tree, reports = translate(keys, _decide)
    return tree, [*reports, *add_defaults(tree, _defaults(file))], list(_remarks(file))


def _decide(key: Key) -> Outcome:
    if key.value is None and key.path[-1] != "max_norm":
        return Outcome("same", note="not set")
    return apply(RULES, key) or Outcome("no counterpart", note=UNKNOWN)


def _remarks(file: PrimeFile) -> Iterator[str]:
    source = file.tree
    if any(len(name) > 1 and name[-2] == "env_vars" for _, name, _ in file.keys):
        yield COPIED
    if file.kind in ("trainer", "orchestrator", "inference"):
        yield f"a file of prime-rl's {file.kind} alone: import it together with the run's other files"
    if file.kind == "sft":
        yield PACKED
        return
    if not train_tags(source):
        return
    yield IN_ORDER
    is_pruned = get(source, "orchestrator.train.filter_zero_advantages", True)
    if algorithm(source) in DISTILLED:
        yield DECREASES
    elif is_pruned and not rejects_zero(source):
        yield MASKED
    if eval_tags(source) and get(source, "orchestrator.eval.sampling.temperature") is None:
        yield EVALUATED
    if any(get(each, LIMIT, get(source, f"orchestrator.eval.{LIMIT}")) is None for each in sources(source, "eval")):
        yield UNLIMITED


def _defaults(file: PrimeFile) -> Iterator[tuple[str, Any]]:
    """Yield prime-rl's defaults that differ from ours."""
    source = file.tree
    if file.kind == "sft":
        yield "pipeline", "sft"
        yield "sequence_length", SFT_LENGTH
        yield "rollout_batch_size", batch(source)
        yield "data.too_long", "truncate"
        if get(source, "data.type", "sft") == "sft" and get_table(source, "data"):
            yield "data.dataset_name", DATASET
        yield "data.response_key", "completion"
        if "val" in source:
            yield "eval_steps", 50
    if file.kind != "inference":
        yield from _trainer_defaults(source)
    yield from _run_defaults(source)
    if file.kind in ("rl", "orchestrator"):
        yield from _algorithm_defaults(source)
    yield from env_defaults(source)
    tags = eval_tags(source)
    if tags and set(tags) != set(all_tags(source)):
        yield "val_env_manager.tags", tags
    if tags:
        yield "eval_steps", 100
        if episodes := eval_size(source):
            yield "final_val_batch_size", episodes
    elif train_tags(source):
        yield "eval_steps", 0


def _run_defaults(source: Tree) -> Iterator[tuple[str, Any]]:
    yield "pretrain", POLICY
    if get(source, "max_steps") is None:
        yield "max_steps", ENDLESS
    saves = [get_table(source, name) for name in ("ckpt", "trainer.ckpt")]
    if any("interval" in each for each in saves):
        yield "max_ckpt_to_keep", ALL_CHECKPOINTS
    if any(get_table(source, name) for name in ("monitors.wandb", "trainer.monitors.wandb",
                                                "orchestrator.monitors.wandb")):  # fmt: skip
        yield "track_with", ["wandb"]
        yield f"{WANDB}.project", "prime-rl"
    if (found := devices(source)) is not None:
        sampling, training = found
        if sampling and all_tags(source):
            yield "actor_infer.device_mapping", sampling
        yield "actor_train.device_mapping", training


def _trainer_defaults(source: Tree) -> Iterator[tuple[str, Any]]:
    yield f"{ARGS}.learning_rate", 1e-6
    yield f"{ARGS}.adam_beta2", 0.999
    yield f"{ARGS}.weight_decay", 0.01
    yield f"{ARGS}.decay_all_weights", True
    if is_unclipped(source):
        yield f"{ARGS}.max_grad_norm", UNCLIPPED
    name, kwargs = schedule(source)
    if name != "constant":
        yield f"{ARGS}.warmup_steps", 10
    if kwargs:
        yield f"{ARGS}.lr_scheduler_kwargs", kwargs
    yield f"{MODEL}.dtype", "bfloat16"
    activations = [get(source, f"trainer.model.{name}", ABSENT) for name in ("ac", "ac_offloading")]
    if activations != [None, None]:  # offloading implies checkpointing
        yield f"{MODEL}.disable_gradient_checkpointing", False
    yield "actor_train.strategy_args.strategy_name", "fsdp2_train"
    if get(source, "trainer.model.lora") is not None:
        yield f"{MODEL}.lora_rank", 16
        yield f"{MODEL}.lora_alpha", 32.0
        yield f"{MODEL}.lora_target", ",".join(PEFT_NAMES)


def _algorithm_defaults(source: Tree) -> Iterator[tuple[str, Any]]:
    name = algorithm(source)
    yield "adv_estimator", "dr_grpo"
    if name == "rae":
        yield "reward_normalization.norm_mean_type", "running"
    yield "pg_variant", "dppo_tv"
    if name in DISTILLED:
        yield "dppo_mask_high", 1.0  # its loss masks decreases alone
    elif get(source, "trainer.loss.type") == "ipo":
        threshold = get(source, "trainer.loss.ipo_threshold", 0.1)
        yield "dppo_mask_low", threshold
        yield "dppo_mask_high", threshold
    yield "sequence_length", sequence_length(source)
    yield "rollout_batch_size", batch(source)
    yield "train_env_manager.group_size", group_size(source)
    yield "train_env_manager.num_env_groups", slots(source)
    ahead = staleness(source)
    yield "max_staleness", ahead
    if ahead < max_off_policy(source):
        yield "buffer.stale_policy", "train"
    tags = train_tags(source)
    if set(tags) != set(all_tags(source)):
        yield "train_env_manager.tags", tags
    if shares := partition(source, slots(source)):
        yield "train_env_manager.tags", tags
        yield "train_env_manager.num_groups_partition", list(shares)
    if tags:
        yield "actor_infer.generating_args.max_new_tokens", longest_of_training(source)
    if eval_tags(source):
        yield "val_env_manager.group_size", 1
