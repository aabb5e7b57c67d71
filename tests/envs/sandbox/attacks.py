"""Programs that try to get out, and the sets of layers that hold them."""

import pytest

from offbeat.envs.sandbox import Limits, platform_isolation, run_python
from offbeat.envs.sandbox.run import LAYERS, Layer

FULL, CONTAINER, NO_FILTERS = LAYERS, ("landlock", "seccomp"), ("namespaces", "mounts")
"""All layers; the layers of a container without user namespaces; a kernel with namespaces alone."""


CALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def check(done):
    if not done:
        raise OSError(ctypes.get_errno(), "refused")
"""


def held(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """The layers, or a skip where this machine lacks one of them."""
    if lacks := set(layers) - set(platform_isolation()):
        pytest.skip(f"this machine's kernel refuses {', '.join(sorted(lacks))}")
    return layers


def attack(program: str, layers: tuple[Layer, ...] = FULL, limits: Limits | None = None, abi: int | None = None) -> str:
    """Return the program's output, or the name of the error that ended it."""
    outcome = run_python(program, layers=held(layers), limits=limits or Limits(), max_landlock_abi=abi)
    assert outcome.layers == layers
    return outcome.stdout.strip() or outcome.error
