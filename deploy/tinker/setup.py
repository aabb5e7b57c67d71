"""Folder, base model and processes' settings of a Tinker server."""

import sys
from collections.abc import Sequence

import msgspec

from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.sharing import SHARED_UTILIZATION
from offbeat.deploy.run_folder import make_private
from offbeat.deploy.run_setup import model_folder, write_policy
from offbeat.deploy.tinker.child import SupervisedChild
from offbeat.deploy.tinker.open_service import ServiceSettings
from offbeat.services.errors import MeshError
from offbeat.services.generation.config import EngineModelArgs
from offbeat.services.generation.hf.limits import architecture_problem
from offbeat.services.generation.tenancy import read_architecture
from offbeat.services.tinker.owners import read_keys
from offbeat.trainer.tinker.base_model import claim_folder, weights_file
from offbeat.trainer.tinker.process import LearnerSettings

TINKER = "tinker"
"""Folder in `output_dir`, and name in a Redis of its own."""
LEARNER = "offbeat.trainer.tinker.process"


class TinkerSetup:
    def __init__(self, config: RunConfig, name: str = TINKER) -> None:
        """Prepare the folder; name: in Redis. Raises MeshError."""
        for key, number in (
            ("actor_infer.num_replicas", config.actor_infer.num_replicas),
            ("actor_train.num_processes", config.actor_train.num_processes),
        ):
            if number > 1:
                raise MeshError(f"{key}: {number}: a Tinker server has one engine and one learner: set it to 1")
        self._config = config
        self._name = name
        self._model = model_folder(config).resolve()
        self.root = config.output_dir.resolve() / TINKER
        make_private(config.output_dir)
        (self.root / "logs").mkdir(parents=True, exist_ok=True)
        if config.has_policy_folder:
            write_policy(config, self._model)
        read_keys(config.tinker.keys_file)
        infer = config.actor_infer
        if config.tinker.engine_on(infer.device) == "hf_infer":
            if infer.device == "cuda":
                raise MeshError("tinker.engine: hf_infer samples on a CPU: take vllm, or set actor_infer.device to cpu")
            if problem := architecture_problem(read_architecture(self._model)):
                raise MeshError(f"pretrain: {self._model}: {problem}")
        claim_folder(self.root, self._model, config.actor_train.model_args, config.seed)

    @property
    def model_name(self) -> str:
        named = self._config.tinker.model_name
        return named or (self._model.name if self._config.pretrain != "tiny" else "tiny")

    def learner(self, redis_url: str) -> SupervisedChild:
        train = self._config.actor_train
        settings = LearnerSettings(
            name=self._name,
            redis_url=redis_url,
            folder=str(self.root),
            model=str(self._model),
            model_args=train.model_args.without_adapters.model_dump_json(),
            seed=self._config.seed,
            context=self._context,
            max_tokens=train.training_args.max_tokens_per_microbatch,
            max_models=self._config.tinker.max_models,
            shared_pass_tokens=self._config.tinker.shared_pass_tokens,
            num_threads=train.num_threads,
            device=train.device,
        )
        return self.child("learner", LEARNER, msgspec.json.encode(settings))

    def service(self, redis_url: str) -> ServiceSettings:
        infer, train = self._config.actor_infer, self._config.actor_train
        if infer.device == train.device == "cuda" and infer.engine.gpu_memory_utilization is None:
            infer = infer.with_engine(gpu_memory_utilization=SHARED_UTILIZATION)
        if infer.device == "cuda" and infer.model_args.dtype == "float32":  # which vLLM's LoRA kernels for GPUs lack
            infer = infer.model_copy(update={"model_args": EngineModelArgs(dtype="bfloat16")})
        return ServiceSettings(
            name=self._name,
            redis_url=redis_url,
            model=str(self._model),
            model_name=self.model_name,
            weights=str(weights_file(self.root, self._model)),
            generation=infer.model_dump_json(),
            tinker=self._config.tinker.model_dump_json(),
            context=self._context,
            seed=self._config.seed,
        )

    def child(self, name: str, module: str, settings: bytes, descriptors: Sequence[int] = ()) -> SupervisedChild:
        log = self.root / "logs" / f"{module.rpartition('.')[2]}.log"
        return SupervisedChild(name, [sys.executable, "-m", module], settings, log, descriptors)

    @property
    def _context(self) -> int:
        return self._config.actor_infer.engine.max_model_len or self._config.sequence_length
