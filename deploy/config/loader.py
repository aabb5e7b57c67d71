"""Configurations from YAML and `key=value` overrides.

Invariant: a `ConfigError` lists all issues before the start.
"""

import json
import math
import os.path
import re
import threading
import warnings
from collections.abc import Callable, Container, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pydantic import ValidationError

from offbeat.deploy.config import hub, hub_datasets
from offbeat.deploy.config.checks.data import check_epochs, steps_of_epochs
from offbeat.deploy.config.checks.devices import local_node
from offbeat.deploy.config.checks.run import check_run
from offbeat.deploy.config.defaults import follow_adapter, read_shown_images, recompute_cut_logprobs
from offbeat.deploy.config.device_plan import ClusterNode
from offbeat.deploy.config.devices import choose_devices, count_gpus
from offbeat.deploy.config.errors import ConfigError, collect_issues, is_like_known
from offbeat.deploy.config.list_overrides import find_list_overrides
from offbeat.deploy.config.override_syntax import find_syntax_problems
from offbeat.deploy.config.paths import expand_home, resolve_paths
from offbeat.deploy.config.rights import check_rights
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.saving import to_saved_tree
from offbeat.deploy.config.sharing import choose_turns
from offbeat.deploy.config.transport import choose_transport
from offbeat.deploy.config.yaml_limits import check_tree_limits, check_yaml_limits, load_yaml, write_yaml
from offbeat.deploy.run_marker import CONFIG, identify
from offbeat.trainer.config.aliases import KEYS, NEUTRAL, canonicalize
from offbeat.trainer.config.issue import ConfigIssue

if TYPE_CHECKING:
    from omegaconf import DictConfig

CONFIGS = Path(__file__).parents[1] / "configs"
MAX_DOCUMENT_CHARS = 1_000_000
JSON_NUL = "\\u0000"
INTERPOLATION = re.compile(r"(\\*)\$\{")
"""Its start, with backslashes before it, of which two stand for one."""
_composing = threading.Lock()
"""Hydra's state is global."""


class Hubs(NamedTuple):
    """How ids of the hub are resolved."""

    model: Callable[[str], str]
    dataset: Callable[[str, str], str]


DOWNLOAD = Hubs(hub.download, hub_datasets.download)
FIND = Hubs(hub.find, hub_datasets.find)


def load_run(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    cores: float | None = None,
    nodes: Sequence[ClusterNode] | None = None,
    started: bool = False,
) -> RunConfig:
    """Compose, validate and check a run; raises `ConfigError` with every issue.

    cores, nodes: of the cluster; None: of this machine. started: as in `check_run`.
    """
    gpus = count_gpus() if nodes is None else sum(node.gpus for node in nodes)
    config = choose_devices(_validate_ids(compose_saved(path, overrides), DOWNLOAD, str(path)), gpus)
    known = [local_node()] if nodes is None else nodes
    config = choose_transport(choose_turns(config, known), known)
    checked = check_run(config, cores=cores, nodes=nodes, started=started)
    if issues := [*check_rights(config, config.control.to_rights(), "control"), *checked]:
        raise ConfigError(issues, str(path))
    return config


def read_run(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration, without checks of this machine; raises `ConfigError`."""
    tree = None if overrides else _read_complete(path)
    tree = compose_saved(path, overrides) if tree is None else _at_home(path, tree)
    return validate_tree(tree, source=str(path))


def _read_complete(path: Path) -> dict[str, Any] | None:
    """Read a file without Hydra, whose import is slow; None if it includes others or is unreadable."""
    from yaml import YAMLError

    try:
        text = path.read_text(encoding="utf-8")
        tree = None if "${" in text or check_yaml_limits(text) else load_yaml(text)
    except (OSError, ValueError, YAMLError):
        return None
    return canonical_tree(tree, str(path)) if isinstance(tree, dict) and "defaults" not in tree else None


def compose_saved(path: Path, overrides: Sequence[str] = (), *, is_remote: bool = False) -> dict[str, Any]:
    """Compose as `compose_tree`; the `output_dir` of a run's own configuration is its folder, unless overridden.

    is_remote: for another machine, which may know the folder by the saved name alone: that stays unless it is another
        folder here.
    """
    tree = compose_tree(path, overrides)
    given = any(each.lstrip("+").startswith("output_dir=") for each in overrides)
    saved = str(tree.get("output_dir"))
    if given or (is_remote and (not os.path.isdir(saved) or os.path.samefile(saved, path.parent))):
        return tree
    return _at_home(path, tree)


def _at_home(path: Path, tree: dict[str, Any]) -> dict[str, Any]:
    """Set a saved configuration's `output_dir` to its folder."""
    if path.name == CONFIG and identify(path.parent) is not None:
        tree["output_dir"] = str(path.parent.resolve())
    return tree


def read_document(document: str | dict[str, Any], *, working_dir: Path | None = None) -> RunConfig:
    """Validate a YAML text or tree, without checks of this machine, user code and downloads.

    working_dir: base of relative paths; None keeps them.

    Raises:
        ConfigError: with every issue; interpolations in a YAML text are one, because they would resolve in the service's
            environment. In a tree `${...}` is text.
    """
    if isinstance(document, str):
        tree = parse_document(document)
    elif issue := check_tree_limits(document):
        raise ConfigError([issue])
    else:
        tree = canonical_tree(document)
    return _validate_ids(tree if working_dir is None else resolve_paths(tree, working_dir), FIND)


def _validate_ids(tree: dict[str, Any], hubs: Hubs, source: str = "") -> RunConfig:
    """Validate a canonical tree, then resolve its models and datasets of the hub."""
    config = validate_tree(tree, source)
    resolved, issues = hub.resolve_models(tree, hubs.model)
    resolved, more = hub_datasets.resolve_datasets(resolved, hubs.dataset)
    if issues := [*issues, *more]:
        raise ConfigError(issues, source)
    config = config if resolved == tree else validate_tree(resolved, source)
    if (issue := check_epochs(config)) is not None:
        raise ConfigError([issue], source)
    steps = steps_of_epochs(config)
    if steps is None or steps == config.max_steps:
        return config
    return validate_tree({**resolved, "max_steps": steps}, source)


def compose_tree(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Compose a YAML file and overrides with Hydra; raises `ConfigError`."""
    from omegaconf import OmegaConf

    path = find_config(path)
    with readable(path):
        composed, own = compose_files(path, overrides)
        files = compose_files(path)[0] if overrides else composed
        tree = OmegaConf.to_container(composed, resolve=True)
        if isinstance(tree, dict):
            own_keys = set(map(str, own)) if isinstance(own, dict) else set[str]()
            tree = _without_variables(tree, {str(key) for key in files}, own_keys, OmegaConf.to_yaml(composed))
    return canonical_tree(tree, str(path))


def compose_files(path: Path, overrides: Sequence[str] = ()) -> tuple["DictConfig", object]:
    """Return a file with its defaults list and overrides, unresolved, and its own tree; raises `ConfigError`."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    if path.suffix != ".yaml":
        raise ConfigError([ConfigIssue("", f"Hydra reads only *.yaml files: rename {path.name}")], str(path))
    with readable(path):
        if issue := check_yaml_limits(text := path.read_text(encoding="utf-8")):
            raise ConfigError([issue], str(path))
        own = load_yaml(text)
        folder = str(path.resolve().parent)
        with _composing, initialize_config_dir(config_dir=folder, version_base="1.3"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*Defaults list is missing `_self_`.*")  # ROLL's files: last by default
            parsed = _allow_new_keys(overrides)
            try:
                return compose(config_name=path.name, overrides=parsed), own
            except (HydraException, TypeError) as error:
                issues = list(find_syntax_problems(overrides, parsed))
                if issues := issues or list(find_list_overrides(overrides, compose(config_name=path.name))):
                    raise ConfigError(issues, str(path)) from error
                raise


@contextmanager
def readable(path: Path) -> Generator[None]:
    import yaml
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, TypeError, UnicodeDecodeError) as error:
        # OmegaConf raises OSError for a document that is a scalar, TypeError for a list's element without a number
        raise ConfigError([ConfigIssue("", _first_lines(error))], str(path)) from error
    except RecursionError as error:
        raise ConfigError(
            [ConfigIssue("", "an override or an included file is nested too deeply")], str(path)
        ) from error
    except ValueError as error:  # Python's, for an integer of too many digits
        raise ConfigError([ConfigIssue("", f"not a valid value: {_first_lines(error)}")], str(path)) from error


def _without_variables(
    tree: dict[Any, Any], in_files: Container[str], own: Container[str], text: str
) -> dict[str, Any]:
    """Drop unknown top-level keys read only by `${name}` in others, and those of files in the defaults list that are like
    no known one.

    in_files: keys without overrides. own: the file's own. text: composed, unresolved.
    """

    def is_variable(key: str, value: object) -> bool:
        if is_known(key) or key not in in_files:
            return False
        is_read = f"${{{key}}}" in text or f"${{{key}." in text
        return is_read or (key not in own and not is_like_known(key, value, RunConfig))

    return {key: value for key, value in tree.items() if not is_variable(str(key), value)}


def is_known(key: str) -> bool:
    """Return whether a top-level key is known, in any spelling."""
    return key in RunConfig.model_fields or any(key == alias.partition(".")[0] for alias in (*KEYS, *NEUTRAL))


def find_config(path: Path) -> Path:
    """Return the file, or the packaged configuration (`recipes/ppo`); raises `ConfigError`."""
    if path.is_file():
        return path
    for packaged in (CONFIGS / path, CONFIGS / f"{path}.yaml"):
        if packaged.is_file():
            return packaged
    raise ConfigError([ConfigIssue("", f"no such file: {path}; packaged: {', '.join(packaged_configs())}")], str(path))


def packaged_configs() -> dict[str, str]:
    """Return packaged names with their files' first comments."""
    files = {str(file.relative_to(CONFIGS).with_suffix("")): file for file in sorted(CONFIGS.rglob("*.yaml"))}
    return {name: _first_comment(file) for name, file in files.items()}


def _first_comment(file: Path) -> str:
    """Return the file's first comment, up to a line that ends a sentence."""
    words: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("# ") and not line.startswith(("# @", "# yaml-language-server:")):
            words.append(line.removeprefix("# "))
        if words and (not line.startswith("# ") or line.endswith((".", ":"))):
            break
    return " ".join(words).rstrip(".:")


def parse_document(text: str) -> dict[str, Any]:
    """Parse a YAML mapping; raises `ConfigError`, also for exceeded limits and interpolations."""
    from yaml import YAMLError

    if len(text) > MAX_DOCUMENT_CHARS:
        raise ConfigError([ConfigIssue("", f"longer than {MAX_DOCUMENT_CHARS:,} characters")])
    if "${" in text:
        raise ConfigError([ConfigIssue("", "interpolation (`${...}`) is not supported here: send resolved values")])
    try:
        if issue := check_yaml_limits(text):
            raise ConfigError([issue])
        return canonical_tree(load_yaml(text))
    except YAMLError as error:
        raise ConfigError([ConfigIssue("", _first_lines(error))]) from error


def validate_tree(tree: dict[str, Any], source: str = "") -> RunConfig:
    """Validate a tree strictly as JSON; raises `ConfigError` with every rejected key."""
    try:
        text = json.dumps(follow_adapter(read_shown_images(recompute_cut_logprobs(tree))))
        if JSON_NUL in text:
            raise ConfigError(
                [ConfigIssue("", "a string contains a NUL character, which paths and names must not")], source
            )
        config = RunConfig.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(collect_issues(error, RunConfig), source) from error
    except (TypeError, ValueError) as error:
        raise ConfigError([ConfigIssue("", f"not plain values: {error}")], source) from error
    if issues := list(_find_infinite(tree)):
        raise ConfigError(issues, source)
    return config


def _find_infinite(value: object, path: str = "") -> Iterator[ConfigIssue]:
    """Yield the numbers of free tables (`env_config`) that pydantic writes as null into a run's record."""
    if isinstance(value, float) and not math.isfinite(value):
        yield ConfigIssue(
            path, f"expected a finite number, got {value}: a run's record is JSON, which can't represent it"
        )
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, child in children:
        yield from _find_infinite(child, f"{path}.{key}" if path else str(key))


def compose_document(path: Path, overrides: Sequence[str] = (), *, is_remote: bool = False) -> str:
    """Return a file as the JSON that `POST /runs` takes; the mesh chooses devices. Raises `ConfigError`.

    is_remote: as in `compose_saved`.
    """
    return json.dumps(resolve_paths(compose_saved(path, overrides, is_remote=is_remote), Path.cwd()))


def dump_yaml(config: RunConfig) -> str:
    """Return a run's file, which is read as `config`: its texts have no interpolations."""
    return write_yaml(escape(to_saved_tree(config)))


def show_yaml(config: RunConfig) -> str:
    """Return every key with its value, implied ones included."""
    return write_yaml(escape(config.model_dump(mode="json")))


def escape(value: Any) -> Any:
    """Escape `${` in texts, which OmegaConf would resolve in the environment of the reader."""
    match value:
        case str():
            return INTERPOLATION.sub(lambda start: start[1] * 2 + "\\${", value)
        case dict():
            return {key: escape(each) for key, each in cast(dict[str, Any], value).items()}
        case list():
            return [escape(each) for each in cast(list[Any], value)]
        case _:
            return value


def _allow_new_keys(overrides: Sequence[str]) -> list[str]:
    """Prefix overrides with `++`, so that our validation reports unknown keys.

    URLs with options (`redis.url=rediss://host?ssl_ca_certs=/ca.pem`) are quoted, as Hydra's values end at an equals
    sign.
    """
    return [text if text.startswith(("+", "~")) else f"++{_quote_url(text)}" for text in overrides]


def _quote_url(override: str) -> str:
    key, equals, value = override.partition("=")
    if "://" not in value or "=" not in value or value[0] in "\"'[{":
        return override
    escaped = value.replace('"', '\\"')
    return f'{key}{equals}"{escaped}"'


def canonical_tree(tree: Any, source: str = "") -> dict[str, Any]:
    """Return the tree with canonical keys and values, and `~` expanded in paths; raises `ConfigError`."""
    if not isinstance(tree, dict):
        raise ConfigError([ConfigIssue("", "expected a mapping of keys to values")], source)
    canonical, issues = canonicalize({str(key): value for key, value in tree.items()})
    if issues:
        raise ConfigError(issues, source)
    expand_home(canonical)
    return canonical


def _first_lines(error: Exception, limit: int = 3) -> str:
    return " ".join(line.strip() for line in str(error).splitlines()[:limit] if line.strip())
