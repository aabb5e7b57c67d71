"""The weights of a run and their companions (critic, reference): created, trained, saved, loaded.

Invariants: a run's first weights depend on its model folder, its warm start and its seed alone; weights that `load`
restores continue exactly. Critic and reference start from the first weights, which are kept in `start/` of the run's
folder if only the warm start could reproduce them.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from offbeat.services.chat.append_only import load_chat_format
from offbeat.services.messages.types import Group
from offbeat.trainer.algorithms.aggregation import MaskedCounts
from offbeat.trainer.config.learner import ModelArgs
from offbeat.trainer.config.reference import InferStrategyArgs
from offbeat.trainer.engines.base import TrainEngine
from offbeat.trainer.engines.deepspeed import DeepSpeedEngine, DeepSpeedLogprobModel
from offbeat.trainer.engines.frozen import AdapterFreeReference, FrozenModel, LogprobModel
from offbeat.trainer.engines.process_group import Ranks, gather
from offbeat.trainer.models.export import copy_model_files, export_weights
from offbeat.trainer.models.loading import load_critic, load_policy
from offbeat.trainer.models.policy import PackedPolicy
from offbeat.trainer.models.tokenizer_check import check_same_tokens
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.optimizer_step import (
    BatchTrainer,
    Gauges,
    StepModels,
    StepPreview,
)
from offbeat.trainer.warm_start.factory import make_demonstrator
from offbeat.trainer.warm_start.train import Progress, warm_start

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)

START = "start"
ALGORITHM = Path("state", "algorithm.json")
REFERENCE = Path("state", "reference.safetensors")
"""There if the reference moves."""


class Trainer(Protocol):
    """Interface of the loop to the weights."""

    def begin(self, progress: Progress, stopped: Callable[[], bool]) -> bool:
        """Create the first weights; return False if `stopped` becomes true first."""
        ...

    def load(self, folder: Path, kl_coef: float) -> None:
        """Restore from a checkpoint's folder, instead of `begin`."""
        ...

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the peak of the policy's learning-rate schedule."""
        ...

    def train(self, groups: Sequence[Group], step: int, silent: MaskedCounts, weights: Sequence[float] = ()) -> Gauges:
        """Train optimizer batch `step` (0-based) on groups that carry signal; none of them leaves the weights alone.

        silent: how much of the batch carries none; weights: what each group's policy loss is multiplied with, 1 by default.
        """
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors to publish: weights by Hugging Face name, or base and adapter separately. Use each before
        the next, and exhaust the iterator."""
        ...

    def save(self, folder: Path) -> None:
        """Fill a checkpoint's folder."""
        ...

    @property
    def kl_coef(self) -> float:
        """Current coefficient of the KL penalty in the reward."""
        ...


class PolicyTrainer:
    """`Trainer` on one rank; all ranks make the same calls."""

    def __init__(self, run: LearnerRun, ranks: Ranks, sign: Callable[[], None] = lambda: None) -> None:
        """sign: called at each pass of a model, however many a batch takes."""
        self._sign = sign
        self._run = run
        self._config = run.config
        self._train = run.config.actor_train
        self._ranks = ranks
        self._model = self._load_trained(run.model_folder)
        self.vocab_size = int(self._model.model.config.get_text_config().vocab_size)
        self._policy = self._engine(self._model)
        self._critic: TrainEngine[Tensor] | None = None
        self._reference: FrozenModel | None = None
        """Set only if the reference is a separate, unsharded model."""
        self._steps: BatchTrainer | None = None

    @property
    def kl_coef(self) -> float:
        return self._batches.kl.coef

    def begin(self, progress: Progress, stopped: Callable[[], bool]) -> bool:
        warm = self._config.warm_start
        if warm is not None:
            engine = self._whole()
            demonstrate = make_demonstrator(
                warm,
                self._config.custom_envs[warm.tag],
                load_chat_format(self._run.model_folder),
                max_tokens=self._config.sequence_length,
            )
            loss = warm_start(engine, warm, demonstrate, seed=self._config.seed, progress=progress, stopped=stopped)
            if loss is None:
                return False
            if self._has_companions or self._adapts:
                self._keep_start(engine)
            if self._adapts:
                self._model = self._load_trained(self._run.output_dir / START)
                self._policy = self._engine(self._model)
        self._build_companions()
        return True

    def load(self, folder: Path, kl_coef: float) -> None:
        """Raises RuntimeError or OSError if the folder is of another model or set-up, or the first weights are needed
        and missing."""
        self._find_start(folder)
        self._build_companions()
        self._batches.load_state_dict(json.loads((folder / ALGORITHM).read_text()))
        self._policy.load(folder / "state" / "policy")
        if self._critic is not None:
            self._critic.load(folder / "state" / "critic")
        if self._reference is not None and (folder / REFERENCE).is_file():
            self._reference.follow(load_file(folder / REFERENCE).items(), 1.0)
        if self._rng_file(folder).is_file():  # there is none for a rank that the checkpoint's writer did not have
            states = load_file(self._rng_file(folder))
            torch.set_rng_state(states["cpu"])
            if "cuda" in states and torch.cuda.is_available():
                torch.cuda.set_rng_state(states["cuda"])
        self._batches.kl.resume(kl_coef)

    def set_learning_rate(self, learning_rate: float) -> None:
        self._batches.learning_rate = learning_rate

    def train(self, groups: Sequence[Group], step: int, silent: MaskedCounts, weights: Sequence[float] = ()) -> Gauges:
        return self._batches.train(groups, step, silent, weights)

    def preview(self, groups: Sequence[Group], step: int, silent: MaskedCounts) -> StepPreview | None:
        return self._batches.preview(groups, step, silent)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self._policy.tensors(merged=self._config.adapter_settings is None)

    def whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights as `save` exports them."""
        return self._policy.tensors()

    def save(self, folder: Path) -> None:
        self._export(folder, self._policy)
        self._policy.save(folder / "state" / "policy")
        if self._critic is not None:
            self._critic.save(folder / "state" / "critic")
        if self._ranks.rank == 0:
            if self._reference is not None and self._config.ref_model_sync_steps is not None:
                save_file({name: tensor.cpu() for name, tensor in self._reference.tensors()}, folder / REFERENCE)
            (folder / ALGORITHM).write_text(json.dumps(self._batches.state_dict()))
        save_file({"cpu": torch.get_rng_state(), **_cuda_rng()}, self._rng_file(folder))
        gather(self._ranks, b"")  # all have written: the leader counts the files next

    @property
    def _batches(self) -> BatchTrainer:
        if self._steps is None:
            raise RuntimeError("begin or load comes first")
        return self._steps

    @property
    def _has_companions(self) -> bool:
        return self._config.has_own_critic or self._config.needs_reference

    def _build_companions(self) -> None:
        """Critic and reference, from the run's first weights."""
        kept = self._run.output_dir / START
        folder = kept if self._config.warm_start is not None and kept.is_dir() else self._run.model_folder
        args, seed = self._train.model_args, self._config.seed
        reference: LogprobModel | None = None
        if self._config.has_own_critic:
            self._critic = self._engine(self._signing(load_critic(folder, args, seed)))
        if self._config.needs_reference and self._adapts:
            reference = AdapterFreeReference(self._policy, self._model)
        elif self._config.needs_reference:
            reference = self._judge(self._load(folder, args), self._config.reference.strategy_args)
            self._reference = reference if isinstance(reference, FrozenModel) else None
        models = StepModels(self._policy, self._critic, reference, self._teachers())
        self._steps = BatchTrainer(self._config, models, self._ranks)

    def _judge(self, model: PackedPolicy, strategy: InferStrategyArgs) -> FrozenModel | DeepSpeedLogprobModel:
        if strategy.strategy_name == "deepspeed_infer":
            return DeepSpeedLogprobModel(model, self._ranks)
        return FrozenModel(model, self._ranks)

    def _teachers(self) -> list[FrozenModel | DeepSpeedLogprobModel]:
        """Raises ValueError if one has another tokenizer than the policy."""
        for name, teacher in self._config.teacher.items():
            check_same_tokens(self._run.model_folder, Path(teacher.pretrain), f"teacher.{name}.pretrain")
        args = self._train.model_args.without_adapters
        return [
            self._judge(self._load(Path(teacher.pretrain), args), teacher.strategy_args)
            for teacher in self._config.teacher.values()
        ]

    @property
    def _adapts(self) -> bool:
        return self._train.model_args.lora_target is not None

    def _whole(self) -> TrainEngine[Any]:
        """The engine that warms up: it trains all weights, those too that adapters leave alone."""
        if not self._adapts:
            return self._policy
        return self._engine(self._load(self._run.model_folder, self._train.model_args.without_adapters))

    def _load(self, folder: Path, args: ModelArgs) -> PackedPolicy:
        return self._signing(load_policy(folder, args, self._config.seed, self._config.temperature))

    def _load_trained(self, folder: Path) -> PackedPolicy:
        """The policy that learns, with all that learns in it."""
        seed, heat, head = self._config.seed, self._config.temperature, self._config.has_value_head
        return self._signing(load_policy(folder, self._train.model_args, seed, heat, value_head=head))

    def _signing(self, model: Model) -> Model:
        model.register_forward_pre_hook(lambda *_: self._sign())
        return model

    def _engine(self, module: nn.Module) -> TrainEngine[Any]:
        strategy = self._train.strategy_args
        if strategy.strategy_name == "fsdp2_train":
            from offbeat.trainer.engines.fsdp2 import FSDP2Engine  # takes a second to import  # noqa: PLC0415

            return FSDP2Engine(module, self._train.training_args, self._ranks)
        return DeepSpeedEngine(module, self._train.training_args, strategy, self._ranks)

    def _keep_start(self, engine: TrainEngine[Any]) -> None:
        aside = self._run.output_dir / f".{START}"
        if self._ranks.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        self._export(aside, engine)
        self._put_in_place(aside)

    def _put_in_place(self, aside: Path) -> None:
        kept = self._run.output_dir / START
        if self._ranks.rank == 0 and aside.is_dir():
            shutil.rmtree(kept, ignore_errors=True)
            aside.rename(kept)
        gather(self._ranks, b"")  # all may read it from here on

    def _find_start(self, checkpoint: Path) -> None:
        """Locate the reference's weights; a checkpoint of another run's folder uses that run's.

        Raises:
            RuntimeError: they were not kept.
        """
        if self._config.warm_start is None or not self._config.needs_reference or self._adapts:
            return
        kept, theirs = self._run.output_dir / START, checkpoint.resolve().parent.parent / START
        aside = self._run.output_dir / f".{START}"
        if self._ranks.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            if theirs.is_dir() and theirs != kept.resolve():
                shutil.copytree(theirs, aside)
        self._put_in_place(aside)
        if not kept.is_dir() and not (checkpoint / REFERENCE).is_file():
            raise RuntimeError(
                f"the reference is the policy as its warm start left it, and neither {kept} nor {theirs} holds that: it is "
                "kept where a run has a reference, adapters or a critic of its own when it begins"
            )

    def _export(self, folder: Path, engine: TrainEngine[Any]) -> None:
        """Write a Hugging Face folder; rank 0 writes, the others help it gather."""
        if self._ranks.rank == 0:
            copy_model_files(self._run.model_folder, folder)
            export_weights(folder, engine.tensors())
        else:
            for _ in engine.tensors():
                pass

    def _rng_file(self, folder: Path) -> Path:
        return folder / "state" / f"rng-rank-{self._ranks.rank:05d}.safetensors"


def _cuda_rng() -> Mapping[str, Tensor]:
    return {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
