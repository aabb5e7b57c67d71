"""ROLL's agentic keys as ours."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from offbeat.deploy.config.importing.report import Outcome
from offbeat.deploy.config.importing.roll_rlvr import REWARDS, place_reward
from offbeat.deploy.config.importing.roll_roles import WITH_IMAGE
from offbeat.deploy.config.importing.roll_run import (
    GROUPING,
    SAMPLING,
    STEPS_DEFAULT,
    estimator_default,
    evaluation_sampling,
    is_distillation,
    normalization_scopes,
)
from offbeat.deploy.config.importing.roll_tools import tools
from offbeat.deploy.config.importing.rules import (
    Key,
    Rule,
    Tree,
    apply,
    get,
    get_table,
    missing,
    no_effect,
    rename,
    same,
)
from offbeat.envs.registry import BUILT_IN, setting_names

GEM_KINDS = ("game", "math", "code", "qa", "logic", "rg", "eval")
"""Name spaces of GEM's ids."""
ENVS = {
    "roll_math": ("math", "questions and answers from a file"),
    "roll_qa": ("qa", "questions and answers from a file"),
    "roll_code": ("code", "problems from a file"),
    "sokoban_sandbox": ("sokoban", "the same game without ROCK's sandbox: execution: process isolates it"),
    "sokoban_native_env": ("sokoban", "the same game"),
    "sokoban_tool_call": ("sokoban", "the same game, without calls of tools"),
}
"""ROLL's env -> ours."""
NO_COLUMN, MAX_COLUMN = re.compile(r"[^A-Za-z0-9_-]+"), 64
"""Of a reward's name."""
MAX_NEW_TOKENS = 8192
"""ROLL's default."""
JUDGE = "roll.pipeline.rlvr.rewards.llm_judge_reward_worker.LLMJudgeRewardWorker"
JUDGE_NOTE = (
    "ROLL's env asks it and weighs the answer; here it judges the whole episode, and its score is added to the env's "
    "reward: set template and weight"
)
OWN_ENV = "no such env here: name a class of your own as `module:Class` (docs/environments.md)"


def _env_type(key: Key) -> Outcome | None:
    name = str(key.value)
    if name in BUILT_IN:
        return None
    if name in ENVS:
        ours, why = ENVS[name]
        return Outcome("value", key.path, ours, why)
    if ":" in name and name.partition(":")[0] in GEM_KINDS:
        return Outcome("value", key.path, "gem", f"env_config.id: {name}, by package gem-llm")
    return Outcome("value", key.path, name, OWN_ENV)


def _env_setting(key: Key) -> Outcome | None:
    """Move settings of GEM's envs; drop those that our env lacks."""
    tag, name = key.path[1], key.path[3]
    env_type = str(get(key.tree, ("custom_envs", tag, "env_type")))
    if name == "env_instruction":
        return None
    if ":" in env_type:
        return Outcome("renamed", (*key.path[:3], "kwargs", name), key.value, "an argument of gem.make")
    ours = env_type if env_type in BUILT_IN else ENVS.get(env_type, ("",))[0]
    if not ours or name in setting_names(ours):
        return None
    if name == "max_steps":
        return Outcome("same", note=f"custom_envs.{tag}.max_steps")
    return Outcome("no counterpart", note=f"{ours} has no such setting")


def _manager(key: Key) -> Outcome | None:
    """Map managers unknown to `aliases.py`."""
    name = str(key.value).rpartition(".")[2]
    if WITH_IMAGE in str(key.value):
        return Outcome("value", key.path, "TrajEnvManager", "images are {image} in agent_template")
    if "proxy_env_manager" in str(key.value):
        return Outcome(
            "value", key.path, "TrajEnvManager", "write agent_runner: {path: module:function} (docs/agents.md)"
        )
    if name == "AgentNativeStepEnvManager" or "agent_native" in str(key.value):
        return Outcome(
            "value",
            key.path,
            "StepConcatEnvManager",
            "ROLL's agent loop: here an agent_runner has one (docs/agents.md)",
        )
    return None


def _runner(key: Key) -> Outcome:
    if key.value is None:
        return Outcome("same", note="the policy answers observations")
    return Outcome(
        "no counterpart", note=f"{key.value}: write agent_runner: {{path: module:function}} (docs/agents.md)"
    )


def _history(key: Key) -> Outcome | None:
    manager = str(get(key.tree, ("custom_envs", key.path[1], "env_manager_cls")) or "")
    if manager.endswith(".StepEnvManager"):
        return None
    return Outcome("no effect", note="of StepEnvManager alone")


def _image_template(key: Key) -> Outcome:
    """Join the texts before and after the image."""
    tag = key.path[1]
    env = get_table(key.tree, ("custom_envs", tag))
    before, after = env.get("pre_step_template") or "", env.get("next_step_template") or ""
    text = f"{before}{{image}}{after}"
    return Outcome("value", ("custom_envs", tag, "agent_template"), text, "one template with {image}")


def _template(key: Key) -> Outcome | None:
    """Convert templates: ROLL's `{history}` of StepConcatEnvManager ends with the current observation, as
    `{observation}` here."""
    manager = str(get(key.tree, ("custom_envs", key.path[1], "env_manager_cls")) or "")
    if key.value is None:
        return Outcome("same", note="the observation alone")
    if not manager.endswith(".StepConcatEnvManager") or "{history}" not in str(key.value):
        return None
    return Outcome(
        "value", key.path, key.value.replace("{history}", "{observation}"), "{history} is {observation} here"
    )


def _is_split(tree: Tree) -> bool:
    table = get_table(tree, "reward_normalization")
    return bool(table.get("norm_mean_type") or table.get("norm_std_type"))


def _of_turns(tree: Tree) -> bool:
    return get(tree, "adv_estimator") == "step_reinforce"


def _uses_grouping(tree: Tree) -> bool:
    if not _is_split(tree):
        return any(normalization_scopes(tree))
    return bool(normalization_scopes(tree)[0]) if _of_turns(tree) else "group" in normalization_scopes(tree)


def _normalization(key: Key) -> Outcome | None:
    """Drop `grouping` if nothing is normalized by it, and make one way of two to name mean and deviation."""
    name = key.path[-1]
    if name == "grouping":
        return None if _uses_grouping(key.tree) else Outcome("no effect", note="nothing is normalized by it")
    if key.value is None:
        return Outcome("same", note="not set")
    if _is_split(key.tree):
        return _turn_normalization(key) if _of_turns(key.tree) else _split_normalization(key)
    if name == "method" and key.value == "asym_clip":
        return Outcome("value", key.path, "mean_std", "which ROLL takes for it: there is no clip")
    return None


def _split_normalization(key: Key) -> Outcome | None:
    """Write the scope that ROLL derives from `method`, since the other one is given."""
    if key.path[-1] != "method":
        return None
    for name, scope in zip(("norm_mean_type", "norm_std_type"), normalization_scopes(key.tree), strict=True):
        if scope and not get(key.tree, ("reward_normalization", name)):
            return Outcome("value", ("reward_normalization", name), scope, "which ROLL derives from it")
    return Outcome("no effect", note="norm_mean_type and norm_std_type count")


def _turn_normalization(key: Key) -> Outcome:
    """Normalize turns with one scope of mean and deviation."""
    mean, std = normalization_scopes(key.tree)
    named = "norm_mean_type" if get(key.tree, "reward_normalization.norm_mean_type") else "method"
    if not mean or key.path[-1] == "norm_std_type":
        return Outcome("no counterpart", note="mean and deviation have one scope, reward_normalization.grouping")
    if key.path[-1] != named:
        return Outcome("same", note=f"with {named}")
    method = "mean_std" if std else "mean"
    return Outcome("value", ("reward_normalization", "method"), method, "over reward_normalization.grouping")


def _groups_per_step(tree: Tree) -> int:
    batch, size = get(tree, "rollout_batch_size"), get(tree, "train_env_manager.group_size") or 1
    return -(-batch // size) if isinstance(batch, int) and isinstance(size, int) and batch > 0 else 1


def _groups(key: Key) -> Outcome | None:
    """Put all rounds of a batch in flight."""
    least = _groups_per_step(key.tree)
    if not isinstance(key.value, int) or key.value >= least:
        return None
    return Outcome("value", key.path, least, "groups of a batch, which are in flight together")


def _partition(key: Key) -> Outcome | None:
    """Keep the shares of tags in the number of groups."""
    groups, least = get(key.tree, "train_env_manager.num_env_groups"), _groups_per_step(key.tree)
    if not isinstance(groups, int) or groups >= least or not isinstance(key.value, list):
        return None
    if len(key.value) == 1:
        return Outcome("value", key.path, [least], "as num_env_groups")
    return Outcome("no counterpart", note="equal shares, since num_env_groups is another: set it again")


def _generating(key: Key) -> Outcome | None:
    """Drop a manager's sampling settings if the engine has some: ROLL gives those to both managers."""
    return Outcome("no effect", note="actor_infer.generating_args counts") if _engine_args(key.tree) else None


def _engine_args(tree: Tree) -> Tree:
    return get_table(tree, "actor_infer.generating_args")


def _longest_answer(tree: Tree) -> int:
    """Return the tokens of a turn without `max_new_tokens`."""
    limits = [get(env, "max_tokens_per_step") for env in get_table(tree, "custom_envs").values() if env]
    found = [limit for limit in limits if isinstance(limit, int)]
    return min(max(found), MAX_NEW_TOKENS) if found else MAX_NEW_TOKENS


def _answer(key: Key) -> Outcome | None:
    """Take the least of the limits on a turn's tokens, as ROLL does, of the managers that play the tag."""
    managers = [get_table(key.tree, name) for name in ("train_env_manager", "val_env_manager")]
    playing = [each for each in managers if not each.get("tags") or key.path[1] in each["tags"]]
    samplings = [_engine_args(key.tree) or get_table(each, "generating_args") for each in playing]
    limits = [args.get("max_new_tokens") or MAX_NEW_TOKENS for args in samplings]
    if not limits or not all(isinstance(limit, int) for limit in (key.value, *limits)) or key.value <= max(limits):
        return None
    return Outcome("value", key.path, max(limits), "generating_args.max_new_tokens, which is less")


def _episodes_per_worker(key: Key) -> Outcome | None:
    manager = get_table(key.tree, key.path[:1])
    size = (manager.get("group_size") or 1) + (manager.get("group_size_redundancy") or 0)
    if not isinstance(key.value, int) or key.value == 0 or key.value >= size:
        return None
    return Outcome("value", key.path, size, "a worker holds a group; set rollout.num_workers for more workers")


def _judge_name(tree: Tree) -> str:
    """Return the judge's name, which is a column here: letters, digits, `_` and `-`."""
    name = NO_COLUMN.sub("-", str(get(tree, "reward.name") or "reward"))
    return name[:MAX_COLUMN] if name[:1].isalpha() else f"reward-{name}"[:MAX_COLUMN]


def _reward(key: Key) -> Outcome | None:
    """Make the model that ROLL's env asks a judge of the tags' episodes, by the rules of RLVR's judges."""
    reward, rest = get_table(key.tree, "reward"), key.path[1:]
    if not reward.get("device_mapping"):
        return Outcome("no effect", note="ROLL serves no reward without device_mapping")
    if rest == ("worker_cls",):
        return Outcome("same", note="its answers are a judge's")
    name = _judge_name(key.tree)
    if rest == ("name",):
        return Outcome("same" if name == key.value else "value", ("rewards", name, "name"), name)
    judge = {**reward, "worker_cls": JUDGE, "judge_model_type": "inference"}
    outcome = apply(REWARDS, Key(("rewards", name, *rest), key.value, {**key.tree, "rewards": {name: judge}}))
    if outcome is not None and rest == ("model_args", "model_name_or_path"):
        return replace(outcome, note=JUDGE_NOTE)
    return outcome


def list_judge(tree: Tree) -> None:
    """Make a list of the reward of episodes."""
    if rewards := get_table(tree, "rewards"):
        tree["rewards"] = [place_reward({"name": name, "kind": "llm_judge", **rewards[name]}) for name in rewards]


AGENTIC: tuple[tuple[str, Rule], ...] = (
    ("train_env_manager|val_env_manager.format_penalty", no_effect("ROLL never reads it: env_config.format_penalty counts")),
    ("train_env_manager|val_env_manager.max_traj_per_env", same("unlimited", -1)),
    ("train_env_manager|val_env_manager.generating_args.**", _generating),
    ("train_env_manager|val_env_manager.llm_proxy.**", missing("the policy's engines answer")),
    ("train_env_manager|val_env_manager.worker_cls", missing("env workers are rollout.num_workers")),
    ("train_env_manager.group_filter_cls", rename("group_filter_cls", "a class of yours needs Offbeat's interface")),
    ("train_env_manager.num_env_groups", _groups),
    ("train_env_manager.num_groups_partition", _partition),
    ("train_env_manager|val_env_manager.max_env_num_per_worker", _episodes_per_worker),
    ("val_env_manager.group_filter_cls", missing("evaluation keeps all groups")),
    ("custom_envs.*.env_type", _env_type),
    ("custom_envs.*.env_config.*", _env_setting),
    ("custom_envs.*.max_tokens_per_step", _answer),
    ("custom_envs.*.env_manager_cls", _manager),
    ("custom_envs.*.agent_runner_cls", _runner),
    ("custom_envs.*.history_length", _history),
    ("custom_envs.*.agent_template", _template),
    ("custom_envs.*.pre_step_template", _image_template),
    ("custom_envs.*.next_step_template", same("with pre_step_template")),
    ("custom_envs.*.tool_wrapper", tools),
    ("batch_adjust_mode", same("batches are whole groups: none is copied or left out")),
    ("env_monitor.**", missing("custom_envs.*.step_timeout_s and episode_timeout_s replace it")),
    ("reward_normalization.grouping|method|norm_mean_type|norm_std_type", _normalization),
    ("reward_normalization.global_scale_factor|global_shift_value", no_effect("ROLL never reads it")),
    ("dirty_data_mask|open_feedback_turn|use_token_reward", no_effect("ROLL never reads it")),
    ("parse_tool_call_parameter_to_dict|skip_mock_system_prompt", missing("templates decide: tokens stay as sampled")),
    ("reward.**", _reward),
    ("prompt_length|response_length|val_prompt_length|val_sequence_length", no_effect("sequence_length counts")),
    ("norm_mean_type|norm_std_type", no_effect("reward_normalization counts")),
)  # fmt: skip


def agentic_defaults(tree: Tree) -> Iterator[tuple[str, str, Any]]:
    """Yield ROLL's key, ours and ROLL's default, if it differs."""
    if "actor_train" not in tree and "actor_infer" not in tree:
        return
    yield STEPS_DEFAULT
    yield "", "old_logprobs", "recompute"
    yield "async_generation_ratio", "max_staleness", 0
    yield estimator_default(tree)
    yield "loss_agg_mode", "loss_agg_mode", "seq-mean-token-mean"
    yield "rollout_batch_size", "rollout_batch_size", 128
    yield "val_batch_size", "val_batch_size", 128
    if not any(normalization_scopes(tree)) and get(tree, "adv_estimator") in ("grpo", "gigpo"):
        yield "reward_normalization.method", "reward_normalization.method", "identity"
    if _uses_grouping(tree) and get(tree, "adv_estimator") != "gigpo" and not is_distillation(tree):
        yield "reward_normalization.grouping", "reward_normalization.grouping", GROUPING
    args = "actor_infer.generating_args"
    for name, value in SAMPLING.items():
        if get(tree, f"train_env_manager.generating_args.{name}") is None or _engine_args(tree):
            yield f"{args}.{name}", f"{args}.{name}", value
    if get(tree, "train_env_manager.generating_args.max_new_tokens") is None or _engine_args(tree):
        yield f"{args}.max_new_tokens", f"{args}.max_new_tokens", _longest_answer(tree)
    else:  # which evaluation takes here
        val = "val_env_manager.generating_args.max_new_tokens"
        yield val, val, _longest_answer(tree)
    yield from evaluation_sampling(_engine_args(tree) or get_table(tree, "val_env_manager.generating_args"))
    for name, value in (("num_env_groups", 128), ("group_size", 1)):
        yield f"train_env_manager.{name}", f"train_env_manager.{name}", value


def add_gem_ids(tree: Tree, source: Tree) -> None:
    """Set the id of each of GEM's envs."""
    for tag, env in get_table(source, "custom_envs").items():
        name = str((env or {}).get("env_type"))
        if ":" in name and name.partition(":")[0] in GEM_KINDS:
            table = tree["custom_envs"][str(tag)]
            table["env_config"] = {"id": name, **table.get("env_config", {})}
            table.setdefault("execution", "process")
