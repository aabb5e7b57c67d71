"""All checks of this machine's installation."""

import sys
from collections.abc import Iterator

from offbeat.deploy.doctor.finding import InstallationFinding
from offbeat.deploy.doctor.libraries import check_libraries, check_versions, describe_python
from offbeat.deploy.doctor.machine import check_machine
from offbeat.deploy.doctor.services import check_services


def check_installation() -> Iterator[InstallationFinding]:
    yield InstallationFinding.of("python", f"{describe_python()} in {sys.prefix}")
    yield from check_libraries()
    yield from check_versions()
    yield from check_services()
    yield from check_machine()
