"""Experiments of AReaL: the YAML file of a script's `--config`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.importing.areal_batches import (
    MINIBATCHES,
    SAMPLES,
    answer_tokens,
    device_defaults,
    eval_answer_tokens,
    evaluates_alone,
    find_pipeline,
    rollout_batch,
    sequence_length,
    slots,
    trainer_name,
)
from offbeat.deploy.config.importing.areal_keys import (
    EVALUATION,
    GSM8K,
    MODEL,
    RULES,
    SCRIPT,
    cuts_top_k,
    dataset_name,
    eval_samples,
    trackers,
)
from offbeat.deploy.config.importing.areal_loss import loss_defaults
from offbeat.deploy.config.importing.areal_optimizer import ARGS, LEARNING_RATE, warmup_steps
from offbeat.deploy.config.importing.environment import hide, reveal
from offbeat.deploy.config.importing.fitting import finish
from offbeat.deploy.config.importing.report import Imported, KeyReport, Outcome
from offbeat.deploy.config.importing.rules import (
    ALL_CHECKPOINTS,
    UNKNOWN,
    Key,
    Tree,
    WrongTypeError,
    add_defaults,
    apply,
    get,
    get_table,
    leaves,
    translate,
)
from offbeat.deploy.config.loader import readable
from offbeat.deploy.config.yaml_limits import load_yaml
from offbeat.trainer.config.issue import ConfigIssue

KNOWN = (
    "experiment_name", "trial_name", "cluster", "allocation_mode", "seed", "enable_offload", "total_train_epochs",
    "total_train_steps", "total_train_n_seqs", "tokenizer_path", "train_dataset", "valid_dataset", "saver", "evaluator",
    "stats_logger", "perf_tracer", "memory_profiler", "recover", "sglang", "vllm", "scheduler", "launcher", "actor", "ref",
    "critic", "teacher", "gconfig", "eval_gconfig", "rollout", "dynamic_bs", "async_training", "model_path",
)  # fmt: skip
"""Keys of AReaL's experiments; others are of a script's own."""
REQUEST_TIMEOUT_S = 3600.0
"""AReaL's default of `rollout.request_timeout`."""
BOXED = "{observation}\nPlease put your final answer within \\boxed{}."
"""AReaL's prompts of gsm8k."""
WORKFLOW = (
    "the workflow and its reward are in the script's Python: name `rewards`, and an env or agent in custom_envs for more "
    "than one answer"
)
SAMPLED = "a script may evaluate with a temperature of its own (gsm8k_rl.py: 0.6): val_env_manager.generating_args"
NO_MODEL = "no actor.path: set pretrain, which is the tiny policy now"
NO_REFERENCE = (
    "without actor.kl_ctl and `ref` AReaL adds -0.1 times its logprob to each token's reward, which rewards improbable "
    "tokens; nothing does here: entropy_loss_coef is nearest"
)
REJECTED = (
    "dynamic_bs: AReaL trains on accepted groups alone; here tokens of rejected groups count in the loss's mean, so that "
    "steps are smaller by their share (docs/algorithms.md#which-groups-and-episodes)"
)
LONG_ANSWERS = (
    "eval_gconfig without max_new_tokens has AReaL's default of 16384, here training's: "
    "val_env_manager.generating_args.max_new_tokens, with room in sequence_length and max_tokens_per_step"
)
PLAIN = "AReaL's SFT has question and answer as plain text; here they are a conversation by the policy's chat template"


def import_areal(path: Path) -> Imported:
    """Import a file of AReaL's; raises `ConfigError`."""
    try:
        return finish(path, *translate_areal(path))
    except WrongTypeError as error:
        raise ConfigError([ConfigIssue(error.key, str(error))], str(path)) from error


def translate_areal(path: Path) -> tuple[Tree, list[KeyReport], list[str]]:
    """Return our unvalidated tree, the outcome of each key, and remarks; raises `ConfigError`."""
    source, remarks = _read(path)
    keys = ((key, Key(key, value, source)) for key, value in leaves(source, ()))
    tree, reports = translate(keys, _decide)
    return tree, [*reports, *add_defaults(tree, _defaults(source))], [*remarks, *_remarks(source)]


def _read(path: Path) -> tuple[Tree, list[str]]:
    """Return a file's keys with its interpolations resolved, and remarks on those that name no key."""
    with readable(path):
        source = load_yaml(path.read_text(encoding="utf-8"))
    if not isinstance(source, dict) or not ({"actor", "train_dataset", "gconfig"} & {*source}):
        raise ConfigError([ConfigIssue("", "no experiment of AReaL: no actor, train_dataset or gconfig")], str(path))
    config, remarks, met = OmegaConf.create(cast(Tree, hide(source))), list[str](), set[str]()
    while True:
        try:
            resolved: Any = OmegaConf.to_container(config, resolve=True)
            return {str(name): value for name, value in reveal(resolved).items()}, remarks
        except InterpolationKeyError as error:
            key, problem = str(error.full_key), str(error.msg).partition("\n")[0]
            if key in met:
                raise ConfigError([ConfigIssue(key, f"{problem}: name a key, or leave it out")], str(path)) from error
            met.add(key)
            remarks.append(f"{key}: {problem}; left out")
            OmegaConf.update(config, key, None)
        except OmegaConfBaseException as error:
            raise ConfigError([ConfigIssue("", str(error).partition("\n")[0])], str(path)) from error


def _decide(key: Key) -> Outcome:
    if key.value is None:
        return Outcome("same", note="not set")
    if key.path[0] not in KNOWN:
        return Outcome("no counterpart", note=SCRIPT)
    return apply(RULES, key) or Outcome("no counterpart", note=UNKNOWN)


def served_model(source: Tree) -> Any:
    """Return the model that the engines serve, for a file without `actor.path`."""
    return get(source, "sglang.model_path") or get(source, "vllm.model")


def _remarks(source: Tree) -> Iterator[str]:
    if not get(source, "actor.path") and not served_model(source):
        yield NO_MODEL
    match find_pipeline(source):
        case "rlvr":
            yield WORKFLOW
            if get(source, "valid_dataset.path") and not get_table(source, "eval_gconfig"):
                yield SAMPLED
            yield from _rollout_remarks(source)
        case "sft" if GSM8K in str(get(source, "train_dataset.path")):
            yield PLAIN
        case _:
            pass


def _rollout_remarks(source: Tree) -> Iterator[str]:
    if get(source, "actor.kl_ctl") is None and not get_table(source, "ref"):
        yield NO_REFERENCE
    if (temperature := get(source, "gconfig.temperature", 1.0)) != 1.0 and get(source, "actor.temperature") is None:
        yield f"without actor.temperature AReaL's logprobs are at temperature 1, here at the sampling's, {temperature}"
    if get(source, "dynamic_bs"):
        yield REJECTED
    evaluates = get(source, "valid_dataset.path") and evaluates_alone(source)
    if evaluates and get(source, "eval_gconfig.max_new_tokens") is None:
        yield LONG_ANSWERS


def _defaults(source: Tree) -> Iterator[tuple[str, Any]]:
    """Yield AReaL's defaults that differ from ours."""
    pipeline = find_pipeline(source)
    yield "pipeline", pipeline
    if model := served_model(source):
        yield "pretrain", model
    yield "sequence_length", sequence_length(source)
    yield "rollout_batch_size", rollout_batch(source)
    if get(source, "total_train_steps") is None:
        yield "data.num_train_epochs", 1
    yield from _optimizer_defaults(source)
    yield f"{MODEL}.dtype", "bfloat16"
    if get(source, "actor.use_lora"):
        yield f"{MODEL}.lora_rank", 32
        yield f"{MODEL}.lora_alpha", 16
        yield f"{MODEL}.lora_target", "all-linear"
    yield from device_defaults(source)
    if names := trackers(source):
        yield "track_with", names
    if get(source, "saver.freq_steps"):
        yield "max_ckpt_to_keep", ALL_CHECKPOINTS
    if not any(get(source, f"evaluator.freq_{unit}") for unit in ("epochs", "steps", "secs")):
        yield "eval_steps", 0
    if GSM8K in str(dataset_name(get(source, "train_dataset.path"))):
        yield "data.prompt_key", "question"
        yield ("data.ground_truth_key" if pipeline == "rlvr" else "data.response_key"), "answer"
    if pipeline == "rlvr":
        yield from _rollout_defaults(source)


def _optimizer_defaults(source: Tree) -> Iterator[tuple[str, Any]]:
    yield f"{ARGS}.learning_rate", LEARNING_RATE
    yield f"{ARGS}.adam_beta2", 0.999
    yield f"{ARGS}.weight_decay", 0.01
    if trainer_name(source) != "megatron":
        yield f"{ARGS}.decay_all_weights", True  # Megatron's optimizer spares norms and biases
    if steps := warmup_steps(source):
        yield f"{ARGS}.warmup_steps", steps
        if get(source, "actor.optimizer.lr_scheduler_type") is None:
            yield f"{ARGS}.lr_scheduler_type", "constant_with_warmup"


def _rollout_defaults(source: Tree) -> Iterator[tuple[str, Any]]:
    """Yield the defaults of experiments that sample."""
    answer = answer_tokens(source)
    yield f"{ARGS}.num_minibatches", MINIBATCHES
    yield "actor_infer.generating_args.max_new_tokens", answer
    yield "train_env_manager.group_size", SAMPLES
    yield "train_env_manager.num_env_groups", slots(source)
    yield "actor_infer.request_timeout_s", REQUEST_TIMEOUT_S
    ahead = get(source, "rollout.max_head_offpolicyness", 0)
    yield "max_staleness", ahead
    if ahead:
        yield "buffer.stale_policy", "train"  # AReaL drops nothing
    yield from loss_defaults(source)
    if not evaluates_alone(source):
        for name in ("temperature", "top_p"):
            if (value := get(source, f"gconfig.{name}", 1.0)) != 1.0:
                yield f"{EVALUATION}.{name}", value
        if cuts_top_k(top_k := get(source, "gconfig.top_k")):
            yield f"{EVALUATION}.top_k", top_k
    yield "val_env_manager.group_size", eval_samples(source)
    env: dict[str, Any] = {
        "env_type": "prompt",
        "max_steps": 1,
        "max_tokens_per_step": max(answer, eval_answer_tokens(source)),
    }
    if GSM8K in str(get(source, "train_dataset.path")):
        env["agent_template"] = BOXED
    yield "custom_envs", {"prompt": env}
