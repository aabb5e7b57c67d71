"""The learner's standard output: a line of JSON per step and evaluation, for who collects logs."""

import json
import sys

from offbeat.trainer.trackers.base import Row, Tracker


class Stdout(Tracker):
    """Prints what the learner trained and how evaluations went; gauges of other services are left out."""

    def write(self, row: Row) -> None:
        if any(name.startswith(("learner/", "eval/")) for name in row.values):
            sys.stdout.write(json.dumps({"step": row.step, "time": row.time, "metrics": row.values}) + "\n")

    def flush(self) -> None:
        sys.stdout.flush()
