import asyncio
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from offbeat.services.tinker.audit import CommandEvidence, find_problems
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
        record = await self._records.session(owner, session_id)
        models = await self._store.all(self._store.keys.models, ModelRecord)
        samplers = await self._store.all(self._store.keys.samplers, SamplerRecord)
        return {
            "training_run_ids": sorted(name for name, each in models.items() if each.session_id == session_id),
            "sampler_ids": sorted(name for name in samplers if name.startswith(f"{session_id}:")),
            "user_metadata": {k: str(v) for k, v in (record.user_metadata or {}).items()} or None,
            "display_name": record.display_name,
        }

    async def training_runs(self, owner: str, offset: int, limit: int) -> Json:
        models = await self._records.models(owner)
        checkpoints = await self._records.checkpoints(owner)
        newest = sorted(models, key=lambda name: -models[name].created_at)
        chosen = newest[offset : offset + limit]
        at = await self._store.applied_at(chosen)
        return {
            "training_runs": [self._training_run(name, models[name], checkpoints, at.get(name)) for name in chosen],
            "cursor": _cursor(offset, limit, len(newest)),
        }

    async def training_run(self, owner: str, model_id: str) -> Json:
        record = await self._records.model(owner, model_id)
        at = await self._store.applied_at([model_id])
        return self._training_run(model_id, record, await self._records.checkpoints(owner), at.get(model_id))

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

    async def samples(self, owner: str, model_id: str) -> Json:
        """Return what was sampled from a model, by version; raises NotFoundError."""
        await self._records.model(owner, model_id)
        numbers = await self._store.samples(model_id)
        return {"versions": [{"version": version, **each} for version, each in numbers.items()]}

    async def audit(self, owner: str, model_id: str) -> Json:
        """Audit a model's commands; raises NotFoundError."""
        await self._records.model(owner, model_id)
        # What is read later has at least the entries of the commands that were applied then
        sampled = frozenset(await self._store.samples(model_id))
        applied, _ = await self._store.queued(model_id)
        commands = await self._store.applied_commands(model_id)
        steps = await self._store.all(self._store.keys.metrics(model_id), StepMetrics)
        checkpoints = await self._records.checkpoints(owner)
        evidence = CommandEvidence(
            applied,
            {seq_id: each for seq_id, each in commands.items() if seq_id <= applied},
            {int(seq_id): each for seq_id, each in steps.items() if int(seq_id) <= applied},
            {path: each for path, each in checkpoints.items() if each.model_id == model_id},
            sampled,
            await self._store.diverged_commands(model_id),
        )
        problems = await asyncio.to_thread(find_problems, evidence)
        refused = sum(each.is_refused for each in evidence.commands.values())
        return {
            "model_id": model_id,
            "proven": not problems,
            "problems": problems,
            "applied": applied,
            "refused": refused,
            "optimizer_steps": len(evidence.steps),
            "checkpoints": len(evidence.checkpoints),
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
        commands = activity.commands if activity is not None else {}
        running = {name: each for name, each in commands.items() if not await self._store.is_applied(name, each)}
        if activity is None or not running:
            return (
                "it has not taken up the next command; if this persists, it is starting, or waits for room on the disk"
            )
        seconds = f"for {time.time() - activity.since:.1f} s"
        if model_id in running:
            others = len(commands) - 1
            shared = f", in a pass with those of {others} other model{'s' if others > 1 else ''}" if others else ""
            return f"it has been applying command {running[model_id]} {seconds}{shared}"
        if len(commands) > 1:
            return f"it has been applying commands of {len(commands)} other models {seconds}; models take turns"
        return f"it has been applying a command of another model {seconds}; models take turns"

    async def storage(self, owner: str) -> Json:
        """Return number and size of the owner's checkpoints."""
        sizes = [each.size_bytes for each in (await self._records.checkpoints(owner)).values()]
        used = {
            "checkpoint_count": len(sizes),
            "size_bytes": sum(sizes),
            "size_gigabytes": sum(sizes) / 1e9,
        }
        return {"data": [used] if sizes else []}

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

    def _training_run(
        self,
        model_id: str,
        record: ModelRecord,
        checkpoints: Mapping[str, CheckpointRecord],
        applied_at: float | None,
    ) -> Json:
        """applied_at: time of the last command. None: there is none, or it is not known."""
        of_model = {path: each for path, each in checkpoints.items() if each.model_id == model_id}
        last = {
            kind: next(iter(_newest_first({k: v for k, v in of_model.items() if v.kind == kind})), None)
            for kind in SEGMENTS
        }
        return {
            "training_run_id": model_id,
            "base_model": self._service.base.name,
            "model_owner": record.owner,
            "is_lora": True,
            "lora_rank": record.lora.rank,
            "lora_seed": record.lora.seed,
            "last_request_time": _time(applied_at or record.created_at),
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
            "expires_at": None if (at := checkpoints[path].expires_at) is None else _time(at),
        }
        for path in paths
    ]


def _cursor(offset: int, limit: int, total: int) -> Json:
    return {"offset": offset, "limit": limit, "total_count": total}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
