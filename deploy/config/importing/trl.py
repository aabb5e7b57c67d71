"""Configurations of TRL's commands (`trl COMMAND --config FILE`), by TRL 1.16's names and defaults."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.importing.fitting import finish
from offbeat.deploy.config.importing.report import Imported, KeyReport, Outcome
from offbeat.deploy.config.importing.rules import (
    ALL_CHECKPOINTS,
    UNKNOWN,
    Key,
    Tree,
    add_defaults,
    apply,
    leaves,
    translate,
)
from offbeat.deploy.config.importing.trl_batches import ARGS, rollout_batch, to_batches
from offbeat.deploy.config.importing.trl_commands import COMMAND, NAME, find_command, find_pipeline
from offbeat.deploy.config.importing.trl_data import validation_name
from offbeat.deploy.config.importing.trl_keys import (
    CORRECTION,
    DECOUPLED,
    MATH_REWARDS,
    MODEL,
    RULES,
    importance_correction,
    loss_name,
    overlong_weight,
    reward_names,
)
from offbeat.deploy.config.loader import readable
from offbeat.deploy.config.yaml_limits import load_yaml
from offbeat.trainer.config.issue import ConfigIssue

NUM_GENERATIONS = {"grpo": 8, "rloo": 2}
COMPLETION = 512
"""TRL's default of `max_completion_length`, in tokens."""
PROMPT = 512
"""Tokens for a prompt, of which TRL's default has no limit."""
LEARNING_RATES = {"sft": 2e-5, "reward": 1e-4}
LEARNING_RATE = 1e-6
"""Of other commands."""
RLOO_KL = 0.05
"""TRL's default of `beta` in `trl rloo`."""
SYNC_STEPS, MIXUP = 512, 0.6
"""TRL's defaults with sync_ref_model."""
OVERLONG_MAX, OVERLONG_BUFFER = 1280, 256
"""Arguments that `trl grpo` gives its overlong punishment."""
ALL_TOKENS = (
    "TRL's loss is on every token of `messages`, unless assistant_only_loss is set; here it is on the assistant's "
    "(data.train_on)"
)
MAX_LENGTH = "max_length"
UNCUT = "TRL cuts no row: set sequence_length to the length of your longest one"
UNCUT_PROMPTS = (
    f"TRL has no limit on prompts; sequence_length leaves {PROMPT} tokens for them, and longer ones are left out: set it "
    "to your longest prompt plus max_completion_length"
)
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
"""TRL's defaults, which sample as Offbeat's evaluations do."""
KL_BEFORE_BASELINE = (
    "TRL's RLOO compares rewards less beta times their KL; here rewards are compared, and each token's KL is "
    "subtracted then"
)


def import_trl(path: Path, command: str | None = None) -> Imported:
    """Import a file of TRL's; raises `ConfigError`. command: TRL's, if the keys do not determine it."""
    tree, reports, remarks = translate_trl(path, command)
    return finish(path, tree, reports, remarks)


def translate_trl(path: Path, command: str | None = None) -> tuple[Tree, list[KeyReport], list[str]]:
    """Return our unvalidated tree, the outcome of each key, and remarks; raises `ConfigError`."""
    with readable(path):
        source: Any = load_yaml(path.read_text(encoding="utf-8"))
    if not isinstance(source, dict):
        raise ConfigError([ConfigIssue("", "expected a mapping of keys to values")], str(path))
    whole: Tree = {**source, NAME: path.stem} if command is None else {**source, COMMAND: command}
    keys = ((key, Key(key, value, whole)) for key, value in leaves(source, ("*",)))
    tree, reports = translate(keys, _decide)
    return tree, [*reports, *add_defaults(tree, _defaults(whole))], list(_remarks(whole))


def _decide(key: Key) -> Outcome:
    if key.value is None:
        is_uncut = key.path == (MAX_LENGTH,) and find_pipeline(key.tree) != "rlvr"
        return Outcome("no counterpart", note=UNCUT) if is_uncut else Outcome("same", note="not set")
    return apply(RULES, key) or Outcome("no counterpart", note=UNKNOWN)


def _remarks(source: Tree) -> Iterator[str]:
    command = find_command(source)
    if command.why:
        also = f", which `trl {command.alternative}` has, too" if command.alternative else ""
        yield f"read as a file of `trl {command.name}`, {command.why}{also}; another command's: --command"
    if command.name == "sft" and not source.get("assistant_only_loss"):
        yield ALL_TOKENS
    if find_pipeline(source) == "rlvr" and source.get("max_prompt_length") is None:
        yield UNCUT_PROMPTS
    if find_pipeline(source) == "rlvr" and source.get("eval_strategy") not in (None, "no", False):
        yield from _remark_on_evaluations(source)
    if command.name == "rloo" and source.get("beta", RLOO_KL):
        yield KL_BEFORE_BASELINE


def _remark_on_evaluations(source: Tree) -> Iterator[str]:
    given = {name: source.get(name) for name in SAMPLING}
    sampling = {name: value for name, value in given.items() if value is not None and value != SAMPLING[name]}
    if sampling:
        table = ", ".join(f"{name}: {value}" for name, value in sampling.items())
        yield (
            "TRL's evaluations sample as its training does: beside data.val_dataset_name set "
            f"val_env_manager.generating_args: {{{table}}}"
        )


def _defaults(source: Tree) -> Iterator[tuple[str, Any]]:
    """Yield TRL's defaults that differ from ours."""
    pipeline, command = find_pipeline(source), find_command(source).name
    yield "pipeline", pipeline
    if source.get("save_steps") or "save_total_limit" in source:
        yield "max_ckpt_to_keep", ALL_CHECKPOINTS
    if rows := validation_name(source):
        yield "data.val_dataset_name", rows
    yield f"{ARGS}.lr_scheduler_type", "linear"
    yield f"{ARGS}.adam_beta2", 0.999
    yield f"{ARGS}.learning_rate", LEARNING_RATES.get(command, LEARNING_RATE)
    yield f"{MODEL}.disable_gradient_checkpointing", False
    if source.get("bf16") is not False:
        yield f"{MODEL}.dtype", "bfloat16"
    yield "rollout_batch_size", rollout_batch(source)
    if (source.get("max_steps") or -1) < 0:
        yield "data.num_train_epochs", 3
    if source.get("use_peft"):
        yield f"{MODEL}.lora_rank", 16
        yield f"{MODEL}.lora_alpha", 32
        yield f"{MODEL}.lora_target", "q_proj,v_proj"  # PEFT's, of Llama, Qwen, Mistral and Gemma
    if source.get("sync_ref_model"):
        yield "ref_model_sync_steps", to_batches(SYNC_STEPS, source)
        yield "ref_model_mixup_alpha", MIXUP
    if pipeline != "rlvr":
        yield "sequence_length", 1024
        if command != "reward" and source.get(MAX_LENGTH, 0) is not None:
            yield "data.too_long", "truncate"
        if command == "sft":
            yield "data.response_key", "completion"
        if command == "kto":
            yield "dpo.loss_type", "kto"
            yield "data.shuffle", False
        return
    yield from _grpo_defaults(source)


def _grpo_defaults(source: Tree) -> Iterator[tuple[str, Any]]:
    """Yield the defaults of `trl grpo` and `trl rloo`."""
    command = find_command(source).name
    completion = source.get("max_completion_length") or COMPLETION
    yield "sequence_length", (source.get("max_prompt_length") or PROMPT) + completion
    yield "actor_infer.generating_args.max_new_tokens", completion
    yield "train_env_manager.group_size", NUM_GENERATIONS[command]
    yield "val_env_manager.group_size", source.get("num_generations") or NUM_GENERATIONS[command]
    if {*reward_names(source)} & {*MATH_REWARDS}:
        yield "data.ground_truth_key", "solution"
    if weight := overlong_weight(source):
        yield "reward_shaping.overlong_max_length", OVERLONG_MAX
        yield "reward_shaping.overlong_buffer", OVERLONG_BUFFER
        yield "reward_shaping.overlong_penalty", weight
    yield from _rloo_defaults(source) if command == "rloo" else _loss_defaults(source, completion)
    if source.get("scale_rewards") == "batch" and source.get("multi_objective_aggregation") != DECOUPLED:
        yield "reward_normalization.norm_mean_type", "group"
        yield "zero_variance", "train"  # groups with equal rewards count in the batch's deviation
    yield "adv_estimator", command
    yield "old_logprobs", "recompute"
    yield "max_staleness", 0
    correction = importance_correction(source) if command == "grpo" else {}
    for name, value in correction.items():
        yield f"{CORRECTION}.{name}", value
    yield "custom_envs", {"prompt": {"env_type": "prompt", "max_steps": 1, "max_tokens_per_step": completion}}


def _loss_defaults(source: Tree, completion: int) -> Iterator[tuple[str, Any]]:
    yield "loss_agg_mode", "token-mean"
    loss = loss_name(source)
    if loss == "dr_grpo":
        yield "loss_agg_length", completion
    if loss in ("cispo", "sapo"):
        yield "pg_variant", loss
    if source.get("beta"):
        yield "use_kl_loss", True
    if source.get("beta") or source.get("entropy_coef"):
        yield "zero_variance", "train"  # groups with equal rewards count in these terms


def _rloo_defaults(source: Tree) -> Iterator[tuple[str, Any]]:
    yield "loss_agg_mode", "seq-mean-token-mean"
    yield "ratio_type", "sequence-product"
    has_kl = source.get("beta", RLOO_KL)
    if has_kl:
        yield "init_kl_coef", RLOO_KL
    if has_kl or source.get("normalize_advantages"):
        yield "zero_variance", "train"  # groups with equal rewards count in the KL, mean and deviation
