"""A program for `LineProcess` that answers once another process has the other's request, or null after 30 s."""

# ruff: noqa: T201
import json
import pathlib
import sys
import time

print("true", flush=True)
for line in sys.stdin:
    own, other = map(pathlib.Path, json.loads(line))
    own.touch()
    deadline = time.monotonic() + 30
    while not other.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    print("true" if other.exists() else "null", flush=True)
