"""Guarantees of the kernel layers."""

from collections.abc import Collection

GUARANTEES: dict[str, tuple[set[str], ...]] = {
    "the network": ({"namespaces"}, {"seccomp"}),
    "other processes": ({"namespaces"}, {"seccomp"}),
    # Landlock leaves out modes, owners, times and attributes, which seccomp refuses
    "files that are not theirs": ({"mounts"}, {"landlock", "seccomp"}),
}
"""Guarantee -> sets of layers that suffice."""


def missing_guarantees(layers: Collection[str], *, one_process: bool) -> list[str]:
    """Return what is missing; seccomp alone confines only one process."""
    return [
        guarantee
        for guarantee, alternatives in GUARANTEES.items()
        if not any(needed <= set(layers) and (one_process or needed != {"seccomp"}) for needed in alternatives)
    ]
