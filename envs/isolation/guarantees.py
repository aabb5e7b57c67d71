"""Guarantees of the kernel layers."""

from collections.abc import Collection

GUARANTEES = {
    "the network": ("namespaces", "seccomp"),
    "other processes": ("namespaces", "seccomp"),
    "files that are not theirs": ("mounts", "landlock"),
}
"""Guarantee -> layers, any of which suffices."""


def missing_guarantees(layers: Collection[str], *, one_process: bool) -> list[str]:
    """Return the missing guarantees; seccomp alone confines only one process."""
    active = set(layers) if one_process else set(layers) - {"seccomp"}
    return [guarantee for guarantee, sufficient in GUARANTEES.items() if not active & set(sufficient)]
