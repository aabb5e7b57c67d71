"""Files of prime-rl: of a run (`rl`), its parts (`trainer`, `orchestrator`, `inference`) and `sft`, under uniform names."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.importing.report import KeyPath
from offbeat.deploy.config.importing.rules import Tree, get_table, put
from offbeat.deploy.config.loader import readable
from offbeat.trainer.config.issue import ConfigIssue

Kind = Literal["rl", "sft", "trainer", "orchestrator", "inference", "eval"]
PARTS: tuple[Kind, ...] = ("orchestrator", "trainer", "inference")
"""Kinds of files that make one run together."""
OWN_KEYS: dict[Kind, tuple[str, ...]] = {
    "rl": ("trainer", "orchestrator", "inference"),
    "orchestrator": (
        "train", "algo", "batch_size", "token_batch_size", "group_size", "max_off_policy_steps", "concurrency",
    ),
    "inference": ("vllm", "server", "router", "backend_port", "kv_cache_offload", "use_deep_gemm"),
    "trainer": ("optim", "scheduler", "loss", "weight_broadcast", "max_steps", "enable_router_replay"),
}  # fmt: skip
"""Keys of a file's root that no kind before it has; the first kind with one counts."""
TRAINER_KEYS = (
    "model", "optim", "scheduler", "tokenizer", "gc", "matmul_precision", "memory_profiler_path", "trace_path",
    "dist_timeout_seconds", "heartbeat",
)  # fmt: skip
"""Keys of `sft` that a run has below `trainer`."""
SOURCES = ("orchestrator.train.source", "orchestrator.eval.source")
NOT_SET = ("None", "none")
"""Texts that prime-rl's parser takes for nothing, which TOML can't write."""


class PrimeFile:
    """Keys of a file, or of a run's parts, by their names in a run's file."""

    def __init__(self, path: Path, kind: Kind, keys: Sequence[tuple[KeyPath, KeyPath, Any]]) -> None:
        self.path, self.kind, self.keys = path, kind, keys
        self.tree = Tree()
        for _, name, value in keys:
            put(self.tree, name, value)


def read_toml(path: Path) -> Tree:
    with readable(path):
        text = path.read_text(encoding="utf-8")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([ConfigIssue("", f"no TOML: {error}")], str(path)) from error


def find_kind(tree: Tree) -> Kind:
    """Return the command that reads a file, by its keys."""
    if isinstance(tree.get("data"), dict) and "fake" not in tree["data"]:
        return "sft"
    if isinstance(tree.get("model"), str) and "eval" in tree:
        return "eval"
    for kind, names in OWN_KEYS.items():
        if any(name in tree for name in names):
            return kind
    return "inference" if set(tree) == {"model"} else "sft" if "slurm" in tree else "trainer"


def read_run(paths: Sequence[Path]) -> PrimeFile:
    """Read a file, or the parts of one run; raises `ConfigError`."""
    trees = [read_toml(path) for path in paths]
    kinds: list[Kind] = [find_kind(tree) for tree in trees]
    if len(paths) == 1:
        if kinds[0] == "eval":
            raise ConfigError(
                [ConfigIssue("", "a file of prime-rl's `eval`, which trains nothing: `offbeat rollout` evaluates a run's "
                 "policy, or a served model (docs/environments.md#evaluation-without-training)")], str(paths[0]),
            )  # fmt: skip
        return PrimeFile(paths[0], kinds[0], _name_all(trees[0], kinds[0], is_part=False))
    ordered = sorted(zip(kinds, paths, trees, strict=True), key=lambda each: PARTS.index(each[0]))
    keys = [key for kind, _, tree in ordered for key in _name_all(tree, kind, is_part=True)]
    return PrimeFile(ordered[0][1], "rl", keys)


def are_parts(paths: Sequence[Path]) -> bool:
    """Return whether the files are different parts of one run."""
    kinds = [find_kind(read_toml(path)) for path in paths] if len(paths) > 1 else []
    return bool(kinds) and set(kinds) <= set(PARTS) and len(set(kinds)) == len(kinds)


def _name_all(tree: Tree, kind: Kind, *, is_part: bool) -> list[tuple[KeyPath, KeyPath, Any]]:
    """Return each key as the report names it, its name in a run's file, and its value."""
    keys: list[tuple[KeyPath, KeyPath, Any]] = []
    for path, value in _walk(tree):
        name = _name(path, kind)
        keys.append((name if is_part else path, name, None if _is_nothing(value) else value))
    return keys


def _is_nothing(value: Any) -> bool:
    return isinstance(value, str) and value in NOT_SET


def _name(path: KeyPath, kind: Kind) -> KeyPath:
    match kind:
        case "trainer" | "orchestrator" | "inference":
            return (kind, "vllm", "model") if (kind, path) == ("inference", ("model", "name")) else (kind, *path)
        case "sft" if path[0] in TRAINER_KEYS:
            return ("trainer", *path)
        case "sft" if path[0] == "eval":
            return ("orchestrator", *path)
        case _:
            return path


def _walk(tree: Mapping[str, Any], path: KeyPath = ()) -> list[tuple[KeyPath, Any]]:
    """Return keys with values; a list of tables is a table of its places, and an empty table a value."""
    keys: list[tuple[KeyPath, Any]] = []
    for name, value in tree.items():
        at = (*path, name)
        table = _as_table(value) if name == "source" else value
        if isinstance(table, dict) and table:
            keys += _walk(cast(Tree, table), at)
        else:
            keys.append((at, table))
    return keys


def _as_table(value: Any) -> Any:
    """Return `[[...]]` as a table by place."""
    is_list = isinstance(value, list) and all(isinstance(each, dict) for each in cast(list[Any], value))
    return {str(place): each for place, each in enumerate(cast(list[Any], value))} if is_list else value


def sources(tree: Tree, part: str) -> list[Tree]:
    """Return the sources of a part, `train` or `eval`, in their order."""
    table = get_table(tree, f"orchestrator.{part}.source")
    return [cast(Tree, each) for each in table.values() if isinstance(each, dict)]
