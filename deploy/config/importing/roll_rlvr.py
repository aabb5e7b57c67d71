"""ROLL's keys of reinforcement learning with verifiable rewards: each domain is a tag with a reward."""

from collections.abc import Iterator
from math import ceil
from typing import Any

from offbeat.deploy.config.importing.report import Outcome
from offbeat.deploy.config.importing.roll_roles import engine_argument, template_outcome
from offbeat.deploy.config.importing.roll_run import SAMPLING, STEPS_DEFAULT, estimator_default, evaluation_sampling
from offbeat.deploy.config.importing.rules import (
    Key,
    Rule,
    Tree,
    apply,
    apply_aliases,
    get,
    get_table,
    missing,
    no_effect,
    put,
    rename,
    same,
    take_file,
    take_stops,
)
from offbeat.services.chat.template_override import replaces

KINDS = {
    "math_rule_reward_worker": "math_rule",
    "code_sandbox_reward_worker": "code_sandbox",
    "llm_judge_reward_worker": "llm_judge",
    "ifeval_rule_reward_worker": "ifeval",
    "crossthinkqa_rule_reward_worker": "crossthink_qa",
    "multiple_choice_boxed_rule_reward_worker": "multiple_choice",
    "detection_reward_worker": "detection",
    "remote_reward_system_worker": "http",
}
"""ROLL's module of a reward worker -> kind."""
NUM_PROMPTS, NUM_ADDITIONAL, PROMPT = 128, 16, 1024
"""ROLL's defaults."""
ANSWER = "actor_infer.generating_args.max_new_tokens"
OVERSAMPLING = "part of a batch ahead, so that filtered groups are replaced at once"
MAX_SHARE_ERROR = 1e-6
SERVED = ("inference", "cluster")
"""ROLL's types of judges whose model it serves: by the reward's own workers, or by `reward_model`."""
IN_WORKERS = "rewards are computed in env workers, or in num_replicas of their own"


def _kind(key: Key) -> Outcome:
    module = str(key.value).rpartition(".")[0].rpartition(".")[2]
    path = (*key.path[:-1], "kind")
    if module not in KINDS:
        return Outcome("value", path, "function", f"no {module} here: name a function of yours in `path`")
    return Outcome("value", path, KINDS[module])


def _is_judge(key: Key) -> bool:
    return "llm_judge" in str(get(key.tree, (*key.path[:2], "worker_cls")))


def _has_own_model(key: Key) -> bool:
    """Return whether it is a judge whose model ROLL serves itself."""
    return _is_judge(key) and get(key.tree, (*key.path[:2], "judge_model_type")) in SERVED


def _model(key: Key) -> Outcome:
    if not _is_judge(key):
        return Outcome("no effect", note="a rule needs no model")
    if _has_own_model(key):
        return Outcome("same", key.path, key.value)
    return Outcome("renamed", (*key.path[:2], "model"), key.value, "of a service: set url")


def _judge_key(key: Key) -> Outcome | None:
    """Take a key of the roles' form, for a judge with a model of its own."""
    return apply_aliases(key) if _has_own_model(key) else None


def _judge_engine(key: Key) -> Outcome | None:
    if not _has_own_model(key):
        return None
    if key.value == "vllm":
        return Outcome("same", key.path, key.value)
    return Outcome("value", key.path, "vllm", "which serves judges here")


def _judge_argument(key: Key) -> Outcome | None:
    if not _has_own_model(key) or get(key.tree, (*key.path[:2], "strategy_args", "strategy_name")) != "vllm":
        return None
    return engine_argument(key) or apply_aliases(key)


def _shared_judge(key: Key) -> Outcome | None:
    """Give the keys of ROLL's `reward_model` to the one judge that calls it."""
    rewards = get_table(key.tree, "rewards")
    callers = [name for name, reward in rewards.items() if (reward or {}).get("judge_model_type") == "cluster"]
    if len(callers) != 1 or key.path[1:] == ("model_args", "model_name_or_path"):
        return None
    judge = {**get_table(key.tree, "reward_model"), **rewards[callers[0]]}
    tree = {**key.tree, "rewards": {**rewards, callers[0]: judge}}
    return apply(REWARDS, Key(("rewards", callers[0], *key.path[1:]), key.value, tree))


def _crossthink_mode(key: Key) -> Outcome:
    if "crossthinkqa" not in str(get(key.tree, (*key.path[:2], "worker_cls"))):
        return Outcome("no effect", note="read by crossthinkqa's reward alone")
    return Outcome("renamed", (*key.path[:2], "mode"), key.value)


def _filter_type(key: Key) -> Outcome:
    if key.value == "no_filter":
        return Outcome("same", note="no filter")
    return Outcome("renamed", ("query_filter_config", key.path[1], "type"), key.value)


def _filter_argument(key: Key) -> Outcome | None:
    if get(key.tree, (*key.path[:3], "type"), "no_filter") == "no_filter":
        return Outcome("no effect", note="no_filter")
    return Outcome("renamed", ("query_filter_config", key.path[1], "filter_args", *key.path[4:]), key.value)


REWARDS: tuple[tuple[str, Rule], ...] = (
    ("rewards.*.worker_cls", _kind),
    ("rewards.*.tag_included", lambda key: Outcome("renamed", ("data", "tag_included", key.path[1]), key.value)),
    ("rewards.*.query_filter_config.type", _filter_type),
    ("rewards.*.query_filter_config.filter_args.*", _filter_argument),
    ("rewards.*.response_filter_config.**", no_effect("ROLL never reads it")),
    ("rewards.*.reward_type", _crossthink_mode),
    ("rewards.*.response_length_penalty_coef", same("", 0, 0.0)),
    ("rewards.*.response_length_penalty_coef", rename("reward_shaping.response_length_penalty_coef", "of all domains")),
    ("rewards.*.model_args.model_name_or_path", _model),
    ("rewards.*.use_local", same("programs run in the sandbox of the env worker", True)),
    ("rewards.*.data_args.template", lambda key: no_effect(
        "the judge's own template is used" if _is_judge(key) else "a rule needs no template")(key)),
    ("rewards.*.model_args.model_type", no_effect("the kind of the reward determines it")),
    ("rewards.*.infer_batch_size", no_effect("max_concurrent bounds calls, and an engine batches by itself")),
    ("rewards.*.judge_model_name", rename("rewards.*.model")),
    ("rewards.*.judge_api_url", rename("rewards.*.url")),
    ("rewards.*.model_args.dtype", _judge_key),
    ("rewards.*.model_args.attn_implementation", lambda key: no_effect("the judge's engine chooses it")(key)
     if _has_own_model(key) else None),
    ("rewards.*.generating_args.temperature|max_new_tokens", lambda key: Outcome("same", key.path, key.value)
     if _is_judge(key) else None),
    ("rewards.*.generating_args.num_beams|num_return_sequences", same("", 1)),
    ("rewards.*.generating_args.**", missing("a judge takes temperature and max_new_tokens")),
    ("rewards.*.strategy_args.strategy_name", _judge_engine),
    ("rewards.*.strategy_args.strategy_config.*", _judge_argument),
    ("rewards.*.device_mapping", _judge_key),
    ("rewards.*.judge_model_type", same("the mesh serves its model", *SERVED)),
    ("rewards.*.judge_model_type", missing("a service with OpenAI's API (`vllm serve`): set url")),
    ("rewards.*.judge_api_key", missing("keys are read from the environment, not from files")),
    ("rewards.*.name", no_effect("the domain names it")),
    ("rewards.*.judge_prompt", missing("one of ROLL's prompts: write yours in `template`, or use the verdict's own")),
    ("rewards.**", missing(IN_WORKERS)),
    ("reward_model.model_args.model_name_or_path", no_effect("ROLL's judge names its model itself")),
    ("reward_model.**", _shared_judge),
    ("reward_model.**", missing("a judge has a model of its own (model_args of its reward), or set its url")),
)  # fmt: skip


def _batch(key: Key) -> Outcome | None:
    size = get(key.tree, "num_return_sequences_in_group") or 1
    if size == 1 or not isinstance(key.value, int):
        return None
    return Outcome("value", key.path, key.value * size, "trajectories, not prompts")


def _normalization(key: Key) -> Outcome:
    if get(key.tree, "adv_estimator") == "grpo":
        return Outcome("no effect", note="of its group, with grpo")
    if key.value is None:
        return Outcome("same", note="none")
    target = ("reward_normalization", key.path[0])
    if key.value != "batch" or not _has_domains(key.tree):
        return Outcome("renamed", target, key.value)
    if _normalizes_by_domain(key.tree):
        return Outcome("value", target, "group", "ROLL's batch is one domain's: reward_normalization.grouping: tags")
    return Outcome("renamed", target, key.value, "over the batch; ROLL's over each domain")


def _has_domains(tree: Tree) -> bool:
    return len(get_table(tree, "rewards")) > 1


def _normalizes_by_domain(tree: Tree) -> bool:
    """Return whether rewards are compared with all of their domain; prompts and domains at once have no counterpart."""
    scopes = [get(tree, name) for name in ("norm_mean_type", "norm_std_type")]
    return get(tree, "adv_estimator") != "grpo" and _has_domains(tree) and "batch" in scopes and "group" not in scopes


def _share(key: Key) -> Outcome:
    shares = [each for each in get_table(key.tree, key.path[:-1]).values() if isinstance(each, int | float)]
    path, total = ("data", "domain_interleave_probs", key.path[-1]), sum(shares)
    if abs(total - 1) < MAX_SHARE_ERROR or not isinstance(key.value, int | float):
        return Outcome("renamed", path, key.value)
    return Outcome("value", path, key.value / total, f"shares sum to 1, not to {total:g}")


def _taught(key: Key) -> Outcome | None:
    domains = get_table(key.tree, "rewards").items()
    if not isinstance(key.value, list):
        return None
    names = [str(name) for name, reward in domains if {*(reward or {}).get("tag_included", [])} & {*key.value}]
    return Outcome("value", key.path, names, "domains") if names else None


def _ratio(key: Key) -> Outcome:
    if key.value != "seq":
        return Outcome("same", note="ratio_type: token")
    return Outcome("value", ("ratio_type",), "sequence")


def _num_prompts(tree: Tree) -> int:
    return get(tree, "rollout_batch_size") or NUM_PROMPTS


def _num_additional(tree: Tree) -> int:
    """Return the prompts in play beyond a batch."""
    count = get(tree, "max_additional_running_prompts")
    count = NUM_ADDITIONAL if count is None else count
    return count if get(tree, "is_use_additional_prompts") and isinstance(count, int) else 0


def _staleness(key: Key) -> Outcome | None:
    if not isinstance(key.value, int | float):
        return None
    ahead = key.value + _num_additional(key.tree) / _num_prompts(key.tree)
    note = OVERSAMPLING if ahead != key.value else ""
    return Outcome("value" if note else "renamed", ("max_staleness",), ahead, note)


def answer_length(tree: Tree, prefix: str = "") -> int | None:
    """Return the tokens of an answer, which ROLL derives from the lengths of sequence and prompt."""
    prompt = get(tree, f"{prefix}prompt_length") or PROMPT
    length = get(tree, f"{prefix}sequence_length")
    if not isinstance(length, int) and prefix:
        return answer_length(tree)
    response = get(tree, "response_length")
    length = length or (prompt + response if isinstance(response, int) else None)
    return length - prompt if isinstance(length, int) and isinstance(prompt, int) and length > prompt else None


def _answer_length(prefix: str, target: str) -> Rule:
    def rule(key: Key) -> Outcome | None:
        length = answer_length(key.tree, prefix)
        path = tuple(target.split("."))
        if length is None or length == key.value:
            return Outcome("same" if path == key.path else "renamed", path, key.value)
        return Outcome("value", path, length, "sequence_length - prompt_length, which ROLL takes in its place")

    return rule


def _loss_weight(key: Key) -> Outcome:
    notes = {
        "difficulty_loss_weight": "of the group's mean reward; ROLL reads the column difficulty",
        "length_loss_weight": "of the batch's longest answer; ROLL's is between its shortest and longest, with mean 1",
        "difficulty_mask": "groups left out count in the loss's denominators here",
    }
    return Outcome("same", key.path, key.value, notes[key.path[0]] if key.value else "")


RLVR: tuple[tuple[str, Rule], ...] = (
    *REWARDS,
    ("rollout_batch_size", _batch),
    ("async_generation_ratio", _staleness),
    ("is_use_additional_prompts", same("in max_staleness and train_env_manager.num_env_groups")),
    ("max_additional_running_prompts", lambda key: same("in max_staleness and train_env_manager.num_env_groups")(key)
     if get(key.tree, "is_use_additional_prompts") else Outcome("no effect", note="is_use_additional_prompts is not set")),
    ("num_return_sequences_in_group", rename("train_env_manager.group_size")),
    ("actor_infer.generating_args.num_return_sequences", same("train_env_manager.group_size")),
    ("prompt_length", rename("data.prompt_length")),
    ("response_length", same("actor_infer.generating_args.max_new_tokens")),
    ("val_prompt_length|val_sequence_length", missing("prompts as in training; answers: val_env_manager.generating_args")),
    ("val_batch_size", no_effect("each evaluation takes every row once")),
    ("norm_mean_type|norm_std_type", _normalization),
    ("importance_sampling", _ratio),
    ("rl_loss_coef", same("", 1, 1.0)),
    ("rl_loss_coef", missing("set the coefficients of the other terms")),
    ("save_logging_board_dir", missing("see track_with")),
    ("postive_loss_coef|use_topr_neg_loss_coef|use_policy_loss_type|use_topr_loss|val_greedy|val_n_sample|mask_type|"
     "balance_length|minibatch_data_iter_num", no_effect("ROLL never reads it")),
    ("dataset_filter.**", no_effect("ROLL never reads it")),
    ("global_template", template_outcome),
    ("tag_to_template.*", lambda key: same("the model's own template")(key) if not replaces(str(key.value))
     else Outcome("no counterpart", note="one template for all: chat_template")),
    ("actor_train.data_args.file_name", take_file("data.dataset_name")),
    ("validation.data_args.file_name", take_file("data.val_dataset_name")),
    ("actor_train.data_args.domain_interleave_probs.*", _share),
    ("teacher.*.tag_included", _taught),
    ("actor_train.data_args.messages", rename("data.messages_key")),
    ("actor_train.data_args.prompt", rename("data.prompt_key")),
    ("actor_train.data_args.tag", rename("data.tag_key")),
    ("*.data_args.dataset_dir", no_effect("file_name is a path")),
    ("*.data_args.preprocessing_num_workers", missing("rows are read as they are needed")),
    ("*.data_args.image_folder", missing("paths of images are relative to the dataset's folder")),
    ("*.data_args.video_folder|audio_folder", missing("rows hold texts and images")),
    ("validation|actor_infer.data_args.template", same("as actor_train")),
    ("*.data_args.interleave_probs", no_effect("ROLL never reads it")),
    ("actor_train.data_args.template", template_outcome),
    ("*.data_args.**", missing("rows hold texts and images, whose size is that of the model's preprocessing")),
    ("validation.generating_args.num_beams|do_sample", same("answers are sampled", 1, True)),
    ("validation.generating_args.num_return_sequences", rename("val_env_manager.group_size")),
    ("actor_infer.generating_args.max_new_tokens", _answer_length("", ANSWER)),
    ("validation.generating_args.max_new_tokens", _answer_length("val_", "val_env_manager.generating_args.max_new_tokens")),
    ("difficulty_loss_weight|length_loss_weight|difficulty_mask", _loss_weight),
    ("validation.generating_args.stop_strings", take_stops("val_env_manager.*.stop_strings")),
    ("validation.generating_args.include_stop_str_in_output", no_effect("an answer keeps its stop string")),
    ("validation.generating_args.temperature|top_p|top_k", lambda key: Outcome(
        "renamed", ("val_env_manager", *key.path[1:]), key.value
    )),
    ("validation.eval_steps", no_effect("ROLL reads that of the top level")),
    ("validation.**", missing("evaluation samples from the policy's engines")),
)  # fmt: skip


def rlvr_defaults(tree: Tree) -> Iterator[tuple[str, str, Any]]:
    """Yield ROLL's key, ours and ROLL's default, if it differs."""
    yield "", "pipeline", "rlvr"
    yield STEPS_DEFAULT
    yield "", "old_logprobs", "recompute"
    prompts, additional = _num_prompts(tree), _num_additional(tree)
    yield "async_generation_ratio", "max_staleness", additional / prompts
    yield estimator_default(tree)
    filters = [get(reward or {}, "query_filter_config.type") for reward in get_table(tree, "rewards").values()]
    if any(each not in (None, "no_filter") for each in filters):
        yield "", "zero_variance", "refill"
    yield "loss_agg_mode", "loss_agg_mode", "seq-mean-token-mean"
    if _has_domains(tree) and (get(tree, "whiten_advantages") or get(tree, "whiten_rewards")):
        yield "", "whiten_over", "tags"
    if _normalizes_by_domain(tree):
        yield "", "reward_normalization.grouping", "tags"
    yield "num_return_sequences_in_group", "train_env_manager.group_size", 1
    size = get(tree, "num_return_sequences_in_group") or 1
    yield "rollout_batch_size", "rollout_batch_size", prompts * size
    ahead = 1 + ceil(get(tree, "async_generation_ratio") or 0)
    yield "", "train_env_manager.num_env_groups", prompts * ahead + additional
    if (answer := answer_length(tree)) is not None:
        yield "sequence_length", "sequence_length", (get(tree, "prompt_length") or PROMPT) + answer
        yield ANSWER, ANSWER, answer
    args = "actor_infer.generating_args"
    for name, value in SAMPLING.items():
        yield f"{args}.{name}", f"{args}.{name}", value
    if "validation" in tree:
        yield from evaluation_sampling(get_table(tree, "validation.generating_args"))
        if get(tree, f"{args}.stop_strings") and not get(tree, "validation.generating_args.stop_strings"):
            yield "", "val_env_manager.generating_args.stop_strings", []


def name_domains(tree: Tree, source: Tree) -> None:
    """Make a tag of each domain, and a list of rewards."""
    answer = answer_length(source) or get(tree, ANSWER)
    domains = get_table(source, "rewards")
    template = {"env_type": "prompt", "max_steps": 1, "agent_template": "{observation}", "execution": "inline"}
    if isinstance(answer, int):
        template["max_tokens_per_step"] = answer
    tree["custom_envs"] = {str(name): dict(template) for name in domains}
    shares = get_table(tree, "data.domain_interleave_probs")
    if shares and (taught := [str(name) for name in domains if str(name) in shares]) != [*map(str, domains)]:
        put(tree, ("train_env_manager", "tags"), taught)  # ROLL trains on no other domain
    rewards = tree.get("rewards", {})
    named = {str(name): rewards.get(str(name), {}) for name in domains}
    tree["rewards"] = [place_reward({"name": name, "tags": [name], **reward}) for name, reward in named.items()]


def place_reward(reward: Tree) -> Tree:
    return {**reward, "device": "cuda"} if "device_mapping" in reward else reward
