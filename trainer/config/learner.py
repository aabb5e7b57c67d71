"""Keys of the learner, under ROLL's names where they exist."""

from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import Field, JsonValue, ValidationInfo, field_validator, model_validator

from offbeat.envs.config import Config
from offbeat.services.chat.template_override import find_problem, replaces
from offbeat.services.devices import DeviceMapping
from offbeat.services.rollout.data.config import GROUP_SIZES, DataConfig, Pipeline
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.checkpoints import CheckpointConfig, CheckpointUrl, find_url_problem
from offbeat.trainer.config.conditions import SET, ConditionalConfig, OnlyWith
from offbeat.trainer.config.console import ConsoleConfig
from offbeat.trainer.config.distillation import DistillConfig
from offbeat.trainer.config.preference import PreferenceConfig
from offbeat.trainer.config.replay import ReplayConfig
from offbeat.trainer.config.roles import AttentionName, CriticConfig, ReferenceConfig, RoleModelArgs, TrainDtype
from offbeat.trainer.config.schedule import ScheduleArgs
from offbeat.trainer.config.staleness import StalenessControllerConfig


class TinyVisionConfig(Config):
    """Vision tower of a tiny Qwen2-VL. An image token covers `2 * patch_size` pixels per side."""

    depth: int = Field(default=2, ge=1)
    embed_dim: int = Field(default=64, ge=32)
    num_heads: int = Field(default=2, ge=1)
    patch_size: int = Field(default=16, ge=4)
    """Pixels per side; with 16, a 32-pixel cell of the built-in envs is one token."""

    @model_validator(mode="after")
    def _heads_fit(self) -> "TinyVisionConfig":
        if self.embed_dim % (4 * self.num_heads):
            raise ValueError(
                f"embed_dim {self.embed_dim} is not a multiple of {4 * self.num_heads}: a head's dimensions are halved for "
                "rows and columns, and rotated in pairs"
            )
        return self


class TinyPolicyConfig(Config):
    """Qwen2 for two CPU cores, with a word-level tokenizer and a ChatML template."""

    hidden_size: int = Field(default=64, ge=32)
    num_hidden_layers: int = Field(default=4, ge=1)
    intermediate_size: int = Field(default=256, ge=1)
    num_attention_heads: int = Field(default=2, ge=1)
    num_key_value_heads: int = Field(default=2, ge=1)
    max_position_embeddings: int = Field(default=512, ge=16)
    """Context length in tokens."""
    initializer_range: float = Field(default=0.1, gt=0)
    """Standard deviation of the initial weights."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    vision: TinyVisionConfig | None = None
    """Image input (`{image}` in `agent_template`); None is text only."""

    @model_validator(mode="after")
    def _heads_fit(self) -> "TinyPolicyConfig":
        head_dim, rest = divmod(self.hidden_size, self.num_attention_heads)
        if rest or head_dim < 32 or head_dim % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} over {self.num_attention_heads} attention heads: "
                "a head needs an even number of dimensions, at least 32 (the minimum of vLLM on a CPU)"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        return self


class WarmStartConfig(Config):
    """Supervised fine-tuning before reinforcement learning."""

    demos: str
    """`module:function` of a demonstrated episode: (env, rng) -> list of chat messages."""
    tag: str
    """Tag of `custom_envs` to demonstrate."""
    steps: int = Field(default=300, ge=1)
    """Optimizer steps."""
    episodes_per_step: int = Field(default=8, ge=1)
    learning_rate: float = Field(default=4e-3, gt=0)
    warmup_steps: int = Field(default=20, ge=0)
    weight_decay: float = Field(default=0.01, ge=0)
    """Of all weights, unless `training_args.weight_decay` exempts some."""
    final_lr_ratio: float = Field(default=0.05, ge=0, le=1)
    """Final fraction of the learning rate; linear decay over the second half."""


class ModelArgs(ConditionalConfig):
    """Model and adapters; ROLL's `model_args`."""

    dtype: TrainDtype = "float32"
    """Of weights and passes; optimizer states are float32. float16 scales the loss dynamically."""
    attn_implementation: AttentionName = "auto"
    """Attention; `auto` is packed causal, padded only inside attention."""
    shared_prefix: Annotated[bool, OnlyWith(attn_implementation=("auto",))] = False
    """Single computation of a group's shared prompt, with equal gradient; for long prompts and short answers. Llama,
    Mistral, Qwen2, Qwen3.
    """
    disable_gradient_checkpointing: bool = True
    """False recomputes activations to save memory."""
    lora_target: str | None = Field(default=None, min_length=1)
    """Layers with LoRA: comma-separated name suffixes (`q_proj,v_proj`) or `all-linear`; others are frozen. None trains
    all.
    """
    lora_rank: Annotated[int, OnlyWith(lora_target=SET)] = Field(default=8, ge=1)
    """Rank of adapters."""
    lora_alpha: Annotated[float | None, OnlyWith(lora_target=SET)] = Field(default=None, gt=0)
    """Scale's numerator in alpha / rank; None is twice the rank."""

    @property
    def lora_targets(self) -> str | list[str]:
        """`lora_target` for PEFT."""
        target = self.lora_target or ""
        return target if target == "all-linear" else [name.strip() for name in target.split(",")]

    @property
    def adapter_alpha(self) -> float:
        return 2 * self.lora_rank if self.lora_alpha is None else self.lora_alpha

    @property
    def without_adapters(self) -> "ModelArgs":
        return self.model_copy(update={"lora_target": None})

    def of_role(self, role: RoleModelArgs) -> "ModelArgs":
        """Return the arguments of a role's model, which has no adapters."""
        return self.without_adapters.model_copy(update=role.overrides)


TINY_LR, PRETRAINED_LR = 1e-3, 1e-6
"""Default learning rates of all weights."""
LORA_LR_FACTOR = 10.0
"""Adapters' learning rate over that of all weights (TRL's documentation of PEFT)."""


class TrainingArgs(ScheduleArgs, ConditionalConfig):
    """Optimizer and micro-batches; ROLL's `training_args`."""

    learning_rate: float = Field(default=PRETRAINED_LR, ge=0)
    """Peak learning rate. Unset: 1e-3 for a `tiny` policy, 1e-6 for a pretrained one, ten times that with `lora_target`.
    0 keeps the weights, to measure engine mismatch.
    """
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up to the peak."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_epsilon: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decay of weight matrices."""
    decay_all_weights: bool = False
    """Decay of norms, biases and embeddings, too."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    max_skipped_steps: int = Field(default=5, ge=1)
    """Consecutive steps with non-finite gradients until the run fails; with float16, those at a loss scale of 1."""
    max_tokens_per_microbatch: int = Field(default=8192, ge=1)
    """Tokens per forward and backward pass."""
    num_minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per pass over a batch."""
    per_device_train_batch_size: int | None = Field(default=None, ge=1)
    """Trajectories per process, forward and backward pass, in place of `max_tokens_per_microbatch`: that many of
    `sequence_length` tokens, packed.
    """
    gradient_accumulation_steps: Annotated[int | None, OnlyWith(per_device_train_batch_size=SET)] = Field(
        default=None, ge=1
    )
    """Micro-batches per process and optimizer step, in place of `num_minibatches`."""


ALTERNATIVES = {
    "megatron_train": "training has no tensor or pipeline parallelism; take fsdp2_train, or deepspeed_train with zero_stage "
    "3, which shard weights, gradients and moments over all processes",
    **dict.fromkeys(
        ("hf_infer", "deepspeed_infer", "fsdp2_infer"),
        "it is for inference: use it for `reference` or a `teacher`, and deepspeed_train to train",
    ),
}
"""ROLL's unsupported strategies, with alternatives."""


class StrategyArgs(ConditionalConfig):
    """Training engine; ROLL's `strategy_args`."""

    strategy_name: Literal["deepspeed_train", "fsdp2_train"] = "deepspeed_train"
    """`deepspeed_train`: DeepSpeed ZeRO. `fsdp2_train`: PyTorch's `fully_shard`, like ZeRO-3; resumes on any number of
    processes. ROLL's `megatron_train` is unsupported.
    """
    zero_stage: Annotated[Literal[0, 1, 2, 3], OnlyWith(strategy_name=("deepspeed_train",))] = 0
    """ZeRO stage: 1 shards optimizer states, 2 also gradients, 3 also weights."""
    strategy_config: Annotated[dict[str, JsonValue], OnlyWith(strategy_name=("deepspeed_train",))] = Field(
        default_factory=dict[str, JsonValue]
    )
    """DeepSpeed settings that override Offbeat's."""

    @field_validator("strategy_name", mode="before")
    @classmethod
    def _is_supported(cls, value: object) -> object:
        if isinstance(value, str) and value in ALTERNATIVES:
            raise ValueError(f"{value} can't train: {ALTERNATIVES[value]}")
        return value


class ActorTrainConfig(Config):
    """Policy training; ROLL's `actor_train`."""

    model_args: ModelArgs = ModelArgs()
    training_args: TrainingArgs = TrainingArgs()
    strategy_args: StrategyArgs = StrategyArgs()
    device: Literal["cpu", "cuda"] = "cpu"
    """Left out, `cuda` where the engines leave GPUs for all processes."""
    num_processes: int = Field(default=1, ge=1)
    """Data-parallel processes, over several nodes where one has too few devices; `device_mapping` implies it."""
    device_mapping: DeviceMapping | None = None
    """Devices of the cluster, one per process, as a list or ROLL's `list(range(0, 8))`. None: chosen."""
    backend_timeout: float = Field(default=30.0, gt=0)
    """Minutes without the main thread's progress (micro-batch, checkpoint) or in a collective call until a hung learner
    is replaced. Dead processes are detected earlier.
    """
    num_threads: int = Field(default=1, ge=1)
    """torch threads per process on CPU."""
    infer_batch_size: int | None = Field(default=None, ge=1)
    """Trajectories per process and pass without gradient, as `per_device_train_batch_size`; None: as in training."""

    def with_default_rate(self, pretrain: str) -> "ActorTrainConfig":
        """Return a copy with a learning rate, if none is set."""
        if "learning_rate" in self.training_args.model_fields_set:
            return self
        rate = TINY_LR if pretrain == "tiny" else PRETRAINED_LR
        rate *= LORA_LR_FACTOR if self.model_args.lora_target else 1.0
        return self.model_copy(update={"training_args": self.training_args.model_copy(update={"learning_rate": rate})})

    def with_mapped_processes(self) -> "ActorTrainConfig":
        """Return a copy with a process per device of `device_mapping`. Raises `ValueError` if `num_processes` disagrees."""
        if self.device_mapping is None:
            return self
        number = len(self.device_mapping)
        if "num_processes" in self.model_fields_set and self.num_processes != number:
            raise ValueError(
                f"num_processes: {self.num_processes} process(es) disagree with device_mapping of {number} device(s): leave "
                "one of them out"
            )
        return self.model_copy(update={"num_processes": number})

    def with_batch_sizes(self, rollout_batch_size: int, sequence_length: int) -> "ActorTrainConfig":
        """Return a copy with the token budget and optimizer steps that ROLL's batch sizes imply.

        Raises:
            ValueError: the batch is not divisible, or other keys disagree.
        """
        args = self.training_args
        if args.per_device_train_batch_size is None:
            return self
        implied = {"max_tokens_per_microbatch": args.per_device_train_batch_size * sequence_length}
        if args.gradient_accumulation_steps is not None:
            per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * self.num_processes
            if rollout_batch_size % per_step:
                raise ValueError(
                    f"training_args: per_device_train_batch_size x gradient_accumulation_steps x num_processes = {per_step} "
                    f"trajectories per optimizer step do not divide rollout_batch_size {rollout_batch_size}"
                )
            implied["num_minibatches"] = rollout_batch_size // per_step
        for key, value in implied.items():
            if key in args.model_fields_set and getattr(args, key) != value:
                raise ValueError(
                    f"training_args.{key}: {getattr(args, key)} disagrees with per_device_train_batch_size and "
                    f"gradient_accumulation_steps, which imply {value}: leave one of them out"
                )
        return self.model_copy(update={"training_args": args.model_copy(update=implied)})


class LearnerConfig(AlgorithmConfig):
    pipeline: Pipeline = "agentic"
    """What groups are made of. `agentic`: episodes of envs; `online_dpo`: the same, of which each group's best
    and worst are a pair; `sft`: conversations of a dataset; `distill`: conversations with
    teachers' distributions; `dpo`: pairs of a dataset (docs/pipelines.md).
    """
    data: Annotated[DataConfig | None, OnlyWith(pipeline=("sft", "dpo", "distill"))] = None
    """Dataset of the data pipelines."""
    dpo: Annotated[PreferenceConfig, OnlyWith(pipeline=("dpo", "online_dpo"))] = PreferenceConfig()
    distill: Annotated[DistillConfig, OnlyWith(pipeline=("distill",))] = DistillConfig()
    seed: int = Field(default=42, ge=0, lt=2**31)
    """Seed of tasks, initial weights and sampling; below 2**31, since engines add ranks."""
    output_dir: Path = Path("runs/offbeat")
    """Folder of checkpoints, metrics and logs."""
    pretrain: str = "tiny"
    """Local Hugging Face folder of the initial policy, a model of the hub (`ORGANIZATION/NAME`, pinned by `@REVISION`), or
    `tiny` (configured by key `tiny`).
    """
    reward_pretrain: str | None = Field(default=None, min_length=1)
    """Model of the critic's first weights, unless `critic.model_args.model_name_or_path` is set; None: the policy's."""
    chat_template: str | None = Field(default=None, min_length=1)
    """Template in place of the model's own, for policy, engines and trainer: a name (`native`, `qwen2_5`, `qwen3`: its own;
    `native_nonthinking`, `longcot_V3`, `chatml`), a file `*.jinja`, or a Jinja text; ROLL's `data_args.template`.
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
    """Steps between console rows, text samples and rows of trackers; `metrics.jsonl` keeps every step. With 1, consoles
    show a row in 10 s and samples in 60 s at most.
    """
    logging_samples: int = Field(default=2, ge=0, le=16)
    """Trajectories per logged step whose text is shown and tracked, from the lowest score to the highest."""
    max_ckpt_to_keep: int = Field(default=2, ge=1)
    """Newest checkpoints kept."""
    system_envs: dict[str, str | int | float | bool] = Field(default_factory=dict[str, str | int | float | bool])
    """Environment variables of learner, engines and env workers."""
    render_save_dir: Path | None = None
    """Folder of rendered episodes of each evaluation, by step; None: only those before and after training, in the run's
    folder.
    """
    render_episodes: int = Field(default=8, ge=1, le=32)
    """Rendered episodes per evaluation."""
    record_batches: int = Field(default=0, ge=0)
    """Newest batches kept in `batches/` for `offbeat learner reproduce`; at least `console.keep_steps`, and 16 with
    non-finite gradients.
    """
    console: ConsoleConfig = ConsoleConfig()
    resume_from_checkpoint: Annotated[bool | CheckpointUrl | Path, Field(union_mode="left_to_right")] = False
    """Checkpoint to resume from: a folder, or a URL in a store (of a checkpoint, or of a run for its newest); `true`: newest
    complete one of `output_dir`.
    """
    checkpoint_config: CheckpointConfig | None = None
    """Store for copies of finished checkpoints; None: `output_dir` alone."""
    rollout_batch_size: int = Field(default=64, ge=1)
    """Trajectories per step; a multiple of `train_env_manager.group_size`."""
    max_staleness: float = Field(default=1.0, ge=0)
    """Maximum lag of trained groups, in policy versions; ROLL's `async_generation_ratio`. 0 is synchronous. A fraction
    admits that fraction of a batch ahead; lags are compared with it rounded up.
    """
    model_update_frequency: int = Field(default=1, ge=1)
    """Steps between published versions; above 1 needs `max_staleness` of at least one less. Checkpoints, evaluations, the
    last step and a lowered bound publish besides.
    """
    staleness_controller: StalenessControllerConfig | None = None
    """Controller of `max_staleness` and `train_env_manager.num_env_groups`; None keeps them fixed."""
    replay: ReplayConfig = ReplayConfig()
    track_with: tuple[str, ...] = ("tensorboard",)
    """Trackers besides `metrics.jsonl`: `tensorboard`, `wandb`, `mlflow`, `swanlab`, `trackio`, `stdout`, or
    `module:Class` (docs/tracking.md). A single name is a list of one.
    """
    tracker_kwargs: dict[str, dict[str, JsonValue]] = Field(default_factory=dict[str, dict[str, JsonValue]])
    """Arguments by tracker: `{wandb: {project: agents}}`."""
    num_gpus_per_node: int | None = Field(default=None, ge=1)
    """Devices of a node in the numbering of `device_mapping`, and learner processes of a node on a CPU. None: each node's
    GPUs; on a CPU, all processes are on one node.
    """
    actor_train: ActorTrainConfig = Field(default=ActorTrainConfig(), validate_default=True)
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = Field(default=ReferenceConfig(), validate_default=True)

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
        """Convert lists, which strict mode rejects after a `before` validator."""
        if isinstance(value, list):
            return tuple(cast(list[object], value))
        return (value,) if isinstance(value, str) else value

    @field_validator("tracker_kwargs", mode="before", json_schema_input_type=dict[str, JsonValue])
    @classmethod
    def _is_grouped_by_tracker(cls, value: object) -> object:
        """Reject ROLL's form, all keys of one tracker."""
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
        """Whether training groups are dataset rows."""
        return self.pipeline in GROUP_SIZES

    @property
    def distills(self) -> bool:
        return self.pipeline == "distill" if self.reads_data else super().distills

    @property
    def sampled_share(self) -> float:
        """Share of rows whose last response is sampled."""
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
        """True if the policy's files are in the run's folder."""
        return self.pretrain == "tiny" or self.chat_template is not None

    @property
    def needs_ref_logprobs(self) -> bool:
        return self.needs_reference if self.reads_data else super().needs_ref_logprobs

    @property
    def critic_folder(self) -> str | None:
        """Folder of the critic's first weights; None: the policy's."""
        own = self.critic.model_args.model_name_or_path or self.reward_pretrain
        return None if own == self.pretrain else own

    @property
    def has_value_head(self) -> bool:
        return self.adv_estimator == "gae" and self.critic.backbone == "policy"

    @property
    def has_own_critic(self) -> bool:
        return self.adv_estimator == "gae" and self.critic.backbone == "own"
