"""Tracker that prints JSON lines to stdout, for log collectors."""

import json
import sys

from offbeat.services.text_samples import sample_to_row
from offbeat.trainer.trackers.base import Row, Tracker


class Stdout(Tracker):
    """Learner and evaluation rows only."""

    def write(self, row: Row) -> None:
        if any(name.startswith(("learner/", "eval/")) for name in row.values):
            samples = {"samples": [sample_to_row(sample) for sample in row.samples]} if row.samples else {}
            line = {"step": row.step, "time": row.time, "metrics": row.values, **samples}
            sys.stdout.write(json.dumps(line) + "\n")

    def flush(self) -> None:
        sys.stdout.flush()
