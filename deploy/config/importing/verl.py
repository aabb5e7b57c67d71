"""Configurations of verl: scripts with overrides (`python -m verl.trainer.main_ppo KEY=VALUE ...`), or YAML files."""

import re
import shlex
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any

import yaml

from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.importing.fitting import finish
from offbeat.deploy.config.importing.report import Imported, KeyReport, Outcome
from offbeat.deploy.config.importing.rules import (
    Key,
    Rules,
    Tree,
    become,
    get,
    missing,
    no_effect,
    put,
    rename,
    same,
    take_file,
    translate_all,
)
from offbeat.deploy.config.loader import readable
from offbeat.deploy.config.yaml_limits import load_yaml
from offbeat.trainer.config.aliases import ENGINE
from offbeat.trainer.config.issue import ConfigIssue

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
ARGS = "actor_train.training_args"
VARIABLE = re.compile(r"\$(?:\{(?P<name>\w+)(?::?-(?P<default>[^}]*))?\}|(?P<bare>\w+))")
ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)")
OVERRIDE = re.compile(r"[+~]*(?P<key>[A-Za-z_][\w.]*)=(?P<value>.*)", re.DOTALL)
PROMPTS, RESPONSES = 1024, 1
"""verl's defaults of train_batch_size and rollout.n."""
MISSING_ESTIMATORS = ("grpo_passk", "optimal_token_baseline")
KL_TYPES = {"low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2", "abs": "abs", "full": "full"}


def _batch(key: Key) -> Outcome | None:
    if not isinstance(key.value, int) or not isinstance(_responses(key.tree), int):
        return None
    return Outcome("value", ("rollout_batch_size",), key.value * _responses(key.tree), "responses, not prompts")


def _responses(tree: Tree) -> int:
    return get(tree, f"{ROLLOUT}.n") or RESPONSES


def _minibatch(key: Key) -> Outcome | None:
    prompts = get(key.tree, "data.train_batch_size") or PROMPTS
    if not isinstance(key.value, int) or not isinstance(prompts, int):
        return None
    steps = max(1, ceil(prompts / key.value))
    return Outcome("value", tuple(f"{ARGS}.num_minibatches".split(".")), steps, "optimizer steps per batch")


def _estimator(key: Key) -> Outcome | None:
    if key.value in MISSING_ESTIMATORS:
        return Outcome("no counterpart", note=f"no {key.value} here: see docs/algorithms.md")
    if key.value == "grpo" and get(key.tree, "algorithm.norm_adv_by_std_in_grpo") is False:
        return Outcome("value", ("adv_estimator",), "dr_grpo", "norm_adv_by_std_in_grpo: false")
    return Outcome("renamed", ("adv_estimator",), key.value)


def _kl_in_reward(key: Key) -> Outcome:
    if not get(key.tree, "algorithm.use_kl_in_reward"):
        return Outcome("no effect", note="use_kl_in_reward is not set")
    return Outcome("renamed", ("init_kl_coef",), key.value)


def _kl_loss(key: Key) -> Outcome:
    if not get(key.tree, f"{ACTOR}.use_kl_loss"):
        return Outcome("no effect", note="use_kl_loss is not set")
    if key.path[-1] == "kl_loss_coef":
        return Outcome("renamed", ("kl_loss_coef",), key.value)
    if key.value not in KL_TYPES:
        return Outcome("no counterpart", note="its mean gradient is 0: take kl_loss_type k3")
    return Outcome("value", ("kl_loss_type",), KL_TYPES[key.value])


def _trackers(key: Key) -> Outcome:
    names = [key.value] if isinstance(key.value, str) else list(key.value or ())
    known = {"console": "stdout"}
    return Outcome("value", ("track_with",), [known.get(name, name) for name in names])


def _tokens(key: Key) -> Outcome:
    if not get(key.tree, f"{ACTOR}.use_dynamic_bsz"):
        return Outcome("no effect", note="use_dynamic_bsz is not set")
    return Outcome("renamed", tuple(f"{ARGS}.max_tokens_per_microbatch".split(".")), key.value)


def _warmup(key: Key) -> Outcome | None:
    if (get(key.tree, f"{ACTOR}.optim.lr_warmup_steps") or -1) > 0:
        return Outcome("no effect", note="lr_warmup_steps counts")
    steps = get(key.tree, "trainer.total_training_steps")
    if not isinstance(key.value, float | int) or not isinstance(steps, int):
        return None
    return Outcome("value", (*ARGS.split("."), "warmup_steps"), int(steps * key.value), f"of {steps} steps")


def _positive(target: str) -> Any:
    return lambda key: (
        Outcome("renamed", tuple(target.split(".")), key.value) if key.value > 0 else Outcome("same", note="off")
    )


RULES: Rules = (
    ("data.train_files", take_file("data.dataset_name")),
    ("data.val_files", take_file("data.val_dataset_name")),
    ("data.train_batch_size", _batch),
    ("data.max_prompt_length", rename("data.prompt_length")),
    ("data.max_response_length", rename("actor_infer.generating_args.max_new_tokens")),
    ("data.prompt_key", rename("data.messages_key")),
    ("data.shuffle", lambda key: Outcome("same", key.path, key.value)),
    ("data.filter_overlong_prompts", same("longer prompts are left out", True)),
    ("data.truncation", same("longer prompts are left out")),
    ("data.val_batch_size", no_effect("each evaluation takes every row once")),
    ("actor_rollout_ref.model.path", rename("pretrain")),
    ("actor_rollout_ref.model.enable_gradient_checkpointing",
     become("actor_train.model_args.disable_gradient_checkpointing", lambda on: not on)),
    ("actor_rollout_ref.model.use_remove_padding", same("sequences are always packed")),
    ("actor_rollout_ref.model.lora_rank", _positive("actor_train.model_args.lora_rank")),
    ("actor_rollout_ref.model.lora_alpha", rename("actor_train.model_args.lora_alpha")),
    ("actor_rollout_ref.model.target_modules", become(
        "actor_train.model_args.lora_target", lambda names: ",".join(names) if isinstance(names, list) else names
    )),
    (f"{ACTOR}.optim.lr", rename(f"{ARGS}.learning_rate")),
    (f"{ACTOR}.optim.weight_decay", rename(f"{ARGS}.weight_decay")),
    (f"{ACTOR}.optim.lr_warmup_steps", _positive(f"{ARGS}.warmup_steps")),
    (f"{ACTOR}.optim.lr_warmup_steps_ratio", _warmup),
    (f"{ACTOR}.optim.lr_warmup_steps_ratio", missing(f"set {ARGS}.warmup_steps")),
    (f"{ACTOR}.optim.lr_scheduler_type|warmup_style", rename(f"{ARGS}.lr_scheduler_type")),
    (f"{ACTOR}.grad_clip", rename(f"{ARGS}.max_grad_norm")),
    (f"{ACTOR}.ppo_mini_batch_size", _minibatch),
    (f"{ACTOR}.ppo_micro_batch_size_per_gpu|ppo_micro_batch_size", lambda key: no_effect("use_dynamic_bsz")(key)
     if get(key.tree, f"{ACTOR}.use_dynamic_bsz") else rename(f"{ARGS}.per_device_train_batch_size")(key)),
    (f"{ACTOR}.use_dynamic_bsz", same(f"{ARGS}.max_tokens_per_microbatch")),
    (f"{ACTOR}.ppo_max_token_len_per_gpu", _tokens),
    (f"{ACTOR}.ppo_epochs", rename("ppo_epochs")),
    (f"{ACTOR}.clip_ratio", rename("pg_clip")),
    (f"{ACTOR}.clip_ratio_low", rename("pg_clip_low")),
    (f"{ACTOR}.clip_ratio_high", rename("pg_clip_high")),
    (f"{ACTOR}.clip_ratio_c", rename("dual_clip")),
    (f"{ACTOR}.loss_agg_mode", rename("loss_agg_mode")),
    (f"{ACTOR}.entropy_coeff", rename("entropy_loss_coef")),
    (f"{ACTOR}.use_kl_loss", rename("use_kl_loss")),
    (f"{ACTOR}.kl_loss_coef|kl_loss_type", _kl_loss),
    (f"{ACTOR}.strategy", become("actor_train.strategy_args.strategy_name", lambda _: "fsdp2_train", "", "fsdp", "fsdp2")),
    (f"{ACTOR}.strategy", become("actor_train.strategy_args.strategy_name", lambda _: "fsdp2_train",
                                 "no Megatron here", "megatron")),
    (f"{ACTOR}.fsdp_config.**", missing("fsdp2_train shards over all processes; deepspeed_train can offload")),
    (f"{ACTOR}.ulysses_sequence_parallel_size", missing("a sequence is on one device", 2, 4, 8)),
    (f"{ACTOR}.ulysses_sequence_parallel_size", same("", 1)),
    (f"{ROLLOUT}.n", rename("train_env_manager.group_size")),
    (f"{ROLLOUT}.temperature", rename("actor_infer.generating_args.temperature")),
    (f"{ROLLOUT}.top_p", rename("actor_infer.generating_args.top_p")),
    (f"{ROLLOUT}.top_k", rename("actor_infer.generating_args.top_k")),
    (f"{ROLLOUT}.name", become("actor_infer.strategy_args.strategy_name", lambda _: "vllm")),
    (f"{ROLLOUT}.tensor_model_parallel_size", rename(f"{ENGINE}.tensor_parallel_size")),
    (f"{ROLLOUT}.gpu_memory_utilization|max_num_batched_tokens|max_num_seqs|enforce_eager|max_model_len",
     lambda key: Outcome("renamed", (*ENGINE.split("."), key.path[-1]), key.value)),
    (f"{ROLLOUT}.val_kwargs.temperature|top_p|top_k",
     lambda key: Outcome("renamed", ("val_env_manager", "generating_args", key.path[-1]), key.value)),
    (f"{ROLLOUT}.val_kwargs.n", rename("val_env_manager.group_size")),
    (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu|log_prob_micro_batch_size", rename("actor_train.infer_batch_size")),
    (f"{ROLLOUT}.mode", same("requests are asynchronous")),
    (f"{ROLLOUT}.multi_turn.**", missing("turns are those of an env: pipeline: agentic")),
    (f"{REF}.log_prob_micro_batch_size_per_gpu|log_prob_micro_batch_size", rename("reference.infer_batch_size")),
    (f"{REF}.fsdp_config.**", missing("reference.strategy_args.strategy_name: deepspeed_infer shards it")),
    ("algorithm.adv_estimator", _estimator),
    ("algorithm.norm_adv_by_std_in_grpo", same("adv_estimator")),
    ("algorithm.gamma", rename("gamma")),
    ("algorithm.lam", rename("lambd")),
    ("algorithm.use_kl_in_reward", same("init_kl_coef")),
    ("algorithm.kl_ctrl.kl_coef", _kl_in_reward),
    ("algorithm.filter_groups.enable", become("zero_variance", lambda on: "refill" if on else None)),
    ("algorithm.filter_groups.**", missing("zero_variance: refill takes groups until a batch is full")),
    ("critic.optim.lr", rename("critic.training_args.learning_rate")),
    ("critic.model.path", rename("critic.model_args.model_name_or_path")),
    ("critic.cliprange_value", rename("value_clip")),
    ("trainer.critic_warmup", rename("critic_warmup")),
    ("trainer.total_epochs", lambda key: no_effect("total_training_steps counts")(key)
     if get(key.tree, "trainer.total_training_steps") else rename("data.num_train_epochs")(key)),
    ("trainer.total_training_steps", rename("max_steps")),
    ("trainer.save_freq", _positive("save_steps")),
    ("trainer.test_freq", _positive("eval_steps")),
    ("trainer.experiment_name", rename("exp_name")),
    ("trainer.project_name", missing("tracker_kwargs.wandb.project")),
    ("trainer.default_local_dir", rename("output_dir")),
    ("trainer.logger", _trackers),
    ("trainer.n_gpus_per_node", rename("num_gpus_per_node")),
    ("trainer.nnodes", missing("device_mapping says which devices a role has (docs/devices.md)")),
    ("trainer.val_before_train", same("evaluated before and after training")),
    ("custom_reward_function.path|name", missing("rewards: [{name: score, kind: function, path: module:function}]")),
)  # fmt: skip


def import_verl(path: Path) -> Imported:
    """Import a script or YAML file of verl's; raises `ConfigError`."""
    tree, reports = translate_verl(path)
    return finish(path, tree, reports)


def translate_verl(path: Path) -> tuple[Tree, list[KeyReport]]:
    """Return our unvalidated tree and the outcome of each key; raises `ConfigError`."""
    with readable(path):
        text = path.read_text(encoding="utf-8")
        source = load_yaml(text) if path.suffix in (".yaml", ".yml") else read_overrides(text)
    if not isinstance(source, dict) or not source:
        raise ConfigError([ConfigIssue("", "no `key=value` of verl, nor a mapping of keys to values")], str(path))
    return translate_all(source, RULES, _defaults(source))


def read_overrides(script: str) -> Tree:
    """Return the dotted keys of a shell script, with its variables expanded."""
    tree, variables = Tree(), dict[str, str]()
    for line in script.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue  # a quote over several lines is no override
        words = words[1:] if words[:1] == ["export"] else words
        if len(words) == 1 and (match := ASSIGNMENT.fullmatch(words[0])):
            variables[match["name"]] = _expand(match["value"], variables)
            continue
        for word in words:
            match = OVERRIDE.fullmatch(word)
            if match and "." in match["key"]:
                put(tree, tuple(match["key"].split(".")), _parse(_expand(match["value"], variables)))
    return tree


def _parse(text: str) -> Any:
    """Read a value as Hydra does; invalid YAML is text."""
    try:
        return load_yaml(text)
    except yaml.YAMLError:
        return text


def _expand(text: str, variables: dict[str, str]) -> str:
    """Expand the script's variables, but not the environment's."""

    def value(match: re.Match[str]) -> str:
        name = match["name"] or match["bare"]
        return variables.get(name) or match["default"] or match.group()

    return VARIABLE.sub(value, text)


def _number(source: Tree, key: str, default: int) -> int:
    value = get(source, key)
    return value if isinstance(value, int) else default


def _defaults(source: Tree) -> Iterator[tuple[str, Any]]:
    """Yield verl's defaults that differ from ours."""
    response = _number(source, "data.max_response_length", 512)
    prompts = _number(source, "data.train_batch_size", PROMPTS)
    yield "pipeline", "rlvr"
    yield "data.messages_key", "prompt"
    yield "data.prompt_length", 512
    yield "sequence_length", _number(source, "data.max_prompt_length", 512) + response
    yield "rollout_batch_size", prompts * _number(source, f"{ROLLOUT}.n", RESPONSES)
    yield "train_env_manager.group_size", RESPONSES
    yield "train_env_manager.num_env_groups", prompts
    yield "adv_estimator", "gae"
    yield "loss_agg_mode", "token-mean"
    yield "old_logprobs", "recompute"
    yield "max_staleness", 0
    yield f"{ARGS}.adam_beta2", 0.999
    if get(source, "algorithm.use_kl_in_reward"):
        yield "init_kl_coef", 0.001
    if not get(source, "trainer.total_training_steps"):
        yield "data.num_train_epochs", 30
    yield "custom_envs", {"prompt": {"env_type": "prompt", "max_steps": 1, "max_tokens_per_step": response}}
