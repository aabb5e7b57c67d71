"""Checks of a run in a process with a time limit."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict

from offbeat.deploy.config.device_plan import ClusterNode
from offbeat.deploy.config.errors import ConfigError, RightsError
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.saving import to_saved_tree
from offbeat.services.control.rights import UNRESTRICTED, Rights
from offbeat.services.errors import EpisodeError
from offbeat.services.rollout.child_process import ChildProcess
from offbeat.trainer.config.issue import ConfigIssue

CHECK_TIMEOUT_S = 120.0
"""Covers envs that load a data set."""
START_TIMEOUT_S = 120.0
"""Covers the imports on a busy machine."""


async def check_in_process(
    config: RunConfig,
    *,
    cores: float | None = None,
    nodes: Sequence[ClusterNode] | None = None,
    rights: Rights = UNRESTRICTED,
    models: bool = True,
    timeout_s: float = CHECK_TIMEOUT_S,
) -> None:
    """Check a configuration after `check_rights`. models: False before their download. timeout_s: of each
    question, once the process has started.

    Raises:
        RightsError: it reaches foreign code through an allowed module.
        ConfigError: with every issue; or, past the time limit, the key and the step.
    """
    child = ChildProcess("offbeat.deploy.config.validation_main", "died")
    limit_s = START_TIMEOUT_S
    with tempfile.NamedTemporaryFile(prefix="offbeat-validation-") as stage:
        try:
            await child.start()
            await child.ask("ping", limit_s)
            limit_s = timeout_s
            arguments = (json.dumps(to_saved_tree(config)), json.dumps(asdict(rights)), stage.name)
            if refused := await child.ask("check_definitions", timeout_s, *arguments):
                raise RightsError([ConfigIssue(*issue) for issue in refused])
            if models and (issues := await child.ask("check", timeout_s, arguments[0], cores, nodes, stage.name)):
                raise ConfigError([ConfigIssue(*issue) for issue in issues])
        except EpisodeError as error:
            key, _, doing = stage.read().decode().partition("\n")
            outcome = f"did not end within {limit_s:g} s" if error.reason.endswith("timeout") else f"failed ({error})"
            raise ConfigError([ConfigIssue(key, f"{doing or 'the validation'} {outcome}")]) from error
        finally:
            await child.kill()
