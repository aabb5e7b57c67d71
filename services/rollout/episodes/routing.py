"""Experts of an episode's tokens, of which engines send those that the worker does not have yet."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from offbeat.services.messages.routing import join_routing
from offbeat.services.messages.types import Completion, Int32Array, RoutingArray


class EpisodeRouting:
    """Experts of the newest answer's tokens and of those before it."""

    def __init__(self) -> None:
        self._tokens: Int32Array = np.zeros(0, dtype=np.int32)
        self._rows: RoutingArray | None = None

    def known(self, prompt: Sequence[int]) -> RoutingArray | None:
        """Return the experts of the prompt's first tokens; None without any."""
        if self._rows is None:
            return None
        tokens = np.asarray(prompt, dtype=np.int32)
        length = min(len(tokens), len(self._rows))
        differing = np.flatnonzero(tokens[:length] != self._tokens[:length])
        return self._rows[: int(differing[0]) if len(differing) else length]

    def complete(self, prompt: Sequence[int], known: RoutingArray | None, completion: Completion) -> Completion:
        """Put the known experts before those of a completion, which begin after them."""
        rest = completion.routing
        if rest is None:
            return completion
        rows = join_routing(known, rest)
        self._tokens = np.array([*prompt, *completion.token_ids], dtype=np.int32)
        self._rows = rows
        return replace(completion, routing=rows)
