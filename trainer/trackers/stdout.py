"""Tracker that prints JSON lines to stdout, for log collectors."""

import json
import sys

from offbeat.trainer.trackers.base import Row, Tracker


class Stdout(Tracker):
    """Learner and evaluation rows only."""

    def write(self, row: Row) -> None:
        if any(name.startswith(("learner/", "eval/")) for name in row.values):
            sys.stdout.write(json.dumps({"step": row.step, "time": row.time, "metrics": row.values}) + "\n")

    def flush(self) -> None:
        sys.stdout.flush()
