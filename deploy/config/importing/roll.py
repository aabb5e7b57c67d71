"""Configurations of ROLL (github.com/alibaba/ROLL), with their `defaults` lists."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.importing.environment import hide, reveal
from offbeat.deploy.config.importing.fitting import finish
from offbeat.deploy.config.importing.report import Imported, KeyPath, KeyReport, Outcome
from offbeat.deploy.config.importing.roll_agentic import add_gem_ids, list_judge
from offbeat.deploy.config.importing.roll_keys import ROLES, find_unknown
from offbeat.deploy.config.importing.roll_rlvr import name_domains
from offbeat.deploy.config.importing.roll_rules import PIPELINES, Defaults
from offbeat.deploy.config.importing.roll_tools import wrap_envs
from offbeat.deploy.config.importing.rules import (
    Key,
    Tree,
    add_defaults,
    apply,
    apply_aliases,
    get,
    get_table,
    leaves,
    put,
    translate,
)
from offbeat.deploy.config.loader import compose_files, readable
from offbeat.deploy.config.yaml_limits import load_yaml
from offbeat.trainer.config.issue import ConfigIssue

ROLE_NAMES = {
    "student_train": "actor_train",
    "student_infer": "actor_infer",
    "sft_train": "actor_train",
    "student": "actor_train",
}
"""ROLL's other names of roles."""
WHOLE = ("custom_envs.*.env_config.*", "custom_envs.*.tool_wrapper", "custom_envs.*.agent_config", "tracker_kwargs.*")
"""Tables that are values."""
WORKER_KEYS = ("model_args", "device_mapping", "strategy_args")


def import_roll(path: Path) -> Imported:
    """Import a file of ROLL's; raises `ConfigError`."""
    tree, reports, remarks = translate_roll(path)
    return finish(path, tree, reports, remarks)


def translate_roll(path: Path) -> tuple[Tree, list[KeyReport], list[str]]:
    """Return our unvalidated tree, the outcome of each key, and remarks; raises `ConfigError`."""
    source, variables, remarks = _compose(path)
    pipeline = find_pipeline(source)
    rules, default_sets = PIPELINES[pipeline]
    uniform = {str(name): value for name, value in _uniform_roles(source).items()}

    def keys() -> Iterator[tuple[KeyPath, Key]]:
        unknown = tuple(name for name in source if find_unknown(pipeline, (ROLE_NAMES.get(name, name),)))
        for original, value in leaves(source, (*WHOLE, *unknown)):
            yield original, Key(_uniform_path(original, source), value, uniform)

    def decide(key: Key) -> Outcome:
        if key.path[0] in variables and find_unknown(pipeline, key.path[:1]):
            return Outcome("same", note="a variable, in place where it is read")
        neutral = apply_aliases(key)
        if neutral.status == "same" and neutral.target is None:
            return neutral
        outcome = apply(rules, key)
        if outcome is None and (unknown := find_unknown(pipeline, key.path)) is not None:
            return Outcome("no effect", note=f"ROLL has no key {'.'.join(unknown)}")
        return outcome or neutral

    tree, reports = translate(keys(), decide)
    if pipeline == "agentic":
        add_gem_ids(tree, source)
        wrap_envs(tree, source)
        list_judge(tree)
    if pipeline == "rlvr":
        name_domains(tree, source)
    reports += _add_defaults(tree, uniform, default_sets)
    return tree, reports, remarks


def find_pipeline(tree: Tree) -> str:
    """Return a file's pipeline, which ROLL's start script names."""
    if "sft_train" in tree:
        return "sft"
    if "student" in tree or "student_pretrain" in tree:
        return "distill"
    if "chosen_key" in tree or "rejected_key" in tree:
        return "dpo"
    if "rewards" in tree:
        return "rlvr"
    return "agentic"


def _compose(path: Path) -> tuple[Tree, set[str], list[str]]:
    """Return the composed file, its variables and remarks.

    Variables are top-level keys that other keys read, or of other files.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

    composed, own, remarks = _compose_existing(path)
    text = OmegaConf.to_yaml(composed)
    hidden = OmegaConf.create(hide(OmegaConf.to_container(composed)))
    while True:
        try:
            tree: Any = reveal(OmegaConf.to_container(hidden, resolve=True))
            break
        except InterpolationKeyError as error:
            key = str(error.full_key)
            remarks.append(f"{key}: {error.msg}; left out")
            OmegaConf.update(hidden, key, None)
        except OmegaConfBaseException as error:
            raise ConfigError([ConfigIssue("", str(error).partition("\n")[0])], str(path)) from error
    if not isinstance(tree, dict):
        raise ConfigError([ConfigIssue("", "expected a mapping of keys to values")], str(path))
    tree = _name_envs({str(key): value for key, value in tree.items()})
    empty = [name for name, value in tree.items() if value is None and ROLE_NAMES.get(name, name) in ROLES]
    remarks += [f"{name}: has no settings; left out" for name in empty]
    tree = {name: value for name, value in tree.items() if name not in empty}
    read = {str(key) for key in tree if f"${{{key}}}" in text or f"${{{key}." in text or str(key) not in own}
    return tree, read, remarks


def _compose_existing(path: Path) -> tuple[Any, set[str], list[str]]:
    """Compose the file, without missing files of its defaults list."""
    from omegaconf import OmegaConf

    with readable(path):
        own = load_yaml(path.read_text(encoding="utf-8"))
    tree: Tree = {str(key): value for key, value in own.items()} if isinstance(own, dict) else {}
    entries: Any = tree.get("defaults")
    names = (
        [each for each in entries if isinstance(each, str) and each != "_self_"] if isinstance(entries, list) else []
    )
    missing = [name for name in names if not _file_of(path, name).is_file()]
    if not missing:
        return compose_files(path)[0], set(tree), []
    others = [compose_files(_file_of(path, name))[0] for name in names if name not in missing]
    own_keys = {key: value for key, value in tree.items() if key not in ("defaults", "hydra")}
    composed = OmegaConf.merge(*others, OmegaConf.create(own_keys))
    return composed, set(tree), [f"defaults: there is no file {_file_of(path, name)}" for name in missing]


def _file_of(path: Path, name: str) -> Path:
    return (path.parent / f"{name.partition('@')[0].removesuffix('.yaml')}.yaml").resolve()


def _name_envs(tree: Tree) -> Tree:
    """Name the envs of an included file (ROLL's `examples/config`)."""
    if "custom_envs" in tree or find_pipeline(tree) != "agentic" or "actor_train" in tree:
        return tree
    tables = [name for name, value in tree.items() if isinstance(value, dict) and all(map(_is_env, value.values()))]
    envs = {tag: env for name in tables for tag, env in tree[name].items()}
    return {
        **{name: value for name, value in tree.items() if name not in tables},
        **({"custom_envs": envs} if envs else {}),
    }


def _is_env(value: object) -> bool:
    return isinstance(value, dict) and "env_type" in value


def _uniform_path(path: KeyPath, source: Tree) -> KeyPath:
    first = ROLE_NAMES.get(path[0], path[0])
    if first == "teacher" and any(name in get_table(source, "teacher") for name in WORKER_KEYS):
        return ("teacher", "teacher", *path[1:])
    return (first, *path[1:])


def _uniform_roles(source: Tree) -> Tree:
    tree = Tree()
    for path, value in leaves(source, WHOLE):
        put(tree, _uniform_path(path, source), value)
    return tree


def _add_defaults(tree: Tree, source: Tree, sets: tuple[Defaults, ...]) -> list[KeyReport]:
    """Add the library's differing defaults of omitted keys."""
    defaults = (default for each in sets for default in each(source))
    return add_defaults(tree, ((ours, value) for theirs, ours, value in defaults if get(source, theirs) is None))
