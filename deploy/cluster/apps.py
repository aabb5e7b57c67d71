"""Builders of the applications in `deploy.yaml` and `cluster.yaml`."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import ray
from pydantic import AfterValidator, Field, JsonValue, ValidationError
from ray.serve import Application

from offbeat.deploy.components.placement import list_nodes
from offbeat.deploy.config.checks.experts import check_returned_experts
from offbeat.deploy.config.checks.hf_infer import check_hf_infer
from offbeat.deploy.config.checks.lora import check_shared_engine
from offbeat.deploy.config.checks.sglang import check_sglang
from offbeat.deploy.config.device_plan import DevicePlan, plan_devices
from offbeat.deploy.config.devices import choose_devices, count_gpus
from offbeat.deploy.config.errors import ConfigError, collect_issues
from offbeat.deploy.config.hub import download, resolve_models
from offbeat.deploy.config.loader import canonical_tree, compose_tree, validate_tree
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.run_setup import LOGS, model_folder, prepare_folder
from offbeat.deploy.tinker import serve_app as tinker_app
from offbeat.envs.config import Config
from offbeat.services.buffer.config import RedisConfig
from offbeat.services.control import app as control_app
from offbeat.services.control.config import RightsConfig, TokenConfig, create_token, find_token_problem, read_token
from offbeat.services.control.rights import TokenGrant, Tokens
from offbeat.services.errors import MeshError
from offbeat.services.generation import app as generation_app
from offbeat.services.redis import serve_app as redis_app
from offbeat.services.redis.url import address_problem
from offbeat.services.redis.url_file import create_url_file, read_url_file
from offbeat.services.tinker.owners import read_keys
from offbeat.trainer.config.issue import ConfigIssue

RUN_FACTORY_PATH = "offbeat.deploy.cluster.ray_run_factory:RayRunFactory"
REDIS_STOP_HOOK = "offbeat.deploy.cluster.reaper:stop_learners"

T = TypeVar("T", bound=Config)
R = TypeVar("R")


def _check_address(url: str) -> str:
    if problem := address_problem(url):
        raise ValueError(problem)
    return url


RedisUrl = Annotated[str, AfterValidator(_check_address)]


class RedisAddress(Config):
    redis_url: RedisUrl | None = None
    """Redis of all runs, for every node."""
    redis_url_file: Path | None = None
    """File with the URL and its password, for its owner alone. For a `redis_url` without a password, the first
    application generates it.
    """

    def resolve(self) -> str:
        """Return the URL with its password; raises `ConfigError`."""
        url, path = self.redis_url, self.redis_url_file
        if path is None and url is None:
            raise ConfigError([ConfigIssue("redis_url", "required, and missing; or set redis_url_file")])
        if path is None:
            return str(url)
        if url is not None and "@" in url:
            raise ConfigError([ConfigIssue("redis_url_file", "has no effect beside a redis_url with a password")])
        try:
            return read_url_file(path) if url is None else create_url_file(path.resolve(), url)
        except (OSError, MeshError) as error:
            raise ConfigError([ConfigIssue("redis_url_file", str(error))]) from None


class RedisArguments(RedisAddress):
    """Server on loopback and `redis_url`'s port."""

    folder: Path
    """Folder of the append-only file."""
    appendfsync: Literal["everysec", "always"] = "everysec"


class ModelArguments(RedisAddress):
    """Application with a run's policy."""

    folder: Path
    """Folder of logs, and of the tiny policy with `pretrain: tiny`."""
    run: str | None = None
    """YAML file of a run like those to serve, or its name in `deploy/configs`."""
    config: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Overrides of `run`: `pretrain`, `sequence_length`, `actor_infer`, `weights`, `tinker`, ..."""


class ControlAppArgs(RightsConfig, RedisAddress):
    working_dir: Path | None = None
    """Base of relative paths; None: the folder of `ray start`."""
    token_file: Path | None = None
    """File with the bearer token, created for its owner; None: each program on the service's host has access."""
    read_token_file: Path | None = None
    """File with a read-only token."""
    tokens: tuple[TokenConfig, ...] = ()
    """More tokens with rights of their own; `allow_modules` and `output_roots` beside them are those of
    `token_file`."""
    log_dir: Path = Path("runs/control")
    """Folder of the service's log."""
    max_cpus: float = Field(0.0, ge=0)
    """CPUs up to which an autoscaler adds nodes; 0: the cluster's own."""


def redis(args: dict[str, Any]) -> Application:
    arguments = parse_arguments(RedisArguments, args)
    config = RedisConfig(appendfsync=arguments.appendfsync)
    folder = arguments.folder.resolve()
    settings = redis_app.RedisSettings.of(arguments.resolve(), folder, config, REDIS_STOP_HOOK)
    if not settings.password:
        advice = "set redis_url_file in every application: the password is generated"
        raise ConfigError(
            [ConfigIssue("redis_url", f"every user of this machine could connect without a password: {advice}")]
        )
    return redis_app.build(settings)


def generation(args: dict[str, Any]) -> Application:
    arguments = parse_arguments(ModelArguments, args)
    folder = arguments.folder.resolve()
    config = choose_devices(_load_run_config(arguments), _count_gpus()).model_copy(update={"output_dir": folder})
    checks = (check_hf_infer, check_sglang, check_shared_engine, check_returned_experts)
    if issues := [issue for check in checks for issue in check(config)]:
        raise ConfigError(issues)
    plan = _plan_engines(config)
    prepare_folder(config)
    settings = generation_app.ReplicaSettings(
        tenant=None,
        config=config.actor_infer,
        transport=config.weights.transport,
        model=model_folder(config).resolve(),
        sequence_length=config.sequence_length,
        redis_url=arguments.resolve(),
        log_dir=folder / LOGS,
        seed=config.seed,
        environment=config.environment,
        slots=plan.engines,
    )
    return generation_app.deploy(settings)


def _plan_engines(config: RunConfig) -> DevicePlan:
    """Place the engines of a `device_mapping`, if any; raises `ConfigError`."""
    if config.actor_infer.device_mapping is None:
        return DevicePlan()
    plan = plan_devices(config, list_nodes())
    if plan.issues:
        raise ConfigError(list(plan.issues))
    return plan


def tinker(args: dict[str, Any]) -> Application:
    arguments = parse_arguments(ModelArguments, args)
    config = _load_run_config(arguments).model_copy(update={"output_dir": arguments.folder.resolve()})
    try:
        read_keys(config.tinker.keys_file)
    except MeshError as error:
        raise ConfigError([ConfigIssue("config.tinker.keys_file", str(error))]) from None
    return tinker_app.build(tinker_app.TinkerSettings(arguments.resolve(), config))


def control(args: dict[str, Any]) -> Application:
    arguments = parse_arguments(ControlAppArgs, args)
    working_dir = (arguments.working_dir or Path()).resolve()
    if arguments.read_token_file is not None and arguments.token_file is None:
        raise ConfigError([ConfigIssue("read_token_file", "has no effect without token_file: set it too")])
    return control_app.build(
        control_app.ControlSettings(
            redis_url=arguments.resolve(),
            factory=RUN_FACTORY_PATH,
            tokens=_read_tokens(arguments, working_dir),
            log_dir=working_dir / arguments.log_dir,
            working_dir=working_dir,
            max_cpus=arguments.max_cpus,
        )
    )


def parse_arguments(kind: type[T], args: dict[str, Any]) -> T:
    """Validate arguments; raises `ConfigError` with every invalid key."""
    try:
        return kind.model_validate_json(json.dumps(args))
    except ValidationError as error:
        raise ConfigError(collect_issues(error, kind)) from None


def _count_gpus() -> float:
    """Count the cluster's GPUs, or this machine's."""
    return ray.cluster_resources().get("GPU", 0.0) if ray.is_initialized() else count_gpus()


def _load_run_config(arguments: ModelArguments) -> RunConfig:
    from omegaconf import OmegaConf  # noqa: PLC0415

    tree: dict[str, Any] = {"custom_envs": {}}
    if arguments.run is not None:
        tree = compose_tree(Path(arguments.run))
    merged = OmegaConf.to_container(OmegaConf.merge(tree, arguments.config))
    config = validate_tree(canonical_tree(merged))
    found, issues = resolve_models({"pretrain": config.pretrain}, download)
    model = str(found["pretrain"])
    if not issues and model != "tiny" and not (Path(model) / "config.json").is_file():
        issues = [ConfigIssue("pretrain", f"{model} is no Hugging Face model folder: it has no config.json")]
    if issues:
        key = "config.pretrain" if "pretrain" in arguments.config else "run: pretrain"
        raise ConfigError([replace(issue, path=key) for issue in issues])
    return config.model_copy(update={"pretrain": model})


def _to_grant(config: TokenConfig, base: Path) -> TokenGrant:
    if config.token and (problem := find_token_problem(config.token)):
        raise ValueError(problem)
    return config.to_grant(base)


def _read_tokens(arguments: ControlAppArgs, working_dir: Path) -> Tokens:
    others = tuple(
        _checked(f"tokens.{place}.{'token' if each.token else 'token_file'}", partial(_to_grant, each, working_dir))
        for place, each in enumerate(arguments.tokens)
    )
    operate, read = arguments.token_file, arguments.read_token_file
    return Tokens(
        operate and _checked("token_file", lambda: create_token(operate)),
        read and _checked("read_token_file", lambda: read_token(read)),
        arguments.to_rights(working_dir),
        others,
    )


def _checked(key: str, read: Callable[[], R]) -> R:
    try:
        return read()
    except ValueError as error:
        raise ConfigError([ConfigIssue(key, str(error))]) from None
    except OSError as error:
        raise ConfigError([ConfigIssue(key, f"can't be read: {error}")]) from None
