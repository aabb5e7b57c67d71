"""A run's configuration from a YAML file and `key=value` overrides: composed by Hydra, validated once, strictly.

Invariant: whatever is wrong is told as `ConfigError`, all of it together, before anything starts.
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

MAX_DOCUMENT_CHARS = 1_000_000
NUL = "\\u0000"
"""As JSON writes it."""


def load_run(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Compose, validate and check the run that `path` and `overrides` describe.

    Raises:
        ConfigError: lists every issue.
    """
    config = validate_tree(compose_tree(path, overrides), source=str(path))
    issues = check_run(config)
    if issues:
        raise ConfigError(issues, str(path))
    return config


def read_run(path: Path) -> RunConfig:
    """The configuration that a run wrote down. It was checked when the run began; whether this machine could run it, or has
    its model and its envs, is not asked.

    Raises:
        ConfigError: it can't be read.
    """
    return validate_tree(compose_tree(path), source=str(path))


def load_document(
    document: str | dict[str, Any],
    *,
    cores: float | None = None,
    gpus: float | None = None,
    working_dir: Path | None = None,
) -> RunConfig:
    """The run that a YAML text or a tree of plain values describes, as REST receives it.

    Interpolations are refused: they would be resolved in the service's environment, not the sender's.

    cores, gpus: see `check_run`. working_dir: relative paths are made absolute from there; None leaves them.

    Raises:
        ConfigError: lists every issue.
    """
    config = validate_tree(parse_document(document) if isinstance(document, str) else document)
    if working_dir is not None:
        config = rooted(config, working_dir)
    issues = check_run(config, cores=cores, gpus=gpus)
    if issues:
        raise ConfigError(issues)
    return config


def compose_tree(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Hydra's composition of a YAML file (its `defaults` list included) and overrides, as plain values.

    Raises:
        ConfigError: the file or an override can't be read.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if not path.is_file():
        raise ConfigError([ConfigIssue("", f"no such file: {path}")], str(path))
    if path.suffix != ".yaml":
        raise ConfigError([ConfigIssue("", f"Hydra reads files that are named *.yaml: rename {path.name}")], str(path))
    folder = path.resolve().parent
    try:
        with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
            composed = compose(config_name=path.name, overrides=_forced(overrides))
        tree = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError) as error:
        # OSError: also what OmegaConf calls a document that is one number, truth or date
        raise ConfigError([ConfigIssue("", _first_lines(error))], str(path)) from error
    return _as_tree(tree, str(path))


def parse_document(text: str) -> dict[str, Any]:
    """A YAML text as plain values.

    Raises:
        ConfigError: it is no YAML mapping, is too long, or asks for interpolation.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if len(text) > MAX_DOCUMENT_CHARS:
        raise ConfigError([ConfigIssue("", f"longer than {MAX_DOCUMENT_CHARS:,} characters")])
    if "${" in text:
        raise ConfigError([ConfigIssue("", "interpolation (`${...}`) is refused here: send resolved values")])
    try:
        if issue := check_yaml_limits(text):
            raise ConfigError([issue])
        tree = OmegaConf.to_container(OmegaConf.create(text))
    except AssertionError as error:  # OmegaConf's own, of a document that is one number, truth or date
        raise ConfigError([ConfigIssue("", "expected a mapping of keys to values")]) from error
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError([ConfigIssue("", _first_lines(error))]) from error
    return _as_tree(tree, "")


def validate_tree(tree: dict[str, Any], source: str = "") -> RunConfig:
    """The configuration of a tree of plain values; strict as JSON is: text may name a path, a list fills a tuple.

    Raises:
        ConfigError: with every key that was refused.
    """
    try:
        text = json.dumps(tree)
        if NUL in text:
            raise ConfigError(
                [ConfigIssue("", "a text in it holds a NUL character, which no path and no name may")], source
            )
        return RunConfig.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(collect_issues(error, RunConfig), source) from error
    except (TypeError, ValueError) as error:
        raise ConfigError([ConfigIssue("", f"not plain values: {error}")], source) from error


def rooted(config: RunConfig, folder: Path) -> RunConfig:
    """The same run with its relative paths made absolute from `folder`."""
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
    """The resolved configuration as YAML that `load_run` reads back."""
    import yaml

    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _forced(overrides: Sequence[str]) -> list[str]:
    """Overrides that add a key where the YAML has none: whether a key exists is for our validation to say, not Hydra's.

    A URL with options (`redis.url=rediss://host?ssl_ca_certs=/ca.pem`) is quoted: an equals sign would end Hydra's value.
    """
    return [text if text.startswith(("+", "~")) else f"++{_quoted(text)}" for text in overrides]


def _quoted(override: str) -> str:
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
