"""Weights of the policy, critic and reference.

Invariants: the first weights depend only on model folder, warm start and seed; `load` continues exactly. Critic and
reference start from them, kept in `start/` after a warm start.
"""

import gc
import json
import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from offbeat.services.chat.append_only import load_chat_format
from offbeat.services.generation.adapter_settings import PREFIX
from offbeat.services.generation.checkpoint_names import checkpoint_tensors
from offbeat.services.messages.types import Group
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.roles import InferStrategyArgs, RoleModelArgs
from offbeat.trainer.config.scored_roles import REFERENCE as REFERENCE_ROLE
from offbeat.trainer.config.scored_roles import TEACHER_PREFIX, scored_roles
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.engines.base import TrainEngine
from offbeat.trainer.engines.deepspeed import DeepSpeedLogprobModel
from offbeat.trainer.engines.factory import make_engine
from offbeat.trainer.engines.frozen import FirstPolicyReference, FrozenModel, LogprobModel, MovableModel
from offbeat.trainer.engines.process_group import READY, Ranks, barrier, broadcast, gather
from offbeat.trainer.engines.state_files import load_tensors
from offbeat.trainer.models.export import copy_model_files, export_weights
from offbeat.trainer.models.initial_adapter import check_resumed_adapter
from offbeat.trainer.models.loading import load_policy, load_reward_model
from offbeat.trainer.models.lora import save_adapter
from offbeat.trainer.models.policy import PackedCritic, PackedPolicy
from offbeat.trainer.models.reward_model import PackedRewardModel
from offbeat.trainer.models.tokenizer_check import check_same_tokens
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.critic_trainer import CRITIC_STATE, load_first_critic
from offbeat.trainer.training.data_step import DataTrainer, make_trainer
from offbeat.trainer.training.group_scorer import GroupScorer
from offbeat.trainer.training.optimizer_step import BatchTrainer, Gauges, StepModels, StepPreview
from offbeat.trainer.training.prepare_scores import open_sources, prepare_scores, show_files
from offbeat.trainer.training.profiler import profile_step
from offbeat.trainer.training.score_keys import score_keys
from offbeat.trainer.training.start_folder import IN_CHECKPOINT, StartFolder, is_based_on_start
from offbeat.trainer.training.step_tokens import StepTokens
from offbeat.trainer.warm_start.factory import make_demonstrator
from offbeat.trainer.warm_start.train import Progress, warm_start
from offbeat.trainer.watchdog import Watchdog

logger = logging.getLogger(__name__)

Model = TypeVar("Model", PackedPolicy, PackedCritic, PackedRewardModel)

ALGORITHM = Path("state", "algorithm.json")
REFERENCE = Path("state", "reference.safetensors")
"""If the reference is updated."""


class PolicyTrainer:
    """`Trainer` on one rank; collective."""

    def __init__(
        self,
        run: LearnerRun,
        ranks: Ranks,
        watchdog: Watchdog | None = None,
        *,
        recorded_scores: Mapping[str, str] | None = None,
    ) -> None:
        """watchdog: kicked at each forward pass. recorded_scores: role -> key, of scores that the batches of a reproduction
        hold.
        """
        self._watchdog = watchdog
        self._recorded_scores = recorded_scores
        self._run = run
        self._start = StartFolder(run, ranks)
        self._config = run.config
        self._train = run.config.actor_train
        self._ranks = ranks
        self._model = self._load_trained(run.model_folder)
        self.vocab_size = int(self._model.model.config.get_text_config().vocab_size)
        self._policy = self._engine(self._model)
        self._critic: TrainEngine[Tensor] | None = None
        self._reference: LogprobModel | None = None
        """Separate reference, if any."""
        self._teacher_models: list[LogprobModel | None] = []
        self._steps: BatchTrainer | None = None

    @property
    def kl_coef(self) -> float:
        return self._batches.kl.coef

    @property
    def last_step(self) -> StepTokens | None:
        return self._batches.last_step

    def begin(self, progress: Progress, should_stop: Callable[[], bool]) -> bool:
        warm = self._config.warm_start
        if warm is not None:
            if self._uses_adapters:  # all weights are trained first
                self._replace_policy(
                    lambda: self._load(self._run.model_folder, self._train.model_args.without_adapters)
                )
            demonstrate = make_demonstrator(
                warm,
                self._config.custom_envs[warm.tag],
                load_chat_format(self._run.model_folder),
                max_tokens=self._config.sequence_length,
            )
            loss = warm_start(
                self._policy,
                warm,
                demonstrate,
                seed=self._config.seed,
                limits=self._train.training_args,
                progress=progress,
                should_stop=should_stop,
            )
            if loss is None:
                return False
            if self._has_companions or self._uses_adapters:
                self._save_start(self._policy.tensors())
            if self._uses_adapters:
                self._replace_policy(lambda: self._load_trained(self._start.path))
        if self._ranks.critics:
            broadcast(self._ranks, READY)
        return self._build_companions(self._run.first_weights, progress, should_stop)

    def load(
        self,
        folder: Path,
        kl_coef: float,
        progress: Progress = lambda *_: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Restore a checkpoint; return False if stopped.

        Raises:
            RuntimeError, OSError: another model or set-up, or missing first weights.
        """
        check_resumed_adapter(folder / "adapter", self._train.model_args)
        first_weights = self._find_first_weights(folder)
        barrier(self._ranks)
        if not self._build_companions(first_weights, progress, should_stop):
            return False
        self._batches.load_state_dict(json.loads((folder / ALGORITHM).read_text()))
        self._policy.load(folder / "state" / "policy")
        if self._uses_adapters and is_based_on_start(folder):
            self._restore_base(folder)
        if self._critic is not None:
            self._critic.load(folder / CRITIC_STATE)
        if isinstance(self._reference, FrozenModel) and (folder / REFERENCE).is_file():
            self._reference.follow(load_tensors(folder / REFERENCE).items(), 1.0)
        if self._rng_file(folder).is_file():  # there is none for a rank that the checkpoint's writer did not have
            states = load_tensors(self._rng_file(folder))
            torch.set_rng_state(states["cpu"])
            if "cuda" in states and self._ranks.device.type == "cuda":
                torch.cuda.set_rng_state(states["cuda"])
        self._batches.kl.resume(kl_coef)
        return True

    def set_learning_rate(self, learning_rate: float) -> None:
        self._batches.learning_rate = learning_rate

    def train(self, batch: StepBatch) -> Gauges:
        with profile_step(self._run, self._ranks, batch.step + 1):
            return self._batches.train(batch.drop_temperature(self._config.temperature))

    def evaluate(self, groups: Sequence[Group]) -> Gauges:
        if not isinstance(self._batches, DataTrainer):
            raise TypeError("only data pipelines evaluate by loss")
        return self._batches.evaluate(groups)

    def preview(self, batch: StepBatch) -> StepPreview | None:
        return self._batches.preview(batch.drop_temperature(self._config.temperature))

    def tensors(self, *, with_base: bool = True) -> Iterator[tuple[str, Tensor]]:
        if self._config.adapter_settings is None:
            return self._policy.tensors("merged")
        return self._policy.tensors("parts" if with_base else "adapter")

    def exported_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self._policy.tensors()

    def offload_states(self) -> None:
        for model in self._movable:
            model.offload_states()
        torch.cuda.empty_cache()

    def load_states(self) -> None:
        for model in self._movable:
            model.load_states()

    @property
    def _movable(self) -> list[TrainEngine[Any] | MovableModel]:
        frozen = [each for each in (self._reference, *self._teacher_models) if isinstance(each, MovableModel)]
        return [self._policy, *([] if self._critic is None else [self._critic]), *frozen]

    def save(self, folder: Path) -> None:
        self._export(folder, self._policy.tensors())
        if self._uses_adapters:
            self._save_adapter(folder / "adapter")
        self._policy.save(folder / "state" / "policy")
        if self._critic is not None:
            self._critic.save(folder / CRITIC_STATE)
        if self._ranks.rank == 0:
            if isinstance(self._reference, FrozenModel) and self._config.ref_model_sync_steps is not None:
                save_file({name: tensor.cpu() for name, tensor in self._reference.tensors()}, folder / REFERENCE)
            elif self._keeps_start:
                self._start.link_into(folder)
            (folder / ALGORITHM).write_text(json.dumps(self._batches.state_dict()))
        save_file({"cpu": torch.get_rng_state(), **_cuda_rng(self._ranks.device)}, self._rng_file(folder))
        barrier(self._ranks)  # rank 0 counts the files next

    @property
    def _batches(self) -> BatchTrainer:
        if self._steps is None:
            raise RuntimeError("begin or load must be called first")
        return self._steps

    @property
    def _has_companions(self) -> bool:
        return self._config.has_own_critic or self._refers_to_start

    @property
    def _refers_to_start(self) -> bool:
        """Return whether the reference is the warm-started policy."""
        return self._config.needs_reference and self._config.reference.model_args.model_name_or_path is None

    @property
    def _keeps_start(self) -> bool:
        """Return whether the warm-started policy is needed beside the trained one; adapters' state has their base."""
        return self._config.warm_start is not None and self._refers_to_start and not self._uses_adapters

    def _build_companions(self, folder: Path, progress: Progress, should_stop: Callable[[], bool]) -> bool:
        """Return False if stopped. folder: of the first weights."""
        recorded = self._recorded_scores
        keys = score_keys(self._run) if recorded is None else recorded
        is_precomputed = recorded is None and self._config.reads_data and self._config.dpo.precompute_ref_log_probs
        if self._config.has_own_critic and not self._ranks.critics:
            self._critic = self._engine(self._kick_watchdog(load_first_critic(self._run)))
        reference = None if REFERENCE_ROLE in keys and not is_precomputed else self._build_reference(folder)
        if is_precomputed and reference is not None:
            if not self._precompute(reference, keys[REFERENCE_ROLE], progress, should_stop):
                return False
            reference = self._reference = None
        self._teacher_models = self._teachers(keys)
        models = StepModels(self._policy, self._critic, reference, self._teacher_models, keys, self.vocab_size)
        self._steps = make_trainer(self._config, models, self._ranks)
        return True

    def _build_reference(self, folder: Path) -> LogprobModel | None:
        """Return the reference, if needed. folder: of the first weights."""
        if self._refers_to_start and self._uses_adapters and isinstance(self._model, PackedPolicy):
            return FirstPolicyReference(self._policy, self._model)
        if not self._config.needs_reference:
            return None
        role = self._config.reference
        self._check_tokens(REFERENCE_ROLE, role.model_args)
        model = self._load_role(role.model_args, folder)
        is_read = bool(self._config.full_kls) or self._config.ref_model_sync_steps is not None
        self._reference = self._frozen(REFERENCE_ROLE, model, role.strategy_args, is_read=is_read)
        return self._reference

    def _precompute(
        self, reference: LogprobModel, key: str, progress: Progress, should_stop: Callable[[], bool]
    ) -> bool:
        """Return False if stopped."""
        (role,) = scored_roles(self._config, self._config.reference, "files")
        scorer = GroupScorer(reference, self._config, role.config.infer_batch_size)
        sources = list(open_sources(self._run, self._run.model_folder))
        num_scored = prepare_scores(sources, role, key, scorer, self._ranks, show_files(sources, progress), should_stop)
        if num_scored is not None:
            logger.info("the reference has scored %d rows; %s", num_scored, key)
        return num_scored is not None

    def _frozen(
        self, role: str, model: PackedPolicy, strategy: InferStrategyArgs, *, is_read: bool = False
    ) -> LogprobModel:
        """Return a frozen model, split as the policy is. is_read: more than logprobs is read of it, so each rank holds it.

        Raises:
            ValueError: it can't be split so.
        """
        split = self._train.strategy_args
        if strategy.strategy_name == "deepspeed_infer":
            return DeepSpeedLogprobModel(model, self._ranks)
        if split.copy_size == 1 or is_read:
            return FrozenModel(model, self._ranks)
        try:
            engine = self._engine(model)
        except ValueError as error:
            advice = "a frozen model is split as the policy is, or needs strategy_args.placement: service"
            raise ValueError(f"{role}: {error} ({advice})") from error
        logger.info("%s is split over %d processes", role, split.copy_size)
        return engine

    def _teachers(self, served: Container[str]) -> list[LogprobModel | None]:
        teachers: list[LogprobModel | None] = []
        for name, teacher in self._config.teacher.items():
            role = f"{TEACHER_PREFIX}{name}"
            if role in served:
                teachers.append(None)
                continue
            self._check_tokens(role, teacher.model_args)
            model = self._load_role(teacher.model_args, self._run.model_folder)
            teachers.append(self._frozen(role, model, teacher.strategy_args))
        return teachers

    @property
    def _uses_adapters(self) -> bool:
        return self._train.model_args.lora_target is not None

    def _replace_policy(self, load: Callable[[], PackedPolicy | PackedRewardModel]) -> None:
        """Free the policy and its engine before others are built."""
        self._policy.close()
        del self._policy, self._model
        gc.collect()
        torch.cuda.empty_cache()
        self._model = load()
        self._policy = self._engine(self._model)

    def _load(self, folder: Path, args: ModelArgs, seed: int | None = None) -> PackedPolicy:
        seed = self._config.seed if seed is None else seed
        return self._kick_watchdog(load_policy(folder, args, seed, self._config.temperature))

    def _check_tokens(self, role: str, args: RoleModelArgs) -> None:
        if args.own_folder is not None:
            check_same_tokens(self._run.model_folder, Path(args.own_folder), f"{role}.model_args.model_name_or_path")

    def _load_role(self, role: RoleModelArgs, folder: Path) -> PackedPolicy:
        seed = role.choose_seed(self._config.seed)
        return self._load(Path(role.own_folder or folder), self._train.model_args.of_role(role), seed)

    def _load_trained(self, folder: Path) -> PackedPolicy | PackedRewardModel:
        config, args, head = self._config, self._train.model_args, self._config.has_value_head
        if config.trains_reward_model:
            return self._kick_watchdog(load_reward_model(folder, args, config.seed))
        device = self._ranks.device
        return self._kick_watchdog(load_policy(folder, args, config.seed, config.temperature, device, value_head=head))

    def _kick_watchdog(self, model: Model) -> Model:
        watchdog = self._watchdog
        if watchdog is not None:
            # Of the backbone, because a pipeline stage calls nothing else
            model.model.base_model.register_forward_pre_hook(lambda *_: watchdog.kick())
        return model

    def _engine(self, module: nn.Module) -> TrainEngine[Any]:
        return make_engine(module, self._train, self._ranks)

    def _save_start(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        staging = self._start.make_staging()
        if self._ranks.rank == 0:
            staging.mkdir(parents=True)
        self._export(staging, tensors)
        self._start.publish(staging)

    def _find_first_weights(self, checkpoint: Path) -> Path:
        """Return the folder of the first weights, which a reproduction reads where they are."""
        if not self._keeps_start:
            return self._run.first_weights
        if self._recorded_scores is not None and (checkpoint / IN_CHECKPOINT).is_dir():
            return checkpoint / IN_CHECKPOINT
        self._start.restore(checkpoint, is_required=not (checkpoint / REFERENCE).is_file())
        return self._run.first_weights

    def _restore_base(self, checkpoint: Path) -> None:
        """Write the adapters' base from the loaded state, unless the checkpoint is this run's own, whose base is here."""
        is_here = self._start.path.is_dir() and checkpoint.resolve().is_relative_to(self._run.output_dir)
        if not int(gather(self._ranks, b"%d" % is_here)[0]):
            parts = self._policy.tensors("parts")
            self._save_start((name, tensor) for name, tensor in parts if not name.startswith(PREFIX))

    def _export(self, folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
        if self._ranks.rank == 0:
            copy_model_files(self._run.model_folder, folder)
            if isinstance(self._model, PackedRewardModel):
                self._model.write_config(folder)
            export_weights(folder, checkpoint_tensors(self._model.model.config, tensors))
        else:
            for _ in tensors:
                pass

    def _save_adapter(self, folder: Path) -> None:
        factors = {name: each.to("cpu", copy=True) for name, each in self._policy.tensors("adapter")}  # on every rank
        if self._ranks.rank == 0:
            base = self._start.path if self._start.path.is_dir() else self._run.model_folder
            save_adapter(folder, factors, self._train.model_args, base)

    def _rng_file(self, folder: Path) -> Path:
        return folder / "state" / f"rng-rank-{self._ranks.rank:05d}.safetensors"


def _cuda_rng(device: torch.device) -> Mapping[str, Tensor]:
    return {"cuda": torch.cuda.get_rng_state()} if device.type == "cuda" else {}
