"""No key of a reward is silent: each changes the score, its failure, or what a service is asked."""

import asyncio
import json
from typing import Any, get_args

import pytest

from offbeat.services.reward.config import AnyReward
from offbeat.services.reward.errors import RewardError
from offbeat.services.reward.factory import build_function
from offbeat.services.reward.kinds.config import RewardConfig
from offbeat.services.reward.kinds.model_config import LlmJudgeConfig, ModelRewardConfig, RewardModelConfig
from tests.services.reward.kinds.conftest import Service
from tests.services.reward.samples import config_of, sample, score_once

Settings = dict[str, Any]
Case = tuple[Settings, Settings, Settings]
"""Settings of a reward, what is changed in them, and the sample."""

FUNCTIONS = "tests.services.reward.functions"
BOX = {"bbox_2d": [0, 0, 10, 10], "label": "cat"}
SHIFTED = {"bbox_2d": [0, 0, 10, 8], "label": "cat"}
CONSTRAINTS = {
    "instruction_id_list": ["punctuation:no_comma", "startend:end_checker"],
    "kwargs": [{}, {"end_phrase": "done"}],
}
PROGRAM = "```python\nprint(input())\n```"
WAITS = "```python\nimport time\nn = input()\ntime.sleep(int(n))\nprint(n)\n```"
TESTS = [{"input": "1", "output": "1"}, {"input": "2", "output": "3"}]
ADDS = "```python\ndef f(x):\n    return x + 1\n```"
CALLS = [{"input": [1], "output": 2}]
PAIR = {"verdict": "pairwise"}
RUBRIC = {"verdict": "rubric", "criteria": {"is short": 1.0}}

OF_A_KIND: dict[str, dict[str, Case]] = {
    "math_rule": {"answer_pattern": ({}, {"answer_pattern": r"so (\d+)"}, {"response": "so 4", "truth": "4"})},
    "multiple_choice": {
        "answer_pattern": ({}, {"answer_pattern": r"so (\w)"}, {"response": "so B", "truth": "B"}),
        "num_choices": ({}, {"num_choices": 2}, {"response": r"\boxed{D}", "truth": "D"}),
    },
    "regex": {
        "pattern": ({"pattern": "a"}, {"pattern": "b"}, {"response": "a"}),
        "match": ({"pattern": "a"}, {"match": "full"}, {"response": "ab"}),
        "text": ({"pattern": "a"}, {"text": "final"}, {"response": "<think>a</think>b"}),
        "timeout_s": ({"pattern": "(a+)+c", "timeout_s": 1e-6}, {"timeout_s": 5.0}, {"response": 22 * "a" + "b"}),
    },
    "crossthink_qa": {"mode": ({}, {"mode": "soft"}, {"response": r"\boxed{Rome}", "truth": "Rome"})},
    "detection": {
        "metric": ({}, {"metric": "map"}, {"response": json.dumps([SHIFTED]), "truth": [BOX]}),
        "max_boxes": ({}, {"max_boxes": 1}, {"response": json.dumps([BOX, SHIFTED]), "truth": [BOX]}),
    },
    "ifeval": {
        "mode": ({}, {"mode": "loose"}, {"response": "well,\nall is done", "row": CONSTRAINTS}),
        "reward": ({}, {"reward": "all"}, {"response": "all is well", "row": CONSTRAINTS}),
    },
    "function": {
        "path": ({"path": f"{FUNCTIONS}:length"}, {"path": f"{FUNCTIONS}:is_long"}, {"response": "four"}),
        "args": ({"path": f"{FUNCTIONS}:length"}, {"args": {"scale": 2.0}}, {"response": "four"}),
    },
    "http": {
        "url": ({}, {"url": "{service}/other"}, {"response": "a"}),
        "score_key": ({}, {"score_key": "confidence"}, {"response": "a"}),
        "api_key_env": ({}, {"api_key_env": "A_TOKEN"}, {"response": "a"}),
    },
    "nemo_gym": {
        "url": ({}, {"url": "{service}/other"}, {"response": "a"}),
        "ground_truth_field": ({}, {"ground_truth_field": "expected_answer"}, {"response": "a", "truth": "b"}),
        "api_key_env": ({}, {"api_key_env": "A_TOKEN"}, {"response": "a"}),
    },
    "code_sandbox": {
        "answer_pattern": ({}, {"answer_pattern": "code: (.+)"}, {"response": "code: print(3)", "truth": TESTS[1:]}),
        "case_type": ({}, {"case_type": "stdio"}, {"response": ADDS, "row": {"entry_point": "f", "test_cases": CALLS}}),
        "tests_key": ({}, {"tests_key": "more"}, {"response": PROGRAM, "truth": TESTS, "row": {"more": TESTS[:1]}}),
        "reward": ({}, {"reward": "pass_rate"}, {"response": PROGRAM, "truth": TESTS}),
        "max_tests": ({}, {"max_tests": 1}, {"response": PROGRAM, "truth": TESTS}),
        "max_total_s": (
            {"reward": "pass_rate", "sandbox": {"timeout_s": 2.0}},
            {"max_total_s": 1e-6},
            {"response": WAITS, "truth": [{"input": "9", "output": "9"}, {"input": "0", "output": "0"}]},
        ),
        "sandbox": (
            {"sandbox": {"max_output_chars": 10, "file_mib": 1}},
            {"sandbox": {"file_mib": 8}},
            {"response": "```python\nprint('a' * 3_000_000)\n```", "truth": [{"input": "", "output": 3_000_000 * "a"}]},
        ),
    },
    "llm_judge": {
        "url": ({}, {"url": "{service}/other"}, {}),
        "model": ({}, {"model": "another"}, {}),
        "generating_args": ({}, {"generating_args": {"temperature": 0.5}}, {}),
        "api_key_env": ({}, {"api_key_env": "A_TOKEN"}, {}),
        "verdict": ({}, {"verdict": "yes_no"}, {}),
        "template": ({}, {"template": "Rate {response}"}, {}),
        "system_prompt": ({}, {"system_prompt": "Be strict."}, {}),
        "sees_images": ({}, {"sees_images": True}, {}),
        "max_score": ({}, {"max_score": 5}, {}),
        "criteria": (RUBRIC, {"criteria": {"is polite": 1.0}}, {}),
        "rubric_key": ({"verdict": "rubric"}, {"rubric_key": "other"}, {"row": {"rubric": ["a"], "other": ["b"]}}),
        "compared_key": (PAIR, {"compared_key": "other"}, {"truth": "b", "row": {"other": "c"}}),
        "extra_body": ({}, {"extra_body": {"seed": 1}}, {}),
    },
}
OF_EVERY_KIND = {
    "name": "test_scorer.py",
    "weight": "test_scorer.py",
    "threshold": "test_scorer.py",
    "tags": "test_scorer.py",
    "timeout_s": "test_caller.py",
    "max_attempts": "test_caller.py",
    "max_retry_s": "test_caller.py",
    "max_concurrent": "test_caller.py",
    "cache_size": "test_caller.py",
    "num_replicas": "tests/integration/test_reward_service.py",
    "queue_timeout_s": "tests/integration/test_reward_service.py",
    "cpus_per_replica": "tests/integration/test_reward_service.py",
}
"""Keys of every kind, and what shows them."""
OF_A_MODEL = {
    "model_args",
    "strategy_args",
    "kv_cache_gib",
    "label",
    "max_length",
    "max_batch_tokens",
    "includes_thoughts",
}
"""Shown by test_reward_model.py and tests/integration/test_judge_model.py."""
OF_DEVICES = set(ModelRewardConfig.model_fields) - set(RewardConfig.model_fields)
"""Shown by tests/deploy/config/checks/test_devices.py."""
OF_GROUPS = {"scope", "compare", "num_partners"}
"""Shown by test_group_verdicts.py, test_comparison.py and test_http.py."""
WITH_A_SERVICE = ("http", "nemo_gym", "llm_judge")
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}

CASES = [
    pytest.param(kind, *case, id=f"{kind}-{key}") for kind, keys in OF_A_KIND.items() for key, case in keys.items()
]


def outcome(kind: str, settings: Settings, given: Settings, service: Service) -> object:
    """Score or failure, and what the service was asked."""
    base = service.url.removesuffix("/score")
    if kind in WITH_A_SERVICE:
        settings = {"url": base, **({"model": "judge"} if kind == "llm_judge" else {}), **settings}
        settings["url"] = settings["url"].replace("{service}", base)
    asked = sample(**{"response": "a", **given})
    if kind == "llm_judge":
        content = [IMAGE, {"type": "text", "text": "Which?"}]
        asked = type(asked)(
            [{"role": "user", "content": content}], asked.response, 0, asked.ground_truth, "", asked.row
        )
    service.requests.clear()
    service.headers.clear()
    service.paths.clear()
    try:
        result: object = asyncio.run(score_once(build_function(config_of(kind, **settings)), asked))
    except RewardError as error:
        result = error.failure
    tokens = [headers.get("Authorization") for headers in service.headers]
    return result, sorted(json.dumps(each, sort_keys=True) for each in service.requests), tokens, list(service.paths)


@pytest.mark.parametrize(("kind", "settings", "change", "given"), CASES)
def test_a_key_of_a_reward_has_an_effect(
    kind: str, settings: Settings, change: Settings, given: Settings, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_TOKEN", "secret")
    # of two questions, one without an answer may end the other before it is asked
    content = "Verdict: TIE" if settings is PAIR else "Score: 5"
    choice = {"message": {"content": content}, "finish_reason": "stop"}
    reply = {"score": 0.25, "confidence": 0.75, "reward": 0.5, "choices": [choice]}
    service.reply = lambda: (200, json.dumps(reply).encode())
    plain = outcome(kind, settings, given, service)
    assert outcome(kind, settings, given, service) == plain
    assert outcome(kind, settings | change, given, service) != plain


def test_every_key_of_every_reward_has_an_effect_that_is_shown() -> None:
    assert set(RewardConfig.model_fields) == set(OF_EVERY_KIND)
    classes = {get_args(each.model_fields["kind"].annotation)[0]: each for each in get_args(get_args(AnyReward)[0])}
    assert set(classes) - {"reward_model"} == set(OF_A_KIND)
    elsewhere = {*OF_EVERY_KIND, "kind"}
    for kind, config in classes.items():
        own = set(config.model_fields) - elsewhere - OF_GROUPS
        if config in (LlmJudgeConfig, RewardModelConfig):
            own -= OF_A_MODEL | OF_DEVICES
        assert own == set(OF_A_KIND.get(kind, {})) - elsewhere, kind
