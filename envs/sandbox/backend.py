"""Choice between the kernel sandbox and a container for a policy's shell."""

from collections.abc import Sequence

from offbeat.envs.sandbox.container import ContainerShell, check_container
from offbeat.envs.sandbox.shell import Shell, ShellLimits, check_shell

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
    return ContainerShell(folders, limits, writable=writable) if limits.image else Shell(folders, limits, hidden)


def check_sandbox(limits: ShellLimits, *, writable: bool = False) -> None:
    """Raise `IsolationError` if this machine can't isolate a shell, or lacks the image. writable: as for `open_shell`."""
    if limits.image:
        check_container(limits, writable=writable)
    else:
        check_shell(limits)
