"""A chat template in place of the model's own: one source for policy, engines, env workers and trainer."""

import hashlib
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from offbeat.benchmarks.harness.pretrained import write_llama
from offbeat.deploy.config.checks.run import check_run
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import compose_tree, validate_tree
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.play.session import find_policy
from offbeat.deploy.run_setup import model_folder, prepare_folder, worker_settings
from offbeat.services.chat.append_only import load_chat_format
from offbeat.services.chat.template_override import CHATML, TEMPLATES
from offbeat.trainer.config.aliases import canonicalize
from offbeat.trainer.config.run import LearnerRunConfig
from offbeat.trainer.models.export import copy_model_files
from offbeat.trainer.run import LearnerRun
from tests.paths import QUICKSTART

OWN = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}"
    "{% endif %}"
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, OWN)
    return folder


def configure(folder: Path, tmp_path: Path, template: str, key: str = "chat_template") -> RunConfig:
    tree = compose_tree(QUICKSTART, [f"pretrain={folder}", f"output_dir={tmp_path / 'run'}"])
    if key == "chat_template":
        tree["chat_template"] = template
    else:
        tree["data_args"] = {"template": template}
    return validate_tree(canonicalize(tree)[0])


def prompt_of(folder: Path) -> str:
    chat = load_chat_format(folder)
    return AutoTokenizer.from_pretrained(folder).decode(chat.first_prompt("", "Left"))


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("native", "[user]Left<|im_end|>[assistant]"),
        ("qwen2_5", "[user]Left<|im_end|>[assistant]"),
        ("qwen3", "[user]Left<|im_end|>[assistant]"),
        ("native_nonthinking", "[user]Left<|im_end|>[assistant]<no>"),
        ("longcot_V3", "[user]Left<|im_end|>[assistant]<think>\n"),
        ("chatml", "<|im_start|>user\nLeft<|im_end|>\n<|im_start|>assistant\n"),
        ("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}>", "Left<|im_end|>>"),
        (
            "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}<think></think>",
            "Left<|im_end|><think></think>",
        ),
    ],
)
@pytest.mark.parametrize("key", ["chat_template", "data_args.template"])
def test_a_template_is_that_of_engines_workers_and_learner(
    llama: Path, tmp_path: Path, template: str, prompt: str, key: str
):
    before = digest(llama)
    config = configure(llama, tmp_path, template, key)
    prepare_folder(config)
    prepare_folder(config)  # a run that is resumed
    learner = LearnerRunConfig.model_validate_json(config.model_dump_json(), extra="ignore")
    places = {
        model_folder(config).resolve(),
        worker_settings(config, "redis://").model_folder,
        LearnerRun("run", "now", config.output_dir, learner).model_folder.resolve(),
    }
    [folder] = places
    assert prompt_of(folder) == prompt
    assert load_chat_format(folder).opened_thought == ("<think>\n" if template == "longcot_V3" else "")
    assert (folder == llama.resolve()) == (TEMPLATES.get(template, template) is None)
    assert digest(llama) == before
    saved = tmp_path / "checkpoint"
    saved.mkdir()
    copy_model_files(folder, saved)
    assert prompt_of(saved) == prompt
    assert prompt_of(find_policy(config)) == prompt


def test_a_file_is_found_beside_the_configuration(llama: Path, tmp_path: Path):
    (tmp_path / "mine.jinja").write_text(CHATML)
    path = tmp_path / "run.yaml"
    tree = compose_tree(QUICKSTART, [f"pretrain={llama}"])
    path.write_text(
        json.dumps(tree | {"chat_template": str(tmp_path / "mine.jinja"), "output_dir": str(tmp_path / "run")})
    )
    config = validate_tree(compose_tree(path, []))
    prepare_folder(config)
    assert prompt_of(model_folder(config)).startswith("<|im_start|>user")
    with pytest.raises(ConfigError, match="there is no file /none"):
        configure(llama, tmp_path, "/none.jinja")


def test_an_unknown_name_is_refused_with_those_known(llama: Path, tmp_path: Path):
    with pytest.raises(ConfigError) as refusal:
        configure(llama, tmp_path, "vicuna", "data_args.template")
    for name in TEMPLATES:
        assert name in str(refusal.value)
    assert "unknown template 'vicuna'" in str(refusal.value)


def test_the_tiny_policy_keeps_its_template(tmp_path: Path):
    assert configure(Path("tiny"), tmp_path, "native").chat_template is None
    with pytest.raises(ConfigError, match="leave chat_template out"):
        configure(Path("tiny"), tmp_path, "chatml")


def test_a_template_that_cannot_be_rendered_is_refused_before_a_start(llama: Path, tmp_path: Path):
    for template, part in (
        ("{% for m in messages %}{{ m.content }}", "line 1: Unexpected end of template"),
        ("{{ raise_exception('no') }}", "no"),
        ("{% for m in messages %}{{ m.content }}##{% endfor %}", "end of an answer"),
    ):
        issues = {issue.path: issue.message for issue in check_run(configure(llama, tmp_path, template))}
        assert part in issues["chat_template"], issues
    assert not [i for i in check_run(configure(llama, tmp_path, "chatml")) if i.path == "chat_template"]
