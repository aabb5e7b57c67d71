"""Guarantees of the kernel layers; used inside and outside of the sandbox."""

from collections.abc import Collection

PROMISES = {
    "the network": ("namespaces", "seccomp"),
    "other processes": ("namespaces", "seccomp"),
    "files that are not theirs": ("mounts", "landlock"),
}
"""Guarantee -> layers of which one must be active."""


def missing_promises(layers: Collection[str], *, one_process: bool) -> list[str]:
    """Return the guarantees that `layers` do not give; seccomp alone confines one process, not several."""
    held = set(layers) if one_process else set(layers) - {"seccomp"}
    return [what for what, holders in PROMISES.items() if not held & set(holders)]
