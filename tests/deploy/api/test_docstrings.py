"""The examples in the public API's docstrings run."""

import doctest

import pytest

import offbeat
from offbeat.deploy.api import episode, run, testing
from tests.paths import ROOT


@pytest.mark.parametrize("module", [run, episode, testing], ids=lambda module: module.__name__)
def test_the_examples_of_the_api_run(module, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    names = {name: getattr(offbeat, name) for name in offbeat.__all__}
    results = doctest.testmod(module, extraglobs=names, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0
    assert results.failed == 0


def test_every_public_name_is_documented_and_there_are_at_most_thirty():
    assert len(offbeat.__all__) <= 30
    assert set(offbeat.__all__) == {*offbeat._MODULES, "__version__"}
    undocumented = [name for name in offbeat._MODULES if not getattr(offbeat, name).__doc__]
    assert undocumented == []
    assert set(dir(offbeat)) >= set(offbeat.__all__)


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = offbeat.trian
