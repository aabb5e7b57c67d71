"""`offbeat tinker`: supervision of a Tinker server's processes.

Invariant: acknowledged commands are in Redis and states on disk, so that any process may be killed.
"""

import asyncio
import socket
import sys
from contextlib import suppress

import msgspec

from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.local.signals import termination_signals
from offbeat.deploy.local.supervised_redis import SupervisedRedis
from offbeat.deploy.local.supervision import run_beside
from offbeat.deploy.run_folder import locked, make_private
from offbeat.deploy.run_setup import model_folder, write_policy
from offbeat.deploy.tinker.child import SupervisedChild
from offbeat.deploy.tinker.http_process import HttpSettings
from offbeat.services.errors import MeshError
from offbeat.services.generation.hf.limits import architecture_problem
from offbeat.services.generation.tenancy import read_architecture
from offbeat.services.tinker.owners import read_keys
from offbeat.trainer.tinker.base_model import claim_folder, weights_file
from offbeat.trainer.tinker.process import LearnerSettings

TINKER = "tinker"
"""Folder in `output_dir`."""
LEARNER, HTTP = "offbeat.trainer.tinker.process", "offbeat.deploy.tinker.http_process"


class TinkerServer:
    def __init__(self, config: RunConfig) -> None:
        """Prepare the folder and bind the port; raises MeshError."""
        self._config = config
        self._model = model_folder(config).resolve()
        self._root = config.output_dir.resolve() / TINKER
        make_private(config.output_dir)
        (self._root / "logs").mkdir(parents=True, exist_ok=True)
        if config.has_policy_folder:
            write_policy(config, self._model)
        self._check()
        self._socket = self._listen()
        self._redis = SupervisedRedis(self._root / "redis", config.redis)
        self._children: list[SupervisedChild] = []

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def model_name(self) -> str:
        named = self._config.tinker.model_name
        return named or (self._model.name if self._config.pretrain != "tiny" else "tiny")

    async def run(self) -> None:
        """Serve until a termination signal; raises MeshError if a part keeps dying."""
        stopped = asyncio.Event()
        for number in termination_signals():
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        with locked(self._config.output_dir):
            await self._redis.start()
            try:
                self._children = [self._learner(), self._http()]
                supervisors = [self._redis.supervise(), *(each.supervise() for each in self._children)]
                await run_beside(stopped.wait(), supervisors)
            finally:
                for child in reversed(self._children):  # first the one that accepts commands
                    await asyncio.to_thread(child.stop)
                self._redis.stop()
                self._socket.close()

    def _check(self) -> None:
        read_keys(self._config.tinker.keys_file)
        if problem := architecture_problem(read_architecture(self._model)):
            raise MeshError(f"pretrain: {self._model}: {problem}")
        claim_folder(self._root, self._model, self._config.actor_train.model_args, self._config.seed)

    def _listen(self) -> socket.socket:
        host, port = self._config.tinker.host, self._config.tinker.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            return socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            raise MeshError(
                f"tinker.port: {host}:{port} can't be listened on ({error.strerror}): set another"
            ) from error

    def _learner(self) -> SupervisedChild:
        train = self._config.actor_train
        settings = LearnerSettings(
            name=TINKER,
            redis_url=self._redis.url,
            folder=str(self._root),
            model=str(self._model),
            model_args=train.model_args.without_adapters.model_dump_json(),
            seed=self._config.seed,
            context=self._context,
            max_tokens=train.training_args.max_tokens_per_microbatch,
            max_models=self._config.tinker.max_models,
            num_threads=train.num_threads,
        )
        return self._child("learner", LEARNER, msgspec.json.encode(settings))

    def _http(self) -> SupervisedChild:
        settings = HttpSettings(
            name=TINKER,
            redis_url=self._redis.url,
            descriptor=self._socket.fileno(),
            model=str(self._model),
            model_name=self.model_name,
            weights=str(weights_file(self._root, self._model)),
            generation=self._config.actor_infer.model_dump_json(),
            tinker=self._config.tinker.model_dump_json(),
            context=self._context,
            seed=self._config.seed,
        )
        return self._child("HTTP server", HTTP, msgspec.json.encode(settings), self._socket.fileno())

    def _child(self, name: str, module: str, settings: bytes, *descriptors: int) -> SupervisedChild:
        log = self._root / "logs" / f"{module.rpartition('.')[2]}.log"
        return SupervisedChild(name, [sys.executable, "-m", module], settings, log, descriptors)

    @property
    def _context(self) -> int:
        return self._config.actor_infer.engine.max_model_len or self._config.sequence_length


def serve(server: TinkerServer) -> None:
    with suppress(KeyboardInterrupt):
        asyncio.run(server.run())
