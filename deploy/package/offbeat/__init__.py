"""Asynchronous reinforcement learning of LLM agents: the public Python API.

    import offbeat

    run = offbeat.train("deploy/configs/quickstart.yaml", ["seed=2"])
    run.wait()
    run.metrics()[["step", "success"]]

Names are imported when they are first used, so that `import offbeat` is fast. Everything else is internal: its names may
change with any release.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from offbeat.services.torch_extensions import hide_mismatched

if TYPE_CHECKING:
    from offbeat.deploy.api.client import Client, connect
    from offbeat.deploy.api.episode import Episode, check_env, play, rollout
    from offbeat.deploy.api.run import Run, RunElsewhereError, RunFailedError, load_config, train
    from offbeat.deploy.config.errors import ConfigError
    from offbeat.deploy.config.run import RunConfig
    from offbeat.envs.config import Config
    from offbeat.envs.contract import ContractReport
    from offbeat.envs.task_samplers import TaskSampler
    from offbeat.services.errors import RetryableError
    from offbeat.services.messages.types import Group, Trajectory
    from offbeat.services.rollout.agents.task import AgentTask
    from offbeat.trainer.data.batch import Batch
    from offbeat.trainer.losses.policy_loss import LossInputs
    from offbeat.trainer.trackers.base import Row, TrackedRun, Tracker

    __version__: str

hide_mismatched()

_MODULES = {
    "AgentTask": "services.rollout.agents.task",
    "Batch": "trainer.data.batch",
    "Client": "deploy.api.client",
    "Config": "envs.config",
    "ConfigError": "deploy.config.errors",
    "ContractReport": "envs.contract",
    "Episode": "deploy.api.episode",
    "Group": "services.messages.types",
    "LossInputs": "trainer.losses.policy_loss",
    "RetryableError": "services.errors",
    "Row": "trainer.trackers.base",
    "Run": "deploy.api.run",
    "RunConfig": "deploy.config.run",
    "RunElsewhereError": "deploy.api.run",
    "RunFailedError": "deploy.api.run",
    "TaskSampler": "envs.task_samplers",
    "TrackedRun": "trainer.trackers.base",
    "Tracker": "trainer.trackers.base",
    "Trajectory": "services.messages.types",
    "check_env": "deploy.api.episode",
    "connect": "deploy.api.client",
    "load_config": "deploy.api.run",
    "play": "deploy.api.episode",
    "rollout": "deploy.api.episode",
    "train": "deploy.api.run",
}

__all__ = [  # noqa: RUF022 (in the order in which a reader needs them)
    "load_config",
    "train",
    "Run",
    "connect",
    "Client",
    "play",
    "rollout",
    "Episode",
    "check_env",
    "ContractReport",
    "RunConfig",
    "ConfigError",
    "RunFailedError",
    "RunElsewhereError",
    "RetryableError",
    "AgentTask",
    "TaskSampler",
    "Tracker",
    "TrackedRun",
    "Row",
    "Group",
    "Trajectory",
    "Batch",
    "LossInputs",
    "Config",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = import_module("importlib.metadata").version("offbeat")
    elif name in _MODULES:
        value = getattr(import_module(f"offbeat.{_MODULES[name]}"), name)
    else:
        raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
