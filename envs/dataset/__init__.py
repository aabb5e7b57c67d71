"""Tasks out of files: one question, one answer, a rule that judges it."""

from envs.dataset.code import CodeConfig, CodeEnv
from envs.dataset.env import Judgement, QuestionEnv, QuestionsConfig
from envs.dataset.math import MathConfig, MathEnv
from envs.dataset.qa import QAConfig, QAEnv

__all__ = [
    "CodeConfig",
    "CodeEnv",
    "Judgement",
    "MathConfig",
    "MathEnv",
    "QAConfig",
    "QAEnv",
    "QuestionEnv",
    "QuestionsConfig",
]
