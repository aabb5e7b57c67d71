"""A group filter that hangs once: whoever finds its file continues, and who made it never returns."""

import os
import threading
from pathlib import Path

from offbeat.services.messages.types import Group


class HangsOnce:
    """Takes every group; at the first one of the second step, the process that comes there first hangs."""

    def __call__(self, group: Group) -> bool:
        hung = Path(os.environ["HANGS_ONCE"])
        if group.number >= 2 and not hung.exists():
            hung.touch()
            threading.Event().wait()
        return True
