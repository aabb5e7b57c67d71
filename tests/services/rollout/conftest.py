"""The tiny policy's tokenizer, once for all tests of the rollout."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from envs.frozen_lake import WORDS
from services.rollout.chat import ChatFormat, load_chat_format
from trainer.config import TinyPolicyConfig
from trainer.policies.tiny import write_tiny_policy


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    write_tiny_policy(folder, TinyPolicyConfig(), WORDS)
    return folder


@pytest.fixture(scope="session")
def tokenizer(policy_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(policy_folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def chat(policy_folder: Path) -> ChatFormat:
    return load_chat_format(policy_folder)
