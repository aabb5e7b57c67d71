"""Process that renders each evaluation, `python -m offbeat.trainer.rendering.evaluations`, beside the learner.

Invariants: training never waits for it; each evaluation is rendered once, also across resumes, unless its file is written
anew; one that can't be rendered keeps no other from it.
"""

import hashlib
import logging
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from offbeat.services.process import DIE_WITH_PARENT
from offbeat.services.rollout.config import CustomEnv
from offbeat.trainer.rendering.episodes import PlayedEpisode, play_again, write_gif, write_html
from offbeat.trainer.rendering.recorded_episodes import FOLDER, read_episodes
from offbeat.trainer.run import LearnerRun

logger = logging.getLogger(__name__)

NICENESS = 19
POLL_S = 1.0
MAX_WAIT_S = 600.0
"""Before the next try of an evaluation that can't be rendered; the first wait is `POLL_S`, each the double of the last."""
END_S = 10.0
"""For evaluations after the learner's end."""
LOG = "rendering.log"
START_MESSAGE = TypeAdapter(tuple[dict[str, CustomEnv], Path, Path, int])
"""First fields of `EvaluationRenderer`."""
NAME = re.compile(r"(before|during|after)-(sampled|greedy)-(\d+)")


@dataclass(frozen=True, slots=True)
class EvaluationRenderer:
    """Renderer of `evaluations/KIND-SAMPLING-STEP.jsonl` to `step-STEP/KIND-SAMPLING.{html,gif}`."""

    custom_envs: dict[str, CustomEnv]
    evaluations: Path
    target: Path
    limit: int
    """Episodes per evaluation."""
    now: Callable[[], float] = time.monotonic
    _failed: dict[Path, tuple[float, float]] = field(default_factory=dict[Path, tuple[float, float]])
    """Monotonic time of the next try, and the wait after it."""
    _rendered: dict[Path, tuple[int, int]] = field(default_factory=dict[Path, tuple[int, int]])
    """Time of change and size of evaluations that are on their pages."""

    def render_new(self) -> int:
        """Render what has no page, or an older one; return the number of pages."""
        files = [
            (int(match[3]), path) for path in self.evaluations.glob("*.jsonl") if (match := NAME.fullmatch(path.stem))
        ]
        return sum(self._try_render(path) for _, path in sorted(files) if self._is_new(path))

    def _is_new(self, path: Path) -> bool:
        """Return whether the page is missing, or of other rows, as by an earlier run."""
        page, stat = self._page(path), path.stat()
        if not page.exists():
            return True
        seen = (stat.st_mtime_ns, stat.st_size)
        if self._rendered.get(path) != seen and page.read_bytes().endswith(_mark(path)):
            self._rendered[path] = seen
        return self._rendered.get(path) != seen

    def _try_render(self, path: Path) -> bool:
        retry_at, wait_s = self._failed.get(path, (0.0, POLL_S))
        if self.now() < retry_at:
            return False
        try:
            self._render(path)
        except Exception:  # a damaged file, a full disk, or pictures of a user's env
            logger.exception("%s can't be rendered; trying again in %.0f s", path.name, wait_s)
            self._failed[path] = (self.now() + wait_s, min(2 * wait_s, MAX_WAIT_S))
            return False
        self._failed.pop(path, None)
        return True

    def _page(self, path: Path) -> Path:
        kind, sampling, step = path.stem.split("-")
        return self.target / f"step-{step}" / f"{kind}-{sampling}.html"

    def _render(self, path: Path) -> None:
        played: list[PlayedEpisode] = []
        mark, page = _mark(path), self._page(path)
        for _, recorded in zip(range(self.limit), read_episodes(path, path.stem), strict=False):
            try:
                played.append(play_again(self, recorded))
            except Exception:  # user code
                logger.exception("%s: rendering seed %d of %s failed", path.name, recorded.seed, recorded.tag)
        page.parent.mkdir(parents=True, exist_ok=True)
        write_gif(page.with_suffix(".gif"), played)
        part = page.with_suffix(".part")
        write_html(part, played, title=f"Evaluation {path.stem}")
        with part.open("ab") as file:
            file.write(mark)
        part.replace(page)  # last: it marks the evaluation as rendered


def _mark(path: Path) -> bytes:
    """Return the end of a page with these rows."""
    return f"\n<!-- rows {hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()} -->\n".encode()


@contextmanager
def rendered_evaluations(run: LearnerRun) -> Iterator[None]:
    """Render evaluations in the background, if `render_save_dir` is set; wait `END_S` at most for the last."""
    config = run.config
    if config.render_save_dir is None:
        yield
        return
    process = _start(run)
    try:
        yield
    finally:
        _end(process)


def _start(run: LearnerRun) -> subprocess.Popen[bytes] | None:
    log = run.output_dir / "logs" / LOG
    module = [sys.executable, "-m", __name__]
    command = [sys.executable, "-c", DIE_WITH_PARENT, str(os.getpid()), str(int(signal.SIGTERM)), *module]
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as err:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=err, start_new_session=True)
        assert process.stdin is not None
        process.stdin.write(_start_message(run) + b"\n")
        process.stdin.flush()
    except OSError as error:  # no memory for a process, a full disk: no reason to end training
        logger.warning("evaluations are not rendered: %s", error)
        return None
    return process


def _end(process: subprocess.Popen[bytes] | None) -> None:
    if process is None:
        return
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        logger.warning("the last evaluations are not rendered: not done in %g s, see logs/%s", END_S, LOG)
        process.kill()
        process.wait()


def _start_message(run: LearnerRun) -> bytes:
    config = run.config
    assert config.render_save_dir is not None
    fields = (config.custom_envs, run.output_dir / FOLDER, config.render_save_dir, config.render_episodes)
    return START_MESSAGE.dump_json(fields)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    line = sys.stdin.readline()
    if not line:
        return
    renderer = EvaluationRenderer(*START_MESSAGE.validate_json(line))
    while True:
        ended = bool(select.select([sys.stdin.fileno()], [], [], POLL_S)[0])
        try:
            renderer.render_new()
        except OSError:  # files that are being replaced: tried again
            logger.exception("rendering failed")
        if ended:
            return


if __name__ == "__main__":
    main()
