"""Contract checks in child processes, each killed if the env hangs.

JSON request on stdin (`env_type`, `env_config`, `num_seeds`, `limit_s`, `digest_only`); on stdout a line for each call
as it starts, and the report before the last one, `END`. A longer call ends the process with a traceback on stderr.
All are files: an env's own processes may outlive it and would hold a pipe open.
"""

import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from pydantic import JsonValue, TypeAdapter

from offbeat.envs.contract import ContractReport, Finding, check_contract, digest_episodes
from offbeat.envs.sandbox import describe_sandbox

REPORT = TypeAdapter(ContractReport)
END = "the end of the process"
PROGRESS_INTERVAL_S = 10.0

Progress = Callable[[str], None]


def check_in_processes(
    env_type: str,
    env_config: Mapping[str, JsonValue],
    *,
    num_seeds: int = 8,
    limit_s: float = 30.0,
    on_progress: Progress = lambda _: None,
) -> ContractReport:
    """Compare an env's episodes in two processes with different string hashes.

    limit_s: per call. on_progress: called every 10 seconds with time, number of calls and the call under way.
    """
    request = {"env_type": env_type, "env_config": dict(env_config), "num_seeds": num_seeds, "limit_s": limit_s}
    report = _run(request, "1", on_progress)
    if report.digest and not report.problems:
        other = _run({**request, "digest_only": True}, "2", on_progress)
        report.findings += other.findings
        if other.digest and other.digest != report.digest:
            message = (
                "episodes of the same seeds differ between processes: do not use hash() of a string, the order of a "
                "set, the time or environment variables"
            )
            report.findings.append(Finding("problem", "determinism", message))
    return report


def _run(request: Mapping[str, object], hash_seed: str, on_progress: Progress) -> ContractReport:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="offbeat-env-check-") as name:
        folder = Path(name)
        (folder / "request").write_text(json.dumps(request))
        with (
            (folder / "request").open() as stdin,
            (folder / "calls").open("w") as calls,
            (folder / "errors").open("w") as stderr,
        ):
            process = subprocess.Popen(
                [sys.executable, "-m", "offbeat.envs.contract_process"],
                env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=stdin,
                stdout=calls,
                stderr=stderr,
            )
        try:
            while True:
                try:
                    process.wait(PROGRESS_INTERVAL_S)
                    break
                except subprocess.TimeoutExpired:
                    lines = _read_lines(folder / "calls")
                    call = f"{len(lines)} calls, now {lines[-1]}" if lines else "import"
                    on_progress(f"{time.monotonic() - start:.0f} s: {call}")
        finally:
            process.kill()
            process.wait()
        lines = _read_lines(folder / "calls")
        if process.returncode == 0 and lines[-1:] == [END]:
            return REPORT.validate_json(lines[-2])
        call_name, errors = (lines or ["import"])[-1], _read_lines(folder / "errors")
        return ContractReport([_explain_exit(process.returncode, call_name, errors, request["limit_s"])])


def _read_lines(path: Path) -> list[str]:
    """Return the lines that are not blank."""
    return [line for line in path.read_text(errors="replace").splitlines() if line.strip()]


def _explain_exit(exit_code: int, call_name: str, errors: list[str], limit_s: object) -> Finding:
    if any("Timeout (" in line for line in errors):
        frames = [line.strip() for line in errors if line.lstrip().startswith("File ")]
        location = f"; it was in {frames[0].removeprefix('File ')}" if frames else ""
        return Finding("problem", "timeout", f"{call_name} took longer than {limit_s} s{location}")
    last = errors[-1] if errors else f"exit code {exit_code}"
    return Finding("problem", "process", f"{call_name} ended the process: {last}")


def main() -> None:
    request = json.load(sys.stdin)
    num_seeds, arguments = request["num_seeds"], (request["env_type"], request["env_config"])
    calls = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def on_call(call_name: str) -> None:
        calls.write(f"{call_name}\n")
        faulthandler.dump_traceback_later(request["limit_s"], exit=True)

    if request.get("digest_only"):
        report = ContractReport(digest=digest_episodes(*arguments, num_seeds=num_seeds, on_call=on_call))
    else:
        report = check_contract(*arguments, num_seeds=num_seeds, on_call=on_call)
        faulthandler.cancel_dump_traceback_later()
        report.sandbox = describe_sandbox()
    calls.write(f"{json.dumps(asdict(report))}\n")
    on_call(END)  # where Python waits for threads that the env left


if __name__ == "__main__":
    main()
