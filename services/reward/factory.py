from collections.abc import Callable

from offbeat.services.reward.caller import RewardCaller
from offbeat.services.reward.comparison import GroupComparison
from offbeat.services.reward.config import AnyReward, RewardsConfig
from offbeat.services.reward.function import GroupFunction, RewardFunction, SampleT, ThreadedFunction, ValueT
from offbeat.services.reward.kinds.code_sandbox import CodeSandbox
from offbeat.services.reward.kinds.config import (
    CodeSandboxConfig,
    CrossThinkQAConfig,
    DetectionConfig,
    HttpConfig,
    IFEvalConfig,
    MathRuleConfig,
    MultipleChoiceConfig,
    NemoGymConfig,
    RegexConfig,
    RewardConfig,
    UserFunctionConfig,
)
from offbeat.services.reward.kinds.crossthink_qa import CrossThinkQA
from offbeat.services.reward.kinds.detection import Detection
from offbeat.services.reward.kinds.group_verdicts import build_group_verdict
from offbeat.services.reward.kinds.http import HttpGroupReward, HttpReward
from offbeat.services.reward.kinds.ifeval import IFEval
from offbeat.services.reward.kinds.judge_verdicts import build_verdict
from offbeat.services.reward.kinds.llm_judge import LlmJudge
from offbeat.services.reward.kinds.math_rule import MathRule
from offbeat.services.reward.kinds.model_config import LlmJudgeConfig, RewardModelConfig
from offbeat.services.reward.kinds.multiple_choice import MultipleChoice
from offbeat.services.reward.kinds.nemo_gym import NemoGymReward
from offbeat.services.reward.kinds.pattern import Pattern
from offbeat.services.reward.kinds.user_function import build_user_function, build_user_group_function
from offbeat.services.reward.sample import RewardSample
from offbeat.services.reward.scorer import RewardScorer


def make_scorer(config: RewardsConfig, *, run_id: str = "", local: bool = False, compares: bool = True) -> RewardScorer:
    """Build the scorer of a process with an event loop.

    run_id: names the applications of rewards with `num_replicas`. local: all in this process. compares: False to leave
    rewards of `scope: group` out.

    Raises:
        ValueError: a package, function or isolation is missing.
    """
    callers = {
        reward.name: _make_caller(reward, build_function, run_id, local=local)
        for reward in config.rewards
        if not reward.is_of_group
    }
    comparisons = {
        reward.name: GroupComparison(reward, _make_caller(reward, build_group_function, run_id, local=local))
        for reward in config.rewards
        if reward.is_of_group and compares
    }
    return RewardScorer(config, callers, comparisons)


def _make_caller(
    config: AnyReward, build: Callable[[AnyReward], RewardFunction[SampleT, ValueT]], run_id: str, *, local: bool
) -> RewardCaller[SampleT, ValueT]:
    """build: the function in this process."""
    if local or not config.num_replicas:
        return RewardCaller(config, build(config))
    # Ray Serve takes a second of CPU, which the command line spares
    from offbeat.services.reward.client import ServedReward, app_name  # noqa: PLC0415

    timeout_s = config.timeout_s + config.queue_timeout_s
    num_processes = config.num_replicas if isinstance(config, MathRuleConfig) else 1
    served = ServedReward[SampleT, ValueT](app_name(run_id, config.name))
    return RewardCaller(config, served, timeout_s, num_processes)


def build_group_function(config: AnyReward) -> GroupFunction:
    """Build a reward of `scope: group` in this process; raises ValueError if something is missing."""
    match config:
        case UserFunctionConfig():
            return build_user_group_function(config)
        case HttpConfig():
            return HttpGroupReward(config)
        case LlmJudgeConfig():
            return LlmJudge(config, build_group_verdict(config))
        case _:
            raise ValueError(f"reward {config.name!r}: {config.kind} has no scope: group")


def build_function(config: AnyReward) -> RewardFunction:
    """Build a reward of `scope: episode` in this process; raises ValueError if something is missing."""
    match config:
        case MathRuleConfig():
            return _threaded(MathRule(config), config)
        case MultipleChoiceConfig():
            return _threaded(MultipleChoice(config), config)
        case RegexConfig():
            return _threaded(Pattern(config), config)
        case CrossThinkQAConfig():
            return _threaded(CrossThinkQA(config), config)
        case DetectionConfig():
            return _threaded(Detection(config), config)
        case IFEvalConfig():
            return _threaded(IFEval(config), config)
        case UserFunctionConfig():
            return build_user_function(config)
        case HttpConfig():
            return HttpReward(config)
        case NemoGymConfig():
            return NemoGymReward(config)
        case LlmJudgeConfig():
            return LlmJudge(config, build_verdict(config))
        case CodeSandboxConfig():
            return _threaded(CodeSandbox(config), config)
        case RewardModelConfig():
            # torch takes seconds and memory, which env workers without a reward model spare
            from offbeat.services.reward.kinds.reward_model import RewardModel  # noqa: PLC0415

            return RewardModel(config)


def _threaded(score: Callable[[RewardSample], float], config: RewardConfig) -> RewardFunction:
    return ThreadedFunction(score, num_threads=config.max_concurrent, timeout_s=config.timeout_s)
