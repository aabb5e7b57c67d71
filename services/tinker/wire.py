"""Tinker's protobuf messages, without the SDK's package.

Invariant: field numbers are those of the SDK (0.38); unknown fields are ignored on both sides. Arrays are bytes of
little-endian numbers.
"""

# pyright: basic
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from offbeat.services.errors import CodecError
from offbeat.services.generation.engine import MostLikely

PACKAGE = "offbeat.tinker"
MESSAGES: dict[str, tuple[str, ...]] = {
    "SampleResponse": (
        "1 sequences SampledSequence*",
        "2 prompt_logprobs bytes",
        "3 topk_prompt_logprobs TopkLogprobs",
        "4 prompt_cache_hit_tokens int32",
    ),
    "SampledSequence": (
        "1 stop_reason int32",
        "2 tokens bytes",
        "3 logprobs bytes",
        "4 topk_sampled_logprobs TopkLogprobs",
        "1000 token_versions bytes",  # Offbeat's own: the SDK skips it
    ),
    "TopkLogprobs": ("1 token_ids bytes", "2 logprobs bytes", "3 k uint32", "4 length uint32"),
    "ForwardBackwardRequest": (
        "1 model_id string",
        "2 seq_id int32",
        "3 data Datum*",
        "4 loss_fn string",
        "5 loss_fn_config NumberEntry*",
        "6 forward_only bool",
        "7 loss_fn_config_v2 ConfigEntry*",
    ),
    "NumberEntry": ("1 key string", "2 value double"),
    "ConfigEntry": ("1 key string", "2 value ConfigValue"),
    "ConfigValue": ("1 number double", "2 text string"),
    "Datum": ("1 model_input Chunk*", "2 loss_fn_inputs TensorEntry*"),
    "Chunk": ("1 encoded_text EncodedText", "2 image Other", "3 dmel Other"),
    "EncodedText": ("1 tokens bytes",),
    "Other": (),
    "TensorEntry": ("1 key string", "2 value Tensor"),
    "Tensor": ("1 dense bytes", "2 sparse_csr SparseCsr", "3 dtype int32", "4 shape int64*"),
    "SparseCsr": ("1 values bytes", "2 crow_indices bytes", "3 col_indices bytes"),
    "ForwardBackwardOutput": (
        "1 loss_fn_output_type string",
        "2 loss_fn_outputs ArrayRecord*",
        "3 metrics NumberEntry*",
    ),
    "ArrayRecord": ("1 type_tag string", "2 fields ArrayEntry*", "3 num_datums int64"),
    "ArrayEntry": ("1 key string", "2 value BatchedTensor"),
    "BatchedTensor": ("1 data bytes", "2 offsets bytes", "3 dtype int32", "4 trailing_shape int64*"),
}
"""Number, name and type of the used fields; a map is a list of entries."""
FLOAT32, INT64 = 1, 2
DTYPES: dict[int, np.dtype[Any]] = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), 3: np.dtype("<i4")}
"""By `DType`."""
NO_LOGPROB = -99999.0
"""Of places in `TopkLogprobs` without a token, whose id is 0."""
STOP_REASONS = {"stop": 0, "length": 1}
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 1 << 26
"""Of a tensor."""
MAX_SPARSE = 1 << 24
"""Elements of a request's sparse tensors together, which are small on the wire."""

Array = npt.NDArray[Any]


def _build_classes() -> dict[str, Any]:
    file = FileDescriptorProto(name="offbeat_tinker.proto", package=PACKAGE, syntax="proto3")
    for message, fields in MESSAGES.items():
        added = file.message_type.add(name=message)
        for text in fields:
            number, name, kind = text.split()
            label = FieldDescriptorProto.LABEL_REPEATED if kind.endswith("*") else FieldDescriptorProto.LABEL_OPTIONAL
            field = added.field.add(name=name, number=int(number), label=label)
            kind = kind.rstrip("*")
            if kind in MESSAGES:
                field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
            else:
                field.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
    pool = DescriptorPool()  # the SDK's descriptors may be in the default pool
    pool.Add(file)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in MESSAGES}


CLASSES = _build_classes()


@dataclass(frozen=True, slots=True)
class Datum:
    """Sequence with a loss's inputs. tokens: [N] int32; inputs: by name, float32 or int64."""

    tokens: Array
    inputs: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    model_id: str
    seq_id: int
    loss_fn: str
    loss_config: Mapping[str, float | str]
    forward_only: bool
    num_data: int
    message: Any

    def data(self, *, is_repeated: bool = False) -> list[Datum]:
        """Decode the sequences; raises CodecError with the index of a bad one.

        is_repeated: sparse tensors have no bound, as earlier builds have applied larger ones.
        """
        if not is_repeated:
            self._check_sparse()
        return [_decode_datum(datum, f"data[{i}]") for i, datum in enumerate(self.message.data)]

    def _check_sparse(self) -> None:
        left = MAX_SPARSE
        for i, datum in enumerate(self.message.data):
            for entry in datum.loss_fn_inputs:
                if entry.value.HasField("sparse_csr"):
                    left -= abs(math.prod(entry.value.shape))
                if left < 0:
                    raise CodecError(
                        f"data[{i}].{entry.key}: sparse tensors up to this one have more than {MAX_SPARSE} elements, "
                        "zeros included: send fewer sequences at once, or targets as [N, K]"
                    )


def decode_forward_backward(body: bytes) -> ForwardBackward:
    """Decode the message, but not its sequences; raises CodecError."""
    message = CLASSES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except (DecodeError, UnicodeDecodeError) as error:
        raise CodecError("the body is no protobuf ForwardBackwardRequest") from error
    config: dict[str, float | str] = {entry.key: entry.value for entry in message.loss_fn_config}
    config |= {entry.key: entry.value.text or entry.value.number for entry in message.loss_fn_config_v2}
    return ForwardBackward(
        message.model_id, message.seq_id, message.loss_fn, config, message.forward_only, len(message.data), message
    )


def _decode_datum(datum: Any, path: str) -> Datum:
    parts: list[Array] = []
    for i, chunk in enumerate(datum.model_input):
        if not chunk.HasField("encoded_text"):
            raise CodecError(f"{path}.model_input[{i}] is no text: images and audio are not served")
        parts.append(_read(chunk.encoded_text.tokens, DTYPES[3], f"{path}.model_input[{i}]"))
    inputs = {entry.key: _decode_tensor(entry.value, f"{path}.{entry.key}") for entry in datum.loss_fn_inputs}
    return Datum(np.concatenate(parts) if parts else np.zeros(0, np.int32), inputs)


def _decode_tensor(tensor: Any, path: str) -> Array:
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise CodecError(f"{path}: dtype {tensor.dtype} is neither float32 nor int64")
    shape = tuple(tensor.shape)
    if len(shape) > MAX_DIMENSIONS:
        raise CodecError(f"{path}: a shape of {len(shape)} dimensions, and {MAX_DIMENSIONS} are possible")
    size = 1
    for length in shape:
        size *= length
        if not 0 <= length <= MAX_ELEMENTS or size > MAX_ELEMENTS:
            raise CodecError(f"{path}: shape {list(shape)} has more than {MAX_ELEMENTS} elements, or a negative length")
    if tensor.HasField("sparse_csr"):
        return _densify(tensor.sparse_csr, dtype, shape, path)
    values = _read(tensor.dense, dtype, path)
    if shape and size != len(values):
        raise CodecError(f"{path}: {len(values)} values do not have shape {list(shape)}")
    return values.reshape(shape) if shape else values


def _densify(csr: Any, dtype: np.dtype[Any], shape: tuple[int, ...], path: str) -> Array:
    values, crow, col = (
        _read(part, kind, path)
        for part, kind in ((csr.values, dtype), (csr.crow_indices, DTYPES[INT64]), (csr.col_indices, DTYPES[INT64]))
    )
    counts = np.diff(crow)
    fits = (
        len(shape) == 2
        and len(counts) == shape[0]
        and (counts >= 0).all()
        and int(counts.sum()) == len(values) == len(col)
        and ((col >= 0) & (col < shape[1])).all()
    )
    if not fits:
        raise CodecError(f"{path}: the sparse indices do not fit shape {list(shape)}")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), counts), col] = values
    return dense


def _read(data: bytes, dtype: np.dtype[Any], path: str) -> Array:
    if len(data) % dtype.itemsize:
        raise CodecError(f"{path}: {len(data)} bytes are no whole number of {dtype.name}")
    return np.frombuffer(data, dtype)


def encode_forward_backward_output(outputs: Mapping[str, Sequence[Array]], metrics: Mapping[str, float]) -> bytes:
    """outputs: by name, an array [N] or [N, K] per datum."""
    message = CLASSES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    # a record holds arrays of one trailing shape, so runs of equal ones share it
    first = next(iter(outputs.values()), ())
    start = 0
    while start < len(first):
        stop = start + 1
        while stop < len(first) and first[stop].shape[1:] == first[start].shape[1:]:
            stop += 1
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=stop - start)
        for name, arrays in outputs.items():
            _write_arrays(record.fields.add(key=name).value, arrays[start:stop])
        start = stop
    for name, value in metrics.items():
        message.metrics.add(key=name, value=value)
    return message.SerializeToString()


def _write_arrays(field: Any, arrays: Sequence[Array]) -> None:
    parts = [np.ascontiguousarray(array, DTYPES[FLOAT32]).tobytes() for array in arrays]
    field.data = b"".join(parts)
    field.offsets = np.cumsum([0, *map(len, parts)], dtype="<i8").tobytes()
    field.dtype = FLOAT32
    field.trailing_shape.extend(arrays[0].shape[1:])


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """Sampled answer. versions: of the weights, by token."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    stop_reason: str
    top: Sequence[MostLikely] | None = None


class SampleAnswer(NamedTuple):
    """prompt_logprobs, prompt_top: per token; NaN and nothing without a score."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs: Sequence[float] | None = None
    prompt_top: Sequence[MostLikely] | None = None


def encode_sample_response(answer: SampleAnswer) -> bytes:
    sequences, prompt_logprobs, prompt_top = answer
    message = CLASSES["SampleResponse"]()
    if prompt_logprobs is not None:
        message.prompt_logprobs = np.asarray(prompt_logprobs, "<f4").tobytes()
    if prompt_top is not None:
        _write_top(message.topk_prompt_logprobs, prompt_top)
    for sequence in sequences:
        added = message.sequences.add(
            stop_reason=STOP_REASONS[sequence.stop_reason],
            tokens=np.asarray(sequence.tokens, "<i4").tobytes(),
            logprobs=np.asarray(sequence.logprobs, "<f4").tobytes(),
            token_versions=np.asarray(sequence.versions, "<i4").tobytes(),
        )
        if sequence.top is not None:
            _write_top(added.topk_sampled_logprobs, sequence.top)
    return message.SerializeToString()


def _write_top(field: Any, top: Sequence[MostLikely]) -> None:
    k = max((len(each.ids) for each in top), default=0)
    ids, logprobs = np.zeros((len(top), k), "<i4"), np.full((len(top), k), NO_LOGPROB, "<f4")
    for i, each in enumerate(top):
        ids[i, : len(each.ids)], logprobs[i, : len(each.ids)] = each.ids, each.logprobs
    field.token_ids, field.logprobs, field.k, field.length = ids.tobytes(), logprobs.tobytes(), k, len(top)


def decode_sample_response(body: bytes) -> SampleAnswer:
    message = CLASSES["SampleResponse"]()
    message.ParseFromString(body)
    reasons = {number: reason for reason, number in STOP_REASONS.items()}
    sequences = [
        SampledSequence(
            np.frombuffer(sequence.tokens, "<i4").tolist(),
            np.frombuffer(sequence.logprobs, "<f4").tolist(),
            np.frombuffer(sequence.token_versions, "<i4").tolist(),
            reasons[sequence.stop_reason],
            _read_top(sequence.topk_sampled_logprobs) if sequence.HasField("topk_sampled_logprobs") else None,
        )
        for sequence in message.sequences
    ]
    return SampleAnswer(
        sequences,
        np.frombuffer(message.prompt_logprobs, "<f4").tolist() if message.prompt_logprobs else None,
        _read_top(message.topk_prompt_logprobs) if message.HasField("topk_prompt_logprobs") else None,
    )


def _read_top(field: Any) -> list[MostLikely]:
    shape = field.length, field.k
    ids = np.frombuffer(field.token_ids, "<i4").reshape(shape)
    logprobs = np.frombuffer(field.logprobs, "<f4").reshape(shape)
    return [
        MostLikely(tokens[kept].tolist(), values[kept].tolist())
        for tokens, values, kept in zip(ids, logprobs, logprobs != NO_LOGPROB, strict=True)
    ]
