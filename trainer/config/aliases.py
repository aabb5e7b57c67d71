"""Other spellings of keys and values (ROLL's, earlier builds'), replaced before validation by `canonicalize`."""

import copy
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from offbeat.services.devices import parse_device_mapping
from offbeat.trainer.config.issue import ConfigIssue
from offbeat.trainer.config.megatron import TABLE, translate_megatron

Tree = dict[str, Any]
Path = tuple[str, ...]

ENGINE = "actor_infer.strategy_args.strategy_config"
MANAGERS = ("train_env_manager", "val_env_manager")
ROLES = ("actor_train", "actor_infer", "critic", "reference", "teacher.*")
REWARD = "rewards.*"
MODELS = (*ROLES, REWARD)

KEYS: dict[str, str] = {
    "async_generation_ratio": "max_staleness",
    "max_grad_norm": "actor_train.training_args.max_grad_norm",
    "data_args.template": "chat_template",
    **{f"{role}.data_args.template": "chat_template" for role in ROLES},
    "actor_infer.dtype": "actor_infer.model_args.dtype",
    "actor_infer.engine_kwargs": ENGINE,
    **{
        f"actor_infer.{key}": f"{ENGINE}.{key}"
        for key in (
            "tensor_parallel_size", "max_model_len", "max_num_seqs", "gpu_memory_utilization", "enforce_eager",
            "enable_prefix_caching", "max_lora_rank", "max_loras",
        )
    },
    f"{ENGINE}.tp_size": f"{ENGINE}.tensor_parallel_size",
    f"{ENGINE}.pp_size": f"{ENGINE}.pipeline_parallel_size",
    f"{TABLE}.tp_size": "actor_train.strategy_args.tp_size",
    f"{TABLE}.tensor_model_parallel_size": "actor_train.strategy_args.tp_size",
    f"{TABLE}.pp_size": "actor_train.strategy_args.pp_size",
    f"{TABLE}.pipeline_model_parallel_size": "actor_train.strategy_args.pp_size",
    "actor_train.model_args.ulysses_size": "actor_train.strategy_args.ulysses_size",
    "custom_envs.*.env_config.env_instruction": "custom_envs.*.env_instruction",
    "critic.learning_rate": "critic.training_args.learning_rate",
    "critic.warmup_steps": "critic.training_args.warmup_steps",
    "teacher.*.pretrain": "teacher.*.model_args.model_name_or_path",
    **{f"{REWARD}.{key}": f"{REWARD}.model_args.{key}" for key in ("model_name_or_path", "dtype")},
    f"{REWARD}.strategy_config": f"{REWARD}.strategy_args.strategy_config",
    f"{REWARD}.temperature": f"{REWARD}.generating_args.temperature",
    f"{REWARD}.max_tokens": f"{REWARD}.generating_args.max_new_tokens",
    f"{REWARD}.strategy_args.strategy_config.tp_size": f"{REWARD}.strategy_args.strategy_config.tensor_parallel_size",
    f"{REWARD}.strategy_args.strategy_config.pp_size": f"{REWARD}.strategy_args.strategy_config.pipeline_parallel_size",
    **{f"{manager}.env_groups": f"{manager}.num_env_groups" for manager in MANAGERS},
    **{f"{manager}.n_groups": f"{manager}.num_groups_partition" for manager in MANAGERS},
}  # fmt: skip
"""Spelling -> canonical key; `*` is any name or place in a list; a table is merged."""

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16", "float": "float32"}
ATTENTION: dict[str, str] = dict.fromkeys(("fa2", "flash_attn", "flash_attention"), "flash_attention_2")
VALUES: dict[str, Mapping[str, str]] = {
    **{f"{role}.model_args.dtype": DTYPES for role in MODELS},
    **{f"{role}.model_args.attn_implementation": ATTENTION for role in MODELS if role != "actor_infer"},
    "adv_estimator": {"reinforce++": "reinforce_plus_plus"},
    "ratio_type": {"segment": "turn"},
    "custom_envs.*.env_manager_cls": {
        f"roll.pipeline.agentic.env_manager.{module}.{name}": name
        for module, name in (
            ("traj_env_manager", "TrajEnvManager"),
            ("step_env_manager", "StepEnvManager"),
            ("step_concat_env_manager", "StepConcatEnvManager"),
        )
    },
}
"""Key -> spelling of its value -> canonical value."""

ANSWERS: dict[str, str] = {
    f"{role}.generating_args.num_return_sequences": f"{manager}.group_size"
    for role, manager in (("actor_infer", MANAGERS[0]), *((manager, manager) for manager in MANAGERS))
}
"""Answers per prompt -> canonical key; 1 is ROLL's default, which a group size overrules, and what it sets for agents."""
ONE_ANSWER = "a turn of an agent has one answer, in ROLL too: for more episodes per task set {}"
ARCHITECTURE = "config.json of the model's folder determines it; pipeline: reward_model trains a sequence classifier"
MODEL_TYPES = {
    **dict.fromkeys(ROLES, ARCHITECTURE),
    "critic": "",
    REWARD: "kind determines it: reward_model is a sequence classifier, llm_judge writes text",
}
NO_BACKWARD = "inference has no backward pass"
MEGATRON_AXES = ("expert_model", "context")
NOT_SPLIT = (
    "only layers are split, by tp_size and pp_size of fsdp2_train, which also shards weights, gradients and moments"
)
NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    **{f"{role}.model_args.model_type": ((None,), reason) for role, reason in MODEL_TYPES.items()},
    **{f"{role}.strategy_args.strategy_config": ((None,), "") for role in MODELS},
    **{
        f"{role}.model_args.disable_gradient_checkpointing": ((True,), NO_BACKWARD)
        for role in ("actor_infer", "reference", "teacher.*", REWARD)
    },
    "actor_infer.dtype": (("auto",), ""),
    **{f"{table}.generating_args.num_beams": ((1,), "answers are sampled") for table in ("actor_infer", *MANAGERS)},
    **{
        f"{role}.model_args.ulysses_size": (
            (1,),
            "set actor_train.strategy_args.ulysses_size, which holds for all roles",
        )
        for role in ROLES
        if role != "actor_train"
    },
    **{f"{role}.training_args.warmup_ratio": ((0, 0.0), "use warmup_steps") for role in ("actor_train", "critic")},
    **{f"{role}.use_remove_padding": ((True,), "sequences are always packed, without padding") for role in ROLES},
    "batch_adjust_mode": (("auto",), "a batch of any number of trajectories is divided over the processes as it is"),
    "rpc_timeout": (
        (None,),
        "each wait has a limit of its own: actor_train.backend_timeout, custom_envs.TAG.episode_timeout_s, ...",
    ),
    **{f"{manager}.max_env_num_per_worker": ((0,), "") for manager in MANAGERS},
    "custom_envs.*.agent_runner_cls": ((None,), "use agent_runner: {path: module:function}"),
    **{key: ((1,), ONE_ANSWER.format(canonical)) for key, canonical in ANSWERS.items()},
    **{f"{TABLE}.{kind}_parallel_size": ((1,), NOT_SPLIT) for kind in MEGATRON_AXES},
}
"""Key -> values without effect, which are dropped, and why others are refused (empty: they are valid)."""

SAMPLING_ONLY = "only engines sample: set actor_infer.generating_args, or of evaluation val_env_manager.generating_args"
UNUSED_PARTS: dict[str, str] = {
    "actor_infer.training_args": "engines do not train: set actor_train.training_args",
    **{f"{role}.training_args": "a frozen model is not trained" for role in ("reference", "teacher.*")},
    **{f"{role}.generating_args": SAMPLING_ONLY for role in ROLES if role != "actor_infer"},
    **{
        f"actor_infer.model_args.lora_{name}": "engines have the adapters of actor_train.model_args.lora_*"
        for name in ("rank", "alpha", "target", "dropout")
    },
    "critic.strategy_args": "the critic is trained by actor_train.strategy_args",
    **{f"{role}.model_args.model_name_or_path": "the policy's folder is pretrain" for role in ROLES[:2]},
    "actor_infer.infer_batch_size": f"an engine batches up to {ENGINE}.max_num_seqs turns",
    f"{REWARD}.model_args": "only the kinds reward_model and llm_judge have a model",
    f"{REWARD}.strategy_args": "only the kinds reward_model and llm_judge have an engine",
    f"{REWARD}.device_mapping": "only the kinds reward_model and llm_judge compute on devices",
    f"{REWARD}.training_args": "a run trains its policy, not its rewards; pipeline: reward_model trains one",
    f"{REWARD}.generating_args": "only the kind llm_judge writes text",
    f"{REWARD}.infer_batch_size": "a reward model batches up to max_batch_tokens, a judge's engine up to max_num_seqs",
    f"{REWARD}.model_args.attn_implementation": "the judge's engine chooses it",
    f"{REWARD}.strategy_args.strategy_config": "transformers has no engine arguments here",
}
"""Part that a role has no use for -> reason; of rewards, a kind without the part."""


def canonicalize(tree: Tree) -> tuple[Tree, list[ConfigIssue]]:
    """Return the canonical tree, and keys set in two spellings."""
    tree, issues = copy.deepcopy(tree), list[ConfigIssue]()
    _group_tracker_arguments(tree)
    answers = _answer_keys(tree)
    for pattern, (neutral, reason) in NEUTRAL.items():
        if pattern in answers:
            continue
        for path, table in list(find_keys(tree, pattern)):
            value = table[path[-1]]
            if not any(type(value) is type(each) and value == each for each in neutral):
                if not reason:
                    continue
                issues.append(ConfigIssue(".".join(path), f"has no effect ({reason}): leave it out"))
            del table[path[-1]]
    issues += translate_megatron(tree)
    for pattern, canonical in {**KEYS, **answers}.items():
        for path, table in list(find_keys(tree, pattern)):
            target = _fill(canonical, pattern, path)
            if problem := _move(tree, table.pop(path[-1]), target):
                issues.append(ConfigIssue(".".join(path), f"{problem}: set {'.'.join(target)} alone"))
    for pattern in ("data_args", *(f"{role}.data_args" for role in ROLES)):
        for path, table in list(find_keys(tree, pattern)):
            if table[path[-1]] == {}:  # only its `template` has a canonical key
                del table[path[-1]]
    for pattern, values in VALUES.items():
        for path, table in find_keys(tree, pattern):
            value = table[path[-1]]
            if isinstance(value, str) and value in values:
                table[path[-1]] = values[value]
    _place_frozen_models(tree)
    return tree, issues


def _place_frozen_models(tree: Tree) -> None:
    """Make a service of each frozen model with devices of its own."""
    train = tree.get("actor_train")
    policy = _read_devices(train)
    for pattern in ("reference.device_mapping", "teacher.*.device_mapping"):
        for _, table in find_keys(tree, pattern):
            devices, strategy = _read_devices(table), table.setdefault("strategy_args", {})
            if devices in (None, policy) or not isinstance(strategy, dict):
                continue
            strategy = cast(Tree, strategy)
            if strategy.get("strategy_name") == "deepspeed_infer":  # of the learner's processes alone
                continue
            if strategy.setdefault("placement", "service") == "service":
                strategy.setdefault("num_replicas", len(devices))


def _read_devices(table: object) -> tuple[int, ...] | None:
    """Return the devices of a role; None: it has none, or not numbers."""
    try:
        devices = parse_device_mapping(cast(Tree, table).get("device_mapping")) if isinstance(table, dict) else None
    except ValueError:
        return None
    return cast("tuple[int, ...]", devices) if isinstance(devices, tuple) else None


def _answer_keys(tree: Tree) -> dict[str, str]:
    """Return the keys of `ANSWERS` that set several answers, in a pipeline with prompts."""
    if tree.get("pipeline") != "rlvr" and not (tree.get("pipeline") == "online_dpo" and tree.get("data")):
        return {}
    found = {key: [table[path[-1]] for path, table in find_keys(tree, key)] for key in ANSWERS}
    return {
        key: ANSWERS[key] for key, values in found.items() for value in values if isinstance(value, int) and value > 1
    }


def _group_tracker_arguments(tree: Tree) -> None:
    tracker, arguments = tree.get("track_with"), tree.get("tracker_kwargs")
    if isinstance(tracker, str) and isinstance(arguments, dict) and tracker not in arguments:
        tree["tracker_kwargs"] = {tracker: arguments}


def canonical_json(text: str | bytes) -> str:
    """Canonicalize a stored configuration."""
    return json.dumps(canonicalize(json.loads(text))[0])


def find_aliases(path: str) -> tuple[str, ...]:
    """Return the canonical keys of a misplaced spelling."""
    leaf = path.rpartition(".")[2]
    targets = {
        target: None
        for key, target in KEYS.items()
        if key.rpartition(".")[2] == leaf != target.rpartition(".")[2]  # else the leaf is right and its table is not
        and not key.startswith(REWARD)
    }
    return tuple(targets) if len({target.rpartition(".")[2] for target in targets}) == 1 else ()


def find_reason(path: str) -> str | None:
    """Return why a role has no use for a part."""
    parts = path.split(".")
    if parts[0] in ("teacher", "rewards") and len(parts) > 1:
        parts[1] = "*"
    return UNUSED_PARTS.get(".".join(parts))


def find_keys(tree: Tree, pattern: str) -> Iterator[tuple[Path, Tree]]:
    """Yield matching paths, each with the table of its last key."""
    *parents, leaf = pattern.split(".")
    nodes: list[tuple[Path, object]] = [((), tree)]
    for part in parents:
        nodes = [((*path, key), child) for path, node in nodes for key, child in _children(node, part)]
    for path, node in nodes:
        if isinstance(node, dict) and leaf in node:
            yield (*path, leaf), cast(Tree, node)


def _children(node: object, part: str) -> Iterator[tuple[str, object]]:
    """Yield a table's named child, or with `*` all children of a table or list."""
    if isinstance(node, dict):
        table = cast(Tree, node)
        yield from ((key, table[key]) for key in (list(table) if part == "*" else [part] if part in table else []))
    elif isinstance(node, list) and part == "*":
        yield from ((str(place), child) for place, child in enumerate(cast(list[object], node)))


def _fill(canonical: str, pattern: str, path: Path) -> Path:
    names = iter([part for part, sign in zip(path, pattern.split("."), strict=True) if sign == "*"])
    return tuple(next(names) if part == "*" else part for part in canonical.split("."))


def _move(tree: Tree, value: Any, target: Path) -> str:
    """Set `target`; return the problem if it has another value."""
    node: Tree | list[object] = tree
    for part, following in itertools.pairwise(target):
        child: object = node.setdefault(part, {}) if isinstance(node, dict) else node[int(part)]
        if isinstance(child, dict):
            node = cast(Tree, child)
        elif isinstance(child, list) and following.isdigit():
            node = cast(list[object], child)
        else:
            return f"{part} is not a table"
    assert isinstance(node, dict), "a key's last part is no place in a list"
    table = node
    old = table.setdefault(target[-1], value)
    if isinstance(old, dict) and isinstance(value, dict):
        old, new = cast(Tree, old), cast(Tree, value)
        twice = sorted(key for key in old.keys() & new.keys() if old[key] != new[key])
        table[target[-1]] = {**new, **old}
        return f"sets {', '.join(twice)} again" if twice else ""
    return "" if old == value else "is set in two spellings"
