"""A run's configuration without secrets, as trackers' servers get it."""

from typing import Any

import pytest

from offbeat.trainer.trackers.supervisor import without_secrets


@pytest.mark.parametrize(
    ("tree", "public"),
    [
        (
            {"system_envs": {"AWS_SECRET_ACCESS_KEY": "s3", "PGPASSWORD": "pw", "PORT": 1}},
            {"system_envs": {"AWS_SECRET_ACCESS_KEY": "***", "PGPASSWORD": "***", "PORT": "***"}},
        ),
        (
            {"agent": {"env": {"AWS_SECRET_ACCESS_KEY": "x", "HF_TOKEN": "y", "SHELL": "bash"}}},
            {"agent": {"env": {"AWS_SECRET_ACCESS_KEY": "***", "HF_TOKEN": "***", "SHELL": "bash"}}},
        ),
        ({"rewards": [{"name": "r", "api_key": "x"}]}, {"rewards": [{"name": "r", "api_key": "***"}]}),
        (
            {
                "headers": {"x-api-key": "x", "Authorization": "Bearer y"},
                "apiKey": "z",
                "db_passwd": "w",
                "credentials": "c",
            },
            {
                "headers": {"x-api-key": "***", "Authorization": "***"},
                "apiKey": "***",
                "db_passwd": "***",
                "credentials": "***",
            },
        ),
        (
            {"credentials": {"user": "u", "key": "k", "n": [1]}, "secrets_path": "p", "api_keys": 2},
            {"credentials": {"user": "***", "key": "***", "n": "***"}, "secrets_path": "p", "api_keys": 2},
        ),
        (
            {"passwd": 123456, "read_token": None, "needs_token": True, "token": [1.5, "x"]},
            {"passwd": "***", "read_token": None, "needs_token": True, "token": ["***", "***"]},
        ),
        (
            {"secret_key": "a", "private_key": "b", "secretKey": "c", "accessToken": "d", "openaiApiKey": "e"},
            dict.fromkeys(("secret_key", "private_key", "secretKey", "accessToken", "openaiApiKey"), "***"),
        ),
        ({"dbPassword": "a", "PassWord": "b", "MonKey": "c"}, {"dbPassword": "***", "PassWord": "***", "MonKey": "c"}),
        ({"base_url": "http://u:pw@host:1/v1"}, {"base_url": "http://***@host:1/v1"}),
        ({"url": "redis://:pw@host:1", "mail": "a@b", "n": 1}, {"url": "redis://***@host:1", "mail": "a@b", "n": 1}),
        (
            {"reward_key": "reward", "max_new_tokens": 8, "tags": ["a", None]},
            {"reward_key": "reward", "max_new_tokens": 8, "tags": ["a", None]},
        ),
    ],
)
def test_secrets_are_masked_and_other_values_kept(tree: dict[str, Any], public: dict[str, Any]):
    assert without_secrets(tree) == public
