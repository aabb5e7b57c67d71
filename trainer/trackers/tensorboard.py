"""TensorBoard tracker; a resumed learner's repeated steps replace earlier ones."""

from pathlib import Path
from typing import Any, cast

from offbeat.services.text_samples import TextSample, to_text
from offbeat.trainer.trackers.base import (
    Ending,
    Row,
    TrackedRun,
    Tracker,
)


class TensorBoard(Tracker):
    """An event file per learner process."""

    def __init__(self, run: TrackedRun, *, log_dir: Path | None = None) -> None:
        """log_dir: default `tensorboard/` in the run folder."""
        # tensorboard's own writer: torch.utils.tensorboard imports much more
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2  # noqa: PLC0415
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415

        self._events, self._summaries = cast(Any, event_pb2), cast(Any, summary_pb2)
        self._tensors, self._types = cast(Any, tensor_pb2), cast(Any, types_pb2)
        self._writer: Any = EventFileWriter(str(log_dir or run.folder))
        # also from step 0: a learner may have died before its first checkpoint
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.add_event(self._events.Event(step=run.resumed_step + 1, session_log=start))

    def write(self, row: Row) -> None:
        make = self._summaries.Summary
        values = [make.Value(tag=tag, simple_value=value) for tag, value in row.values.items()]
        values += [self._text(f"samples/{place}", sample) for place, sample in enumerate(row.samples)]
        if values:
            self._writer.add_event(self._events.Event(wall_time=row.time, step=row.step, summary=make(value=values)))

    def _text(self, tag: str, sample: TextSample) -> Any:
        """Return the sample for the text dashboard, without interpreted markup."""
        summary = self._summaries
        plugin = summary.SummaryMetadata.PluginData(plugin_name="text")
        text = "\n".join(f"    {line}" for line in to_text(sample).splitlines())
        tensor = self._tensors.TensorProto(dtype=self._types.DT_STRING, string_val=[text.encode(errors="replace")])
        return summary.Summary.Value(tag=tag, metadata=summary.SummaryMetadata(plugin_data=plugin), tensor=tensor)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, ending: Ending) -> None:
        del ending
        self._writer.close()
