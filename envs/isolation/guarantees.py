"""Which layers of the kernel hold what; known inside and outside of the sandbox."""

from collections.abc import Collection

PROMISES = {
    "the network": ("namespaces", "seccomp"),
    "other processes": ("namespaces", "seccomp"),
    "files that are not theirs": ("mounts", "landlock"),
}
"""What a program is kept from, and the layers of which one must be there."""


def missing_promises(layers: Collection[str], *, one_process: bool) -> list[str]:
    """What these layers do not keep a program from. seccomp alone holds one process, and can't hold several."""
    held = set(layers) if one_process else set(layers) - {"seccomp"}
    return [what for what, holders in PROMISES.items() if not held & set(holders)]
