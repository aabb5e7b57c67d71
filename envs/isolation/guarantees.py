"""Guarantees of the kernel layers; used inside and outside of the sandbox."""

from collections.abc import Collection

GUARANTEES = {
    "the network": ("namespaces", "seccomp"),
    "other processes": ("namespaces", "seccomp"),
    "files that are not theirs": ("mounts", "landlock"),
}
"""Guarantee -> layers of which one must be active."""


def missing_guarantees(layers: Collection[str], *, one_process: bool) -> list[str]:
    """Return the guarantees that `layers` do not give; seccomp alone confines one process, not several."""
    active = set(layers) if one_process else set(layers) - {"seccomp"}
    return [guarantee for guarantee, sufficient in GUARANTEES.items() if not active & set(sufficient)]
