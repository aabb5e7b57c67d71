"""Calls of replicas: what fits a message of gRPC, and which errors can be retried."""

from dataclasses import replace

import numpy as np
import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from ray.exceptions import ActorUnavailableError, RayTaskError
from ray.serve._private.constants import RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH

from offbeat.services.errors import GenerationError, MeshError, RetryableError
from offbeat.services.generation.client import MAX_MESSAGE_BYTES, fits_message, split_messages, translate
from offbeat.services.messages.codec import encode_completions
from offbeat.services.messages.types import Completion, GenerateRequest, Sampling, VersionSpan


def completion(number: int, length: int) -> Completion:
    """An answer whose every token is of another version, which takes most room."""
    spans = tuple(VersionSpan(i, i + 1, 10**6 + i) for i in range(length))
    return Completion(f"{'e' * 60}/{number}", (10**6,) * length, (-1.5,) * length, spans)


@pytest.mark.parametrize(("count", "length"), [(1, 1), (3, 100_000), (40, 20_000), (9_000, 1)])
def test_completions_are_split_into_messages_that_serve_carries(count: int, length: int) -> None:
    completions = [completion(number, length) for number in range(count)]
    parts = list(split_messages(completions))
    assert [each for part in parts for each in part] == completions
    assert max(len(encode_completions(part)) for part in parts) < RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH * 0.9
    assert len(parts) < 2 + 2 * len(encode_completions(completions)) / MAX_MESSAGE_BYTES


def test_experts_count_in_the_size_of_a_message() -> None:
    experts = np.zeros((500, 48, 8), dtype=np.uint8)
    completions = [replace(completion(number, 1), routing=experts) for number in range(64)]
    parts = list(split_messages(completions))
    assert sum(map(len, parts)) == 64
    assert max(len(encode_completions(part)) for part in parts) <= MAX_MESSAGE_BYTES


def test_a_call_fits_a_message_by_its_size_and_by_that_of_its_longest_answer() -> None:
    def request(max_new_tokens: int) -> GenerateRequest:
        return GenerateRequest("r", (1,), Sampling(max_new_tokens=max_new_tokens))

    assert fits_message([request(64), request(100_000)], MAX_MESSAGE_BYTES)
    assert not fits_message([request(64)], MAX_MESSAGE_BYTES + 1)
    assert not fits_message([request(64), request(200_000)], 100)


BROKEN_CALL = AioRpcError(StatusCode.CANCELLED, Metadata(), Metadata(), "the server stops")


@pytest.mark.parametrize(
    ("error", "expected", "says"),
    [
        (BROKEN_CALL, RetryableError, "no replica answered: CANCELLED: the server stops"),
        (ActorUnavailableError("gone", b"1" * 16), RetryableError, "no replica answered: The actor "),
        (RayTaskError("f", "traceback", RetryableError("it left routing")), RetryableError, "it left routing"),
        (RetryableError("it left routing"), RetryableError, "it left routing"),
        (GenerationError("refused"), GenerationError, "refused"),
        (KeyError("bug"), GenerationError, "the replica failed: KeyError('bug')"),
        (RayTaskError("f", "traceback", KeyError("bug")), GenerationError, "the replica failed: KeyError('bug')"),
    ],
)
def test_errors_of_the_replica_and_of_the_way_there_become_the_services(
    error: Exception, expected: type[MeshError], says: str
) -> None:
    translated = translate(error)
    assert type(translated) is expected
    assert says in str(translated)
