"""Folder, base model and processes' settings of a Tinker server."""

import hashlib
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from offbeat.deploy.config.checks.hf_infer import check_cache
from offbeat.deploy.config.checks.model import count_experts, has_vision
from offbeat.deploy.config.checks.packing import check_packing
from offbeat.deploy.config.checks.recurrent import check_recurrent
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.sharing import SHARED_UTILIZATION
from offbeat.deploy.config.vocabulary import collect_words
from offbeat.deploy.run_folder import make_private
from offbeat.deploy.run_marker import identify
from offbeat.deploy.run_setup import digest_base, load_architecture, model_folder, write_policy
from offbeat.deploy.tinker.child import SupervisedChild
from offbeat.deploy.tinker.open_service import ServiceSettings
from offbeat.services.errors import MeshError
from offbeat.services.generation.config import EngineModelArgs
from offbeat.services.generation.hf.limits import architecture_problem
from offbeat.services.tinker.owners import read_keys
from offbeat.trainer.models.recurrent_layers import RECURRENT_LAYERS
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
        _check_model(config)
        read_keys(config.tinker.keys_file)
        self._config = config
        self._name = name
        self._model = model_folder(config).resolve()
        self.root = config.output_dir.resolve() / TINKER
        _check_folder(config, self.root)
        make_private(config.output_dir)
        (self.root / "logs").mkdir(parents=True, exist_ok=True)
        claim_folder(self.root, self._model, config.actor_train.model_args, config.seed, _digest_base(config))
        if config.has_policy_folder:
            write_policy(config, self._model)

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
            weights=self._weights,
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
            weights=self._weights,
            generation=infer.model_dump_json(),
            tinker=self._config.tinker.model_dump_json(),
            context=self._context,
            seed=self._config.seed,
        )

    def child(self, name: str, module: str, settings: bytes, descriptors: Sequence[int] = ()) -> SupervisedChild:
        log = self.root / "logs" / f"{module.rpartition('.')[2]}.log"
        return SupervisedChild(name, [sys.executable, "-m", module], settings, log, descriptors)

    @property
    def _weights(self) -> str:
        """File of the base model that the learner provides for the engine."""
        engine = self._config.tinker.engine_on(self._config.actor_infer.device)
        return str(weights_file(self.root, self._model, engine))

    @property
    def _context(self) -> int:
        return self._config.actor_infer.engine.max_model_len or self._config.sequence_length


def _check_folder(config: RunConfig, root: Path) -> None:
    """Refuse a run's folder: the server would replace its policy, and its Redis would keep the run from resuming."""
    if not root.is_dir() and (run := identify(config.output_dir)):
        raise MeshError(
            f"output_dir {config.output_dir} is the folder of run {run.run_id!r}: set a folder of its own, such as "
            "output_dir=runs/tinker"
        )


def _is_recurrent(config: RunConfig) -> bool:
    architecture = load_architecture(config)
    text = architecture.get("text_config", architecture)
    return isinstance(text, dict) and text.get("model_type") in RECURRENT_LAYERS


def _check_model(config: RunConfig) -> None:
    """Raise MeshError with the key if adapters, or the engine, do not support the base model."""
    infer = config.actor_infer
    if config.actor_train.model_args.load_in_4bit:
        raise MeshError("actor_train.model_args.load_in_4bit: a Tinker server's base is not quantized: leave it out")
    if config.actor_train.training_args.optim != "adamw_torch":
        raise MeshError(
            "actor_train.training_args.optim: a Tinker server's optimizer is AdamW in float32: leave it out"
        )
    if has_vision(config):
        raise MeshError("pretrain: the policy has image input; adapters support text models only")
    for issue in check_packing(config):
        raise MeshError(str(issue))
    engine, experts = config.tinker.engine_on(infer.device), count_experts(config)
    if experts > 1 and config.tinker.shared_pass_tokens:
        raise MeshError(
            f"tinker.shared_pass_tokens: the base model has {experts} experts, which mix tokens of several models in their "
            "sums, so that a pass is not repeated to the bit: leave it out"
        )
    if config.tinker.shared_pass_tokens and _is_recurrent(config):
        raise MeshError(
            "tinker.shared_pass_tokens: the base model has recurrent layers, which compute tokens in another order than "
            "that of a pass that models share: leave it out"
        )
    if experts > 1 and engine == "vllm" and infer.device == "cpu":
        raise MeshError(
            f"tinker.engine: the base model has {experts} experts, whose adapters vLLM serves on GPUs alone: take hf_infer"
        )
    if engine != "hf_infer":
        for issue in check_recurrent(config):
            raise MeshError(str(issue))
        return
    if infer.device == "cuda":
        raise MeshError("tinker.engine: hf_infer samples on a CPU: take vllm, or set actor_infer.device to cpu")
    architecture = load_architecture(config)
    if problem := architecture_problem(architecture):
        raise MeshError(f"pretrain: {config.pretrain}: {problem}: take vllm (tinker.engine)")
    with suppress(KeyError):  # of an unknown architecture, which the engine reports
        for issue in check_cache(config, architecture):
            raise MeshError(str(issue))


def _digest_base(config: RunConfig) -> str:
    """Return a digest of the base model; of the tiny policy's settings, as its files depend on transformers' version."""
    if config.pretrain != "tiny":
        return digest_base(config, None)
    settings = [config.tiny.model_dump(mode="json"), collect_words(config)]
    return hashlib.blake2b(json.dumps(settings).encode(), digest_size=16).hexdigest()
