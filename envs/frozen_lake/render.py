"""FrozenLake as an image."""

import numpy as np
import numpy.typing as npt

from offbeat.envs.frozen_lake.maps import Cell, LakeMap

TILE = 32
"""Cell side, pixels."""
ICE, EDGE, HOLE, GOAL, START, AGENT, FALLEN = (
    (225, 240, 250),
    (170, 200, 220),
    (40, 70, 110),
    (60, 160, 90),
    (205, 220, 235),
    (225, 110, 40),
    (170, 60, 60),
)

Image = npt.NDArray[np.uint8]


def _disc(radius: float) -> npt.NDArray[np.bool_]:
    offset = np.arange(TILE) - (TILE - 1) / 2
    return np.hypot(offset[:, None], offset[None, :]) <= radius


def draw_lake(lake: LakeMap, agent: Cell) -> Image:
    """Return [size * 32, size * 32, 3] uint8: dark holes, green goal, orange agent."""
    image = np.empty((lake.size * TILE, lake.size * TILE, 3), dtype=np.uint8)
    for row in range(lake.size):
        for column in range(lake.size):
            at = row, column
            tile = image[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE]
            tile[:] = EDGE
            tile[1:-1, 1:-1] = START if at == lake.start else ICE
            if at in lake.holes:
                tile[_disc(TILE * 0.42)] = HOLE
            if at == lake.goal:
                tile[5:-5, 5:-5] = GOAL
            if at == agent:
                tile[_disc(TILE * 0.28)] = FALLEN if at in lake.holes else AGENT
    return image
