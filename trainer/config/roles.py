"""Critic, reference and teachers; omitted keys are the policy's."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from offbeat.envs.config import Config
from offbeat.services.devices import DeviceMapping
from offbeat.services.generation.config import AttentionName
from offbeat.trainer.config.conditions import ConditionalConfig, NotWith, OnlyWith

TrainDtype = Literal["float32", "bfloat16", "float16"]

TINY = "tiny"
"""Model without a folder, small and with random weights."""
UNSUPPORTED = {
    "megatron_infer": "frozen models are not split: deepspeed_infer shards their weights",
    "fsdp2_infer": "deepspeed_infer does the same",
    "sglang": "a frozen model's logprobs must come from the trainer's own numerics",
}


class RoleModelArgs(Config):
    """Model of a role; ROLL's `model_args`."""

    model_name_or_path: str | None = Field(default=None, min_length=1)
    """Local Hugging Face folder of the weights; None: the policy's first."""
    dtype: TrainDtype | None = None
    attn_implementation: AttentionName | None = None

    @property
    def own_folder(self) -> str | None:
        """Return the folder of weights that are not the policy's first."""
        return self.model_name_or_path

    def choose_seed(self, seed: int) -> int:
        """Return the seed of random weights."""
        return seed

    @property
    def overrides(self) -> dict[str, object]:
        return self.model_dump(exclude={"model_name_or_path", "model_type"}, exclude_none=True)


CriticModelType = Literal["auto_sequence_classification", "auto_token_classification"]


class CriticModelArgs(RoleModelArgs):
    model_type: CriticModelType | None = None
    """Class of the folder's model, whose `score` of one label is the first value head: a reward model's, for one. None: a
    new value head.
    """
    disable_gradient_checkpointing: bool | None = None
    """False recomputes activations to save memory."""


class CriticTrainingArgs(Config):
    """Schedule of the critic or value head; other optimizer settings are the policy's."""

    learning_rate: float = Field(default=5e-4, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""


class CriticConfig(ConditionalConfig):
    """Value function for `adv_estimator: gae`; ROLL's `critic`."""

    backbone: Literal["own", "policy"] = "own"
    """`own`: a separate model. `policy`: a linear head on the policy's last hidden states, trained with it."""
    model_args: Annotated[CriticModelArgs, OnlyWith(backbone=("own",))] = CriticModelArgs()
    training_args: CriticTrainingArgs = CriticTrainingArgs()
    num_processes: Annotated[int | None, OnlyWith(backbone=("own",))] = Field(default=None, ge=1)
    """Processes of its own, which compute values and train beside the policy; `device_mapping` implies it. None: the
    learner's processes compute this model.
    """
    device_mapping: Annotated[DeviceMapping | None, OnlyWith(backbone=("own",))] = None
    """Devices of its own, one per process and shared with no role, or those of `actor_train`."""
    infer_batch_size: Annotated[int | None, OnlyWith(backbone=("own",))] = Field(default=None, ge=1)
    """As `actor_train.infer_batch_size`."""
    vf_coef: Annotated[float, OnlyWith(backbone=("policy",))] = Field(default=0.1, gt=0)
    """Coefficient of the value loss."""

    def with_mapped_processes(self, policy_devices: DeviceMapping | None) -> "CriticConfig":
        """Return a copy with a process per device of its own; raises `ValueError` if `num_processes` disagrees."""
        if self.device_mapping is None:
            return self
        number = None if self.device_mapping == policy_devices else len(self.device_mapping)
        if self.num_processes not in (None, number):
            of = "the devices of actor_train" if number is None else f"device_mapping of {number} device(s)"
            raise ValueError(
                f"num_processes: {self.num_processes} process(es) disagree with {of}: leave one of them out"
            )
        return self.model_copy(update={"num_processes": number})


class InferStrategyArgs(ConditionalConfig):
    """Frozen model's engine; ROLL's `strategy_args`."""

    strategy_name: Literal["hf_infer", "deepspeed_infer", "vllm"] = "hf_infer"
    """`hf_infer`: transformers, a full copy per process. `deepspeed_infer`: weights sharded (ZeRO-3) and gathered by
    layer. Both split batches over processes. `vllm`: vLLM's engine, of a teacher of `pipeline: distill` with `placement:
    service`.
    """
    placement: Annotated[
        Literal["learner", "service", "files"],
        NotWith(
            "a process beside the learner holds the whole model: take hf_infer", strategy_name=("deepspeed_infer",)
        ),
    ] = "learner"
    """`learner`: in the learner's processes. `service`: in processes of its own, which score complete groups beside
    rollouts and training. `files`: beside a data pipeline's dataset, written by `offbeat distill prepare`.
    """
    num_replicas: Annotated[int, OnlyWith(placement=("service",))] = Field(default=1, ge=1)
    """Processes of the service, each with the whole model (with `actor_train.device: cuda` on a GPU of its own)."""

    @field_validator("strategy_name", mode="before")
    @classmethod
    def _is_supported(cls, value: object) -> object:
        if isinstance(value, str) and value in UNSUPPORTED:
            raise ValueError(f"{value} is not supported ({UNSUPPORTED[value]}): take hf_infer or deepspeed_infer")
        return value

    @model_validator(mode="after")
    def _is_a_service(self) -> "InferStrategyArgs":
        if self.strategy_name == "vllm" and self.placement != "service":
            raise ValueError("placement: vllm runs in a process of its own: take service")
        return self


class ReferenceConfig(Config):
    """Reference of KL penalties; ROLL's `reference`."""

    model_args: RoleModelArgs = RoleModelArgs()
    """A folder of its own makes a fixed reference policy."""
    device_mapping: DeviceMapping | None = None
    """Devices of `actor_train`, or of a scoring service, one per replica; others than `actor_train`'s imply `placement:
    service` and `num_replicas`.
    """
    strategy_args: InferStrategyArgs = InferStrategyArgs()
    infer_batch_size: int | None = Field(default=None, ge=1)
    """As `actor_train.infer_batch_size`."""


class TeacherModelArgs(RoleModelArgs):
    model_name_or_path: str = Field(min_length=1)  # pyright: ignore[reportIncompatibleVariableOverride]
    """Local Hugging Face folder, with the policy's tokenizer; `tiny`: random weights of a tiny policy's size, other than the
    policy's, to try a run without a teacher.
    """

    @property
    def is_tiny(self) -> bool:
        return self.model_name_or_path == TINY

    @property
    def own_folder(self) -> str | None:
        return None if self.is_tiny else self.model_name_or_path

    def choose_seed(self, seed: int) -> int:
        return seed + 1 if self.is_tiny else seed


class TeacherConfig(Config):
    """Teacher of sampled tokens; one of ROLL's `teacher`."""

    model_args: TeacherModelArgs
    tag_included: tuple[str, ...] = ()
    """Tags of `custom_envs`, or of a dataset's rows, to teach; empty for all."""
    opd_kl_coef: float = Field(default=1.0, gt=0)
    """Weight of this teacher's KL."""
    device_mapping: DeviceMapping | None = None
    """Devices of `actor_train`, or of a scoring service, one per replica; others than `actor_train`'s imply `placement:
    service` and `num_replicas`.
    """
    strategy_args: InferStrategyArgs = InferStrategyArgs()
    infer_batch_size: int | None = Field(default=None, ge=1)
    """As `actor_train.infer_batch_size`."""

    def teaches(self, tag: str) -> bool:
        return not self.tag_included or tag in self.tag_included
