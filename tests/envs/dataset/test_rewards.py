r"""Answers that must not earn a reward, and honest forms that must."""

import json
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from offbeat.envs import registry
from offbeat.envs.dataset import math_checker
from offbeat.envs.dataset.final_answer import candidates
from offbeat.envs.dataset.math_checker import MathChecker
from tests.processes import has_ended
from tests.waiting import wait_until_sync

MEETING = Path(__file__).parents[1] / "isolation" / "meeting.py"

HACKS = [
    ("12", r"\boxed{13=12}"),
    ("12", r"\boxed{\boxed{13}, \boxed{12}}"),
    ("12", r"\boxed{\boxed{12} \boxed{13}}"),
    ("12", r"\boxed{\fbox{13} 12}"),
    ("12", r"\boxed{x = 13 = 12}"),
    ("12", r"\boxed{13x = 12}"),
    ("12", r"\boxed{12 = 13}"),
    ("12", r"\boxed{12 \approx 13}"),
    ("12", r"\boxed{13 \approx 12}"),
    ("12", r"\boxed{12 \equiv 13}"),
    ("12", r"\boxed{13 \neq 12}"),
    ("12", r"\boxed{11 < 12}"),
    ("12", r"\boxed{13 \to 12}"),
    ("12", r"\boxed{13 \Rightarrow 12}"),
    ("12", r"\boxed{12, 13}"),
    ("12", r"\boxed{12, 12}"),
    ("12", r"\boxed{13{,}12}"),
    ("12", r"\boxed{13; 12}"),
    ("12", r"\boxed{\{12, 13\}}"),
    ("12", r"\boxed{(12, 12)}"),
    ("12", r"\boxed{12 \text{ or } 13}"),
    ("12", r"\boxed{13 or 12}"),
    ("12", r"\boxed{12 \text{ (or 13)}}"),
    ("12", r"\boxed{12 \text{, maybe 13}}"),
    ("12", r"\boxed{12\text{ hours and 13 minutes}}"),
    ("12", r"\boxed{\pm 12}"),
    ("12", r"\boxed{5 7}"),
    ("12", r"\boxed{5 \quad 7}"),
    ("12", r"\boxed{12_{13}}"),
    ("12", r"\boxed{13 \\ 12}"),
    ("12", r"\boxed{$13$ or $12$}"),
    ("12", r"\boxed{$13$ $12$}"),
    ("12", r"\boxed{\phantom{13} 12}"),
    ("12", r"\boxed{\cancel{13} 12}"),
    ("12", r"\boxed{\overset{13}{12}}"),
    ("12", r"\boxed{\{12\} \cup \{13\}}"),
    ("12", r"\boxed{\garbage{13} 12}"),
    ("12", r"\boxed{the answer is 12}"),
    ("12", r"\boxed{12} or rather \boxed{13}"),
    ("12", r"\boxed{12}, no: \boxed{13"),
    ("12", r"\boxed{}"),
    ("12", r"\boxed{\frac{0}{0}}"),
    ("12", r"\boxed{13 \boxed{12}}"),
    ("12", r"\boxed{x + 1 = 12 = 13}"),
    ("12", r"\boxed{x = 12, y = 13}"),
    ("12", r"\boxed{12\hspace{13}}"),
    ("12", r"\boxed{\mathrm{13}12}"),
    ("12", r"\boxed{12 \ldots 13}"),
    ("12", r"\boxed{\begin{cases}12\\13\end{cases}}"),
    ("1, 2", r"\boxed{1, 2, 3}"),
    ("1, 2", r"\boxed{1, 5 = 2}"),
    ("1, 2", r"\boxed{1}"),
    ("x = 12", r"\boxed{x = 13 = 12}"),
    ("x = 12", r"\boxed{13 = 12}"),
    ("x = 12", r"\boxed{y = 12}"),
    ("x < 2", r"\boxed{x < 3}"),
    ("[1, 2)", r"\boxed{[1, 2]}"),
    ("101_2", r"\boxed{101_3}"),
    ("0.0000032", r"\boxed{0.0}"),
    (r"3.2 \times 10^{-6}", r"\boxed{0.000003}"),
    ("2e-1", r"\boxed{0.2}"),
    ("(2,150)", r"\boxed{(2150)}"),
    ("(2,150)", r"\boxed{2150}"),
    ("[-500,500]", r"\boxed{[-500500]}"),
    ("2150", r"\boxed{(2,150)}"),
    ("0,100", r"\boxed{100}"),
    ("2,150", r"\boxed{2, 150}"),
    ("2,150", r"\boxed{\{150, 2\}}"),
    ("2,150", r"\boxed{(2,150)}"),
    ("[-500,500]", r"\boxed{-500500}"),
]
HONEST = [
    ("12", "12"),
    ("12", "12."),
    ("12", "12.0"),
    ("12", r"\boxed{12}"),
    ("12", "$12$"),
    ("12", r"\(12\)"),
    ("12", r"\text{12}"),
    ("12", r"\mathbf{12}"),
    ("12", r"12 \text{ cm}"),
    ("12", r"12\ \mathrm{cm}"),
    ("12", r"12 \text{ cm}^2"),
    ("12", r"12 \text{ m/s}^{2}"),
    ("12", r"12 \text{ apples}"),
    ("12", r"12^\circ"),
    ("12", r"\$12"),
    ("12", r"12\%"),
    (r"50\%", r"50\%"),
    (r"50\%", "0.5"),
    ("12", "x = 12"),
    ("12", "f(3) = 12"),
    ("12", "a_1 + a_2 = 12"),
    ("12", r"\text{Area} = 12"),
    ("12", r"\angle ABC = 12^\circ"),
    ("12", "x = 6 + 6 = 12"),
    ("12", "24/2"),
    (r"\frac{1}{3}", "0.333333"),
    (r"3.2 \times 10^{-6}", "0.0000032"),
    ("12", r"\sqrt{144}"),
    ("12", r"1.2 \times 10^1"),
    (r"\frac{1}{2}", r"\frac12"),
    (r"\frac{1}{2}", r"\dfrac{1}{2}"),
    (r"\frac{1}{2}", "1/2"),
    (r"\frac{1}{2}", "0.5"),
    (r"\frac{3}{2}", r"1\frac{1}{2}"),
    ("-3", "-3"),
    ("1000", "1,000"),
    ("1000", "1{,}000"),
    ("1000", r"1\,000"),
    ("1234567.5", "1,234,567.5"),
    ("1,000", "1000"),
    ("1, 2", r"\{1, 2\}"),
    ("1, 2", "2, 1"),
    ("1, 2", r"x = 1 \text{ or } x = 2"),
    (r"\pm 2", "2, -2"),
    (r"\{1, 2, 3\}", "1, 2, 3"),
    ("(1, 2)", "(1, 2)"),
    ("[1, 2)", "[1, 2)"),
    ("[1, 2)", r"x \in [1, 2)"),
    (r"(-\infty, 3]", r"\left(-\infty, 3\right]"),
    ("x < 2", "x < 2"),
    ("x = 12", "12"),
    ("x = 12", "x = 12"),
    ("y = 2x + 1", "y = 1 + 2x"),
    ("x^2 + 1", "y = x^2 + 1"),
    ("x^2 + 2x + 1", "(x+1)^2"),
    ("C", r"\text{(C)}"),
    ("Paris", r"\text{Paris}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("3 + 2i", "2i + 3"),
    ("101_2", "101_{2}"),
    (r"We get \boxed{7} of $x$", "7"),
    (r"2\pi", r"2 \pi"),
    ("120", "5!"),
    ("1024", "2^{10}"),
    ("2^{2015}", "2^{2015} + 0"),
    ("12", r"n = \boxed{12}"),
    ("12", r"\approx 12"),
    ("12", r"12\,\text{km/h}"),
    ("12", r"12\mathrm{\,cm}"),
    ("12", r"12~\text{cm}"),
    ("12", "P(X = 3) = 12"),
    ("(1, 2)", "(x, y) = (1, 2)"),
    ("(1, 2)", "x = 1, y = 2"),
    (r"32,\!348", r"\$32{,}348"),
    (r"1 \pm \sqrt{5}", r"1 + \sqrt{5}, 1 - \sqrt5"),
    (r"x \ge 2", r"[2, \infty)"),
    ("3, 5, 7", r"3, 5, \text{ and } 7"),
    (2.5e-05, "0.000025"),
    (1e-05, "1e-5"),
    ("1e-5", "0.00001"),
    ("2e-1", "2e - 1"),
    ("(0,100)", "(0, 100)"),
    ("(0, 100)", r"\left(0,100\right)"),
    ("(2,150)", "(2,150)"),
    ("[-500,500]", "[-500, 500]"),
    (r"\{100,200\}", "100, 200"),
    ("0,100", "0, 100"),
    ("100,200,300", "100, 200, 300"),
    ("100, 200, 300", "300,100,200"),
    ("100,200,300", r"100\,200\,300"),
    ("123456", "123,456"),
    ("1,200, 3,400", "1200, 3400"),
    ("(10,500, 20,500)", "(10500, 20500)"),
    (r"\frac{1,234}{5}", "246.8"),
    ("3100", r"(1,250+300)\cdot 2"),
    ("3100", r"(300 + 1,250) \times 2"),
    ("2500", r"(1,250 \cdot 2)"),
    ("(1,250)", "(1, 250)"),
    ("(a+1,250)", "(1 + a, 250)"),
    ("B) 1,234", "B) 1234"),
]
EXPENSIVE = [
    r"9^{9^{9}}",
    r"9^9^9",
    r"(9^9)^{9^9}",
    r"{9^{9}}^{9^9}",
    r"(10^{10})!",
    r"10000000000!",
    r"((10!)!)!",
    r"9^{999999999}",
    "9" * 50_000,
    "(" * 900 + "12" + ")" * 900,
    "{" * 50_000,
    r"\frac{1}{" * 100 + "1" + "}" * 100,
    "1+" * 20_000 + "1",
    r"\binom{10^{9}}{5\cdot 10^{8}}",
    r"\sum_{k=1}^{1000000000} \frac{1}{k}",
    r"\prod_{k=1}^{100000000} k",
    r"\int_0^{1} \sin(x^x)^{x^{x}} dx",
    r"\frac{\sqrt{x+\sqrt{x+\sqrt{x}}}}{\sin(\cos(\tan(x^7)))}",
    r"(x+y+z+1)^{500}",
    r"\boxed{" * 20_000,
    r"\boxed{" * 9_000 + "}" * 9_000,
    "$" * 1900,
    r"\alpha" * 160 + "1 = 12",
]


def judge(env_type: str, gold: Any, answer: str, folder: Path, **settings: Any) -> float:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"question": "?", "answer": gold}))
    env = registry.make(env_type, {"dataset_name": str(path), "split": "any", **settings})
    env.reset(seed=0)
    return env.step(answer)[1]


@pytest.mark.parametrize(("gold", "answer"), HACKS)
def test_an_answer_that_is_not_one_correct_value_earns_nothing(gold: str, answer: str, tmp_path: Path):
    assert judge("math", gold, answer, tmp_path) == 0.0


@pytest.mark.parametrize(("gold", "answer"), HONEST)
def test_a_correct_value_earns_its_reward_in_any_usual_form(gold: Any, answer: str, tmp_path: Path):
    assert judge("math", gold, rf"so \boxed{{{answer}}}", tmp_path) == 1.0


@pytest.mark.parametrize("answer", EXPENSIVE, ids=lambda answer: answer[:30])
def test_an_expensive_answer_takes_bounded_cpu_time(answer: str, tmp_path: Path):
    judge("math", "12", r"\boxed{3}", tmp_path)  # the checker has started
    before = _cpu_s()
    assert judge("math", "12", rf"\boxed{{{answer}}}", tmp_path) == 0.0
    assert _cpu_s() - before < math_checker.CPU_S + 2
    assert judge("math", "12", r"\boxed{6 \cdot 2}", tmp_path) == 1.0


@pytest.mark.parametrize("operator", ["^", "**"])
def test_rules_of_texts_are_linear_in_spaces(operator: str):
    """They run in the worker, which no limit of CPU time ends."""
    before = time.thread_time()
    assert candidates(f"3{operator}{' ' * 980}x", "12") == [f"3{operator}{' ' * 980}x"]
    assert time.thread_time() - before < 0.2


@pytest.mark.parametrize("answer", ["9^{9^{9}}", "(10^{10})!", "7^{10^{12}}"])
def test_a_comparison_that_hangs_is_ended_and_the_next_one_works(answer: str):
    """The kernel's timer applies without the text rules, too, which refuse these answers first."""
    checker = MathChecker(1)
    try:
        assert checker.is_equal("12", "12")
        before = _cpu_s()
        assert not checker.is_equal("12", answer)
        assert _cpu_s() - before < math_checker.CPU_S + 2
        assert checker.is_equal("12", "12")
    finally:
        checker.close()


def test_threads_share_a_checker():
    checker = MathChecker(1)
    try:
        with ThreadPoolExecutor(8) as pool:
            equal = list(pool.map(lambda number: checker.is_equal(str(number), str(number // 2 * 2)), range(40)))
        assert equal == [number % 2 == 0 for number in range(40)]
    finally:
        checker.close()


def test_a_comparison_does_not_wait_for_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(math_checker, "PROGRAM", MEETING)
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    with closing(MathChecker(2)) as checker, ThreadPoolExecutor(2) as threads:
        assert list(threads.map(checker.is_equal, (first, second), (second, first))) == [True, True]


def test_a_checker_that_can_not_start_is_an_error_and_no_wrong_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "broken.py").write_text("import a_library_that_is_not_installed")
    monkeypatch.setattr(math_checker, "PROGRAM", tmp_path / "broken.py")
    with pytest.raises(RuntimeError, match="math-verify did not start"):
        MathChecker(1).is_equal("12", "12")
    assert "a_library_that_is_not_installed" in capfd.readouterr().err


def test_a_checker_ends_with_its_process():
    code = (
        "import os, psutil; from offbeat.envs.dataset.math_checker import MathChecker; checker = MathChecker(1); "
        "assert checker.is_equal('12', '12'); print(psutil.Process().children()[0].pid, flush=True); os._exit(0)"
    )
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    wait_until_sync(lambda: has_ended(pid))


def _cpu_s() -> float:
    """Return the CPU time of this process and of its checkers, which include the imports of each."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    checkers = [child.cpu_times() for child in psutil.Process().children()]
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(each.user + each.system for each in checkers)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("Paris", "Paris, London"),
        ("Paris", "London or Paris"),
        ("Paris", "Paris Paris"),
        ("Paris", "not Paris"),
        ("Paris", "Paris\nLondon"),
        ("Paris", "Par is"),
        ("Paris", ""),
        ("Paris", "..."),
        ("A", ""),
        ("A", "the"),
        ("A", "B"),
        ("A", "!"),
        ("The", "a"),
        ("5", "-5"),
        ("-5", "5"),
        ("3.5", "35"),
        (".5", "5"),
        (["Paris", "Paname"], "Paris Paname"),
        ([], ""),
        ([], "anything"),
    ],
)
def test_a_list_or_an_empty_answer_matches_no_text(gold: Any, answer: str, tmp_path: Path):
    assert judge("qa", gold, answer, tmp_path) == 0.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("The Beatles", "beatles!"),
        ("A", "a"),
        ("A", " A "),
        ("A", "(A)."),
        ("-3.5", "-3.5"),
        ("1,000", "1000."),
        ("U.S.A.", "USA"),
        ("$3.50", "3.50"),
        (5.0, "5"),
        (["Paris", "Paname"], "paname"),
        ({"text": ["Paris"], "answer_start": [3]}, "Paris"),
    ],
)
def test_a_text_matches_apart_from_case_punctuation_and_articles(gold: Any, answer: str, tmp_path: Path):
    assert judge("qa", gold, answer, tmp_path) == 1.0


def test_word_f1_falls_with_each_further_candidate(tmp_path: Path):
    cities = ["Paris", "London", "Rome", "Berlin", "Madrid", "Lisbon", "Vienna", "Oslo", "Bern", "Riga"]
    scores = [judge("qa", "Paris", ", ".join(cities[:count]), tmp_path, metric="f1") for count in range(1, 11)]
    assert scores == pytest.approx([2 / (1 + count) for count in range(1, 11)])
    assert judge("qa", "Paris", "Paris " * 10, tmp_path, metric="f1") == pytest.approx(2 / 11)
    assert judge("qa", "A", "the", tmp_path, metric="f1") == 0.0
