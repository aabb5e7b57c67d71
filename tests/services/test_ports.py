import os
import socket

from offbeat.services.ports import find_port_problem
from offbeat.services.process import free_port


def test_a_free_port_has_no_problem():
    assert find_port_problem("127.0.0.1", free_port()) == ""


def test_a_busy_port_names_its_process():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        problem = find_port_problem("127.0.0.1", port)
    assert problem.startswith(f"port {port} of 127.0.0.1 is in use by process {os.getpid()} (")


def test_a_host_that_is_not_of_this_machine_is_named():
    assert find_port_problem("192.0.2.1", 8000).startswith("can't listen on port 8000 of 192.0.2.1: ")
    assert find_port_problem("no such host", 8000).startswith("no such host is no address")
