"""Choice between the kernel sandbox and a container for a policy's shell."""

import functools
from collections.abc import Sequence

from offbeat.envs.sandbox.container import ContainerShell, check_container
from offbeat.envs.sandbox.network import NetworkError, check_programs
from offbeat.envs.sandbox.run import IsolationError
from offbeat.envs.sandbox.shell import Shell, ShellError, ShellLimits, check_shell
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
    """Raise `IsolationError` if this machine can't isolate a shell, lacks the image, or can't connect it to a network."""
    (check_container if limits.image else check_shell)(limits)
    if limits.network != "none":
        _check_network(limits.model_dump_json(exclude_unset=True))


@functools.cache
def _check_network(limits: str) -> None:
    check_programs()
    shell = ContainerShell(("/tmp",), ShellLimits.model_validate_json(limits))
    try:
        shell.connect().close()
    except (NetworkError, ShellError) as error:
        raise IsolationError(f"network: {error}") from error
    finally:
        shell.close()
