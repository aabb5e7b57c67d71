"""Sessions, models, checkpoints and sampling sessions of a key.

Invariant: other keys' are not found.
"""

import time
import uuid
from typing import TypeVar

import msgspec

from offbeat.services.tinker.errors import GoneError, NotFoundError
from offbeat.services.tinker.records import CheckpointRecord, Metadata, ModelRecord, SamplerRecord, Session
from offbeat.services.tinker.store import TinkerStore

OwnedT = TypeVar("OwnedT", Session, ModelRecord, SamplerRecord)


class OwnedRecords:
    def __init__(self, store: TinkerStore) -> None:
        self._store = store

    async def create_session(
        self, owner: str, user_metadata: Metadata | None = None, display_name: str | None = None
    ) -> str:
        session_id = str(uuid.uuid4())
        session = Session(owner=owner, created_at=time.time(), user_metadata=user_metadata, display_name=display_name)
        await self._store.put(self._store.keys.sessions, session_id, session)
        await self._store.beat(session_id)
        return session_id

    async def session(self, owner: str, session_id: str) -> Session:
        """Raises NotFoundError."""
        session = await self._store.find(self._store.keys.sessions, session_id, Session)
        return _owned(session, owner, f"session {session_id}")

    async def check_session(self, owner: str, session_id: str) -> None:
        """Raise GoneError if a session has ended."""
        if (await self.session(owner, session_id)).is_finished:
            raise GoneError(f"session {session_id} has ended")

    async def heartbeat(self, owner: str, session_id: str) -> None:
        """Renew a session; raises GoneError once it has ended."""
        await self.check_session(owner, session_id)
        await self._store.beat(session_id)

    async def finish_session(self, owner: str, session_id: str) -> None:
        """End a session; its models are closed when their commands are applied."""
        session = await self.session(owner, session_id)
        await self._store.end_session(session_id, msgspec.structs.replace(session, is_finished=True))

    async def heartbeats(self) -> dict[str, float]:
        """Return the Unix times of the last heartbeats of all keys' sessions that have not ended."""
        return await self._store.heartbeats()

    async def end_session(self, session_id: str) -> None:
        """End a session of any key."""
        session = await self._store.find(self._store.keys.sessions, session_id, Session)
        if session is not None:
            await self.finish_session(session.owner, session_id)

    async def models(self, owner: str) -> dict[str, ModelRecord]:
        models = await self._store.all(self._store.keys.models, ModelRecord)
        return {name: each for name, each in models.items() if each.owner == owner}

    async def checkpoints(self, owner: str) -> dict[str, CheckpointRecord]:
        """Return the owner's checkpoints that have not expired, by path."""
        own, now = await self.models(owner), time.time()
        checkpoints = await self._store.all(self._store.keys.checkpoints, CheckpointRecord)
        return {path: each for path, each in checkpoints.items() if each.model_id in own and not each.is_expired(now)}

    async def model(self, owner: str, model_id: str) -> ModelRecord:
        """Raises NotFoundError."""
        record = await self._store.find(self._store.keys.models, model_id, ModelRecord)
        return _owned(record, owner, f"model {model_id}")

    async def checkpoint(self, owner: str, path: str) -> CheckpointRecord:
        """Raises NotFoundError."""
        record = await self._store.find(self._store.keys.checkpoints, path, CheckpointRecord)
        if record is None or record.is_expired(time.time()):
            raise NotFoundError(f"there is no checkpoint {path}")
        try:
            await self.model(owner, record.model_id)
        except NotFoundError:
            raise NotFoundError(f"there is no checkpoint {path}") from None
        return record

    async def sampler(self, owner: str, sampler_id: str) -> SamplerRecord:
        """Raises NotFoundError."""
        record = await self._store.find(self._store.keys.samplers, sampler_id, SamplerRecord)
        return _owned(record, owner, f"sampling session {sampler_id}")


def _owned(record: OwnedT | None, owner: str, what: str) -> OwnedT:
    if record is None or record.owner != owner:
        raise NotFoundError(f"there is no {what}")
    return record
