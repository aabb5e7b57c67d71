"""A policy's shell in a container whose image it may change, as tasks with images of their own need.

Invariant: after `secure`, no process of the policy runs, and operations do what they say, whatever it wrote.
"""

import re
from collections.abc import Sequence

from offbeat.envs.sandbox.container import OWN_ENV, PROGRAMS, ContainerShell
from offbeat.envs.sandbox.container_engine import PROGRAM_FOLDERS, SYSTEM_PATH, run_engine
from offbeat.envs.sandbox.layer import (
    Original,
    check_files,
    check_layer,
    kept_files,
    read_changes,
    read_copies,
    unlisted_links,
)
from offbeat.envs.sandbox.run import IsolationError
from offbeat.envs.sandbox.shell import ShellError, ShellLimits

COMMANDS = f"""
path=$1; shift
for program in sh "$@"; do
  found=$(command -v "$program") && echo "program $found" && echo "program $(readlink -f "$found")"
done
found=$(PATH=$PATH:$path command -v bash) || {{ echo "it lacks bash, which its shell needs" >&2; exit 1; }}
echo "program $found"; echo "program $(readlink -f "$found")"; echo "bash $found"
for folder in {" ".join(PROGRAM_FOLDERS)}; do for file in "$folder"/*; do echo "name ${{file##*/}}"; done; done
for file in /lib/ld-musl-*; do [ ! -e "$file" ] || echo "musl $file"; done
"""
"""Lists the image's commands, before the policy can change them."""
MOUNT_TABLES = ("/proc/mounts", "/proc/self/mounts", "../proc/self/mounts")
"""Targets of /etc/mtab, which podman makes."""
OF_LOADERS = re.compile(r"LD_.*|BASH_ENV|ENV")
"""Variables that name libraries or scripts."""


class WritableShell(ContainerShell):
    """Shell of one episode in a container of podman, with a layer of its own; concurrent calls wait for each other."""

    is_writable = True

    def __init__(self, folders: Sequence[str], limits: ShellLimits) -> None:
        """folders: in memory, besides `HOME`; `secure` empties them.

        Raises:
            IsolationError: podman, or its image, is missing.
            ShellError: the container did not start.
        """
        super().__init__(folders, limits)
        self._written: list[str] = []
        self._unlisted: dict[str, str] = {}
        try:
            self._original = self._read_original()
        except (IsolationError, ShellError):
            self.close()
            raise

    def secure(self) -> None:
        """Stop the container, verify what was written to it, and start it again, with empty folders in memory.

        Raises:
            ShellError: programs of the operations were changed, or podman does not answer.
        """
        self._manage("stop", "--time", "0")
        changes = read_changes(self.image, self._name)
        check_layer(changes, self._original)
        copies = read_copies(self.image, self._name)
        check_files(kept_files(copies), self._original)
        self._written = [path for kind, path in changes if kind != "deleted"]
        self._unlisted = unlisted_links(copies)
        self._manage("start")

    def unlink_to(self, folders: Sequence[str], targets: Sequence[str]) -> None:
        """Remove symbolic links that were written to the image before `secure`, and lead into `targets`, above them, or
        into /proc. folders: those in memory, which are empty.
        """
        del folders
        unlisted = {path: target for path, target in self._unlisted.items() if target not in MOUNT_TABLES}
        links = unlisted | self.read_links(self._written)
        self.unlink(list(links), dict(links), targets)

    def command_env(self) -> dict[str, str]:
        """Return a command's variables: the image's."""
        return {"PATH": SYSTEM_PATH, **self.image.env, **OWN_ENV}

    def verifier_env(self) -> dict[str, str]:
        """Return the image's variables, less those that name libraries or scripts, which a policy could fill."""
        return {name: value for name, value in self.command_env().items() if not OF_LOADERS.fullmatch(name)}

    def _read_original(self) -> Original:
        path = self.image.env.get("PATH", "")
        rows = [line.partition(" ") for line in self.call("start", COMMANDS, path, *PROGRAMS).decode().split("\n")]
        found = {
            kind: frozenset(value for each, _, value in rows if each == kind) for kind in ("program", "name", "musl")
        }
        (self.bash,) = (value for kind, _, value in rows if kind == "bash")
        others = tuple(
            folder.rstrip("/") for folder in path.split(":") if folder.rstrip("/") not in ("", *PROGRAM_FOLDERS)
        )
        files = kept_files(read_copies(self.image, self._name))
        return Original(found["program"], found["name"], others, bool(found["musl"]), files)

    def _manage(self, *command: str) -> None:
        try:
            # where conmon, which a start leaves, can't write a file `oom`
            result = run_engine(*self.image.command, *command, self._name, folder="/proc")
        except IsolationError as error:
            raise ShellError(str(error)) from error
        if result.returncode:
            raise ShellError(f"{command[0]}: {(result.stderr.strip().splitlines() or ['no message'])[-1]}")
