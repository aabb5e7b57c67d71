import shutil
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from offbeat.services.tinker.errors import NotFoundError
from offbeat.services.tinker.records import SEGMENTS, CheckpointRecord, ModelRecord, SamplerRecord, Session, StepMetrics
from offbeat.services.tinker.service import TinkerService

Json = dict[str, Any]


class TinkerListings:
    def __init__(self, service: TinkerService) -> None:
        self._service = service
        self._store = service.store
        self._records = service.records

    async def sessions(self, owner: str, offset: int, limit: int) -> Json:
        sessions = await self._store.all(self._store.keys.sessions, Session)
        own = sorted((-each.created_at, name) for name, each in sessions.items() if each.owner == owner)
        return {"sessions": [name for _, name in own][offset : offset + limit]}

    async def session(self, owner: str, session_id: str) -> Json:
        await self._records.session(owner, session_id)
        models = await self._store.all(self._store.keys.models, ModelRecord)
        samplers = await self._store.all(self._store.keys.samplers, SamplerRecord)
        return {
            "training_run_ids": sorted(name for name, each in models.items() if each.session_id == session_id),
            "sampler_ids": sorted(name for name in samplers if name.startswith(f"{session_id}:")),
        }

    async def training_runs(self, owner: str, offset: int, limit: int) -> Json:
        models = await self._records.models(owner)
        checkpoints = await self._records.checkpoints(owner)
        newest = sorted(models, key=lambda name: -models[name].created_at)
        chosen = newest[offset : offset + limit]
        return {
            "training_runs": [self._training_run(name, models[name], checkpoints) for name in chosen],
            "cursor": _cursor(offset, limit, len(newest)),
        }

    async def training_run(self, owner: str, model_id: str) -> Json:
        record = await self._records.model(owner, model_id)
        return self._training_run(model_id, record, await self._records.checkpoints(owner))

    async def checkpoints(self, owner: str, offset: int, limit: int) -> Json:
        found = _newest_first(await self._records.checkpoints(owner))
        return {"checkpoints": found[offset : offset + limit], "cursor": _cursor(offset, limit, len(found))}

    async def checkpoints_of(self, owner: str, model_id: str) -> Json:
        await self._records.model(owner, model_id)
        checkpoints = await self._records.checkpoints(owner)
        return {"checkpoints": _newest_first({k: v for k, v in checkpoints.items() if v.model_id == model_id})}

    async def metrics(self, owner: str, model_id: str) -> Json:
        """Return a model's optimizer steps; raises NotFoundError."""
        await self._records.model(owner, model_id)
        steps = await self._store.all(self._store.keys.metrics(model_id), StepMetrics)
        return {
            "steps": [
                {"seq_id": seq_id, **msgspec.structs.asdict(steps[str(seq_id)])} for seq_id in sorted(map(int, steps))
            ]
        }

    async def why(self, owner: str, model_id: str) -> Json:
        """Return what a model waits for; raises NotFoundError."""
        await self._records.model(owner, model_id)
        applied, queued = await self._store.queued(model_id)
        if model_id not in await self._store.open_models(owner):
            reason = "nothing: its session has ended"
        elif not queued:
            reason = "its client: every command that came is applied"
        elif queued[0] != applied + 1:
            reason = f"its client: command {applied + 1} has not come; later ones are held"
        else:
            reason = f"the learner: {await self._learner_activity(model_id)}"
        return {"model_id": model_id, "applied": applied, "queued": len(queued), "waits_for": reason}

    async def _learner_activity(self, model_id: str) -> str:
        activity = await self._store.activity()
        if activity is None or await self._store.is_applied(activity.model_id, activity.seq_id):
            return "it has not taken up the next command; if this persists, it is starting"
        seconds = time.time() - activity.since
        if activity.model_id == model_id:
            return f"it has been applying command {activity.seq_id} for {seconds:.1f} s"
        return f"it has been applying a command of another model for {seconds:.1f} s; models take turns"

    async def weights_info(self, owner: str, path: str) -> Json:
        lora = (await self._records.checkpoint(owner, path)).lora
        return {
            "base_model": self._service.base.name,
            "is_lora": True,
            "lora_rank": lora.rank,
            "train_attn": lora.train_attn,
            "train_mlp": lora.train_mlp,
            "train_unembed": lora.train_unembed,
        }

    async def delete_checkpoint(self, owner: str, model_id: str, checkpoint_id: str) -> None:
        """Delete a checkpoint; commands that would load it fail. Raises NotFoundError."""
        path = f"tinker://{model_id}/{checkpoint_id}"
        record = await self._records.checkpoint(owner, path)
        if not await self._store.remove_checkpoint(owner, path):
            raise NotFoundError(f"there is no checkpoint {path}")
        shutil.rmtree(Path(record.adapter.folder), ignore_errors=True)

    def _training_run(self, model_id: str, record: ModelRecord, checkpoints: Mapping[str, CheckpointRecord]) -> Json:
        of_model = {path: each for path, each in checkpoints.items() if each.model_id == model_id}
        last = {
            kind: next(iter(_newest_first({k: v for k, v in of_model.items() if v.kind == kind})), None)
            for kind in SEGMENTS
        }
        changed_at = max([record.created_at, *(each.created_at for each in of_model.values())])
        return {
            "training_run_id": model_id,
            "base_model": self._service.base.name,
            "model_owner": record.owner,
            "is_lora": True,
            "lora_rank": record.lora.rank,
            "last_request_time": _time(changed_at),
            "last_checkpoint": last["training"],
            "last_sampler_checkpoint": last["sampler"],
            "user_metadata": {k: str(v) for k, v in (record.user_metadata or {}).items()} or None,
        }


def _newest_first(checkpoints: Mapping[str, CheckpointRecord]) -> Sequence[Json]:
    paths = sorted(checkpoints, key=lambda path: -checkpoints[path].created_at)
    return [
        {
            "checkpoint_id": path.split("/", 3)[3],
            "checkpoint_type": checkpoints[path].kind,
            "time": _time(checkpoints[path].created_at),
            "tinker_path": path,
            "size_bytes": checkpoints[path].size_bytes,
            "user_metadata": checkpoints[path].user_metadata,
        }
        for path in paths
    ]


def _cursor(offset: int, limit: int, total: int) -> Json:
    return {"offset": offset, "limit": limit, "total_count": total}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
