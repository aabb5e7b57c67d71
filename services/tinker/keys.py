"""Redis keys of a Tinker server, under one hash tag."""

from dataclasses import dataclass

SERVERS = "offbeat:tinker-servers"
"""Set: names of the servers with a log in this Redis."""


@dataclass(frozen=True, slots=True)
class TinkerKeys:
    name: str

    def key(self, *parts: str) -> str:
        return ":".join((f"offbeat:{{tinker-{self.name}}}", *parts))

    @property
    def epoch(self) -> str:
        """Integer: incremented by each learner, which fences its predecessors."""
        return self.key("epoch")

    @property
    def sessions(self) -> str:
        """Hash: session id -> `Session`."""
        return self.key("sessions")

    @property
    def heartbeats(self) -> str:
        """Hash: id of a session that has not ended -> Unix time of its last heartbeat."""
        return self.key("heartbeats")

    @property
    def ended(self) -> str:
        """Set: ended sessions with models that are not closed."""
        return self.key("ended")

    @property
    def closed(self) -> str:
        """Set: ids of models that take no more commands."""
        return self.key("closed")

    @property
    def models(self) -> str:
        """Hash: model id -> `ModelRecord`."""
        return self.key("models")

    @property
    def samplers(self) -> str:
        """Hash: sampling session id -> `SamplerRecord`."""
        return self.key("samplers")

    def open_models(self, owner: str) -> str:
        """Set: ids of the owner's models that take commands."""
        return self.key("open_models", owner)

    @property
    def checkpoints(self) -> str:
        """Hash: `tinker://` path -> `CheckpointRecord`."""
        return self.key("checkpoints")

    def checkpoint_sizes(self, owner: str) -> str:
        """Hash: `tinker://` path of the owner's -> bytes."""
        return self.key("checkpoint_sizes", owner)

    @property
    def discarded_folders(self) -> str:
        """Set: folders of deleted and replaced checkpoints, until the learner removes them."""
        return self.key("discarded_folders")

    @property
    def inflight(self) -> str:
        """Hash: model id -> `AdapterVersion` of inflight samplers."""
        return self.key("inflight")

    @property
    def applied(self) -> str:
        """Hash: model id -> sequence id of the last applied command."""
        return self.key("applied")

    @property
    def activity(self) -> str:
        """String: `LearnerActivity`."""
        return self.key("activity")

    @property
    def deaths(self) -> str:
        """Hash: request id of a command -> learners that died while they applied it, or of a failed repetition."""
        return self.key("deaths")

    def metrics(self, model_id: str) -> str:
        """Hash: sequence id of an optimizer step -> `StepMetrics`."""
        return self.key("metrics", model_id)

    def applied_commands(self, model_id: str) -> str:
        """Hash: sequence id -> `AppliedCommand`."""
        return self.key("applied_commands", model_id)

    def diverged_commands(self, model_id: str) -> str:
        """Hash: sequence id -> `AppliedCommand` of the first repetition that has left another state than the command."""
        return self.key("diverged_commands", model_id)

    def samples(self, model_id: str) -> str:
        """Hash: version:`sequences` or version:`tokens` -> number sampled."""
        return self.key("samples", model_id)

    @property
    def newest_steps(self) -> str:
        """Hash: model id -> `StepMetrics` of its newest optimizer step."""
        return self.key("newest_steps")

    @property
    def queued_bytes(self) -> str:
        """Hash: owner -> bytes of unapplied commands."""
        return self.key("queued_bytes")

    @property
    def wakeups(self) -> str:
        """List: ids of models with a new command; a hint."""
        return self.key("wakeups")

    @property
    def done(self) -> str:
        """Channel: request ids with a new result; a hint."""
        return self.key("done")

    def log(self, model_id: str) -> str:
        """Hash: sequence id -> command, until a state on disk contains it."""
        return self.key("log", model_id)

    def shared_passes(self, model_id: str) -> str:
        """Hash: sequence id -> `SharedPass` of its gradient, as long as the command is in the log."""
        return self.key("shared_passes", model_id)

    def result(self, request_id: str) -> str:
        """String with expiry: `Result`."""
        return self.key("result", request_id)
