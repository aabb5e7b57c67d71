"""SGLang's kernels for CPUs by name: PyPI has those for GPUs alone.

SGLang imports them, and calls none of them for a dense model on a CPU without AMX.
"""

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args: object, **options: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} was not compiled")

    return kernel
