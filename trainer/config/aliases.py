"""Other spellings of keys and values (ROLL's, earlier builds'), replaced before validation by `canonicalize`."""

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from offbeat.trainer.config.issue import ConfigIssue
from offbeat.trainer.config.megatron import TABLE, translate_megatron

Tree = dict[str, Any]
Path = tuple[str, ...]

ENGINE = "actor_infer.strategy_args.strategy_config"
MANAGERS = ("train_env_manager", "val_env_manager")
ROLES = ("actor_train", "actor_infer", "critic", "reference", "teacher.*")

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
            "enable_prefix_caching", "max_lora_rank",
        )
    },
    f"{ENGINE}.tp_size": f"{ENGINE}.tensor_parallel_size",
    f"{ENGINE}.pp_size": f"{ENGINE}.pipeline_parallel_size",
    f"{TABLE}.tp_size": "actor_train.strategy_args.tp_size",
    f"{TABLE}.tensor_model_parallel_size": "actor_train.strategy_args.tp_size",
    f"{TABLE}.pp_size": "actor_train.strategy_args.pp_size",
    f"{TABLE}.pipeline_model_parallel_size": "actor_train.strategy_args.pp_size",
    "custom_envs.*.env_config.env_instruction": "custom_envs.*.env_instruction",
    "critic.learning_rate": "critic.training_args.learning_rate",
    "critic.warmup_steps": "critic.training_args.warmup_steps",
    "teacher.*.pretrain": "teacher.*.model_args.model_name_or_path",
    **{f"{manager}.env_groups": f"{manager}.num_env_groups" for manager in MANAGERS},
    **{f"{manager}.n_groups": f"{manager}.num_groups_partition" for manager in MANAGERS},
}  # fmt: skip
"""Spelling -> canonical key; `*` is any name; a table is merged."""

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16", "float": "float32"}
ATTENTION: dict[str, str] = dict.fromkeys(("fa2", "flash_attn", "flash_attention"), "flash_attention_2")
VALUES: dict[str, Mapping[str, str]] = {
    **{f"{role}.model_args.dtype": DTYPES for role in ROLES},
    **{f"{role}.model_args.attn_implementation": ATTENTION for role in ROLES if role != "actor_infer"},
    "adv_estimator": {"reinforce++": "reinforce_plus_plus"},
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

ONE_ANSWER = "a turn has one answer: set group_size for more episodes per task"
NO_BACKWARD = "inference has no backward pass"
MEGATRON_AXES = ("expert_model", "context")
NOT_SPLIT = (
    "only layers are split, by tp_size and pp_size of fsdp2_train, which also shards weights, gradients and moments"
)
NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    **{f"{role}.model_args.model_type": ((None,), "the model folder's config.json determines it") for role in ROLES},
    **{f"{role}.strategy_args.strategy_config": ((None,), "") for role in ROLES},
    **{
        f"{role}.model_args.disable_gradient_checkpointing": ((True,), NO_BACKWARD)
        for role in ("actor_infer", "reference", "teacher.*")
    },
    "actor_infer.dtype": (("auto",), ""),
    **{f"{table}.generating_args.num_beams": ((1,), "answers are sampled") for table in ("actor_infer", *MANAGERS)},
    **{f"{role}.model_args.ulysses_size": ((1,), "sequences are not split over devices") for role in ROLES},
    **{f"{role}.training_args.warmup_ratio": ((0, 0.0), "use warmup_steps") for role in ("actor_train", "critic")},
    **{f"{role}.use_remove_padding": ((True,), "sequences are always packed, without padding") for role in ROLES},
    "batch_adjust_mode": (("auto",), "a batch of any number of trajectories is divided over the processes as it is"),
    "rpc_timeout": (
        (None,),
        "each wait has a limit of its own: actor_train.backend_timeout, rollout.episode_timeout_s, ...",
    ),
    "profiler_memory": ((False,), "there is no profiler"),
    "profiler_timeline": ((False,), "there is no profiler"),
    **{f"{manager}.max_env_num_per_worker": ((0,), "") for manager in MANAGERS},
    "custom_envs.*.agent_runner_cls": ((None,), "use agent_runner: {path: module:function}"),
    **{f"{manager}.generating_args.num_return_sequences": ((1,), ONE_ANSWER) for manager in ("actor_infer", *MANAGERS)},
    **{f"{TABLE}.{kind}_parallel_size": ((1,), NOT_SPLIT) for kind in MEGATRON_AXES},
}
"""Key -> values without effect, which are dropped, and why others are refused (empty: they are valid)."""

SAMPLING_ONLY = "only engines sample: set actor_infer.generating_args, or of evaluation val_env_manager.generating_args"
UNUSED_PARTS: dict[str, str] = {
    "actor_infer.training_args": "engines do not train: set actor_train.training_args",
    **{f"{role}.training_args": "a frozen model is not trained" for role in ("reference", "teacher.*")},
    **{f"{role}.generating_args": SAMPLING_ONLY for role in ROLES if role != "actor_infer"},
    "critic.strategy_args": "the critic is trained by actor_train.strategy_args",
    **{f"{role}.model_args.model_name_or_path": "the policy's folder is pretrain" for role in ROLES[:2]},
    "actor_infer.infer_batch_size": f"an engine batches up to {ENGINE}.max_num_seqs turns",
}
"""Part that a role has no use for -> reason."""


def canonicalize(tree: Tree) -> tuple[Tree, list[ConfigIssue]]:
    """Return the canonical tree, and keys set in two spellings."""
    tree, issues = copy.deepcopy(tree), list[ConfigIssue]()
    _group_tracker_arguments(tree)
    for pattern, (neutral, reason) in NEUTRAL.items():
        for path, table in list(find_keys(tree, pattern)):
            value = table[path[-1]]
            if not any(type(value) is type(each) and value == each for each in neutral):
                if not reason:
                    continue
                issues.append(ConfigIssue(".".join(path), f"has no effect ({reason}): leave it out"))
            del table[path[-1]]
    issues += translate_megatron(tree)
    for pattern, canonical in KEYS.items():
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
    return tree, issues


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
    }
    return tuple(targets) if len({target.rpartition(".")[2] for target in targets}) == 1 else ()


def find_reason(path: str) -> str | None:
    """Return why a role has no use for a part."""
    parts = path.split(".")
    if parts[0] == "teacher" and len(parts) > 1:
        parts[1] = "*"
    return UNUSED_PARTS.get(".".join(parts))


def find_keys(tree: Tree, pattern: str) -> Iterator[tuple[Path, Tree]]:
    """Yield matching paths, each with the table of its last key."""
    *parents, leaf = pattern.split(".")
    tables: list[tuple[Path, Tree]] = [((), tree)]
    for part in parents:
        tables = [
            ((*path, key), child)
            for path, table in tables
            for key in (list(table) if part == "*" else (part,))
            if isinstance(child := table.get(key), dict)
        ]
    for path, table in tables:
        if leaf in table:
            yield (*path, leaf), table


def _fill(canonical: str, pattern: str, path: Path) -> Path:
    names = iter([part for part, sign in zip(path, pattern.split("."), strict=True) if sign == "*"])
    return tuple(next(names) if part == "*" else part for part in canonical.split("."))


def _move(tree: Tree, value: Any, target: Path) -> str:
    """Set `target`; return the problem if it has another value."""
    table = tree
    for part in target[:-1]:
        child = table.setdefault(part, {})
        if not isinstance(child, dict):
            return f"{part} is not a table"
        table = cast(Tree, child)
    old = table.setdefault(target[-1], value)
    if isinstance(old, dict) and isinstance(value, dict):
        old, new = cast(Tree, old), cast(Tree, value)
        twice = sorted(key for key in old.keys() & new.keys() if old[key] != new[key])
        table[target[-1]] = {**new, **old}
        return f"sets {', '.join(twice)} again" if twice else ""
    return "" if old == value else "is set in two spellings"
