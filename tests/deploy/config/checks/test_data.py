"""Checks of data pipelines before the start."""

import json
from pathlib import Path
from typing import Any

import pytest

from offbeat.benchmarks.harness.pretrained import FORGETTING, write_llama
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import load_run, read_run
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.vocabulary import collect_words
from offbeat.deploy.run_setup import worker_settings
from offbeat.envs.frozen_lake.env import WORDS
from offbeat.envs.frozen_lake.rows import conversations, pairs, write_rows
from offbeat.services.rollout.actor import load_format
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.models.tiny import ROLES, write_tiny_policy
from offbeat.trainer.models.tokenizer_check import check_same_tokens
from tests.paths import CONFIGS
from tests.qwen2 import write_qwen2

TEACHERS_WORDS = ("taught", *WORDS)
LORA = "actor_train.model_args.lora_target"
PLACEMENT = "teacher.lake.strategy_args.placement"


def load(folder: Path, pipeline: str, *overrides: str) -> RunConfig:
    make = pairs if pipeline in ("dpo", "reward_model") else conversations
    for name in ("rows", "val"):
        if not (folder / f"{name}.jsonl").exists():
            write_rows(folder / f"{name}.jsonl", make(20))
    files = [f"data.dataset_name={folder / 'rows.jsonl'}", f"data.val_dataset_name={folder / 'val.jsonl'}"]
    if pipeline == "distill":
        write_tiny_policy(folder / "teacher", TinyPolicyConfig(), TEACHERS_WORDS)
        files.append(f"teacher.lake.model_args.model_name_or_path={folder / 'teacher'}")
    return load_run(CONFIGS / f"{pipeline}.yaml", [*files, f"output_dir={folder / 'run'}", *overrides])


def refused(folder: Path, pipeline: str, *overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load(folder, pipeline, *overrides)
    return {issue.path: issue.message for issue in caught.value.issues}


def test_epochs_imply_the_steps(tmp_path: Path):
    sft = load(tmp_path, "sft", "data.num_train_epochs=1.5")
    assert (sft.max_steps, sft.groups_per_step, sft.train_env_manager.num_env_groups) == (4, 8, 16)
    assert load(tmp_path, "sft", "data.num_train_epochs=null", "max_steps=7").max_steps == 7
    issues = refused(tmp_path, "sft", "max_steps=7")
    assert "7 disagrees with data.num_train_epochs, which implies 10: take that, or leave" in issues["max_steps"]


def test_a_fraction_of_epochs_is_taken_as_it_is_written(tmp_path: Path):
    """As floats, 2.2 times 25 are more than 55 rows."""
    write_rows(tmp_path / "rows.jsonl", conversations(25))
    assert load(tmp_path, "sft", "data.num_train_epochs=2.2", "rollout_batch_size=5", "max_steps=11").max_steps == 11


def test_a_group_is_a_row_in_the_order_of_the_seed(tmp_path: Path):
    for pipeline, size in (("sft", 1), ("dpo", 2), ("distill", 1), ("reward_model", 2)):
        (tmp_path / pipeline).mkdir()
        config = load(tmp_path / pipeline, pipeline)
        assert (config.train_env_manager.group_size, config.buffer.order) == (size, "admission")
        assert not config.uses_engine
    assert (
        "one row, of 1 trajectories" in refused(tmp_path, "sft", "train_env_manager.group_size=4")["train_env_manager"]
    )
    assert "the seed draws" in refused(tmp_path, "sft", "buffer.order=completion")["buffer"]


def test_a_saved_configuration_is_read_again(tmp_path: Path):
    from offbeat.deploy.config.loader import dump_yaml

    config = load(tmp_path, "sft")
    (tmp_path / "saved.yaml").write_text(dump_yaml(config))
    assert read_run(tmp_path / "saved.yaml") == config


@pytest.mark.parametrize(
    ("pipeline", "override", "path", "problem"),
    [
        ("sft", "use_kl_loss=true", "use_kl_loss", "no effect with pipeline: sft"),
        ("sft", "adv_estimator=rloo", "adv_estimator", "no effect with pipeline: sft"),
        ("sft", "warm_start={demos: 'a:b', tag: A}", "warm_start", "no effect with pipeline: sft"),
        ("sft", "dpo.beta=0.2", "dpo", "no effect with pipeline=sft"),
        (
            "dpo",
            "reference.strategy_args.placement=service",
            "reference.strategy_args.placement",
            "beside the policy",
        ),
        ("sft", "data=null", "data.dataset_name", "name a file"),
        ("dpo", "dpo.label_smoothing=0.5", "dpo.label_smoothing", "less than 0.5"),
        ("dpo", "dpo.simpo_gamma=1.0", "dpo.simpo_gamma", "no effect with loss_type=sigmoid"),
        ("dpo", "data.chosen_key=better", "data.dataset_name", "no column 'better'"),
        ("sft", "data.dataset_name=/nowhere.jsonl", "data.dataset_name", "no such file"),
        ("dpo", "dpo.loss_type=kto", "data.dataset_name", "needs one response and a label per row"),
        ("dpo", "dpo.desirable_weight=2", "dpo.desirable_weight", "take loss_type=kto"),
        (
            "dpo",
            "reference.strategy_args.placement=files",
            "reference.strategy_args.placement",
            "precompute_ref_log_probs",
        ),
        (
            "dpo",
            "dpo={loss_type: simpo, precompute_ref_log_probs: true}",
            "dpo.precompute_ref_log_probs",
            "simpo has no reference",
        ),
        ("sft", "distill.logits_topk=3", "distill", "no effect with pipeline=sft"),
        ("sft", "teacher={a: {model_args: {model_name_or_path: x}}}", "teacher", "no effect with pipeline: sft"),
        ("distill", "~teacher", "teacher", "distillation needs one"),
        (
            "distill",
            "teacher.lake.model_args.model_name_or_path=/nowhere",
            "teacher.lake.model_args.model_name_or_path",
            "no such folder",
        ),
        ("distill", f"{PLACEMENT}=service", PLACEMENT, "a service scores training rows alone"),
        ("distill", "distill.lmbda=1.5", "distill.lmbda", "less than or equal to 1"),
        ("distill", "distill.distill_loss_weight=0", "distill.distill_loss_weight", "greater than 0"),
        ("distill", "distill.js_beta=0.3", "distill.js_beta", "take kd_objective=js_divergence"),
        ("distill", "distill.add_tail=false", "distill.add_tail", "set logits_topk"),
        ("sft", "pipeline=agentic", "data", "no effect with pipeline=agentic"),
        ("sft", "center_rewards_coefficient=0.1", "center_rewards_coefficient", "no effect with pipeline=sft"),
        ("reward_model", "dpo.beta=0.2", "dpo", "no effect with pipeline=reward_model"),
        ("reward_model", f"{LORA}=all-linear", LORA, "a reward model is trained whole"),
        ("reward_model", "data.train_on=last", "data.train_on", "scores the last token"),
        ("reward_model", "data.too_long=truncate", "data.too_long", "take drop"),
        ("reward_model", "tiny.vision={}", "pretrain", "reads text"),
        ("sft", "data.chosen_key=better", "data.chosen_key", "no effect with pipeline: sft"),
        ("dpo", "data.response_key=answer", "data.response_key", "no effect with pipeline: dpo"),
        ("dpo", "data.margin_key=gap", "data.margin_key", "no effect with pipeline: dpo"),
        ("reward_model", "data.label_key=good", "data.label_key", "no effect with pipeline: reward_model"),
        (
            "reward_model",
            "data.margin_key=gap",
            "data.margin_key",
            "has the column 'gap'; there is prompt, chosen, rej",
        ),
        ("dpo", "data.query_key=input", "data.query_key", "no effect with pipeline: dpo"),
        ("sft", "data.query_key=input", "data.query_key", "has the column 'input'; there is messages"),
        ("sft", "data.tools_key=functions", "data.tools_key", "has the column 'functions'; there is messages"),
    ],
)
def test_what_can_not_be_trained_is_refused(pipeline: str, override: str, path: str, problem: str, tmp_path: Path):
    assert problem in refused(tmp_path, pipeline, override)[path]


@pytest.mark.parametrize(
    ("override", "path", "problem"),
    [
        ("entropy_loss_coef=0.1", "entropy_loss_coef", "no effect with pipeline: online_dpo"),
        ("adv_estimator=rloo", "adv_estimator", "no effect with pipeline: online_dpo"),
        ("dpo.loss_type=kto", "dpo.loss_type", "kto is for rows"),
        ("dpo.precompute_ref_log_probs=true", "dpo.precompute_ref_log_probs", "not known beforehand"),
        ("reference.strategy_args.placement=service", "reference.strategy_args.placement", "in the learner"),
    ],
)
def test_what_online_pairs_do_not_use_is_refused(override: str, path: str, problem: str):
    with pytest.raises(ConfigError) as caught:
        load_run(CONFIGS / "recipes" / "online_dpo.yaml", [override])
    assert problem in {issue.path: issue.message for issue in caught.value.issues}[path]


def test_online_pairs_use_the_filters_of_groups():
    filters = "+query_filter_config.FrozenLake={type: mean_filter, filter_args: {threshold_up: 0.9}}"
    config = load_run(CONFIGS / "recipes" / "online_dpo.yaml", [filters, "difficulty_mask=true"])
    assert [*config.query_filter_config] == ["FrozenLake"]


def test_scores_in_files_are_of_rows(tmp_path: Path):
    teacher = f"teacher.a.model_args.model_name_or_path={tmp_path}"
    with pytest.raises(ConfigError) as caught:
        load_run(CONFIGS / "quickstart.yaml", ["use_opd=true", teacher, "teacher.a.strategy_args.placement=files"])
    assert "hold the scores of a dataset's rows" in str(caught.value.issues[0])


def test_only_sampled_rows_need_an_engine(tmp_path: Path):
    assert not load(tmp_path, "distill").uses_engine
    sampled = load(tmp_path, "distill", "distill.lmbda=0.5")
    assert (sampled.uses_engine, sampled.plays, sampled.sampled_share) == (True, False, 0.5)
    issues = refused(tmp_path, "distill", "distill.lmbda=0.5", f"{PLACEMENT}=files")
    assert "no distributions of what the policy samples" in issues[PLACEMENT]


VLLM = "strategy_args={strategy_name: vllm, placement: service}"
BY_VLLM = (f"teacher.lake.{VLLM}", "data.val_dataset_name=null", "eval_steps=0", "distill.logits_topk=5")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("distill.logits_topk=0", "set distill.logits_topk above 0"),
        ("distill.teacher_temperature=2", "at distill.teacher_temperature 1"),
        ("actor_train.model_args.shared_prefix=true", "leave shared_prefix out"),
    ],
)
def test_a_teacher_by_vllm_gives_probable_tokens_of_text(override: str, problem: str, tmp_path: Path):
    assert load(tmp_path, "distill", *BY_VLLM).teacher["lake"].strategy_args.strategy_name == "vllm"
    assert problem in refused(tmp_path, "distill", *BY_VLLM, override)["teacher.lake.strategy_args.strategy_name"]
    path = "teacher.lake.strategy_args"
    assert "take service" in refused(tmp_path, "distill", *BY_VLLM, f"{path}.placement=learner")[path]


def test_only_a_teachers_distributions_are_vllms():
    with pytest.raises(ConfigError, match=r"vllm is for teachers of pipeline: distill"):
        load_run(
            CONFIGS / "quickstart.yaml",
            ["use_kl_loss=true", f"reference.{VLLM}"],
        )


def test_a_tiny_policy_takes_its_teachers_token_ids(tmp_path: Path):
    words = collect_words(load(tmp_path, "distill"))
    assert words == (*ROLES, *TEACHERS_WORDS)


def test_words_that_a_tiny_teacher_does_not_know_are_none_of_its_students(tmp_path: Path):
    """Rows of another text than the teacher's: both read the same tokens, as they must."""
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "two and 59", "response": "sixty-one"}] * 20)
    write_rows(tmp_path / "val.jsonl", [{"prompt": "two", "response": "and"}] * 4)
    words = collect_words(load(tmp_path, "distill"))
    assert words == (*ROLES, *TEACHERS_WORDS)
    write_tiny_policy(tmp_path / "student", TinyPolicyConfig(num_hidden_layers=1), words)
    check_same_tokens(tmp_path / "student", tmp_path / "teacher", "teacher.lake")


def test_a_teacher_with_other_tokens_than_the_policy_is_refused_before_the_start(tmp_path: Path):
    path = "teacher.lake.model_args.model_name_or_path"
    write_tiny_policy(tmp_path / "student", TinyPolicyConfig(), (*TEACHERS_WORDS, "more"))
    issues = refused(tmp_path, "distill", f"pretrain={tmp_path / 'student'}", "tiny.num_hidden_layers=4")
    assert "has another tokenizer than the policy: 'more' is token None" in issues[path]
    write_qwen2(tmp_path / "qwen", ["two and two"])
    assert (
        "set pretrain to a model of the teacher's family"
        in refused(tmp_path, "distill", f"{path}={tmp_path / 'qwen'}")[path]
    )


def test_a_tiny_teacher_needs_a_tiny_policy(tmp_path: Path):
    path = "teacher.lake.model_args.model_name_or_path"
    assert load(tmp_path, "distill", f"{path}=tiny").teacher["lake"].model_args.own_folder is None
    issues = refused(
        tmp_path, "distill", f"{path}=tiny", f"pretrain={tmp_path / 'teacher'}", "tiny.num_hidden_layers=4"
    )
    assert issues[path].startswith("tiny: for pretrain: tiny alone")
    issues = refused(tmp_path, "distill", f"{path}=tiny", *BY_VLLM)
    assert "a tiny teacher has none" in issues["teacher.lake.strategy_args.strategy_name"]


def test_a_reference_needs_a_loss_that_has_one(tmp_path: Path):
    assert load(tmp_path, "dpo").needs_reference
    assert not load(tmp_path, "dpo", "dpo.loss_type=simpo").needs_reference
    issues = refused(tmp_path, "dpo", "dpo.loss_type=simpo", "reference.infer_batch_size=4")
    assert "no reference" in issues["reference"]
    given = ("dpo.loss_type=simpo", "dpo.precompute_ref_log_probs=true")
    assert list(refused(tmp_path, "dpo", *given)) == ["dpo.precompute_ref_log_probs"]  # not what it would have set
    issues = refused(tmp_path, "dpo", "dpo.reference_free=true", "reference.model_args.dtype=bfloat16")
    assert "reference is not used with reference_free (dpo)" in issues["reference.model_args.dtype"]


@pytest.mark.parametrize(
    ("row", "overrides", "path", "problem"),
    [
        (
            {"messages": [{"role": "user"}]},
            [],
            "data.dataset_name",
            "rows.jsonl:2: messages[0]: a message needs content",
        ),
        (None, ["sequence_length=8"], "sequence_length", "rows.jsonl fits in 8 tokens"),
    ],
)
def test_first_rows_are_read_before_the_start(row: Any, overrides: list[str], path: str, problem: str, tmp_path: Path):
    write_llama(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", conversations(4))
    if row is not None:
        lines = (tmp_path / "rows.jsonl").read_text().splitlines()
        (tmp_path / "rows.jsonl").write_text("\n".join([lines[0], json.dumps(row), *lines[2:]]) + "\n")
    issues = refused(tmp_path, "sft", f"pretrain={tmp_path / 'model'}", *overrides)
    assert problem in issues[path]


ASKED = {"role": "user", "content": "Where is G ?"}
ANSWERED = {"role": "assistant", "content": "Down"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "rows.jsonl has no rows"),
        ("hello\n", "rows.jsonl:1: not JSON"),
        ("[1]\n", "rows.jsonl:1: expected an object, got list"),
        (
            '{"question": "a"}\n',
            "neither the column 'messages' (messages_key) nor 'prompt' (prompt_key); there is question",
        ),
        ('{"messages": "a"}\n', "rows.jsonl:1: messages: expected a list of messages, got str"),
        (
            '{"prompt": "a", "response": null}\n',
            "rows.jsonl:1: response: expected a text or a list of messages, got nothing",
        ),
        (json.dumps({"messages": [ASKED]}), "rows.jsonl:1: there is no assistant turn to learn"),
        ('{"prompt": "a", "response": "cut \\ud83d"}\n', "surrogates not allowed"),
    ],
)
def test_a_wrong_file_is_reported_with_its_line(text: str, problem: str, tmp_path: Path):
    """With the tiny policy, whose vocabulary is the file's."""
    (tmp_path / "rows.jsonl").write_text(text)
    for key in ("dataset_name", "val_dataset_name"):
        other = "val_dataset_name" if key == "dataset_name" else "dataset_name"
        write_rows(tmp_path / "good.jsonl", conversations(4))
        files = [f"data.{key}={tmp_path / 'rows.jsonl'}", f"data.{other}={tmp_path / 'good.jsonl'}"]
        issues = refused(tmp_path, "sft", *files)
        assert list(issues) == [f"data.{key}"]
        assert problem in issues[f"data.{key}"]
        assert "bad_row" not in issues[f"data.{key}"]


def test_the_tiny_policys_rows_must_fit(tmp_path: Path):
    assert "fits in 8 tokens" in refused(tmp_path, "sft", "sequence_length=8")["sequence_length"]


def test_a_table_names_the_row(tmp_path: Path):
    (tmp_path / "rows.csv").write_text("prompt,response\nhi,yo\nho,\n")
    issues = refused(tmp_path, "sft", f"data.dataset_name={tmp_path / 'rows.csv'}")
    assert "rows.csv row 2: response: expected" in issues["data.dataset_name"]


def test_each_of_the_first_rows_must_fit_the_template(tmp_path: Path):
    write_llama(tmp_path / "model", FORGETTING)
    write_rows(tmp_path / "rows.jsonl", iter([{"messages": [ASKED, ANSWERED]}, {"messages": [ASKED, ANSWERED] * 2}]))
    model = f"pretrain={tmp_path / 'model'}"
    issues = refused(tmp_path, "sft", model)
    assert "rows.jsonl:2: the chat template changes earlier turns" in issues["data.dataset_name"]
    assert load(tmp_path, "sft", model, "data.train_on=last").data is not None


@pytest.mark.parametrize(
    ("template", "problem"), [(None, "without a chat template"), ("{% for m in %}", "line 1: Expected")]
)
def test_a_model_without_a_usable_template_is_the_models_problem(template: str | None, problem: str, tmp_path: Path):
    write_llama(tmp_path / "model")
    path = tmp_path / "model" / "chat_template.jinja"
    path.unlink() if template is None else path.write_text(template)
    assert problem in refused(tmp_path, "sft", f"pretrain={tmp_path / 'model'}")["pretrain"]


def test_rows_are_checked_by_the_configured_template(tmp_path: Path):
    write_llama(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    model = f"pretrain={tmp_path / 'model'}"
    assert load(tmp_path, "sft", model, "chat_template=chatml").chat_template == "chatml"
    (tmp_path / "other.jinja").write_text("{{ raise_exception('no rows') if messages[0].content != 'offbeatkey' }}"
                                          "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")  # fmt: skip
    issues = refused(tmp_path, "sft", model, f"chat_template={tmp_path / 'other.jinja'}")
    assert "no rows" in issues["data.dataset_name"]
    (tmp_path / "other.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    issues = refused(tmp_path, "sft", model, f"chat_template={tmp_path / 'other.jinja'}")
    assert "the end of an answer can't be determined" in issues["chat_template"]


REPEATING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% if m['role'] == 'user' %} {{ m['content'] }}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Template that rows can be rendered by, and no policy can play by."""


def test_a_template_that_can_not_be_played_by_is_refused_only_where_the_policy_samples(tmp_path: Path):
    write_llama(tmp_path / "model", REPEATING)
    model = f"pretrain={tmp_path / 'model'}"
    rows = load(tmp_path, "sft", model)
    assert load_format(worker_settings(rows, "redis://localhost")) is None
    teacher = f"teacher.lake.model_args.model_name_or_path={tmp_path / 'model'}"
    assert not load(tmp_path, "distill", model, teacher).uses_engine
    issues = refused(tmp_path, "distill", model, teacher, "distill.lmbda=0.5")
    assert "shows a message 2 times, not once" in issues["pretrain"]


def test_engines_that_do_not_exist_have_no_settings(tmp_path: Path):
    assert "samples nothing" in refused(tmp_path, "sft", "actor_infer.num_replicas=2")["actor_infer.num_replicas"]
    stops = "actor_infer.generating_args.stop_strings"
    assert "samples nothing" in refused(tmp_path, "sft", f"{stops}=['</a>']")[stops]


@pytest.mark.parametrize("key", ["actor_infer", "train_env_manager"])
@pytest.mark.parametrize("envs", [(), ("custom_envs={lake: {env_type: frozen_lake}}",)])
def test_rows_that_are_not_sampled_have_no_temperature(key: str, envs: tuple[str, ...], tmp_path: Path):
    """It would scale the logits of their loss."""
    path = f"{key}.generating_args.temperature"
    assert "samples no rows" in refused(tmp_path, "sft", f"{path}=0.5", *envs)[path]
