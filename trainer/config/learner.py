"""Keys of the learner."""

from pathlib import Path
from typing import Annotated, cast

from pydantic import Field, JsonValue, ValidationInfo, field_validator

from offbeat.services.chat.template_override import find_problem, replaces
from offbeat.services.rollout.data.config import GROUP_SIZES, DataConfig, Pipeline
from offbeat.trainer.config.actor_train import ActorTrainConfig
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.checkpoints import CheckpointConfig, CheckpointUrl, find_url_problem
from offbeat.trainer.config.conditions import OnlyWith
from offbeat.trainer.config.console import ConsoleConfig
from offbeat.trainer.config.distillation import DistillConfig
from offbeat.trainer.config.preference import PreferenceConfig
from offbeat.trainer.config.replay import ReplayConfig
from offbeat.trainer.config.roles import CriticConfig, ReferenceConfig
from offbeat.trainer.config.staleness import StalenessControllerConfig
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.config.warm_start import WarmStartConfig

WITH_DATA = ("rlvr", "online_dpo", "sft", "dpo", "distill", "reward_model")


class LearnerConfig(AlgorithmConfig):
    pipeline: Pipeline = "agentic"
    """Source of groups. `agentic`: episodes of envs; `online_dpo`: each group's best and worst episode as a pair, with
    `data` its best and worst answer; `rlvr`: answers to a dataset's prompts, scored by `rewards`; `sft`: conversations
    of a dataset; `distill`: conversations with teachers' distributions; `dpo`: pairs of a dataset; `reward_model`:
    pairs, for a model that scores conversations (docs/pipelines.md).
    """
    data: Annotated[DataConfig | None, OnlyWith(pipeline=WITH_DATA)] = None
    """Dataset of the data pipelines, or of prompts."""
    dpo: Annotated[PreferenceConfig, OnlyWith(pipeline=("dpo", "online_dpo"))] = PreferenceConfig()
    distill: Annotated[DistillConfig, OnlyWith(pipeline=("distill",))] = DistillConfig()
    center_rewards_coefficient: Annotated[float, OnlyWith(pipeline=("reward_model",))] = Field(default=0.0, ge=0)
    """Coefficient of (chosen + rejected reward)^2, which keeps a reward model's scores around 0 (arXiv:2312.09244)."""
    seed: int = Field(default=42, ge=0, lt=2**31)
    """Seed of tasks, initial weights and sampling; below 2**31, as engines add ranks."""
    output_dir: Path = Path("runs/offbeat")
    """Folder of checkpoints, metrics and logs."""
    pretrain: str = "tiny"
    """Local Hugging Face folder of the initial policy, a model of the hub (`ORGANIZATION/NAME`, pinned by `@REVISION`),
    or `tiny`.
    """
    reward_pretrain: str | None = Field(default=None, min_length=1)
    """Model of the critic's first weights, unless `critic.model_args.model_name_or_path` is set; None: the policy's."""
    chat_template: str | None = Field(default=None, min_length=1)
    """Template in place of the model's own: a name (`native`, `qwen2_5`, `qwen3`: its own; `native_nonthinking`,
    `longcot_V3`, `chatml`), a file `*.jinja`, or a Jinja text; ROLL's `data_args.template`.
    """
    tiny: TinyPolicyConfig = TinyPolicyConfig()
    warm_start: WarmStartConfig | None = None
    """Supervised fine-tuning before training; None skips it."""
    max_steps: int = Field(default=100, ge=1)
    """Training steps."""
    save_steps: int = Field(default=20, ge=1)
    """Steps between checkpoints."""
    eval_steps: int = Field(default=10, ge=0)
    """Steps between evaluations; 0: only before and after training."""
    logging_steps: int = Field(default=1, ge=1)
    """Steps between console rows, text samples and rows of trackers; `metrics.jsonl` has every step. With 1, consoles
    show at most a row per 10 s and samples per 60 s.
    """
    logging_samples: int = Field(default=2, ge=0, le=16)
    """Trajectories per logged step with text, from the lowest to the highest score."""
    max_ckpt_to_keep: int = Field(default=2, ge=1)
    """Newest checkpoints kept."""
    system_envs: dict[str, str | int | float | bool] = Field(default_factory=dict[str, str | int | float | bool])
    """Environment variables of learner, engines and env workers."""
    render_save_dir: Path | None = None
    """Folder of rendered episodes of each evaluation, by step; None: those before and after training, in the run's
    folder.
    """
    render_episodes: int = Field(default=8, ge=1, le=32)
    """Rendered episodes per evaluation."""
    record_batches: int = Field(default=0, ge=0)
    """Newest batches kept in `batches/` for `offbeat learner reproduce`; at least `console.keep_steps`, and 16 with
    non-finite gradients.
    """
    profiler_timeline: bool = False
    """Profile `profiler_steps` by `torch.profiler`: a trace of each learner process in the run's folder `profiler/`."""
    profiler_memory: bool = False
    """Record CUDA's allocations of `profiler_steps`: a snapshot of each learner process in `profiler/`."""
    profiler_steps: tuple[Annotated[int, Field(ge=1)], ...] = (3,)
    """Profiled steps, from 1."""
    console: ConsoleConfig = ConsoleConfig()
    resume_from_checkpoint: Annotated[bool | CheckpointUrl | Path, Field(union_mode="left_to_right")] = False
    """Checkpoint to resume from: a folder, or a URL in a store (of a checkpoint, or of a run for its newest); `true`:
    newest complete one of `output_dir`.
    """
    checkpoint_config: CheckpointConfig | None = None
    """Store for copies of finished checkpoints."""
    rollout_batch_size: int = Field(default=64, ge=1)
    """Trajectories per step; a multiple of `train_env_manager.group_size`."""
    max_staleness: float = Field(default=1.0, ge=0)
    """Maximum lag of trained groups, in policy versions; ROLL's `async_generation_ratio`. 0 is synchronous. A fraction
    admits that fraction of a batch ahead; lags are compared with its ceiling.
    """
    model_update_frequency: int = Field(default=1, ge=1)
    """Steps between published versions; above 1 needs `max_staleness` of at least one less. Checkpoints, evaluations,
    the last step and a lowered bound also publish.
    """
    staleness_controller: StalenessControllerConfig | None = None
    """Controller of `max_staleness` and `train_env_manager.num_env_groups`; None keeps them fixed."""
    replay: ReplayConfig = ReplayConfig()
    track_with: tuple[str, ...] = ("tensorboard",)
    """Trackers besides `metrics.jsonl`: `tensorboard`, `wandb`, `mlflow`, `swanlab`, `trackio`, `stdout`, or
    `module:Class`. A single name is a list of one.
    """
    tracker_kwargs: dict[str, dict[str, JsonValue]] = Field(default_factory=dict[str, dict[str, JsonValue]])
    """Arguments by tracker: `{wandb: {project: agents}}`."""
    num_gpus_per_node: int | None = Field(default=None, ge=1)
    """Devices of a node, as numbered in `device_mapping`, and learner processes of a node on a CPU. None: each node's
    GPUs; on a CPU, one node has all processes.
    """
    actor_train: ActorTrainConfig = Field(default=ActorTrainConfig(), validate_default=True)
    critic: CriticConfig = Field(default=CriticConfig(), validate_default=True)
    reference: ReferenceConfig = Field(default=ReferenceConfig(), validate_default=True)

    @field_validator("max_steps", mode="before")
    @classmethod
    def _has_steps(cls, value: object) -> object:
        """Name the command for evaluations alone."""
        if type(value) is int and value == 0:
            raise ValueError(
                "0 steps train nothing: take at least 1, or `offbeat rollout CONFIG --engine config`, which evaluates "
                "without training"
            )
        return value

    @field_validator("actor_train")
    @classmethod
    def _has_a_rate_and_processes(cls, value: ActorTrainConfig, info: ValidationInfo) -> ActorTrainConfig:
        return value.with_default_rate(info.data.get("pretrain", "")).with_mapped_processes()

    @field_validator("actor_train")
    @classmethod
    def _has_batch_sizes(cls, value: ActorTrainConfig, info: ValidationInfo) -> ActorTrainConfig:
        if "rollout_batch_size" not in info.data or "sequence_length" not in info.data:  # rejected already
            return value
        return value.with_batch_sizes(info.data["rollout_batch_size"], info.data["sequence_length"])

    @field_validator("critic")
    @classmethod
    def _has_processes(cls, value: CriticConfig, info: ValidationInfo) -> CriticConfig:
        train = info.data.get("actor_train")
        return value.with_mapped_processes(train.device_mapping) if isinstance(train, ActorTrainConfig) else value

    @field_validator("chat_template")
    @classmethod
    def _is_a_template(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None or not replaces(value):
            return None
        if info.data.get("pretrain") == "tiny":
            raise ValueError("the tiny policy has ChatML over a vocabulary of its own: leave chat_template out")
        if problem := find_problem(value):
            raise ValueError(problem)
        return value

    @field_validator("reference")
    @classmethod
    def _is_precomputed(cls, value: ReferenceConfig, info: ValidationInfo) -> ReferenceConfig:
        dpo = info.data.get("dpo")
        if not isinstance(dpo, PreferenceConfig) or not dpo.precompute_ref_log_probs:
            return value
        strategy = value.strategy_args.model_copy(update={"placement": "files"})
        return value.model_copy(update={"strategy_args": strategy})

    @field_validator("track_with", mode="before", json_schema_input_type=tuple[str, ...] | str)
    @classmethod
    def _as_tuple(cls, value: object) -> object:
        """Convert lists, which strict mode rejects."""
        if isinstance(value, list):
            return tuple(cast(list[object], value))
        return (value,) if isinstance(value, str) else value

    @field_validator("tracker_kwargs", mode="before", json_schema_input_type=dict[str, JsonValue])
    @classmethod
    def _is_grouped_by_tracker(cls, value: object) -> object:
        """Reject ROLL's form, keys of one tracker."""
        if isinstance(value, dict):
            for key, kwargs in cast(dict[object, object], value).items():
                if kwargs is not None and not isinstance(kwargs, dict):
                    raise ValueError(f"arguments are grouped by tracker: use tracker_kwargs.NAME.{key}")
        return cast(object, value)

    @field_validator("resume_from_checkpoint")
    @classmethod
    def _is_usable(cls, value: bool | str | Path) -> bool | str | Path:
        if isinstance(value, str) and (problem := find_url_problem(value)):
            raise ValueError(problem)
        return value

    @property
    def environment(self) -> dict[str, str]:
        """`system_envs` as text."""
        return {
            name: str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in self.system_envs.items()
        }

    @property
    def reads_data(self) -> bool:
        """Return whether training groups are dataset rows."""
        return self.pipeline in GROUP_SIZES

    @property
    def plays_prompts(self) -> bool:
        """Return whether episodes answer a dataset's prompts."""
        return self.pipeline == "rlvr" or (self.pipeline == "online_dpo" and self.data is not None)

    @property
    def distills(self) -> bool:
        return self.pipeline == "distill" if self.reads_data else super().distills

    @property
    def trains_reward_model(self) -> bool:
        """Whether the trained model scores conversations instead of continuing them."""
        return self.pipeline == "reward_model"

    @property
    def sampled_share(self) -> float:
        """Return the share of rows whose last response is sampled."""
        return self.distill.lmbda if self.pipeline == "distill" else 0.0

    @property
    def needs_reference(self) -> bool:
        if self.reads_data:
            return self.pipeline == "dpo" and self.dpo.needs_reference
        if self.pipeline == "online_dpo":
            return self.dpo.needs_reference
        return super().needs_reference

    @property
    def has_policy_folder(self) -> bool:
        """Return whether the policy's files are in the run's folder."""
        return self.pretrain == "tiny" or self.chat_template is not None

    @property
    def needs_ref_logprobs(self) -> bool:
        return self.needs_reference if self.reads_data else super().needs_ref_logprobs

    @property
    def critic_folder(self) -> str | None:
        """Return the folder of the critic's first weights; None: the policy's."""
        own = self.critic.model_args.model_name_or_path or self.reward_pretrain
        return None if own == self.pretrain else own

    @property
    def has_value_head(self) -> bool:
        return self.adv_estimator == "gae" and self.critic.backbone == "policy"

    @property
    def has_own_critic(self) -> bool:
        return self.adv_estimator == "gae" and self.critic.backbone == "own"

    @property
    def num_critic_processes(self) -> int:
        """Return the number of the critic's own processes; 0: the policy's compute it, or there is none."""
        return (self.critic.num_processes or 0) if self.has_own_critic else 0
