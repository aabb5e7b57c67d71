"""A source of prime-rl has keys of its own or inherits them, where a run has one value for all tags."""

from pathlib import Path

import pytest

from offbeat.deploy.config.importing.prime_rl import import_prime_rl
from offbeat.deploy.config.importing.report import Imported
from offbeat.deploy.config.importing.rules import get
from offbeat.deploy.config.loader import validate_tree

OPD = 'algo = { type = "opd", teacher = { name = "org/teacher", base_url = "http://a/v1" } }'


def convert(folder: Path, *own: str, shared: str = "") -> Imported:
    """Import a run of these sources' own keys, below shared ones."""
    names = ("math", "code", "chat")
    sources = "".join(
        f'[[orchestrator.train.source]]\nenv = {{ taskset = {{ id = "{name}" }} }}\n{keys}\n'
        for name, keys in zip(names, own, strict=False)
    )
    path = folder / "rl.toml"
    path.write_text(f"{shared}\n{sources}")
    return import_prime_rl([path])


def outcome(imported: Imported, key: str) -> tuple[str, str]:
    return next((each.outcome.status, each.outcome.note) for each in imported.keys if ".".join(each.key) == key)


@pytest.mark.parametrize(
    ("own", "key", "expected"),
    [
        ('algo = { type = "max_rl" }', "adv_estimator", "maxrl"),
        ('algo = { type = "rae" }', "adv_estimator", "reinforce"),
        ('algo = { type = "rae" }', "reward_normalization", {"norm_mean_type": "running"}),
        (OPD, "adv_estimator", "opd"),
        (OPD, "dppo_mask_high", 1.0),
        (OPD, "teacher", {"teacher": {"model_args": {"model_name_or_path": "org/teacher"}}}),
        ("sampling = { temperature = 0.6 }", "actor_infer.generating_args.temperature", 0.6),
        ("sampling = { extra_body = { top_k = 20 } }", "actor_infer.generating_args.top_k", 20),
        ("sampling = { max_completion_tokens = 128 }", "actor_infer.generating_args.max_new_tokens", 128),
        ("group_size = 8", "train_env_manager.group_size", 8),
    ],
)
def test_keys_of_all_sources_are_the_runs(own: str, key: str, expected: object, tmp_path: Path):
    for sources in ([own], [own, own]):
        tree = convert(tmp_path, *sources).tree
        assert get(tree, key) == expected
        manager = {**tree["train_env_manager"], "group_size": 8}
        validate_tree({**tree, "train_env_manager": manager})


def test_keys_that_every_source_sets_replace_the_shared_ones(tmp_path: Path):
    shared = "[orchestrator]\ngroup_size = 4\nalgo.type = 'rae'\ntrain.sampling.temperature = 0.9"
    own = 'group_size = 8\nalgo = { type = "max_rl" }\nsampling = { temperature = 0.6 }'
    imported = convert(tmp_path, own, own, shared=shared)
    assert imported.tree["adv_estimator"] == "maxrl"
    assert "reward_normalization" not in imported.tree
    assert imported.tree["train_env_manager"]["group_size"] == 8
    assert imported.tree["actor_infer"]["generating_args"]["temperature"] == 0.6
    for key in ("orchestrator.group_size", "orchestrator.algo.type", "orchestrator.train.sampling.temperature"):
        assert outcome(imported, key) == ("no effect", "each source has its own")


def test_sources_that_differ_have_the_shared_value(tmp_path: Path):
    own = 'group_size = 8\nalgo = { type = "max_rl" }\nsampling = { temperature = 0.6 }'
    imported = convert(tmp_path, own, "", shared="[orchestrator]\ngroup_size = 4\nbatch_size = 64")
    assert imported.tree["adv_estimator"] == "dr_grpo"
    assert imported.tree["train_env_manager"]["group_size"] == 4
    assert "temperature" not in imported.tree["actor_infer"]["generating_args"]
    for key in ("group_size", "algo.type", "sampling.temperature"):
        assert outcome(imported, f"orchestrator.train.source.0.{key}")[0] == "no counterpart"


def test_a_source_without_a_size_has_the_default_not_anothers(tmp_path: Path):
    imported = convert(tmp_path, "group_size = 8", "")
    assert imported.tree["train_env_manager"]["group_size"] == 1
    assert outcome(imported, "orchestrator.train.source.0.group_size")[0] == "no counterpart"


def test_the_longest_answer_of_all_sources_is_sampled(tmp_path: Path):
    imported = convert(
        tmp_path,
        "sampling = { max_completion_tokens = 1024 }",
        "",
        shared="[orchestrator.train.sampling]\nmax_completion_tokens = 128",
    )
    assert imported.tree["actor_infer"]["generating_args"]["max_new_tokens"] == 1024
    tokens = {tag: env["max_tokens_per_step"] for tag, env in imported.tree["custom_envs"].items()}
    assert tokens == {"math": 1024, "code": 128}


GATE = "curriculum = { gates = { zero = { %s } } }"


@pytest.mark.parametrize("keys", ["reject_min = 0.0, reject_max = 0.0", "", "type = 'advantage_range'"])
def test_a_gates_type_is_its_default(keys: str, tmp_path: Path):
    imported = convert(tmp_path, GATE % keys)
    assert imported.tree["zero_variance"] == "refill"
    assert not [remark for remark in imported.remarks if "tokens with an advantage" in remark]
    assert {each.outcome.status for each in imported.keys if "zero" in each.key} == {"value"}


def test_a_gate_with_bounds_has_no_counterpart(tmp_path: Path):
    """Neither does it replace groups that train nothing, if it rejects others."""
    imported = convert(tmp_path, GATE % "reject_min = -0.1, reject_max = 0.5")
    assert "zero_variance" not in imported.tree
    assert [remark for remark in imported.remarks if "tokens with an advantage" in remark]


def test_gates_reject_groups_that_are_not_filtered(tmp_path: Path):
    imported = convert(tmp_path, GATE % "", shared="[orchestrator.train]\nfilter_zero_advantages = false")
    assert imported.tree["zero_variance"] == "refill"


@pytest.mark.parametrize("loss", ["dppo_mask_low = 0.5", "kl_tau = 0.1", "type = 'ipo'\nipo_threshold = 0.3"])
def test_the_loss_of_distillation_is_fixed(loss: str, tmp_path: Path):
    imported = convert(tmp_path, OPD, shared=f"[trainer.loss]\n{loss}")
    assert imported.tree["pg_variant"] == "dppo_tv"
    assert {"dppo_mask_low", "dppo_kl_tau"}.isdisjoint(imported.tree)
    assert imported.tree["dppo_mask_high"] == 1.0
    assert outcome(imported, f"trainer.loss.{loss.split()[0]}")[0] == "no effect"
    assert any("decreased" in remark for remark in imported.remarks)


EVALUATION = '[[orchestrator.eval.source]]\nenv = { taskset = { id = "aime" } }\n'


@pytest.mark.parametrize(
    ("evaluation", "is_remarked"),
    [
        ("[orchestrator.eval.sampling]\ntemperature = 0.6\n", True),
        ("[orchestrator.eval.sampling]\ntemperature = 0.6\nmax_completion_tokens = 512\n", False),
    ],
)
def test_evaluations_without_a_limit_are_remarked_on(evaluation: str, is_remarked: bool, tmp_path: Path):
    shared = "[orchestrator.train.sampling]\nmax_completion_tokens = 128\n"
    imported = convert(tmp_path, "", shared=f"{shared}{evaluation}{EVALUATION}")
    assert any("max_completion_tokens" in remark for remark in imported.remarks) == is_remarked


def test_rows_are_validated_every_50_steps(tmp_path: Path):
    path = tmp_path / "sft.toml"
    path.write_text("[data]\nname = 'a.jsonl'\n[val.data]\nname = 'b.jsonl'\n")
    assert import_prime_rl([path]).tree["eval_steps"] == 50


def test_gates_admit_groups_without_advantages(tmp_path: Path):
    """Distillation assigns none."""
    imported = convert(tmp_path, f"{OPD}\n{GATE % ''}")
    assert "zero_variance" not in imported.tree
    status, note = outcome(imported, "orchestrator.train.source.0.curriculum.gates.zero")
    assert (status, note.startswith("has no effect")) == ("no effect", True)
