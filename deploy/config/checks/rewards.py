"""Checks of `pipeline: rlvr`, and of rewards."""

from collections.abc import Iterator

from offbeat.deploy.config.checks.data import CHECKED_ROWS, check_named_columns
from offbeat.deploy.config.checks.prompts import OnStep
from offbeat.deploy.config.checks.row_images import check_images, read_rows
from offbeat.deploy.config.run import RunConfig
from offbeat.services.reward.checks import find_problems
from offbeat.services.reward.kinds.model_config import LlmJudgeConfig
from offbeat.services.rollout.data.config import DataConfig
from offbeat.services.rollout.data.interleaving import Interleaving
from offbeat.services.rollout.data.prompts import DomainRows
from offbeat.trainer.config.estimators import DECOUPLED
from offbeat.trainer.config.issue import ConfigIssue

PROMPT_KEYS = ("ground_truth_key", "prompt_length", "tag_included", "domain_interleave_probs")
"""Of `data`, used only by prompts."""
ROW_KEYS = (
    "query_key",
    "system_key",
    "response_key",
    "chosen_key",
    "rejected_key",
    "margin_key",
    "completion_key",
    "label_key",
    "tools_key",
    "train_on",
    "too_long",
)
"""Of `data`, unused by prompts."""
NAMED_COLUMNS = ("ground_truth_key", "images_key", "tag_key")
"""Of `data`, columns that rows need not have unless their names are set."""
ROW_KINDS = ("math_rule", "multiple_choice", "crossthink_qa", "detection", "ifeval", "code_sandbox", "nemo_gym")
"""Kinds of rewards that compare with a row."""
EACH_ROW = "each evaluation takes every validation row once"


def check_rlvr(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues found without files and user code."""
    if not config.plays_prompts:
        for key in PROMPT_KEYS:
            if config.data is not None and getattr(config.data, key) != DataConfig.model_fields[key].get_default(
                call_default_factory=True
            ):
                yield ConfigIssue(f"data.{key}", f"has no effect with pipeline: {config.pipeline}: leave it out")
        yield from _check_episodes(config)
        return
    if config.data is None:
        yield ConfigIssue("data.dataset_name", "pipeline: rlvr answers the prompts of a dataset: name a file")
        return
    yield from _check_effects(config, config.data)
    yield from _check_domains(config, config.data)
    if config.scoring is None:
        yield ConfigIssue("rewards", "nothing scores the answers: name at least one reward, such as {name: answer, "
                          "kind: math_rule}")  # fmt: skip
        return
    yield from _check_combination(config)
    yield from _check_groups(config)
    yield from _check_tags_of_groups(config)
    try:
        config.scoring.check_tags(_tags(config))
    except ValueError as error:
        yield ConfigIssue("rewards", str(error))


def check_rewards(config: RunConfig, on_step: OnStep) -> Iterator[ConfigIssue]:
    """Yield problems of the files, and rewards that can't be built."""
    if config.plays_prompts and config.data is not None:
        yield from _check_files(config, config.data, on_step)
    if config.scoring is not None:
        on_step("rewards", "building the reward functions")
        for place, problem in find_problems(config.scoring):
            yield ConfigIssue(f"rewards.{place}", problem)


def _check_files(config: RunConfig, data: DataConfig, on_step: OnStep) -> Iterator[ConfigIssue]:
    managers = {"dataset_name": config.train_env_manager, "val_dataset_name": config.val_env_manager}
    for key, manager in managers.items():
        path = getattr(data, key)
        if path is None:
            continue
        on_step(f"data.{key}", f"reading {path}")
        try:
            domains = DomainRows(path, data, manager.tags_of(config.custom_envs))
            if key == "dataset_name":
                yield from check_named_columns(data, NAMED_COLUMNS, domains.rows, path)
            yield from check_images(config, read_rows(domains, data, CHECKED_ROWS), f"data.{key}")
        except (ValueError, OSError) as error:
            yield ConfigIssue(f"data.{key}", str(error))


def _check_episodes(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield rewards that can't score episodes of envs."""
    if config.scoring is None:
        if config.adv_estimator in DECOUPLED:
            yield ConfigIssue("adv_estimator", "gdpo compares each of the rewards: name some, or take grpo")
        if config.combine != type(config).model_fields["combine"].default:
            yield ConfigIssue("combine", f"{config.combine} has no effect without rewards: name some, or leave it out")
        return
    yield from _check_combination(config)
    yield from _check_groups(config)
    yield from _check_tags_of_groups(config)
    for index, reward in enumerate(config.rewards):
        if reward.kind in ROW_KINDS:
            message = (
                f"{reward.kind} compares with a row of data, which episodes of envs have not: let the env reward it, take "
                "kind function, http or llm_judge, or pipeline: rlvr with data"
            )
            yield ConfigIssue(f"rewards.{index}.kind", message)
    try:
        config.scoring.check_named_tags(_tags(config))
    except ValueError as error:
        yield ConfigIssue("rewards", str(error))


def _check_combination(config: RunConfig) -> Iterator[ConfigIssue]:
    if config.adv_estimator in DECOUPLED and config.combine != "weighted":
        yield ConfigIssue("combine", f"adv_estimator gdpo adds the rewards by weight: take weighted in place of "
                          f"{config.combine}, or adv_estimator grpo")  # fmt: skip


def _check_groups(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield rewards that would have no members to compare, or a greedy one among them."""
    size = config.train_env_manager.group_size
    for index, reward in enumerate(config.rewards):
        if not reward.is_of_group:
            continue
        if config.num_baselines:
            message = (
                f"adv_estimator {config.adv_estimator} needs the reward of a greedy episode, which is none of the group's "
                "members: take another, such as rloo"
            )
            yield ConfigIssue(f"rewards.{index}.scope", message)
        elif size < 2:
            message = "it compares the members of a group: take a train_env_manager.group_size of at least 2"
            yield ConfigIssue(f"rewards.{index}.scope", message)
        elif isinstance(reward, LlmJudgeConfig) and (reward.num_partners or 0) >= size:
            message = f"a group of {size} has {size - 1} others: take at most these, or leave it out for all"
            yield ConfigIssue(f"rewards.{index}.num_partners", message)


def _check_tags_of_groups(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield rewards of groups that compare none, and evaluations that have these rewards alone."""
    assert config.scoring is not None, "rewards"
    trained = config.train_env_manager.tags_of(config.custom_envs)
    for index, reward in enumerate(config.rewards):
        if reward.is_of_group and reward.tags and not {*reward.tags} & {*trained}:
            message = (
                f"it compares groups, which only training has: name one of {', '.join(trained)}, or leave tags out"
            )
            yield ConfigIssue(f"rewards.{index}.tags", message)
    is_evaluated = config.eval_steps and config.data is not None and config.data.val_dataset_name is not None
    for tag in config.val_env_manager.tags_of(config.custom_envs) if config.plays_prompts and is_evaluated else ():
        rewards = config.scoring.of_tag(tag)
        if rewards and all(reward.is_of_group for reward in rewards):
            message = (
                f"evaluations have no groups, and all rewards of {tag} compare them, so that each would be 0: add a "
                "reward that scores an answer alone (weight: 0 keeps it out of a weighted score), or take eval_steps: 0"
            )
            yield ConfigIssue("rewards", message)


def _tags(config: RunConfig) -> list[str]:
    managers = (config.train_env_manager, config.val_env_manager)
    return list(dict.fromkeys(tag for manager in managers for tag in manager.tags_of(config.custom_envs)))


def _has_agents_alone(config: RunConfig) -> bool:
    return bool(config.custom_envs) and all(env.agent_runner for env in config.custom_envs.values())


def _pipeline(config: RunConfig) -> str:
    return f"pipeline: {config.pipeline}"


def _check_effects(config: RunConfig, data: DataConfig) -> Iterator[ConfigIssue]:
    for key in ROW_KEYS:
        if getattr(data, key) != DataConfig.model_fields[key].default:
            yield ConfigIssue(f"data.{key}", f"has no effect with {_pipeline(config)}: leave it out")
    fields = type(config).model_fields
    for key in ("val_batch_size", "final_val_batch_size"):
        if getattr(config, key) != fields[key].default:
            yield ConfigIssue(key, f"has no effect with {_pipeline(config)} ({EACH_ROW}): leave it out")
    for name, manager in (("train_env_manager", config.train_env_manager), ("val_env_manager", config.val_env_manager)):
        if manager.num_groups_partition:
            advice = "set data.domain_interleave_probs" if name == "train_env_manager" else EACH_ROW
            yield ConfigIssue(f"{name}.num_groups_partition", f"has no effect with {_pipeline(config)}: {advice}")
    if config.train_env_manager.task_sampler is not None:
        yield ConfigIssue("train_env_manager.task_sampler", "the dataset's rows are the tasks: leave it out")
    if data.prompt_length is not None and _has_agents_alone(config):
        yield ConfigIssue("data.prompt_length", "has no effect with agents, which write the prompts: leave it out")
    elif data.prompt_length is not None and data.prompt_length >= config.sequence_length:
        yield ConfigIssue(
            "data.prompt_length",
            f"prompts of {data.prompt_length} tokens leave no room for an answer in a sequence_length of "
            f"{config.sequence_length}: take less",
        )


def _check_domains(config: RunConfig, data: DataConfig) -> Iterator[ConfigIssue]:
    known = ", ".join(config.custom_envs)
    for key in ("tag_included", "domain_interleave_probs"):
        for tag in getattr(data, key):
            if tag not in config.custom_envs:
                yield ConfigIssue(f"data.{key}.{tag}", f"no tag {tag!r} in custom_envs; there is {known}")
    tags = config.train_env_manager.tags_of(config.custom_envs)
    owners: dict[str, str] = {}
    for tag in _tags(config):
        for value in data.tag_included.get(tag, (tag,)):
            if owners.setdefault(value, tag) != tag:
                yield ConfigIssue(f"data.tag_included.{tag}", f"{value!r} belongs to {owners[value]}, too")
    probs = data.domain_interleave_probs
    if not probs:
        return
    if {*probs} != {*tags}:
        yield ConfigIssue("data.domain_interleave_probs", f"name each training tag once: {', '.join(tags)}")
        return
    try:
        Interleaving(probs)
    except ValueError as error:
        yield ConfigIssue("data.domain_interleave_probs", str(error))
