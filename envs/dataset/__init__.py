"""Single-turn data set tasks."""

from offbeat.envs.dataset.code import CodeConfig, CodeEnv
from offbeat.envs.dataset.env import Judgement, QuestionEnv, QuestionsConfig
from offbeat.envs.dataset.math import MathConfig, MathEnv
from offbeat.envs.dataset.prompt import PromptConfig, PromptEnv
from offbeat.envs.dataset.qa import QAConfig, QAEnv

__all__ = [
    "CodeConfig",
    "CodeEnv",
    "Judgement",
    "MathConfig",
    "MathEnv",
    "PromptConfig",
    "PromptEnv",
    "QAConfig",
    "QAEnv",
    "QuestionEnv",
    "QuestionsConfig",
]
