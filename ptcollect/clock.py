"""Virtual time: events in order, ports that carry one message at a time, and what waits for what."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from ptcollect.link import Link, Route
from ptcollect.timeline import Message, Timeline

Done = Callable[[float], None]
"""Called with the time at which something has ended."""


class Label(NamedTuple):
    """What a message belongs to."""

    stage: str
    leaf: str
    round: int


class Transfer(NamedTuple):
    """A message whose two sides have met."""

    source: int
    destination: int
    size: int
    route: Route
    label: Label
    sent: Done
    received: Done
    order: int


class Clock:
    """Lets messages between ranks take the time that a link gives them.

    A message may start when both sides are ready, its port out of the sender is free, and its port into the receiver
    will be when it gets there. Of those that wait, the one that has waited longest goes first; one that must wait for
    its receiver's port holds up no other.
    """

    def __init__(self, link: Link, timeline: Timeline | None = None) -> None:
        self.link = link
        self.timeline = timeline
        self.now = 0.0
        self._events: list[tuple[float, bool, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._senders: defaultdict[Hashable, deque[Callable[[Done], None]]] = defaultdict(deque)
        self._receivers: defaultdict[Hashable, deque[Done]] = defaultdict(deque)
        self._free: defaultdict[tuple[str, tuple[str, int]], float] = defaultdict(float)
        self._routes: dict[tuple[int, int], Route] = {}

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Have `action` done at `time`; at the same time in the order in which it was asked for."""
        heapq.heappush(self._events, (time, False, next(self._numbers), action))

    def _start_at(self, time: float, transfer: Transfer) -> None:
        # After all else that happens at that time: then whoever is ready too has been heard of.
        heapq.heappush(self._events, (time, True, transfer.order, lambda: self._start(transfer)))

    def run(self) -> None:
        """Let time pass until nothing more happens."""
        while self._events:
            self.now, _, _, action = heapq.heappop(self._events)
            action()

    def send(
        self, box: Hashable, source: int, destination: int, size: int, at: float, label: Label, done: Done
    ) -> None:
        """`source` is ready at `at` to send `size` bytes by `box`; `done` when they have left."""
        order = next(self._numbers)

        def meet() -> None:
            def pair(received: Done) -> None:
                route = self._route(source, destination)
                self._start_at(self.now, Transfer(source, destination, size, route, label, done, received, order))

            if self._receivers[box]:
                pair(self._receivers[box].popleft())
            else:
                self._senders[box].append(pair)

        self.at(at, meet)

    def receive(self, box: Hashable, at: float, done: Done) -> None:
        """The receiver is ready at `at` for the next message by `box`; `done` when it is there."""

        def meet() -> None:
            if self._senders[box]:
                self._senders[box].popleft()(done)
            else:
                self._receivers[box].append(done)

        self.at(at, meet)

    def _route(self, source: int, destination: int) -> Route:
        route = self._routes.get((source, destination))
        if route is None:
            route = self._routes[source, destination] = self.link.route(source, destination)
        return route

    def _start(self, transfer: Transfer) -> None:
        route, now = transfer.route, self.now
        out, into = ("out", route.out), ("into", route.into)
        ready = max(self._free[out], self._free[into] - route.latency)
        if ready > now * (1 + 1e-12):
            self._start_at(ready, transfer)
            return
        gone = now + route.busy(transfer.size)
        there = gone + route.latency
        self._free[out], self._free[into] = gone, there
        self.at(gone, lambda: transfer.sent(gone))
        self.at(there, lambda: transfer.received(there))
        if self.timeline is not None:
            self.timeline.messages.append(
                Message(
                    transfer.source,
                    transfer.destination,
                    transfer.size,
                    *transfer.label,
                    now,
                    gone,
                    now + route.latency,
                    there,
                )
            )

    def ring(self, ranks: Sequence[int], sizes: Sequence[int], label: Label, done: Sequence[Done]) -> None:
        """A native all-reduce that starts now, as a ring: chunk c of `sizes[c]` bytes, two times around."""
        n = len(ranks)
        waiting = [0] * n  # what is left of the round
        rounds = [0] * n

        def next_round(place: int) -> None:
            if rounds[place] == 2 * (n - 1):
                done[place](self.now)
                return
            number = rounds[place]
            rounds[place] += 1
            waiting[place] = 2
            size = sizes[(place - number) % n]
            box = (id(waiting), place, number)  # the ring, its link, the round
            before = (id(waiting), (place - 1) % n, number)
            sending = label._replace(round=rounds[place])
            self.send(box, ranks[place], ranks[(place + 1) % n], size, self.now, sending, lambda _: ended(place))
            self.receive(before, self.now, lambda _: ended(place))

        def ended(place: int) -> None:
            waiting[place] -= 1
            if not waiting[place]:
                next_round(place)

        for place in range(n):
            next_round(place)


class Wait:
    """Something with several parts that a rank may wait for."""

    def __init__(self, parts: int, at: float) -> None:
        self.parts = parts
        self.done_at: float | None = None if parts else at
        self.then: Done | None = None

    def part(self, time: float) -> None:
        """One part has ended."""
        self.parts -= 1
        if not self.parts:
            self.done_at = time
            if self.then is not None:
                self.then(time)
