"""Keys of the policy's training."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue, field_validator

from offbeat.envs.config import Config
from offbeat.services.devices import DeviceMapping
from offbeat.services.generation.config import AttentionName
from offbeat.trainer.config.conditions import SET, ConditionalConfig, OnlyWith, OnlyWithAny
from offbeat.trainer.config.roles import RoleModelArgs, TrainDtype
from offbeat.trainer.config.schedule import ScheduleArgs


class ModelArgs(ConditionalConfig):
    """Model and adapters; ROLL's `model_args`."""

    dtype: TrainDtype = "float32"
    """Of weights and passes; optimizer states are float32. float16 scales the loss dynamically."""
    attn_implementation: AttentionName = "auto"
    """Attention; `auto` is packed causal, padded only inside attention, and `eager` where logits are capped (Gemma 2)."""
    image_input: bool | None = None
    """Whether a policy of Qwen3-VL or Qwen3.5 has image input: its vision tower is then trained, and in the engines. None:
    if an `agent_template` has `{image}`. Qwen2-VL and Qwen2.5-VL always have it.
    """
    shared_prefix: Annotated[bool, OnlyWith(attn_implementation=("auto",))] = False
    """Single computation of tokens that sequences have in common from their start, with equal gradient. Llama, Mistral,
    Qwen2, Qwen3.
    """
    disable_gradient_checkpointing: bool = True
    """False recomputes activations to save memory."""
    adapter_name_or_path: str | None = Field(default=None, min_length=1)
    """LoRA adapter to start from, in PEFT's form: a local folder, or an id of the hub. It is the policy of version 0, and
    the reference. Left out, `lora_target`, `lora_rank`, `lora_alpha` and `use_rslora` are the adapter's.
    """
    lora_target: str | None = Field(default=None, min_length=1)
    """Layers with LoRA: comma-separated name suffixes (`q_proj,v_proj`) or `all-linear`; others are frozen. None trains
    all.
    """
    lora_rank: Annotated[int, OnlyWithAny(lora_target=SET, adapter_name_or_path=SET)] = Field(default=8, ge=1)
    """Rank of adapters."""
    lora_alpha: Annotated[float | None, OnlyWithAny(lora_target=SET, adapter_name_or_path=SET)] = Field(
        default=None, gt=0
    )
    """Numerator of the scale alpha / rank; None is twice the rank."""
    use_rslora: Annotated[bool, OnlyWithAny(lora_target=SET, adapter_name_or_path=SET)] = False
    """Scale alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732)."""
    load_in_4bit: Annotated[bool, OnlyWithAny(lora_target=SET, adapter_name_or_path=SET)] = False
    """Keep the frozen weights of linear layers in 4 bits (QLoRA, arXiv:2305.14314), by bitsandbytes of the extra
    `quantization`. Passes compute in `dtype` with the values that the 4 bits stand for, which engines get as well.
    """
    bnb_4bit_quant_type: Annotated[Literal["nf4", "fp4"], OnlyWith(load_in_4bit=(True,))] = "nf4"
    """Values of the 4 bits: NormalFloat, or floating point."""
    use_bnb_nested_quant: Annotated[bool, OnlyWith(load_in_4bit=(True,))] = False
    """Keep the scales of blocks of 64 weights in 8 bits instead of 32."""

    @property
    def lora_targets(self) -> str | list[str]:
        """`lora_target` for PEFT."""
        target = self.lora_target or ""
        return target if target == "all-linear" else [name.strip() for name in target.split(",")]

    @property
    def adapter_alpha(self) -> float:
        return 2 * self.lora_rank if self.lora_alpha is None else self.lora_alpha

    @property
    def has_adapters(self) -> bool:
        return self.lora_target is not None or self.adapter_name_or_path is not None

    @property
    def without_adapters(self) -> "ModelArgs":
        return self.model_copy(update={"lora_target": None, "adapter_name_or_path": None, "load_in_4bit": False})

    def of_role(self, role: RoleModelArgs) -> "ModelArgs":
        """Return the arguments of a role's model, without adapters; with `shared_prefix` its attention is packed, too."""
        overrides = role.overrides
        if self.shared_prefix:
            overrides.pop("attn_implementation", None)
        return self.without_adapters.model_copy(update=overrides)

    def of_start(self, role: RoleModelArgs) -> "ModelArgs":
        """Return the arguments of a role whose model is the policy of version 0: with the adapter that it starts from."""
        if self.adapter_name_or_path is None:
            return self.of_role(role)
        names = ("adapter_name_or_path", "lora_target", "lora_rank", "lora_alpha", "use_rslora")
        return self.of_role(role).model_copy(update={name: getattr(self, name) for name in names})


TINY_LR, PRETRAINED_LR = 1e-3, 1e-6
"""Default learning rates of all weights."""
LORA_LR_FACTOR = 10.0
"""Adapters' learning rate over that of all weights (TRL's documentation of PEFT)."""


class TrainingArgs(ScheduleArgs, ConditionalConfig):
    """Optimizer and micro-batches; ROLL's `training_args`."""

    learning_rate: float = Field(default=PRETRAINED_LR, ge=0)
    """Peak learning rate. Unset: 1e-3 for a `tiny` policy, 1e-6 for a pretrained one, ten times that with
    `lora_target`. 0 keeps the weights.
    """
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up to the peak."""
    optim: Literal["adamw_torch", "adamw_8bit"] = "adamw_torch"
    """AdamW with moments in float32, or in 8 bits with a float32 scale per 256 (arXiv:2110.02861) by bitsandbytes of the
    extra `quantization`.
    """
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_epsilon: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decay of weight matrices."""
    decay_all_weights: bool = False
    """Also decay norms, biases and embeddings."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    max_skipped_steps: int = Field(default=5, ge=1)
    """Consecutive steps with non-finite gradients until the run fails; with float16, at the smallest loss scale."""
    max_tokens_per_microbatch: int = Field(default=8192, ge=1)
    """Tokens per forward and backward pass, of all processes that share it."""
    num_minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per pass over a batch."""
    per_device_train_batch_size: int | None = Field(default=None, ge=1)
    """Trajectories of `sequence_length` tokens per process and pass, packed, in place of `max_tokens_per_microbatch`.
    """
    gradient_accumulation_steps: Annotated[int | None, OnlyWith(per_device_train_batch_size=SET)] = Field(
        default=None, ge=1
    )
    """Micro-batches per process and optimizer step, in place of `num_minibatches`."""


ALTERNATIVES = dict.fromkeys(
    ("hf_infer", "deepspeed_infer", "fsdp2_infer"),
    "it is for inference: use it for `reference` or a `teacher`, and deepspeed_train to train",
)
"""ROLL's unsupported strategies, with alternatives."""


class StrategyArgs(ConditionalConfig):
    """Training engine; ROLL's `strategy_args`."""

    strategy_name: Literal["deepspeed_train", "fsdp2_train", "megatron_train"] = "deepspeed_train"
    """`deepspeed_train`: DeepSpeed ZeRO. `fsdp2_train`: PyTorch's `fully_shard`, like ZeRO-3; resumes on any number of
    processes. `megatron_train`: Megatron's model, of the extra `megatron`, in one process and float32.
    """
    tp_size: Annotated[int, OnlyWith(strategy_name=("fsdp2_train",))] = Field(default=1, ge=1)
    """Consecutive processes over which layers are split (tensor parallelism); divides `num_processes`. ROLL's
    `tensor_model_parallel_size`.
    """
    pp_size: Annotated[int, OnlyWith(strategy_name=("fsdp2_train",))] = Field(default=1, ge=1)
    """Pipeline stages over which layers are distributed, each of `tp_size` processes; `tp_size` x `pp_size` divides
    `num_processes`. ROLL's `pipeline_model_parallel_size`.
    """
    ulysses_size: Annotated[int, OnlyWith(strategy_name=("fsdp2_train",), tp_size=(1,), pp_size=(1,))] = Field(
        default=1, ge=1
    )
    """Consecutive processes over which the tokens of each micro-batch are split (sequence parallelism); divides
    `num_processes`. ROLL's `model_args.ulysses_size`.
    """
    zero_stage: Annotated[Literal[0, 1, 2, 3], OnlyWith(strategy_name=("deepspeed_train",))] = 0
    """ZeRO stage: 1 shards optimizer states, 2 also gradients, 3 also weights."""
    strategy_config: Annotated[dict[str, JsonValue], OnlyWith(strategy_name=("deepspeed_train",))] = Field(
        default_factory=dict[str, JsonValue]
    )
    """DeepSpeed settings that override Offbeat's."""

    @property
    def copy_size(self) -> int:
        """Number of consecutive processes that compute the same micro-batches."""
        return self.tp_size * self.pp_size * self.ulysses_size

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
    """Default: `cuda` if the engines leave GPUs for all processes."""
    num_processes: int = Field(default=1, ge=1)
    """Processes, over several nodes if needed; `device_mapping` implies it. They are data-parallel, except for
    `strategy_args.tp_size`, `pp_size` and `ulysses_size`.
    """
    device_mapping: DeviceMapping | None = None
    """Devices of the cluster, one per process, as a list or ROLL's `list(range(0, 8))`. None: chosen."""
    backend_timeout: float = Field(default=30.0, gt=0)
    """Minutes without progress of the main thread (micro-batch, checkpoint) or in a collective call until a hung
    learner is replaced. Dead processes are detected earlier.
    """
    num_threads: int = Field(default=1, ge=1)
    """torch threads per process on CPU."""
    infer_batch_size: int | None = Field(default=None, ge=1)
    """Trajectories per process and pass without gradient; None: as in training."""

    def is_sharded(self, args: ModelArgs) -> bool:
        """Return whether DeepSpeed splits a model's optimizer over the processes: at stage 0 only that of 16 bits."""
        strategy = self.strategy_args
        return strategy.strategy_name == "deepspeed_train" and (strategy.zero_stage > 0 or args.dtype != "float32")

    def num_pass_groups(self, world_size: int) -> int:
        """Return the number of groups of processes that compute passes in parallel, each stage of a pipeline one."""
        return max(1, world_size // (self.strategy_args.tp_size * self.strategy_args.ulysses_size))

    def with_default_rate(self, pretrain: str) -> "ActorTrainConfig":
        """Return a copy with a default learning rate."""
        if "learning_rate" in self.training_args.model_fields_set:
            return self
        rate = TINY_LR if pretrain == "tiny" else PRETRAINED_LR
        rate *= LORA_LR_FACTOR if self.model_args.has_adapters else 1.0
        return self.model_copy(update={"training_args": self.training_args.model_copy(update={"learning_rate": rate})})

    def with_mapped_processes(self) -> "ActorTrainConfig":
        """Return a copy with a process per device of `device_mapping`; raises `ValueError` if `num_processes`
        disagrees."""
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
        """Return a copy with the token budget and optimizer steps implied by ROLL's batch sizes.

        Raises:
            ValueError: the batch is not divisible, or other keys disagree.
        """
        args = self.training_args
        if args.per_device_train_batch_size is None:
            return self
        implied = {"max_tokens_per_microbatch": args.per_device_train_batch_size * sequence_length}
        if args.gradient_accumulation_steps is not None:
            copies = max(1, self.num_processes // self.strategy_args.copy_size)
            per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * copies
            if rollout_batch_size % per_step:
                raise ValueError(
                    "training_args: per_device_train_batch_size x gradient_accumulation_steps x num_processes / (tp_size x "
                    f"pp_size x ulysses_size) = {per_step} trajectories per optimizer step do not divide rollout_batch_size "
                    f"{rollout_batch_size}"
                )
            implied["num_minibatches"] = rollout_batch_size // per_step
        for key, value in implied.items():
            if key in args.model_fields_set and getattr(args, key) != value:
                raise ValueError(
                    f"training_args.{key}: {getattr(args, key)} disagrees with per_device_train_batch_size and "
                    f"gradient_accumulation_steps, which imply {value}: leave one of them out"
                )
        return self.model_copy(update={"training_args": args.model_copy(update=implied)})
