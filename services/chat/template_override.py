"""Chat templates in place of a model's own, by ROLL's names, as Jinja text or file.

Invariant: a model's folder never changes; the policy folder links to its files.
"""

import json
import shutil
from pathlib import Path

from offbeat.services.chat.tokenizer import load_tokenizer
from offbeat.services.errors import RolloutError

OWN = "{own}"
"""Place of the model's template."""
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES: dict[str, str | None] = {
    "native": None,
    "qwen2_5": None,
    "qwen3": None,
    "native_nonthinking": "{% set enable_thinking = false %}" + OWN,
    "longcot_V3": OWN + "{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}",
    "chatml": CHATML,
}
"""ROLL's name -> template; None is the model's own."""
SUFFIXES = (".jinja", ".jinja2", ".j2")
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FILES = (TEMPLATE_FILE, "chat_template.json", "additional_chat_templates")
TOKENIZER_CONFIG = "tokenizer_config.json"


def is_file(template: str) -> bool:
    return template.endswith(SUFFIXES) and "{" not in template and "\n" not in template


def find_problem(template: str) -> str:
    """Return why `template` is no name, Jinja text or file; empty if it is one."""
    if template in TEMPLATES or "{{" in template or "{%" in template:
        return ""
    if is_file(template):
        return "" if Path(template).is_file() else f"there is no file {template}"
    return f"unknown template {template!r}: use one of {', '.join(TEMPLATES)}, a file *{SUFFIXES[0]}, or a Jinja text"


def replaces(template: str | None) -> bool:
    return template is not None and TEMPLATES.get(template, template) is not None


def write_policy_folder(source: Path, folder: Path, template: str) -> None:
    """Link the files of model folder `source` in `folder`, with `template`.

    Raises:
        RolloutError: no tokenizer, or a template that extends a model's which has none.
    """
    text = _text_of(source, template)
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.name in TEMPLATE_FILES or path.name.startswith("."):
            continue
        link = folder / path.name
        if link.is_symlink() or link.is_file():
            link.unlink()
        elif link.is_dir():
            shutil.rmtree(link)
        if path.name == TOKENIZER_CONFIG:
            config = json.loads(path.read_text(encoding="utf-8"))
            config.pop("chat_template", None)
            link.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        else:
            link.symlink_to(path.resolve())
    (folder / TEMPLATE_FILE).write_text(text, encoding="utf-8")


def _text_of(source: Path, template: str) -> str:
    if is_file(template):
        return Path(template).read_text(encoding="utf-8")
    text = TEMPLATES.get(template) or template
    if template not in TEMPLATES or OWN not in text:
        return text
    own = load_tokenizer(source).chat_template
    if not isinstance(own, str):
        raise RolloutError(f"{source} has no single chat template, which {template} extends: take another template")
    return text.replace(OWN, own)
