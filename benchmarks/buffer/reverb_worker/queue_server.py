"""Queue server, in Reverb's venv; each item is yielded once.

Load: a line of JSON (lengths) and blobs, padded as a column has one shape. Reply: a line of JSON.
"""

# pyright: basic, reportMissingImports=false

import json
import sys
import time
from typing import Any

import numpy as np
import reverb

TABLE = "queue"


def main() -> None:
    server = reverb.Server([reverb.Table.queue(TABLE, 1 << 20)], port=None)
    client = reverb.Client(f"localhost:{server.port}")
    answer({"ready": True})
    while line := sys.stdin.buffer.readline():
        lengths = json.loads(line)
        width = max(map(max, lengths))
        groups = [[pad_blob(sys.stdin.buffer.read(n), width) for n in row] for row in lengths]
        answer(round_of(client, groups))
    server.stop()


def pad_blob(blob: bytes, width: int) -> np.ndarray:
    return np.frombuffer(blob.ljust(width, b"\0"), np.uint8)


def round_of(client: reverb.Client, groups: list[list[np.ndarray]]) -> dict[str, float]:
    """Write, flushed per group, and read."""
    count = sum(map(len, groups))
    start = time.perf_counter()
    with client.trajectory_writer(num_keep_alive_refs=len(groups[0])) as writer:
        for group in groups:
            for blob in group:
                writer.append({"blob": blob})
                writer.create_item(TABLE, 1.0, {"blob": writer.history["blob"][-1:]})
            writer.flush()
    into = time.perf_counter() - start
    start = time.perf_counter()
    num_trajectories = sum(1 for sample in client.sample(TABLE, num_samples=count) if sample[0].data[0].nbytes)
    out = time.perf_counter() - start
    return {"into_s": into, "out_s": out, "trajectories": num_trajectories}


def answer(reply: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
