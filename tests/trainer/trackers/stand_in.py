"""`python -m tests.trainer.trackers.stand_in ORDER`: a stand-in learner with one tracker, until killed."""

import json
import sys
import time

from offbeat.services.telemetry import MetricRecord
from offbeat.trainer.trackers.supervisor import TrackerProcesses
from offbeat.trainer.trackers.worker import StartMessage


class NoSink:
    """Drops every record."""

    def append(self, record: MetricRecord, once: str = "") -> None: ...


if __name__ == "__main__":
    with TrackerProcesses([StartMessage(**json.loads(sys.argv[1]))], print, NoSink()):
        time.sleep(600.0)
