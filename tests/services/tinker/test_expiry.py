"""What expires: sessions without a heartbeat, results that were fetched, and what closed models have left."""

import time

from offbeat.services.tinker.expiry import SessionExpiry
from offbeat.services.tinker.log import CLOSED_EXPIRY_S, RESULT_EXPIRY_S, Write
from offbeat.services.tinker.records import AppliedCommand, Result, StepMetrics
from offbeat.services.tinker.store import FETCHED_EXPIRY_S
from tests.services.tinker.api_server import Server


async def is_finished(server: Server, session_id: str) -> bool:
    owner = server.log.model(f"{session_id}:train:0").owner
    return (await server.service.records.session(owner, session_id)).is_finished


async def test_a_session_ends_once_its_heartbeat_has_stayed_the_same(server: Server) -> None:
    session, _ = await server.create_model()
    expiry = SessionExpiry(server.service.records, 100.0)
    await expiry.end_idle(0.0)
    await server.post("/session_heartbeat", {"session_id": session})
    for now in (99.0, 100.0, 198.9):
        await expiry.end_idle(now)
        assert not await is_finished(server, session)
    await expiry.end_idle(199.0)
    assert await is_finished(server, session)


async def test_time_in_which_the_machine_slept_does_not_count(server: Server) -> None:
    """The wall clock has gone on, and the heartbeats have not."""
    session, _ = await server.create_model()
    server.redis.hset(server.log.keys.heartbeats, session, time.time() - 1e6)
    expiry = SessionExpiry(server.service.records, 100.0)
    for now in (0.0, 50.0):
        await expiry.end_idle(now)
    assert not await is_finished(server, session)


async def test_a_result_that_was_fetched_expires_soon(server: Server) -> None:
    """It may be fetched again at once, as an answer may be lost."""
    _, model = await server.create_model()
    owner, key = server.log.model(model).owner, server.log.keys.result
    for seq_id in range(2):
        server.log.commit(model, owner, seq_id, Result.of_json({}))
    await server.post("/retrieve_future", {"request_id": f"{model}:0"})
    await server.service.store.expire_fetched()
    assert 0 < server.redis.ttl(key(f"{model}:0")) <= FETCHED_EXPIRY_S
    assert FETCHED_EXPIRY_S < server.redis.ttl(key(f"{model}:1")) <= RESULT_EXPIRY_S
    assert await server.post("/retrieve_future", {"request_id": f"{model}:0"}) == {}


async def test_what_the_commands_of_a_closed_model_leave_expires(server: Server) -> None:
    session, model = await server.create_model()
    _, other = await server.create_model()
    keys, log = server.log.keys, server.log
    metrics = StepMetrics(version=1, loss=0.5, num_sequences=1, num_tokens=2, grad_norm=1.0, learning_rate=0.1, at=1.0)
    for each in (model, other):
        applied = AppliedCommand(kind="create_model", at=1.0, version=0)
        writes = (Write.of(keys.applied_commands(each), "0", applied), Write.of(keys.metrics(each), "0", metrics))
        log.commit(each, log.model(each).owner, 0, Result.of_json({}), writes)
        await server.service.store.count_samples(each, {0: 1}, {0: 8})
    await server.post(f"/sessions/{session}/finish", {})
    assert log.close(model)
    for key in (keys.applied_commands, keys.metrics, keys.samples):
        assert 0 < server.redis.ttl(key(model)) <= CLOSED_EXPIRY_S
        assert server.redis.ttl(key(other)) == -1
