"""Contract checks in a child process, killed if the env hangs.

JSON request on stdin (`env_type`, `env_config`, `num_seeds`, `limit_s`), JSON report as stdout's last line. A longer
call ends the process with a traceback on stderr.
"""

import faulthandler
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict

from pydantic import JsonValue, TypeAdapter

from offbeat.envs.contract import ContractReport, Finding, check_contract
from offbeat.envs.sandbox import describe_sandbox

REPORT = TypeAdapter(ContractReport)


def check_in_processes(
    env_type: str,
    env_config: Mapping[str, JsonValue],
    *,
    num_seeds: int = 8,
    limit_s: float = 30.0,
) -> ContractReport:
    """Compare an env's episodes in two processes with different string hashes. limit_s: per call."""
    request = {"env_type": env_type, "env_config": dict(env_config), "num_seeds": num_seeds, "limit_s": limit_s}
    report = _run(request, hash_seed="1")
    if report.digest and not report.problems:
        other = _run(request, hash_seed="2")
        if other.digest != report.digest:
            message = (
                "episodes of the same seeds differ between processes: do not use hash() of a string, the order of a "
                "set, the time or environment variables"
            )
            report.findings.append(Finding("problem", "determinism", message))
    return report


def _run(request: Mapping[str, object], *, hash_seed: str) -> ContractReport:
    process = subprocess.run(
        [sys.executable, "-m", "offbeat.envs.contract_process"],
        input=json.dumps(request),
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = process.stdout.splitlines()
    if process.returncode == 0 and lines:
        return REPORT.validate_json(lines[-1])
    return ContractReport([_explain_exit(process, str(request["limit_s"]))])


def _explain_exit(process: subprocess.CompletedProcess[str], limit_s: str) -> Finding:
    call_name = next((line for line in reversed(process.stdout.splitlines()) if line), "import")
    if "Timeout (" in process.stderr:
        frames = [line.strip() for line in process.stderr.splitlines() if line.lstrip().startswith("File ")]
        location = f"; it was in {frames[0].removeprefix('File ')}" if frames else ""
        return Finding("problem", "timeout", f"{call_name} took longer than {limit_s} s{location}")
    last = next(
        (line for line in reversed(process.stderr.splitlines()) if line.strip()), f"exit code {process.returncode}"
    )
    return Finding("problem", "process", f"{call_name} ended the process: {last}")


def main() -> None:
    request = json.loads(sys.stdin.read())

    def on_call(call_name: str) -> None:
        sys.stdout.write(f"{call_name}\n")
        faulthandler.dump_traceback_later(request["limit_s"], exit=True)

    report = check_contract(request["env_type"], request["env_config"], num_seeds=request["num_seeds"], on_call=on_call)
    faulthandler.cancel_dump_traceback_later()
    report.sandbox = describe_sandbox()
    sys.stdout.write(f"\n{json.dumps(asdict(report))}\n")


if __name__ == "__main__":
    main()
