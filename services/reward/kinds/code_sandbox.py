"""Programs, run with their tests in the sandbox."""

from itertools import takewhile

from offbeat.envs.dataset.code import FENCED
from offbeat.envs.dataset.env import last_group
from offbeat.envs.dataset.program_checker import CallTest, check_output, check_program, count_pytest, run_tests
from offbeat.envs.sandbox import Limits, check_isolation
from offbeat.services.reward.kinds.code_cases import AssertCase, Case, PytestFile, StdioCase, read_cases
from offbeat.services.reward.kinds.config import CodeSandboxConfig
from offbeat.services.reward.sample import RewardSample, final_text

TESTS_SHARE = 0.9
"""Share of `timeout_s` for tests; the rest is for the last one's sandboxes to start and end."""


class CodeSandbox:
    def __init__(self, config: CodeSandboxConfig) -> None:
        """Raises IsolationError if this machine can't confine programs."""
        check_isolation(config.sandbox)
        self._config = config
        self._pattern = config.answer_pattern or FENCED

    def __call__(self, sample: RewardSample) -> float:
        cases = read_cases(sample, self._config)
        program = last_group(self._pattern, final_text(sample.response))
        if program is None:
            return 0.0
        rates = run_tests(
            cases,
            lambda case, limits: run_case(program, case, limits),
            lambda rate: rate < 1,
            self._config.sandbox,
            self._config.max_total_s,
            TESTS_SHARE * self._config.timeout_s,
        )
        if self._config.reward == "all":
            return float(sum(1 for _ in takewhile(lambda rate: rate == 1, rates)) == len(cases))
        return sum(rates) / len(cases)


def run_case(program: str, case: Case, limits: Limits) -> float:
    """Return the share that passes."""
    match case:
        case AssertCase(code):
            return float(not check_program(program, code, limits))
        case CallTest():
            return float(not check_program(program, case, limits))
        case PytestFile(source):
            num_passed, num_tests = count_pytest(program, source, limits)
            return num_passed / num_tests if num_tests else 0.0
        case StdioCase(stdin, expected):
            return float(not check_output(program, stdin, expected, limits))
