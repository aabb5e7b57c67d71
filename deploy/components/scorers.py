# pyright: basic
"""Services of frozen models: replicas as Ray actors, one pool per role.

The process exits if scoring fails, so that Ray restarts it; its successor continues with its group.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from offbeat.deploy.components import ray_names
from offbeat.deploy.components.actor_pool import ActorPool
from offbeat.deploy.components.placement import place
from offbeat.deploy.components.ray_actors import find_actor
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.run_setup import LOGS
from offbeat.services.control.interfaces import Health, Observation
from offbeat.services.devices import VISIBLE, parent_visible, visible_devices
from offbeat.services.errors import ControlError, ForeignRunError
from offbeat.services.log_format import set_process_log_fields
from offbeat.services.telemetry import configure_logging
from offbeat.trainer.config.scored_roles import ScoredRole

logger = logging.getLogger(__name__)

UNLIMITED = -1


def scorer_name(run_id: str, role: str, index: int) -> str:
    return f"scorer-{run_id}:{role}-{index}"  # run ids have no colon


class ScorerActor:
    def __init__(
        self,
        run_id: str,
        uid: str,
        role: str,
        index: int,
        redis_url: str,
        output_dir: Path,
        devices: Sequence[int] = (),
    ) -> None:
        """devices: of the node; empty: Ray chose."""
        if devices:
            os.environ[VISIBLE] = visible_devices(devices, parent_visible())
        self._name = scorer_name(run_id, role, index)
        configure_logging(self._name, output_dir / LOGS)
        set_process_log_fields(run=run_id)
        self._run_id = run_id
        self._uid = uid
        self._role = role
        self._redis_url = redis_url
        self._status = "starting"
        self._problem = ""
        self._scorer: Any = None
        threading.Thread(target=self._run, name="scorer", daemon=True).start()

    def alive(self) -> dict[str, Any]:
        """Return process id, wait (empty: scoring) and permanent problem."""
        status = self._status if self._scorer is None else self._scorer.status
        return {"name": self._name, "pid": os.getpid(), "status": status, "problem": self._problem}

    def _run(self) -> None:
        logger.info("%s started in process %d", self._name, os.getpid())
        try:
            self._score()
        except ControlError as error:
            logger.error("%s", error)
            self._problem = str(error)
        except ForeignRunError as error:
            logger.error("%s: this scorer belongs to an earlier one, and exits", error)
            ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
        except Exception:
            logger.exception("scoring failed; restarting the process")
            os._exit(1)

    def _score(self) -> None:
        # vLLM is imported by a teacher that asks for it
        from offbeat.services.generation.vllm.prompt_logprobs import PromptLogprobs  # noqa: PLC0415
        from offbeat.trainer.scoring.factory import build_scorer  # torch is of the actor alone  # noqa: PLC0415

        self._scorer = build_scorer(self._run_id, self._uid, self._role, self._name, self._redis_url, PromptLogprobs)
        self._scorer.run()


class ScorerPool(ActorPool):
    def __init__(self, config: RunConfig, role: ScoredRole, redis_url: str, uid: str = "") -> None:
        super().__init__()
        self.name = role.name
        self._config = config
        self._role = role
        self._redis_url = redis_url
        self._uid = uid

    @property
    def _names(self) -> Sequence[str]:
        return [scorer_name(self._config.exp_name, self.name, index) for index in range(self._role.num_replicas)]

    async def ensure(self) -> None:
        for index, name in enumerate(self._names):
            await asyncio.to_thread(self._start, index, name)

    def _start(self, index: int, name: str) -> None:
        train = self._config.actor_train
        slots = place(self._config).scorers.get(self.name, ())
        where = slots[index] if slots else None
        affinity = (
            {} if where is None else {"scheduling_strategy": NodeAffinitySchedulingStrategy(where.node_id, False)}
        )
        arguments = (self._config.exp_name, self._uid, self.name, index, self._redis_url)
        ray.remote(ScorerActor).options(
            name=name,
            namespace=ray_names.NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            num_gpus=1 if train.device == "cuda" else 0,
            max_restarts=UNLIMITED,
            **affinity,
        ).remote(*arguments, self._config.output_dir.resolve(), where.devices if where else ())

    async def stop(self, *, now: bool) -> None:  # noqa: ARG002
        """Kill the replicas, whose claims expire."""
        for name in self._names:
            actor = await asyncio.to_thread(find_actor, name)
            if actor is not None:
                await asyncio.to_thread(ray.kill, actor, no_restart=True)

    def _ping(self, actor: ActorHandle) -> "ray.ObjectRef[Any]":
        return actor.alive.remote()

    def _judge(self, answer: Mapping[str, Any], log: str) -> Observation:
        if answer["problem"]:
            return Observation(Health.BROKEN, answer["problem"], log)
        if answer["status"]:
            return Observation(Health.STARTING, answer["status"], log)
        return Observation(Health.READY, log=log)
