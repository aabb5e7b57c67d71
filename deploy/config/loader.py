"""Loading of configurations from YAML and `key=value` overrides.

Invariant: a `ConfigError` lists all issues, before the start.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from offbeat.deploy.config.checks.run import check_run
from offbeat.deploy.config.errors import ConfigError, collect_issues
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.yaml_limits import check_yaml_limits
from offbeat.trainer.config.issue import ConfigIssue

CONFIGS = Path(__file__).parents[1] / "configs"
"""Packaged configurations."""
MAX_DOCUMENT_CHARS = 1_000_000
JSON_NUL = "\\u0000"


def load_run(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Compose, validate and check a run.

    Raises:
        ConfigError: with every issue.
    """
    config = validate_tree(compose_tree(path, overrides), source=str(path))
    issues = check_run(config)
    if issues:
        raise ConfigError(issues, str(path))
    return config


def read_run(path: Path) -> RunConfig:
    """Read a saved configuration, without checks of this machine.

    Raises:
        ConfigError: the file can't be read.
    """
    return validate_tree(compose_tree(path), source=str(path))


def load_document(
    document: str | dict[str, Any],
    *,
    cores: float | None = None,
    gpus: float | None = None,
    working_dir: Path | None = None,
    trial: bool = True,
) -> RunConfig:
    """Validate and check a run from a YAML text or tree.

    Interpolations are rejected: they would resolve in the service's environment.

    cores, gpus, trial: see `check_run`. working_dir: base of relative paths; None keeps them.

    Raises:
        ConfigError: with every issue.
    """
    config = validate_tree(parse_document(document) if isinstance(document, str) else document)
    if working_dir is not None:
        config = resolve_paths(config, working_dir)
    issues = check_run(config, cores=cores, gpus=gpus, trial=trial)
    if issues:
        raise ConfigError(issues)
    return config


def compose_tree(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Compose a YAML file and overrides with Hydra.

    Raises:
        ConfigError: invalid file or override.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    path = find_config(path)
    if path.suffix != ".yaml":
        raise ConfigError([ConfigIssue("", f"Hydra reads only *.yaml files: rename {path.name}")], str(path))
    folder = path.resolve().parent
    try:
        with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
            composed = compose(config_name=path.name, overrides=_allow_new_keys(overrides))
        tree = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError) as error:
        # OmegaConf raises OSError for a document that is a scalar
        raise ConfigError([ConfigIssue("", _first_lines(error))], str(path)) from error
    return _as_tree(tree, str(path))


def find_config(path: Path) -> Path:
    """Return a configuration's file; a name (`quickstart`, `recipes/ppo`) that is no file is a packaged one.

    Raises:
        ConfigError: there is none.
    """
    if path.is_file():
        return path
    for packaged in (CONFIGS / path, CONFIGS / f"{path}.yaml"):
        if packaged.is_file():
            return packaged
    names = sorted(str(each.relative_to(CONFIGS).with_suffix("")) for each in CONFIGS.rglob("*.yaml"))
    raise ConfigError([ConfigIssue("", f"no such file: {path}; packaged: {', '.join(names)}")], str(path))


def parse_document(text: str) -> dict[str, Any]:
    """Parse a YAML text.

    Raises:
        ConfigError: no mapping, a limit exceeded, or interpolations.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if len(text) > MAX_DOCUMENT_CHARS:
        raise ConfigError([ConfigIssue("", f"longer than {MAX_DOCUMENT_CHARS:,} characters")])
    if "${" in text:
        raise ConfigError([ConfigIssue("", "interpolation (`${...}`) is not supported here: send resolved values")])
    try:
        if issue := check_yaml_limits(text):
            raise ConfigError([issue])
        tree = OmegaConf.to_container(OmegaConf.create(text))
    except AssertionError as error:  # OmegaConf's, for a document that is a scalar
        raise ConfigError([ConfigIssue("", "expected a mapping of keys to values")]) from error
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError([ConfigIssue("", _first_lines(error))]) from error
    return _as_tree(tree, "")


def validate_tree(tree: dict[str, Any], source: str = "") -> RunConfig:
    """Validate a tree strictly as JSON.

    Raises:
        ConfigError: with every rejected key.
    """
    try:
        text = json.dumps(tree)
        if JSON_NUL in text:
            raise ConfigError(
                [ConfigIssue("", "a string contains a NUL character, which paths and names must not")], source
            )
        return RunConfig.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(collect_issues(error, RunConfig), source) from error
    except (TypeError, ValueError) as error:
        raise ConfigError([ConfigIssue("", f"not plain values: {error}")], source) from error


def resolve_paths(config: RunConfig, folder: Path) -> RunConfig:
    """Resolve relative paths against `folder`."""
    changes: dict[str, Any] = {"output_dir": folder / config.output_dir}
    if config.pretrain != "tiny":
        changes["pretrain"] = str(folder / config.pretrain)
    if config.teacher:
        changes["teacher"] = {
            name: teacher.model_copy(update={"pretrain": str(folder / teacher.pretrain)})
            for name, teacher in config.teacher.items()
        }
    if isinstance(config.resume_from_checkpoint, Path):
        changes["resume_from_checkpoint"] = folder / config.resume_from_checkpoint
    return config.model_copy(update=changes)


def dump_yaml(config: RunConfig) -> str:
    """Serialize a configuration for `load_run`."""
    import yaml

    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _allow_new_keys(overrides: Sequence[str]) -> list[str]:
    """Prefix overrides with `++`, so that our validation reports unknown keys.

    URLs with options (`redis.url=rediss://host?ssl_ca_certs=/ca.pem`) are quoted: Hydra's values end at an equals sign.
    """
    return [text if text.startswith(("+", "~")) else f"++{_quote_url(text)}" for text in overrides]


def _quote_url(override: str) -> str:
    key, equals, value = override.partition("=")
    if "://" not in value or "=" not in value or value[0] in "\"'[{":
        return override
    escaped = value.replace('"', '\\"')
    return f'{key}{equals}"{escaped}"'


def _as_tree(tree: Any, source: str) -> dict[str, Any]:
    if not isinstance(tree, dict):
        raise ConfigError([ConfigIssue("", "expected a mapping of keys to values")], source)
    return {str(key): value for key, value in tree.items()}


def _first_lines(error: Exception, limit: int = 3) -> str:
    return " ".join(line.strip() for line in str(error).splitlines()[:limit] if line.strip())
