"""Sources of prime-rl's tasks, verifiers' environments, as envs of a run; verifiers plays their episodes as an agent."""

import re
from collections.abc import Iterator
from typing import Any

from offbeat.deploy.config.importing.numbers import get_number
from offbeat.deploy.config.importing.prime_rl_files import sources
from offbeat.deploy.config.importing.prime_rl_sources import find_values
from offbeat.deploy.config.importing.report import KeyPath, Outcome
from offbeat.deploy.config.importing.rules import Key, Rule, Rules, Tree, get, get_table, missing, no_effect, same

AGENT = "offbeat.deploy.agents.verifiers_env:play"
TIMEOUT_S = 3600.0
"""Of an episode and of a request, which have none by prime-rl's defaults."""
NO_NAME = re.compile(r"[^A-Za-z0-9_-]+")
TRAIN, EVAL = "train", "eval"
SAMPLING = "actor_infer.generating_args"
SEQUENCE = 2048
"""prime-rl's default of `seq_len`."""
TOOL_PARSER = ("inference", "vllm", "tool_call_parser")


def tag_of(source: Tree) -> str:
    """Return the tag of a source by its name, else by its taskset, as prime-rl names it."""
    name = str(source.get("name") or get(source, "env.taskset.id") or get(source, "env.id") or "env")
    return NO_NAME.sub("-", name).strip("-") or "env"


def train_tags(tree: Tree) -> list[str]:
    return [tag_of(source) for source in sources(tree, TRAIN)]


def eval_tag(tree: Tree, source: Tree) -> str:
    """Return the tag of a source of evaluation; a training source of its name and settings is the same env."""
    tag = tag_of(source)
    same_name = [each for each in sources(tree, TRAIN) if tag_of(each) == tag]
    return tag if not same_name or same_name[0].get("env") == source.get("env") else f"{tag}-eval"


def eval_tags(tree: Tree) -> list[str]:
    return [eval_tag(tree, source) for source in sources(tree, EVAL)]


def all_tags(tree: Tree) -> list[str]:
    return list(dict.fromkeys([*train_tags(tree), *eval_tags(tree)]))


def sequence_length(tree: Tree) -> int:
    """Return a trajectory's tokens: those that the orchestrator trains on, else a trainer's alone."""
    named = ["data.seq_len", "orchestrator.seq_len", "seq_len"]
    if "orchestrator" not in tree:
        named.append("trainer.model.seq_len")
    return next((value for name in named if isinstance(value := get(tree, name), int)), SEQUENCE)


def _source(key: Key) -> tuple[str, KeyPath]:
    """Return the tag of a source's key, and its path within the source."""
    _, part, _, _, *rest = key.path
    source = get_table(key.tree, key.path[:4])
    return (tag_of(source) if part == TRAIN else eval_tag(key.tree, source)), tuple(rest)


def _env_key(key: Key) -> Outcome:
    """Take a key of an `env` block: those of the taskset, and those that verifiers' environment has besides."""
    tag, rest = _source(key)
    is_shared = key.path[1] == EVAL and tag in train_tags(key.tree)
    if is_shared:
        return Outcome("same", note=f"as of training: tag {tag}")
    config = ("custom_envs", tag, "env_config")
    if rest == ("env", "taskset", "id"):
        return Outcome("renamed", (*config, "id"), key.value)
    if rest[:2] == ("env", "taskset"):
        return Outcome("renamed", (*config, "taskset", *rest[2:]), key.value)
    if rest[-2:] == ("timeout", "rollout") and isinstance(key.value, int | float):
        return Outcome("value", ("custom_envs", tag, "agent_runner", "timeout_s"), float(key.value), "seconds")
    return Outcome("renamed", (*config, "environment", *rest[1:]), key.value)


def _named(key: Key) -> Outcome:
    tag, _ = _source(key)
    return Outcome("same", note=f"custom_envs.{tag}")


def _answer_limit(key: Key) -> Outcome | None:
    """Take the longest answer, which each tag has here."""
    if not isinstance(key.value, int):
        return None
    tag, _ = _source(key)
    if key.path[1] == EVAL and tag in train_tags(key.tree):
        return Outcome("no counterpart", note=f"tag {tag} is also trained on: its max_tokens_per_step counts")
    return take_answer(f"custom_envs.{tag}.max_tokens_per_step")(key)


def _sole_eval(target: str) -> Rule:
    """Take a value of the only source of evaluation, or one that all have."""

    def rule(key: Key) -> Outcome:
        given = {str(source.get(key.path[4])) for source in sources(key.tree, EVAL)}
        if len(given) > 1:
            return Outcome("no counterpart", note=f"one value for all tags: set {target}")
        value = key.value
        if key.path[4] == "num_examples":
            return _examples(key, value)
        return Outcome("renamed", tuple(target.split(".")), value)

    return rule


def _examples(key: Key, value: Any) -> Outcome:
    """Convert examples of each source to episodes of an evaluation."""
    if not isinstance(value, int) or value < 0:
        return Outcome("no counterpart", note="all examples: set val_batch_size to the episodes of an evaluation")
    evaluated = sources(key.tree, EVAL)
    episodes = value * eval_group_size(key.tree) * max(1, len(evaluated))
    return Outcome("value", ("val_batch_size",), episodes, "episodes, of all tags")


def eval_group_size(tree: Tree) -> int:
    own = {source.get("group_size") for source in sources(tree, EVAL)} - {None}
    size = own.pop() if len(own) == 1 else get(tree, "orchestrator.eval.group_size", 1)
    return size if isinstance(size, int) else 1


def _shared_examples(key: Key) -> Outcome:
    if sources(key.tree, EVAL) and all("num_examples" in each for each in sources(key.tree, EVAL)):
        return Outcome("no effect", note="each source has its own")
    return _examples(key, key.value)


def _shared_eval(target: str) -> Rule:
    def rule(key: Key) -> Outcome:
        if sources(key.tree, EVAL) and all(key.path[-1] in each for each in sources(key.tree, EVAL)):
            return Outcome("no effect", note="each source has its own")
        return Outcome("renamed", tuple(target.split(".")), key.value)

    return rule


def _parser(key: Key) -> Outcome:
    tags = all_tags(key.tree)
    if key.value == "auto" or not tags:
        return Outcome("same", note="detected from the chat template")
    return Outcome("renamed", ("custom_envs", tags[0], "agent_runner", "tool_call_parser"), key.value, "of each tag")


def env_defaults(tree: Tree) -> Iterator[tuple[str, Any]]:
    """Yield what each env has besides the source's own keys."""
    tags = all_tags(tree)
    parser = get(tree, TOOL_PARSER)
    if tags:
        yield "actor_infer.request_timeout_s", TIMEOUT_S
    for tag in tags:
        at = f"custom_envs.{tag}"
        yield f"{at}.env_type", "verifiers"
        yield f"{at}.env_config.played_by", "agent"
        yield f"{at}.env_config.split", "any"
        yield f"{at}.agent_runner.path", AGENT
        yield f"{at}.agent_runner.timeout_s", TIMEOUT_S
        yield f"{at}.episode_timeout_s", _longest_episode(tree, tag)
        yield f"{at}.max_tokens_per_step", longest_answer(tree)
        if parser not in (None, "auto"):
            yield f"{at}.agent_runner.tool_call_parser", parser


def _longest_episode(tree: Tree, tag: str) -> float:
    """Return the timeout of a tag's episodes, which contains the agent's."""
    named = [(tag_of(each), each) for each in sources(tree, TRAIN)]
    named += [(eval_tag(tree, each), each) for each in sources(tree, EVAL)]
    agents = [get_table(each, "env").values() for name, each in named if name == tag]
    found = [get(agent, "timeout.rollout") for values in agents for agent in values if isinstance(agent, dict)]
    return max([float(each) for each in found if isinstance(each, int | float)], default=TIMEOUT_S)


def longest_answer(tree: Tree) -> int:
    """Return the tokens of the longest answer of training, else of evaluation, that leaves room for a prompt."""
    train = get(tree, "orchestrator.train.sampling.max_completion_tokens")
    evaluation = get(tree, "orchestrator.eval.sampling.max_completion_tokens")
    given = evaluation if not sources(tree, TRAIN) else train
    lengths = [each for each in (given, evaluation) if isinstance(each, int)] if given is not None else []
    return cut_answer(max(lengths, default=sequence_length(tree)), tree)


def longest_of_training(tree: Tree) -> int:
    """Return the tokens of the longest answer of all training sources."""
    lengths = find_values(tree, "sampling.max_completion_tokens")
    if not lengths:
        return longest_answer(tree)
    return cut_answer(max(each if isinstance(each, int) else sequence_length(tree) for each in lengths), tree)


def take_longest(key: Key) -> Outcome | None:
    """Take the tokens of an answer, of the source with the longest one."""
    if not isinstance(key.value, int):
        return None
    tokens, target = longest_of_training(key.tree), (*SAMPLING.split("."), "max_new_tokens")
    if tokens == key.value:
        return Outcome("renamed", target, tokens)
    return Outcome(
        "value", target, tokens, "a prompt needs room" if tokens < key.value else "the longest of all sources"
    )


def cut_answer(tokens: int, tree: Tree) -> int:
    """Return an answer's tokens, less than those of a sequence, which prime-rl does not require."""
    return min(tokens, sequence_length(tree) - 1)


def take_answer(target: str) -> Rule:
    """Take the tokens of an answer, fewer than a sequence's."""

    def rule(key: Key) -> Outcome | None:
        if not isinstance(key.value, int):
            return None
        tokens = cut_answer(key.value, key.tree)
        kind = "renamed" if tokens == key.value else "value"
        return Outcome(kind, tuple(target.split(".")), tokens, "" if kind == "renamed" else "a prompt needs room")

    return rule


def partition(tree: Tree, num_groups: int) -> tuple[int, ...]:
    """Return the groups of each training tag by their ratios; empty for equal ones."""
    at = f"orchestrator.{TRAIN}.source"
    ratios = [float(get_number(tree, f"{at}.{place}.ratio", 1.0)) for place in get_table(tree, at)]
    if any(ratio <= 0 for ratio in ratios):
        return ()
    if len(set(ratios)) <= 1 or num_groups < len(ratios):
        return ()
    shares = [ratio / sum(ratios) * num_groups for ratio in ratios]
    groups = [max(1, int(share)) for share in shares]
    by_rest = sorted(range(len(groups)), key=lambda place: groups[place] - shares[place])
    for place in by_rest[: max(0, num_groups - sum(groups))]:
        groups[place] += 1
    return tuple(groups) if sum(groups) == num_groups else ()


SOURCE, EVALUATION = "orchestrator.train.source.*", "orchestrator.eval.source.*"
SERVERS = "verifiers runs in the env workers' agent processes: agent_runner.num_agents and rollout.num_workers"
ENVIRONMENTS: Rules = (
    *((f"{each}.env.**", _env_key) for each in (SOURCE, EVALUATION)),
    *((f"{each}.name", _named) for each in (SOURCE, EVALUATION)),
    *((f"{each}.serve.**", no_effect(SERVERS)) for each in (SOURCE, EVALUATION)),
    *((f"{each}.sampling.max_completion_tokens", _answer_limit) for each in (SOURCE, EVALUATION)),
    (f"{EVALUATION}.num_examples", _sole_eval("val_batch_size")),
    (f"{EVALUATION}.group_size", _sole_eval("val_env_manager.group_size")),
    (f"{EVALUATION}.interval", _sole_eval("eval_steps")),
    (f"{EVALUATION}.sampling.**", missing("sampling of all tags: val_env_manager.generating_args")),
    (f"{EVALUATION}.ratio", no_effect("evaluation takes all sources")),
    ("orchestrator.eval.num_examples", _shared_examples),
    ("orchestrator.eval.group_size", _shared_eval("val_env_manager.group_size")),
    ("orchestrator.eval.interval", _shared_eval("eval_steps")),
    ("orchestrator.eval.sampling.temperature|top_p|top_k",
     lambda key: Outcome("renamed", ("val_env_manager", "generating_args", key.path[-1]), key.value)),
    ("orchestrator.eval.sampling.max_completion_tokens", take_answer("val_env_manager.generating_args.max_new_tokens")),
    ("orchestrator.eval.sampling.**", missing("val_env_manager.generating_args has temperature, top_p, top_k")),
    ("orchestrator.eval.skip_first_step", same("", False)),
    ("orchestrator.eval.skip_first_step", missing("the policy is evaluated before training, too")),
    ("orchestrator.eval.retrigger_on_resume", no_effect("an evaluation that was not finished is repeated")),
    ("orchestrator.eval.**", missing("evaluations have the run's own engines")),
    (".".join(TOOL_PARSER), _parser),
)  # fmt: skip
