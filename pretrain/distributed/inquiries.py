"""Questions to all ranks, as the switchboard puts them: it calls every rank, each answers what it is doing, and then the question is concluded.

Thousands of ranks that wait ask the same at the same time. So what they ask is collected for a moment, and equal questions are put
once and concluded once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from functools import partial

from pretrain.distributed.standing import Standing

ANSWER_SECONDS = 3.0
"""How long a rank may take to say what it is doing before it counts as silent."""
RANKS_A_SECOND = 1000
"""How many ranks are called a second for what is asked again and again: 4,096 ranks every 4 s, a few ranks at once."""


@dataclass
class _Inquiry:
    """A question that was put. It is concluded when `is_enough`, or at `deadline`."""

    deadline: float
    conclude: Callable[[], None]
    is_enough: Callable[[], bool]


class Inquiries:
    """The questions of one switchboard's thread. `connected`: the ranks that can be called; `call` calls them all, with the number of the call."""

    def __init__(self, standings: list[Standing], connected: Collection[int], call: Callable[[int], None]) -> None:
        self._standings, self._connected, self._call = standings, connected, call
        self._asked: dict[Hashable, tuple[set[int], Callable[[set[int]], None]]] = {}
        self._next = 0.0  # when the next of them may be put
        self._open: list[_Inquiry] = []
        self._calls = 0
        self._unanswered: set[int] = set()  # ranks that were called and have not answered
        self._silent_since: dict[int, float] = {}

    @property
    def all_answered(self) -> bool:
        """Whether every rank that was called has answered, or has ended."""
        return not self._unanswered

    def ask(self, question: Hashable, asker: int, conclude: Callable[[set[int]], None]) -> None:
        """Put a question soon, once for all that ask it until then: `conclude` gets them."""
        self._asked.setdefault(question, (set(), conclude))[0].add(asker)

    def put(self, conclude: Callable[[], None], is_enough: Callable[[], bool] | None = None) -> None:
        """Put a question now: `conclude` it when the answers are enough (by default all), or after ANSWER_SECONDS."""
        if not self._open:
            self._call_all()
        self._open.append(_Inquiry(time.monotonic() + ANSWER_SECONDS, conclude, is_enough or (lambda: self.all_answered)))

    def _call_all(self) -> None:
        self._calls += 1
        self._unanswered = set(self._connected)
        self._call(self._calls)

    def hear(self, rank: int, call: int) -> None:
        """Take note that a rank has answered a call."""
        self._silent_since.pop(rank, None)
        if call == self._calls:
            self._unanswered.discard(rank)

    def forget(self, rank: int) -> None:
        """Expect no answer of a rank any more."""
        self._unanswered.discard(rank)

    def times(self) -> list[float]:
        """When `take_turn` must be called again, even if nothing is heard."""
        return [inquiry.deadline for inquiry in self._open] + ([self._next] if self._asked else [])

    def take_turn(self) -> None:
        """Put what was asked, and conclude what can be concluded."""
        now = time.monotonic()
        if self._asked and now >= self._next:
            self._next = now + len(self._standings) / RANKS_A_SECOND
            asked, self._asked = self._asked, {}
            if self._open:  # anew: a rank whose answer was lost would count as silent as long as others ask
                self._call_all()
            for askers, conclude in asked.values():
                self.put(partial(conclude, askers))
        if any(now >= inquiry.deadline for inquiry in self._open):
            self._note_silence(now)
        for inquiry in list(self._open):
            if now >= inquiry.deadline or inquiry.is_enough():
                self._open.remove(inquiry)
                inquiry.conclude()

    def _note_silence(self, now: float) -> None:
        for rank in self._unanswered:
            since = self._silent_since.setdefault(rank, now - ANSWER_SECONDS)
            self._standings[rank].silent, self._standings[rank].unheard = True, now - since
