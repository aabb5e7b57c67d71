import pytest
from pydantic import ValidationError

from offbeat.deploy.config.errors import collect_issues, nearest_keys
from offbeat.deploy.config.run import RunConfig


def problems(tree: dict[str, object]) -> dict[str, str]:
    import json

    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate_json(json.dumps(tree))
    return {problem.path: problem.message for problem in collect_issues(caught.value, RunConfig)}


ENVS = {"Lake": {"env_type": "frozen_lake"}}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("max_stepz", "max_steps"),
        ("actor_train.training_args.learning_rat", "actor_train.training_args.learning_rate"),
        ("custom_envs.Lake.max_step", "custom_envs.Lake.max_steps"),
        ("group_size", "train_env_manager.group_size"),
        ("train_env_manager.num_env_group", "train_env_manager.num_env_groups"),
    ],
)
def test_an_unknown_key_names_the_nearest_valid_one(written: str, meant: str):
    assert nearest_keys(written, RunConfig)[0] == meant


def test_no_run_has_a_colon_which_ends_its_name_in_those_of_applications_and_scorers():
    assert "exp_name" in problems({"custom_envs": ENVS, "exp_name": "math:v2"})


def test_a_key_like_none_gets_no_guess():
    assert nearest_keys("nonsense", RunConfig) == ()
    found = problems({"custom_envs": ENVS, "nonsense": 1, "actor_train": {"bf16": True}})
    for key in ("nonsense", "actor_train.bf16"):
        assert found[key] == "unknown key, and none is like it: `offbeat config show` lists all"


@pytest.mark.parametrize(
    ("tree", "key", "says"),
    [
        ({"dual_clip_loss": True}, "dual_clip_loss", "here `dual_clip` (1 + 2 pg_clip"),
        (
            {"is_offload_states": True},
            "is_offload_states",
            "not one of Offbeat's (learner and engines work at the same",
        ),
        ({"num_nodes": 2}, "num_nodes", "(device_mapping says it): leave it out"),
        (
            {"actor_train": {"training_args": {"bf16": True}}},
            "actor_train.training_args.bf16",
            "model_args.dtype: bfloat16",
        ),
        ({"actor_train": {"name": "x"}}, "actor_train.name", "(no such workers here): leave it out"),
    ],
)
def test_a_key_of_rolls_is_explained_as_by_the_importer(tree: dict[str, object], key: str, says: str):
    message = problems({"custom_envs": ENVS, **tree})[key]
    assert message.startswith("ROLL's key, ")
    assert says in message


def test_unknown_key_lists_several_equal_keys():
    assert set(nearest_keys("learning_rate", RunConfig)) == {
        "warm_start.learning_rate",
        "actor_train.training_args.learning_rate",
        "critic.training_args.learning_rate",
    }


def test_all_issues_are_listed_with_full_paths():
    found = problems(
        {
            "custom_envs": {"Lake": {"env_type": "frozen_lake", "max_step": 3, "max_steps": "x"}},
            "seed": "five",
            "actor_train": {"training_args": {"max_grad_norm": -1.0}},
            "pg_variant": "dpo",
            "nonsense": 1,
        }
    )
    assert set(found) == {
        "custom_envs.Lake.max_step",
        "custom_envs.Lake.max_steps",
        "seed",
        "actor_train.training_args.max_grad_norm",
        "pg_variant",
        "nonsense",
    }
    assert "`custom_envs.Lake.max_steps`" in found["custom_envs.Lake.max_step"]
    assert found["seed"] == "expected an integer, got 'five' (a string)"
    assert found["actor_train.training_args.max_grad_norm"] == "expected greater than 0, got -1.0 (a number)"
    assert found["pg_variant"].startswith("expected 'ppo', 'vanilla', 'tis', ")
    assert found["pg_variant"].endswith(", got 'dpo' (a string)")


def test_union_branches_are_one_issue():
    found = problems({"custom_envs": ENVS, "resume_from_checkpoint": 7, "reward_clip": "x", "redis": {"url": 3}})
    assert set(found) == {"resume_from_checkpoint", "reward_clip", "redis.url"}
    assert found["resume_from_checkpoint"] == "expected a boolean or a string or a path, got 7 (an integer)"
    assert found["reward_clip"].startswith("expected a number")


def test_an_unknown_key_in_a_table_of_a_kind_names_that_tables_keys():
    reward = {"name": "tests", "kind": "code_sandbox", "sandbox": {"timeout": 5}}
    found = problems({"custom_envs": ENVS, "rewards": [reward]})
    key = "rewards.0.sandbox.timeout"
    assert found[key] == "unknown key of this kind; did you mean `rewards.0.sandbox.timeout_s`?"


def test_a_missing_key_is_named():
    assert problems({"custom_envs": {"Lake": {}}}) == {"custom_envs.Lake.env_type": "required, and missing"}


def test_rejected_combination_names_its_table():
    found = problems({"custom_envs": ENVS, "train_env_manager": {"tags": ["Lake"], "num_groups_partition": [3, 5]}})
    assert found["train_env_manager"].startswith("num_groups_partition has 2 entries for 1 tags")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"control": "S3CRET"}, "expected an object, got a string"),
        ({"control": {"tokens": ["S3CRET"]}}, "expected an object, got a string"),
        ({"control": {"read_token": 53213371}}, "expected a string, got an integer"),
        ({"redis": "redis://:S3CRET@h:1"}, "expected an object, got a string"),
        ({"system_envs": ["HF_TOKEN=S3CRET"]}, "expected an object, got a list"),
        ({"telemetry": {"otlp_endpoint": "http://u:S3CRET@h:1"}}, "got a string"),
        ({"max_steps": ["http://u:S3CRET@h:1"]}, "got a list"),
        ({"control": {"port": 1.5}}, "got 1.5 (a number)"),
    ],
)
def test_what_may_be_a_secret_in_another_form_is_not_printed(tree: dict[str, object], message: str):
    (issue,) = problems({"custom_envs": ENVS, **tree}).values()
    assert issue.endswith(message)
    assert "S3CRET" not in issue
