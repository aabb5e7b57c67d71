import math
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from offbeat.services.buffer.config import BufferConfig
from offbeat.services.findings import DiagnosisLimits
from offbeat.services.generation.config import ROUTED_EXPERTS, GeneratingArgs, GenerationConfig, arguments_beyond_hf
from offbeat.services.live_settings import Settings, configured_settings
from offbeat.services.reward.config import AnyReward, Combine, RewardsConfig
from offbeat.services.rollout.config import CustomEnv, EnvManagerConfig, RolloutConfig
from offbeat.services.rollout.data.config import GROUP_SIZES, PLAYING_PROMPTS, TRAINING_EPISODES, DataConfig
from offbeat.services.tracing.config import TelemetryConfig
from offbeat.services.weights.config import WeightsConfig
from offbeat.trainer.config.actor_train import ActorTrainConfig
from offbeat.trainer.config.conditions import OnlyWith
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.config.pipeline_keys import keys_without_effect

MISMATCH_KL = {"float32": 1e-6, "bfloat16": 1e-3, "float16": 1e-3}
"""Expected KL of engine and trainer by the trainer's type, nats per token: float32 on both sides measures 1e-13,
bfloat16 on one side 1e-5."""


KEPT_BY_TOP_K = 0.95
"""Mass of a distribution that `top_k` is expected to keep; a random policy's may be less."""


def limit_cut_kl(top_p: float, top_k: int) -> float:
    """Return the largest KL (k3) between the part of a distribution that is kept and the whole, per token."""
    kept = min(top_p, KEPT_BY_TOP_K if top_k > 0 else 1.0)
    return kept - 1 - math.log(kept)


def longest_answer(custom_envs: Mapping[str, CustomEnv]) -> int:
    """Return the tags' largest `max_tokens_per_step`, at least the default of `max_new_tokens`."""
    return max(GeneratingArgs().max_new_tokens, *(env.max_tokens_per_step for env in custom_envs.values()), 0)


READ_AHEAD_STEPS = 2
"""Batches of rows in flight."""


def count_groups_ahead(pipeline: str, rollout_batch_size: int) -> int:
    """Return the groups of a data pipeline in flight."""
    return max(READ_AHEAD_STEPS * rollout_batch_size // GROUP_SIZES[pipeline], 1)


class LearnerRunConfig(LearnerConfig):
    """A run's configuration for its learner."""

    custom_envs: dict[str, CustomEnv] = Field(default_factory=dict[str, CustomEnv])
    """Envs and templates by tag; with a data pipeline, of evaluation by sampling. With `rlvr`, envs of type `prompt`
    show the rows of `data`.
    """
    rewards: Annotated[tuple[AnyReward, ...], OnlyWith(pipeline=TRAINING_EPISODES)] = ()
    """Reward functions of answers to `data`, or of episodes; the score is added to the env's reward on the last turn."""
    combine: Annotated[Combine, OnlyWith(pipeline=TRAINING_EPISODES)] = Field(default="weighted", validate_default=True)
    """Combination of a tag's rewards. `weighted`: sum of weight times value. `product`: of the values. `gate`: 0 if a
    reward with a `threshold` is below it, else the weighted sum of the others (1 without any).
    """
    train_env_manager: EnvManagerConfig = Field(default=EnvManagerConfig(), validate_default=True)
    """Training tags, groups and their size."""
    val_env_manager: EnvManagerConfig = EnvManagerConfig(group_size=1)
    """Evaluation episodes; pass@k is measured with `group_size` above 1."""
    val_batch_size: int = Field(default=64, ge=1)
    """Episodes per evaluation during training; `rlvr` takes every validation row."""
    final_val_batch_size: int = Field(default=256, ge=1)
    """Episodes per evaluation before and after training."""
    actor_infer: GenerationConfig = Field(default=GenerationConfig(), validate_default=True)
    """Engines and sampling; ROLL's `actor_infer`."""
    rollout: RolloutConfig = RolloutConfig()
    """Env workers."""
    buffer: BufferConfig = Field(default=BufferConfig(), validate_default=True)
    """Trajectory buffer: timeouts and retries."""
    weights: WeightsConfig = WeightsConfig()
    """Weight transport to engines."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Traces from the prompt to the gradient."""

    @field_validator("custom_envs")
    @classmethod
    def _read_the_prompts(cls, value: dict[str, CustomEnv], info: ValidationInfo) -> dict[str, CustomEnv]:
        data = info.data.get("data")
        if info.data.get("pipeline") not in PLAYING_PROMPTS or not isinstance(data, DataConfig):
            return value
        return {tag: env.with_rows(data) for tag, env in value.items()}

    @field_validator("combine")
    @classmethod
    def _makes_a_score(cls, value: Combine, info: ValidationInfo) -> Combine:
        if rewards := info.data.get("rewards"):
            RewardsConfig(rewards=rewards, combine=value)
        return value

    @field_validator("train_env_manager")
    @classmethod
    def _has_the_pipelines_groups(cls, value: EnvManagerConfig, info: ValidationInfo) -> EnvManagerConfig:
        size = GROUP_SIZES.get(info.data.get("pipeline", ""))
        if size is None:
            return value
        if "group_size" in value.model_fields_set and value.group_size != size:
            raise ValueError(
                f"group_size {value.group_size}: a group of pipeline {info.data['pipeline']} is one row, of {size} "
                "trajectories: leave it out"
            )
        lookahead = count_groups_ahead(info.data["pipeline"], info.data.get("rollout_batch_size", size))
        num_groups = value.num_env_groups if "num_env_groups" in value.model_fields_set else lookahead
        return value.model_copy(update={"group_size": size, "num_env_groups": num_groups})

    @field_validator("buffer")
    @classmethod
    def _has_the_pipelines_order(cls, value: BufferConfig, info: ValidationInfo) -> BufferConfig:
        if info.data.get("pipeline") not in GROUP_SIZES:
            return value
        if "order" in value.model_fields_set and value.order != "admission":
            raise ValueError(f"order {value.order}: rows are trained in the order that the seed draws: leave it out")
        return value.model_copy(update={"order": "admission"})

    @field_validator("actor_infer")
    @classmethod
    def _has_the_managers_sampling(cls, value: GenerationConfig, info: ValidationInfo) -> GenerationConfig:
        manager = info.data.get("train_env_manager")
        if not isinstance(manager, EnvManagerConfig):
            return value
        given = value.generating_args
        for name, of_manager in manager.generating_args.model_dump(exclude_none=True).items():
            if name in given.model_fields_set and getattr(given, name) != of_manager:
                raise ValueError(
                    f"generating_args.{name}: {getattr(given, name)} disagrees with train_env_manager.generating_args."
                    f"{name}, {of_manager}, for the same episodes: leave one of them out (earlier builds took the "
                    "manager's), or set both alike"
                )
        args = manager.generating_args.over(given)
        if "max_new_tokens" not in args.model_fields_set:
            args = args.model_copy(update={"max_new_tokens": longest_answer(info.data.get("custom_envs", {}))})
        return value.model_copy(update={"generating_args": args})

    @field_validator("actor_infer")
    @classmethod
    def _has_mapped_replicas(cls, value: GenerationConfig) -> GenerationConfig:
        return value.with_mapped_replicas()

    @field_validator("actor_infer")
    @classmethod
    def _has_model_args(cls, value: GenerationConfig, info: ValidationInfo) -> GenerationConfig:
        train, own = info.data.get("actor_train"), value.model_args
        if not isinstance(train, ActorTrainConfig):
            return value
        implied = {name: getattr(train.model_args, name) for name in type(own).model_fields}
        missing = {name: implied[name] for name in implied if getattr(own, name) is None}
        return value.model_copy(update={"model_args": own.model_copy(update=missing)}) if missing else value

    @field_validator("actor_infer")
    @classmethod
    def _returns_routing(cls, value: GenerationConfig, info: ValidationInfo) -> GenerationConfig:
        is_vllm = value.strategy_args.strategy_name == "vllm"
        if not info.data.get("router_replay") or not is_vllm or ROUTED_EXPERTS in (value.engine.model_extra or {}):
            return value
        return value.with_engine(**{ROUTED_EXPERTS: True})

    @property
    def scoring(self) -> RewardsConfig | None:
        """Return the rewards besides those of envs."""
        return RewardsConfig(rewards=self.rewards, combine=self.combine) if self.rewards else None

    @property
    def reward_weights(self) -> Mapping[str, float]:
        return {reward.name: reward.weight for reward in self.rewards}

    @property
    def uses_engine(self) -> bool:
        """Return whether training or evaluation samples."""
        return self.plays or self.sampled_share > 0

    @property
    def takes_turns(self) -> bool:
        """Whether engines sleep during the learner's steps, which gives its devices to them between steps."""
        return self.uses_engine and bool(self.actor_infer.engine.enable_sleep_mode)

    @property
    def plays(self) -> bool:
        """Return whether training or evaluation plays envs."""
        return not self.reads_data or bool(self.custom_envs)

    @property
    def groups_per_step(self) -> int:
        return self.rollout_batch_size // self.train_env_manager.group_size

    @property
    def adapter_settings(self) -> Mapping[str, object] | None:
        """Return PEFT settings for engines; None for merged weights."""
        args = self.actor_train.model_args
        if self.actor_infer.engine.max_lora_rank is None:
            return None
        kind = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"}
        scale = {"r": args.lora_rank, "lora_alpha": args.adapter_alpha, "use_rslora": args.use_rslora}
        return {**kind, **scale, "target_modules": args.lora_targets}

    @property
    def temperature(self) -> float:
        """Return the default sampling temperature of training; rows are unscaled."""
        return 1.0 if self.reads_data else self.actor_infer.generating_args.temperature

    @property
    def limits(self) -> DiagnosisLimits:
        train = self.actor_train
        longest = max((env.max_tokens_per_step for env in self.custom_envs.values()), default=None)
        answer_tokens = longest and min(longest, self.actor_infer.generating_args.max_new_tokens)
        sampling = self.actor_infer.generating_args
        return DiagnosisLimits(
            MISMATCH_KL[train.model_args.dtype] + limit_cut_kl(sampling.top_p, sampling.top_k),
            train.training_args.max_grad_norm,
            answer_tokens,
            is_sampling_cut=sampling.top_p < 1 or sampling.top_k > 0,
            masks_episodes=self.max_len_mask or self.error_max_len_clip,
            distills=self.distills,
            has_faster_engine=self._has_faster_engine,
            without_effect=frozenset(keys_without_effect(self)),
            trains_by_admission=self.buffer.order == "admission",
        )

    @property
    def _has_faster_engine(self) -> bool:
        """Return whether vLLM samples a tiny policy on a CPU with nothing that `hf_infer` lacks."""
        infer = self.actor_infer
        is_vllm = infer.strategy_args.strategy_name == "vllm" and infer.device == "cpu"
        is_tiny = self.pretrain == "tiny" and self.tiny.vision is None
        return self.uses_engine and is_vllm and is_tiny and infer.app is None and not arguments_beyond_hf(infer.engine)

    @property
    def settings(self) -> Settings:
        """Configured live settings."""
        return configured_settings(self)
