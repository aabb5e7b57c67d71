"""Replies of a reward service, as msgpack."""

import msgspec

from offbeat.services.reward.errors import Failure, RewardError


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    score: float | list[float] | None = None
    """Of a group one for each member."""
    failure: Failure | None = None
    detail: str = ""
    trace: str = ""


def encode_score(score: float | list[float]) -> bytes:
    return msgspec.msgpack.encode(Reply(score=score))


def encode_failure(error: RewardError) -> bytes:
    return msgspec.msgpack.encode(Reply(failure=error.failure, detail=error.detail, trace=error.trace))


def read_reply(blob: bytes) -> float | list[float]:
    """Return the score; raises RewardError for the service's failure or an invalid reply."""
    try:
        reply = msgspec.msgpack.decode(blob, type=Reply)
    except msgspec.MsgspecError as error:
        raise RewardError(Failure.MALFORMED, f"the reward service's reply can't be read: {error}") from error
    if reply.failure is not None:
        raise RewardError(reply.failure, reply.detail, reply.trace)
    if reply.score is None:
        raise RewardError(Failure.MALFORMED, "the reward service's reply has no score")
    return reply.score
