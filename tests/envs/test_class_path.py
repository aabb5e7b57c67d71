import sys
from pathlib import Path

import pytest

from offbeat.envs.class_path import RENAMED_PATHS, load_object
from offbeat.envs.task_samplers import Levels


def test_an_object_is_imported_by_its_path():
    assert load_object("offbeat.envs.task_samplers:Levels") is Levels


@pytest.mark.parametrize("path", RENAMED_PATHS)
def test_a_name_of_an_earlier_release_is_found(path: str):
    assert load_object(path) is load_object(RENAMED_PATHS[path])


def test_the_users_own_module_wins_over_an_earlier_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "__init__.py").touch()
    (tmp_path / "envs" / "curricula.py").write_text("Levels = 'mine'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("envs", "envs.curricula"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    assert load_object("envs.curricula:Levels") == "mine"
    for name in ("envs", "envs.curricula"):
        sys.modules.pop(name, None)


def test_a_missing_import_inside_the_module_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "needs_more.py").write_text("import no_such_library_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(ModuleNotFoundError, match="no_such_library_at_all"):
        load_object("needs_more:Thing")


@pytest.mark.parametrize("path", ["module", "module:", ":Class", ""])
def test_a_path_without_module_or_name_is_refused(path: str):
    with pytest.raises(ValueError, match="expected `module:name`"):
        load_object(path)
