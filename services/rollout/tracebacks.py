"""Tracebacks of user code."""

import re

OWN_FRAMES = re.compile(r'  File "[^"]*/offbeat/services/rollout/[^"]*", line .*\n(?:    .*\n)*')


def strip_own_frames(trace: str) -> str:
    return OWN_FRAMES.sub("", trace).strip()
