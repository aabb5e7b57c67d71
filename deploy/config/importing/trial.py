"""Trial of an imported run, with tiny models on CPUs."""

import copy
import json
from collections.abc import Iterator

from pydantic import ValidationError

from offbeat.deploy.config.importing.rules import Tree, get, get_table, put, remove
from offbeat.deploy.config.run import RunConfig
from offbeat.envs.prompts import IMAGE
from offbeat.services.generation.config import VllmConfig
from offbeat.trainer.config.aliases import ENGINE
from offbeat.trainer.config.roles import TINY
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig

MANAGERS = ("train_env_manager", "val_env_manager")
ROLES = ("actor_train", "actor_infer", "critic", "reference")
MODEL_ARGS = ("model_name_or_path", "attn_implementation", "dtype")
GPU_ARGUMENTS = ("gpu_memory_utilization", "tensor_parallel_size", "pipeline_parallel_size", "block_size")
"""Of vLLM."""
DEVICE_KEYS = (
    "checkpoint_config",
    "tracker_kwargs",
    "num_gpus_per_node",
    "reward_pretrain",
    "chat_template",
    *(f"{role}.device_mapping" for role in ROLES),
    *(f"{role}.model_args.{name}" for role in ROLES for name in MODEL_ARGS),
    *(f"actor_train.training_args.{name}" for name in ("per_device_train_batch_size", "gradient_accumulation_steps")),
    "actor_train.infer_batch_size",
    *(f"actor_train.strategy_args.{name}" for name in ("tp_size", "pp_size", "ulysses_size")),
    "actor_infer.num_replicas",
    *(f"{ENGINE}.{name}" for name in ("max_model_len", *GPU_ARGUMENTS)),
)
"""Keys of model, GPUs and their machine's folders."""
REWARD_KEYS = ("name", "tags", "weight", "threshold")
"""Of a reward by a model, what its stand-in keeps."""
MAX_ANSWER_TOKENS = 256
"""A random policy's greedy answers never end."""
STAND_IN = {"kind": "regex", "pattern": "(..)*", "match": "full"}
"""Reward of a response with an even number of characters, of which any policy has some."""


def num_minibatches(tree: Tree) -> int | None:
    """Return the optimizer steps per batch, if the tree is valid."""
    try:
        return RunConfig.model_validate_json(json.dumps(tree)).actor_train.training_args.num_minibatches
    except ValidationError:
        return None


def make_trial(tree: Tree) -> Tree:
    """Return the tree with another model and devices; algorithm, steps per batch and envs stay."""
    tree, steps = copy.deepcopy(tree), num_minibatches(tree)
    for key in DEVICE_KEYS:
        remove(tree, tuple(key.split(".")))
    for name in list(get(tree, "teacher", {})):
        for part in ("device_mapping", "model_args", "strategy_args.strategy_name"):
            remove(tree, ("teacher", name, *part.split(".")))
        put(tree, ("teacher", name, "model_args", "model_name_or_path"), TINY)
    if rewards := tree.get("rewards"):
        tree["rewards"] = [_stand_in(reward) if reward.get("model_args") else reward for reward in rewards]
    if steps is not None:
        put(tree, ("actor_train", "training_args", "num_minibatches"), steps)
    _sample_on_cpus(tree)
    for tag in get_table(tree, "custom_envs"):
        remove(tree, ("custom_envs", tag, "agent_runner", "tool_call_parser"))  # the tiny policy calls no tools
    for table, name in _answer_limits(tree):
        table[name] = min(table[name], MAX_ANSWER_TOKENS)
    tree["pretrain"] = TINY
    for role in ROLES[:2]:
        remove(tree, (role, "device"))
        put(tree, (role, "device"), "cpu")
    shows_images = any(IMAGE in (env.get("agent_template") or "") for env in tree.get("custom_envs", {}).values())
    if shows_images or get(tree, "data.images_key"):
        put(tree, ("tiny", "vision"), {})
    longest = tree.get("sequence_length")
    if isinstance(longest, int) and longest > TinyPolicyConfig().max_position_embeddings:
        put(tree, ("tiny", "max_position_embeddings"), longest)
    return tree


def describe_trial(tree: Tree) -> Iterator[str]:
    """Yield what `make_trial` replaces in a tree."""
    yield "the tiny policy on CPUs, in place of pretrain and devices"
    longest = max((table[name] for table, name in _answer_limits(tree)), default=0)
    if longest > MAX_ANSWER_TOKENS:
        yield f"answers of at most {MAX_ANSWER_TOKENS} tokens, in place of {longest}"
    for name in get(tree, "teacher", {}):
        yield f"teacher.{name}: random weights of the tiny policy's size, in place of its model"
    for reward in tree.get("rewards", ()):
        if reward.get("model_args"):
            yield (
                f"rewards: {reward['name']} ({reward['kind']}) is 1 for a response with an even number of characters, in "
                "place of its model"
            )


def _answer_limits(tree: Tree) -> Iterator[tuple[Tree, str]]:
    """Yield tables and names of limits on an answer's tokens."""
    tables = [get_table(tree, f"{role}.generating_args") for role in ("actor_infer", *MANAGERS)]
    named = [(table, "max_new_tokens") for table in tables]
    named += [(env, "max_tokens_per_step") for env in get_table(tree, "custom_envs").values()]
    yield from ((table, name) for table, name in named if isinstance(table.get(name), int))


def _stand_in(reward: Tree) -> Tree:
    return {name: value for name, value in reward.items() if name in REWARD_KEYS} | STAND_IN


def _sample_on_cpus(tree: Tree) -> None:
    """Take vLLM in place of SGLang, without the server's own arguments."""
    strategy = tuple(ENGINE.split("."))[:-1]
    if get(tree, (*strategy, "strategy_name")) != "sglang":
        return
    remove(tree, (*strategy, "strategy_name"))
    for name in set(get_table(tree, ENGINE)) - set(VllmConfig.model_fields):
        remove(tree, (*ENGINE.split("."), name))
