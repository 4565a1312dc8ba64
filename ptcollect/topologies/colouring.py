"""Edges into rounds: no rank twice in a round. Edge colouring, with as few rounds as the proofs promise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise


def rounds_of_graph(n: int, edges: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Undirected edges into at most D + 1 rounds, D the largest degree; no rank is in a round twice.

    Source: Misra and Gries 1992, A constructive proof of Vizing's theorem. A fan of u is a row of its neighbours such
    that each one's edge has a colour which the one before it is free of; turning it moves those colours on by one.
    """
    at: list[dict[int, int]] = [{} for _ in range(n)]  # rank -> colour -> the neighbour over that edge
    colour_of: dict[tuple[int, int], int] = {}

    def free(rank: int) -> int:
        return next(c for c in range(len(at[rank]) + 1) if c not in at[rank])

    def paint(u: int, v: int, colour: int) -> None:
        colour_of[min(u, v), max(u, v)] = colour
        at[u][colour], at[v][colour] = v, u

    def strip(u: int, v: int) -> int:
        colour = colour_of.pop((min(u, v), max(u, v)))
        del at[u][colour], at[v][colour]
        return colour

    for u, v in edges:
        fan = [v]
        while True:
            last = at[fan[-1]]
            longer = next((w for c, w in sorted(at[u].items()) if c not in last and w not in fan), None)
            if longer is None:
                break
            fan.append(longer)
        c, d = free(u), free(fan[-1])
        path, colour = [u], d
        while colour in at[path[-1]]:  # from u along edges of the colours d, c, d, ...
            path.append(at[path[-1]][colour])
            colour = c if colour == d else d
        turned = [strip(a, b) for a, b in pairwise(path)]
        for (a, b), was in zip(pairwise(path), turned, strict=True):
            paint(a, b, c if was == d else d)
        end = 0  # the shortest part of the fan that still is one, and ends in a rank free of d
        while d in at[fan[end]]:
            end += 1
        for i in range(end):
            paint(u, fan[i], strip(u, fan[i + 1]))
        paint(u, fan[end], d)
    return _by_colour(colour_of)


def rounds_of_digraph(n: int, edges: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Directed edges into D rounds, D the largest in- or out-degree; no rank sends or receives twice in a round.

    Source: Koenig 1916: the edges of a bipartite graph, of senders and receivers here, need D colours. Where the two
    ends of an edge have no free colour in common, exchanging two colours along a path makes one.
    """
    at: list[dict[int, int]] = [{} for _ in range(2 * n)]  # senders, then receivers

    def free(node: int) -> int:
        return next(c for c in range(len(at[node]) + 1) if c not in at[node])

    colour_of: dict[tuple[int, int], int] = {}
    for sender, receiver in edges:
        u, v = sender, receiver + n
        c, d = free(u), free(v)
        if c != d:  # from v along c, d, c, ...: never to u, which has no c and would be reached by one
            path, colour = [v], c
            while colour in at[path[-1]]:
                path.append(at[path[-1]][colour])
                colour = d if colour == c else c
            links = list(pairwise(path))
            for i, (a, b) in enumerate(links):
                was = c if i % 2 == 0 else d
                for node, other in ((a, b), (b, a)):
                    if at[node].get(was) == other:
                        del at[node][was]
            for i, (a, b) in enumerate(links):
                now = d if i % 2 == 0 else c
                at[a][now], at[b][now] = b, a
                colour_of[min(a, b), max(a, b) - n] = now
        at[u][c], at[v][c] = v, u
        colour_of[sender, receiver] = c
    return _by_colour(colour_of)


def _by_colour(colour_of: dict[tuple[int, int], int]) -> list[list[tuple[int, int]]]:
    rounds: list[list[tuple[int, int]]] = [[] for _ in range(max(colour_of.values(), default=-1) + 1)]
    for edge, colour in sorted(colour_of.items()):
        rounds[colour].append(edge)
    return [edges for edges in rounds if edges]


def reached(n: int, edges: Sequence[tuple[int, int]], start: int = 0) -> set[int]:
    """The ranks that a walk along directed edges from `start` can come to."""
    following: dict[int, list[int]] = {}
    for a, b in edges:
        following.setdefault(a, []).append(b)
    seen, stack = {start}, [start]
    while stack:
        for peer in following.get(stack.pop(), ()):
            if peer not in seen:
                seen.add(peer)
                stack.append(peer)
    return seen
