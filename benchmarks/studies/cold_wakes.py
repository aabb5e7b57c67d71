"""CPU time of a trajectory (check, encode, decode) in a busy and in a waking process.

python -m offbeat.benchmarks.studies.cold_wakes
"""

import time
from collections.abc import Sequence

from rich.console import Console

from offbeat.benchmarks.buffer.load import make_load
from offbeat.services.messages.codec import decode_trajectory, encode_trajectory
from offbeat.services.messages.types import Trajectory

PAUSE_S = 0.004
BURSTS = (1, 4, 16, 64)
WAKES = 500
ROUNDS = 3


def work(trajectories: Sequence[Trajectory], count: int) -> None:
    for i in range(count):
        trajectory = trajectories[i % len(trajectories)]
        decode_trajectory(encode_trajectory(trajectory))


def cpu_us(trajectories: Sequence[Trajectory], burst: int, wakes: int, pause_s: float) -> float:
    """Return the CPU time per trajectory, `burst` after each pause."""
    began = time.process_time()
    for _ in range(wakes):
        work(trajectories, burst)
        if pause_s:
            time.sleep(pause_s)
    spent = time.process_time() - began
    began = time.process_time()
    for _ in range(wakes if pause_s else 0):
        time.sleep(pause_s)
    spent -= time.process_time() - began
    return 1e6 * spent / (burst * wakes)


def main() -> None:
    load = make_load(groups=8, group_size=8, tokens=256, in_hand=64, batch=1)
    trajectories = [trajectory for row in load.trajectories for trajectory in row]
    work(trajectories, 1000)
    echo = Console().print
    for _ in range(ROUNDS):
        echo(f"on and on: {cpu_us(trajectories, 64, 50, 0):.0f} us")
        for burst in BURSTS:
            echo(f"  {burst} after {1000 * PAUSE_S:.0f} ms: {cpu_us(trajectories, burst, WAKES, PAUSE_S):.0f} us")


if __name__ == "__main__":
    main()
