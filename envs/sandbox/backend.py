"""Choice between the kernel sandbox and a container for a policy's shell."""

from collections.abc import Sequence

from offbeat.envs.sandbox.container import ContainerShell, check_container
from offbeat.envs.sandbox.shell import Shell, ShellLimits, check_shell
from offbeat.envs.sandbox.writable import WritableShell

AnyShell = Shell | ContainerShell


def open_shell(
    folders: Sequence[str], limits: ShellLimits, hidden: Sequence[str] = (), *, writable: bool = False
) -> AnyShell:
    """Start a shell.

    folders: writable, besides `HOME`. hidden: folders of this machine that it must not read. writable: whether an image's
    files are, too.

    Raises:
        IsolationError: the machine can't isolate it.
        ShellError: it did not start.
    """
    if limits.image is None:
        return Shell(folders, limits, hidden)
    return WritableShell(folders, limits) if writable else ContainerShell(folders, limits)


def check_sandbox(limits: ShellLimits) -> None:
    """Raise `IsolationError` if this machine can't isolate a shell, or lacks the image."""
    (check_container if limits.image else check_shell)(limits)
