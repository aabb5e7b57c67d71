"""Sokoban as an image."""

import numpy as np
import numpy.typing as npt

from offbeat.envs.sokoban.rooms import Room

TILE = 32
"""Cell side, pixels."""
WALL, JOINT, FLOOR, TARGET, BOX, BOX_EDGE, DONE, DONE_EDGE, PLAYER = (
    (110, 90, 80),
    (80, 64, 56),
    (240, 232, 220),
    (220, 60, 60),
    (205, 150, 80),
    (140, 95, 45),
    (95, 175, 95),
    (45, 115, 55),
    (50, 105, 200),
)

Image = npt.NDArray[np.uint8]


def draw_room(room: Room) -> Image:
    """Return [height * 32, width * 32, 3] uint8: brown boxes, green on a target (red ring), blue player."""
    image = np.empty((room.height * TILE, room.width * TILE, 3), dtype=np.uint8)
    for cell in range(room.height * room.width):
        row, column = room.cell(cell)
        tile = image[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE]
        _draw(tile, room.code(cell))
    return image


def _draw(tile: Image, code: int) -> None:
    if code == 0:
        tile[:] = WALL
        tile[[0, TILE // 2 - 1]] = JOINT
        tile[: TILE // 2, TILE // 2] = JOINT
        tile[TILE // 2 :, 0] = JOINT
        return
    tile[:] = FLOOR
    if code in (2, 6):
        tile[_disc(TILE * 0.34) & ~_disc(TILE * 0.22)] = TARGET
    if code in (3, 4):
        tile[3:-3, 3:-3] = DONE_EDGE if code == 3 else BOX_EDGE
        tile[6:-6, 6:-6] = DONE if code == 3 else BOX
    if code in (5, 6):
        tile[_disc(TILE * 0.2)] = PLAYER


def _disc(radius: float) -> npt.NDArray[np.bool_]:
    offset = np.arange(TILE) - (TILE - 1) / 2
    return np.hypot(offset[:, None], offset[None, :]) <= radius
