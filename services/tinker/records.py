from typing import Literal

import msgspec

from offbeat.services.errors import CodecError

Metadata = dict[str, str | int | float | bool | None]
"""The SDK's `user_metadata`."""


class StoredRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of records stored as JSON."""

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


class Session(StoredRecord, frozen=True, kw_only=True):
    owner: str
    created_at: float
    is_finished: bool = False
    user_metadata: Metadata | None = None
    display_name: str | None = None


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


class ModelRecord(StoredRecord, frozen=True, kw_only=True):
    owner: str
    session_id: str
    created_at: float
    lora: Lora
    user_metadata: Metadata | None = None


class AdapterVersion(StoredRecord, frozen=True, kw_only=True):
    folder: str
    version: int


class StepMetrics(StoredRecord, frozen=True, kw_only=True):
    """Figures of an optimizer step. loss: sum over the sequences of its gradient; version: of the weights after it."""

    at: float
    """Unix time."""
    version: int
    loss: float
    num_sequences: int
    num_tokens: int
    grad_norm: float
    learning_rate: float


class AppliedCommand(StoredRecord, frozen=True, kw_only=True):
    """What an applied command has left."""

    kind: str
    """Tag of the command."""
    at: float
    """Unix time."""
    version: int | None
    """Of the weights. None: not known, since the model was not in memory."""
    num_sequences: int = 0
    """In the gradient."""
    num_added: int = 0
    """Sequences that the command has added to it."""
    is_refused: bool = False

    def leaves_state_of(self, other: "AppliedCommand") -> bool:
        """Return whether version and gradient are those of another entry, as far as both are known."""
        if self.version is None or other.version is None:
            return True
        return (self.version, self.num_sequences) == (other.version, other.num_sequences)


class LearnerActivity(StoredRecord, frozen=True, kw_only=True):
    """Command that the learner has taken up last."""

    model_id: str
    seq_id: int
    since: float
    """Unix time."""
    shared_with: dict[str, int] = {}
    """Other models' commands in the same pass: sequence id by model."""

    @property
    def commands(self) -> dict[str, int]:
        """Sequence id by model."""
        return {self.model_id: self.seq_id, **self.shared_with}


class SharedPass(StoredRecord, frozen=True, kw_only=True):
    """Lengths of other models' sequences in a gradient's pass, before and after its own."""

    before: list[int] = []
    after: list[int] = []


CheckpointKind = Literal["training", "sampler"]
SEGMENTS: dict[CheckpointKind, str] = {"training": "weights", "sampler": "sampler_weights"}
"""Of `tinker://` paths."""


class CheckpointRecord(StoredRecord, frozen=True, kw_only=True):
    model_id: str
    kind: CheckpointKind
    created_at: float
    adapter: AdapterVersion
    lora: Lora
    size_bytes: int = 0
    user_metadata: dict[str, str] | None = None
    expires_at: float | None = None
    """Unix time. None: never."""

    def is_expired(self, now: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now


class SamplerRecord(StoredRecord, frozen=True, kw_only=True):
    """Sampling session of the base model, of an adapter, or of a model's newest inflight weights."""

    owner: str
    model_id: str | None = None
    """None: base model, or of an earlier build."""
    model_path: str | None = None
    adapter: AdapterVersion | None = None
    inflight_model_id: str | None = None


class LoadWeights(msgspec.Struct, frozen=True, tag="load_weights"):
    path: str
    folder: str
    """Of the checkpoint at acceptance."""
    with_optimizer: bool


class CreateModel(msgspec.Struct, frozen=True, tag="create_model"):
    """First command of a model; `start`: its weights, if not new."""

    start: LoadWeights | None = None


class ForwardBackwardCommand(msgspec.Struct, frozen=True, tag="forward_backward"):
    body: bytes
    """Protobuf, as received."""


class OptimStep(msgspec.Struct, frozen=True, kw_only=True, tag="optim_step"):
    """AdamW's hyperparameters; grad_clip_norm: 0 does not clip."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class SaveWeights(msgspec.Struct, frozen=True, tag="save_weights"):
    name: str
    kind: CheckpointKind = "training"
    should_overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    ttl_seconds: int | None = None
    """Since the command is applied. None: never expires."""


class PublishSampler(msgspec.Struct, frozen=True, tag="publish_sampler"):
    """Open a sampling session on the current weights."""

    sampling_session_id: str
    is_inflight: bool = False


class RefusedCommand(msgspec.Struct, frozen=True, tag="refused"):
    """Invalid command; it keeps its place, as a client can't skip a sequence id."""

    error: str


Command = CreateModel | ForwardBackwardCommand | OptimStep | SaveWeights | LoadWeights | PublishSampler | RefusedCommand
_COMMANDS = msgspec.msgpack.Decoder(Command)


def kind_of(command_type: type[Command]) -> str:
    """Return the tag of a command's type."""
    return str(command_type.__struct_config__.tag)


def encode_command(command: Command) -> bytes:
    return msgspec.msgpack.encode(command)


def decode_command(data: bytes) -> Command:
    """Raises CodecError."""
    try:
        return _COMMANDS.decode(data)
    except msgspec.MsgspecError as error:
        raise CodecError(f"not a command: {error}") from error


class Result(msgspec.Struct, frozen=True):
    """Answer of `retrieve_future`: JSON, or protobuf."""

    body: bytes
    is_protobuf: bool = False

    @classmethod
    def of_json(cls, content: object) -> "Result":
        return cls(msgspec.json.encode(content))

    @classmethod
    def of_error(cls, message: str, category: Literal["user", "server"] = "user") -> "Result":
        return cls.of_json({"error": message, "category": category})

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "Result":
        return msgspec.msgpack.decode(data, type=cls)


def request_id_of(model_id: str, seq_id: int) -> str:
    return f"{model_id}:{seq_id}"


def tinker_path(model_id: str, kind: CheckpointKind, name: str) -> str:
    return f"tinker://{model_id}/{SEGMENTS[kind]}/{name}"
