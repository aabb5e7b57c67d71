"""What the learner can be told; the keys that ROLL has keep ROLL's names and stand at the root of a run's YAML."""

from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import Field, JsonValue, field_validator, model_validator

from offbeat.envs.config import Config
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.conditions import SET, ConditionalConfig, OnlyWith
from offbeat.trainer.config.reference import ReferenceConfig
from offbeat.trainer.config.replay import ReplayConfig
from offbeat.trainer.config.schedule import ScheduleArgs
from offbeat.trainer.config.staleness import StalenessControllerConfig


class TinyVisionConfig(Config):
    """A vision tower for the tiny policy, which is a Qwen2-VL then; a picture's token is `2 * patch_size` pixels wide."""

    depth: int = Field(default=2, ge=1)
    embed_dim: int = Field(default=64, ge=32)
    num_heads: int = Field(default=2, ge=1)
    patch_size: int = Field(default=16, ge=4)
    """Pixels; envs draw cells of 32, so that at 16 a cell is a token."""

    @model_validator(mode="after")
    def _heads_fit(self) -> "TinyVisionConfig":
        if self.embed_dim % (4 * self.num_heads):
            raise ValueError(
                f"embed_dim {self.embed_dim} is no multiple of {4 * self.num_heads}: a head's dimensions are halved for "
                "rows and columns, and turned in pairs"
            )
        return self


class TinyPolicyConfig(Config):
    """A policy small enough to learn on two CPU cores (a Qwen2), with a word-level tokenizer and a ChatML template."""

    hidden_size: int = Field(default=64, ge=32)
    num_hidden_layers: int = Field(default=4, ge=1)
    intermediate_size: int = Field(default=256, ge=1)
    num_attention_heads: int = Field(default=2, ge=1)
    num_key_value_heads: int = Field(default=2, ge=1)
    max_position_embeddings: int = Field(default=512, ge=16)
    initializer_range: float = Field(default=0.1, gt=0)
    rope_theta: float = Field(default=10_000.0, gt=0)
    vision: TinyVisionConfig | None = None
    """Lets the policy see pictures (`{image}` in a tag's `agent_template`)."""

    @model_validator(mode="after")
    def _heads_fit(self) -> "TinyPolicyConfig":
        head_dim, rest = divmod(self.hidden_size, self.num_attention_heads)
        if rest or head_dim < 32 or head_dim % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} over {self.num_attention_heads} attention heads: "
                "a head needs an even number of dimensions, 32 or more (vLLM on a CPU takes no smaller one)"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        return self


class WarmStartConfig(Config):
    """A short supervised fine-tune before reinforcement learning starts."""

    demos: str
    """`module:function` that plays one weak episode: (env, rng) -> list of chat messages."""
    tag: str
    """The tag of `custom_envs` that is demonstrated."""
    steps: int = Field(default=300, ge=1)
    episodes_per_step: int = Field(default=8, ge=1)
    learning_rate: float = Field(default=4e-3, gt=0)
    warmup_steps: int = Field(default=20, ge=0)
    weight_decay: float = Field(default=0.01, ge=0)
    final_lr_ratio: float = Field(default=0.05, ge=0, le=1)
    """Learning rate at the end over the peak; linear over the second half."""


class ModelArgs(ConditionalConfig):
    """ROLL's `model_args`."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """`auto`: packed causal attention that pads inside the attention alone."""
    shared_prefix: Annotated[bool, OnlyWith(attn_implementation=("auto",))] = False
    """Compute the prompt that a group's trajectories have in common once, and attend to it from each of them: the same
    gradient for less work where prompts are long and answers short. For Llama, Mistral, Qwen2 and Qwen3."""
    disable_gradient_checkpointing: bool = True
    lora_target: str | None = Field(default=None, min_length=1)
    """Linear layers of the policy that get a low-rank adapter (LoRA): the ends of their names with commas between
    (`q_proj,v_proj`), or `all-linear`. Everything else stays as it is. None trains all weights."""
    lora_rank: Annotated[int, OnlyWith(lora_target=SET)] = Field(default=8, ge=1)
    lora_alpha: Annotated[float | None, OnlyWith(lora_target=SET)] = Field(default=None, gt=0)
    """The adapter's product counts alpha / rank times; None takes twice the rank."""

    @property
    def lora_targets(self) -> str | list[str]:
        """As PEFT takes them."""
        target = self.lora_target or ""
        return target if target == "all-linear" else [name.strip() for name in target.split(",")]

    @property
    def adapter_alpha(self) -> float:
        return 2 * self.lora_rank if self.lora_alpha is None else self.lora_alpha

    @property
    def without_adapters(self) -> "ModelArgs":
        return self.model_copy(update={"lora_target": None})


class TrainingArgs(ScheduleArgs):
    """ROLL's `training_args`."""

    learning_rate: float = Field(default=1e-6, ge=0)
    """0 trains nothing: to measure how far the learner's logprobs are from the engine's."""
    warmup_steps: int = Field(default=0, ge=0)
    """Where a run has fewer steps, the rate ends at that share of its peak."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_epsilon: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    max_skipped_steps: int = Field(default=5, ge=1)
    """Steps in a row whose gradient is not finite (each leaves the weights alone) after which the run is failed."""
    max_tokens_per_microbatch: int = Field(default=8192, ge=1)
    """Token budget of one forward and backward pass."""
    num_minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per pass over a batch."""


ELSEWHERE = {
    "megatron_train": "training has no tensor or pipeline parallelism; take fsdp2_train, or deepspeed_train with zero_stage "
    "3, which shard weights, gradients and moments over all processes",
    **dict.fromkeys(
        ("hf_infer", "deepspeed_infer", "fsdp2_infer"),
        "it only asks a model: it belongs to `reference` or a `teacher`; to train, take deepspeed_train",
    ),
}
"""Strategies of ROLL, and what to take instead."""


class StrategyArgs(ConditionalConfig):
    """ROLL's `strategy_args`: which engine trains, and how."""

    strategy_name: Literal["deepspeed_train", "fsdp2_train"] = "deepspeed_train"
    """`deepspeed_train`: ZeRO. `fsdp2_train`: PyTorch's `fully_shard`, which shards what ZeRO-3 shards, and whose
    checkpoints any number of processes may go on from. ROLL's `megatron_train` is refused by name."""
    zero_stage: Annotated[Literal[0, 1, 2, 3], OnlyWith(strategy_name=("deepspeed_train",))] = 0
    strategy_config: Annotated[dict[str, JsonValue], OnlyWith(strategy_name=("deepspeed_train",))] = Field(
        default_factory=dict[str, JsonValue]
    )
    """Further DeepSpeed settings, merged over ours."""

    @field_validator("strategy_name", mode="before")
    @classmethod
    def _is_built(cls, value: object) -> object:
        """Raises ValueError with what does the same here."""
        if isinstance(value, str) and value in ELSEWHERE:
            raise ValueError(f"{value} can't train: {ELSEWHERE[value]}")
        return value


class ActorTrainConfig(Config):
    """The policy as it is trained; ROLL's `actor_train`."""

    model_args: ModelArgs = ModelArgs()
    training_args: TrainingArgs = TrainingArgs()
    strategy_args: StrategyArgs = StrategyArgs()
    device: Literal["cpu", "cuda"] = "cpu"
    num_processes: int = Field(default=1, ge=1)
    """Data-parallel learner processes."""
    backend_timeout: float = Field(default=30.0, gt=0)
    """Minutes for which a process may keep the others waiting in a call that all make (a sum of gradients, say); then all
    end, and the learner is replaced. One that is stopped or dead is missed much earlier. Also for which the main thread of
    the learner may come no further (one micro-batch, writing a checkpoint): then it is taken for hung, and replaced."""
    num_threads: int = Field(default=1, ge=1)
    """torch threads of each process on a CPU."""


class CriticConfig(ConditionalConfig):
    """The value function of `adv_estimator: gae`."""

    backbone: Literal["own", "policy"] = "own"
    """`own`: a second model of the policy's architecture, with a scalar head. `policy`: a value head alone, one linear layer
    on the policy's last hidden states, trained in the policy's own optimizer step."""
    vf_coef: Annotated[float, OnlyWith(backbone=("policy",))] = Field(default=0.1, gt=0)
    """What the value loss is multiplied with before it is added to the policy's."""
    learning_rate: float = Field(default=5e-4, gt=0)
    """Of the critic's own weights: all of them, or the value head's."""
    warmup_steps: int = Field(default=0, ge=0)


class LearnerConfig(AlgorithmConfig):
    """All that the learner reads of a run."""

    seed: int = Field(default=42, ge=0, lt=2**31)
    """Of tasks, weights and sampling. Each engine adds its rank to it, and numpy takes 32 bits."""
    output_dir: Path = Path("runs/offbeat")
    pretrain: str = "tiny"
    """A local Hugging Face folder, or `tiny` for the built-in policy of `tiny`."""
    tiny: TinyPolicyConfig = TinyPolicyConfig()
    warm_start: WarmStartConfig | None = None
    max_steps: int = Field(default=100, ge=1)
    save_steps: int = Field(default=20, ge=1)
    eval_steps: int = Field(default=10, ge=0)
    """Steps between evaluations; 0 evaluates only before and after."""
    max_ckpt_to_keep: int = Field(default=2, ge=1)
    record_batches: int = Field(default=0, ge=0)
    """Newest steps whose groups are kept in `batches/`, for `offbeat learner replay`; 0 keeps those alone whose gradient was
    not finite."""
    resume_from_checkpoint: bool | Path = False
    """`true` takes the complete one of `output_dir` that was written last; a path takes that one."""
    rollout_batch_size: int = Field(default=64, ge=1)
    """Trajectories of one step; a multiple of `train_env_manager.group_size`."""
    max_staleness: float = Field(default=1.0, ge=0)
    """Versions that a consumed group may lag behind; ROLL's `async_generation_ratio`. 0 is synchronous. A fraction admits
    that part of a batch ahead; a group's lag is a whole number, so it is held against the next one."""
    staleness_controller: StalenessControllerConfig | None = None
    """Sets `max_staleness` and `train_env_manager.num_env_groups` while the run goes on; None leaves them alone."""
    replay: ReplayConfig = ReplayConfig()
    track_with: tuple[str, ...] = ("tensorboard",)
    """Who gets the metrics besides `metrics.jsonl`: `tensorboard`, `wandb`, `mlflow`, `swanlab`, `trackio`, `stdout`, or a
    class of one's own as `module:Class` (docs/tracking.md). A name alone stands for a list of one."""
    tracker_kwargs: dict[str, dict[str, JsonValue]] = Field(default_factory=dict[str, dict[str, JsonValue]])
    """What trackers are told, each under its name: `{wandb: {project: agents}}`."""
    actor_train: ActorTrainConfig = ActorTrainConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()

    @field_validator("track_with", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: object) -> object:
        """A list becomes a tuple here: behind a validator JSON's lists are taken for Python's, which strictness refuses."""
        if isinstance(value, list):
            return tuple(cast(list[object], value))
        return (value,) if isinstance(value, str) else value

    @field_validator("tracker_kwargs", mode="before")
    @classmethod
    def _by_name(cls, value: object) -> object:
        """Raises ValueError for ROLL's form, in which all keys are of one tracker."""
        if isinstance(value, dict):
            for key, told in cast(dict[object, object], value).items():
                if told is not None and not isinstance(told, dict):
                    raise ValueError(f"stands under the tracker's name here: tracker_kwargs.NAME.{key}")
        return cast(object, value)

    @property
    def has_value_head(self) -> bool:
        """Whether the policy itself says what it expects."""
        return self.adv_estimator == "gae" and self.critic.backbone == "policy"

    @property
    def has_own_critic(self) -> bool:
        """Whether a model beside the policy says what it expects."""
        return self.adv_estimator == "gae" and self.critic.backbone == "own"
