"""Pipeline and Transform: how gradient synchronisation is composed, and how the result is run.

A `Pipeline` maps trees to trees; a `Transform` maps pipelines to pipelines; `chain` (in `ptcollect.chain`) spells both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from typing_extensions import Unpack

from ptcollect.comm import Comm
from ptcollect.compiling import eager
from ptcollect.dtypes import restrided
from ptcollect.errors import PipelineError
from ptcollect.state import State, joined, numbered, part
from ptcollect.tree import Leaves, flatten, refuse_empty
from ptcollect.value import Value, refuse_tree

if TYPE_CHECKING:
    from ptcollect.options import RunOptions
    from ptcollect.pending import Pending


class Pipeline(Value):
    """A gradient synchronisation, or any step of one: tree in, tree out, on every rank of a group.

    Pipelines are values: frozen, hashable, picklable, printed as the code that builds them. Reducers such as
    `ring_reduce`, maps such as `clip_by_global_norm`, and complete chains are pipelines.

    >>> import torch, ptcollect as pc
    >>> mean = pc.chain(pc.bucketize("25MiB"), pc.ring_reduce())
    >>> mean
    chain(bucketize("25MiB"), ring_reduce())
    >>> mean.communicates, mean.consensus, mean.stateful
    (True, True, False)
    """

    # What is known before anything runs.

    def children(self) -> tuple[Pipeline, ...]:
        """The pipelines directly inside this one."""
        return ()

    def walk(self) -> Iterator[Pipeline]:
        """This pipeline and every one inside it, outermost first."""
        yield self
        for child in self.children():
            yield from child.walk()

    @property
    def communicates(self) -> bool:
        """Whether ranks exchange anything."""
        return any(child.communicates for child in self.children())

    @property
    def consensus(self) -> bool:
        """Whether every rank ends with the same bits."""
        talking = [child for child in self.children() if child.communicates]
        return bool(talking) and talking[-1].consensus

    @property
    def fresh(self) -> bool:
        """Whether the tensors it returns are certainly its own, shared with no input, state or closure."""
        return False

    @property
    def leafwise(self) -> bool:
        """Whether what becomes of a leaf depends on that leaf alone, so that parts of a tree can be treated apart."""
        return False

    @property
    def local_and_leafwise(self) -> bool:
        """Whether it can treat a leaf as soon as that is there, without a word to anybody."""
        return self.leafwise and not self.communicates

    @property
    def streams(self) -> bool:
        """Whether it asks ``comm.arrived`` for each leaf's value when it needs it; else all must be there before."""
        return False

    @property
    def works_in_buckets(self) -> bool:
        """Whether `bucketize` may hand it buckets, with its state by path packed as they are."""
        return False

    @property
    def works_on(self) -> str:
        """``"gradients"``, ``"parameters"`` or ``"any"``: what the pipeline is meant to be given."""
        kinds = {child.works_on for child in self.children()} - {"any"}
        return kinds.pop() if len(kinds) == 1 else "any"

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the stages that keep state, from the left."""
        return tuple(name for child in self.children() for name in child.state_names)

    @property
    def uses_step(self) -> bool:
        """Whether some stage depends on the step count, and so on state, without keeping any of its own."""
        return any(child.uses_step for child in self.children())

    @property
    def stateful(self) -> bool:
        """Whether results depend on earlier steps; then `init` and `update` replace the plain call."""
        return bool(self.state_names) or self.uses_step

    def quiet(self, step: int) -> bool:
        """Whether nothing is sent at `step`; then ranks do not even compare what they bring."""
        return not self.communicates or (bool(self.children()) and all(child.quiet(step) for child in self.children()))

    # What extensions implement and call.

    def begin(self, params: Leaves) -> State:
        """The stages' first state for parameters `params` (path -> tensor), without the step counter."""
        return {}

    async def apply(self, tree: Leaves, state: State, comm: Comm) -> tuple[Leaves, State]:
        """One step on the flat tree `tree` (path -> tensor); returns the new tree and the stages' new state."""
        raise NotImplementedError(f"{type(self).__qualname__}.apply")

    # What users call.

    @eager
    def init(self, params: Any) -> State:
        """The state before the first step; needs no process group and sends nothing.

        Args:
            params: tree of tensors shaped like the gradients to come, or a `torch.nn.Module`.

        Returns:
            ``{"step": 0, stage: {...}}``; ``{}`` where the pipeline is stateless.

        >>> import torch, ptcollect as pc
        >>> pc.ring_reduce().init({"w": torch.zeros(3)})
        {}
        """
        if isinstance(params, torch.nn.Module):
            params = dict(params.named_parameters())
        leaves, structure = flatten(params)
        refuse_empty(structure)
        return {"step": 0, **self.begin(leaves)} if self.stateful else {}

    @eager
    def __call__(self, tree: Any, **options: Unpack[RunOptions]) -> Any:
        """Synchronise `tree` with the other ranks of the group; for stateless pipelines.

        Args:
            tree: tree of tensors of any dtype with a mean; ``None`` leaves are missing gradients. Left unchanged.
            **options: see `RunOptions`.

        Returns:
            A tree of the same structure, shapes, dtypes, devices and strides, in storage of its own.

        Raises:
            PipelineError: the pipeline keeps state (use `init` and `update`), or cannot treat a leaf.
            TreeMismatchError: the ranks brought different trees, pipelines or options.
            PeerLostError: a peer died, raised, or was silent for longer than the group's timeout.
        """
        if self.stateful:
            raise PipelineError(self._needs_state("called like a plain function"))
        return self.update(tree, None, **options)[0]

    @eager
    def update(self, tree: Any, state: State | None, **options: Unpack[RunOptions]) -> tuple[Any, State]:
        """One step with explicit state: ``grads, state = pipeline.update(grads, state)``.

        Args:
            tree: tree of tensors, as for a call.
            state: what `init` or the previous `update` returned; left unchanged.
            **options: see `RunOptions`.

        Returns:
            The synchronised tree, and the state for the next step.

        Raises:
            PipelineError: `state` is not this pipeline's; otherwise as for a call.
        """
        from ptcollect.engine import run  # torch.distributed only where something runs

        return run(self, tree, state, options)

    @eager
    def start(self, tree: Any, state: State | None = None, **options: Unpack[RunOptions]) -> Pending:
        """Begin an `update` on the communication thread; ``tree, state = pending.wait()`` ends it.

        Args:
            tree: as for `update`; leave it unchanged until `wait` returns.
            state: as for `update`.
            **options: see `RunOptions`.

        Returns:
            A `Pending`. Calls on the same group are performed in the order in which they were started.
        """
        from ptcollect.engine import start

        return start(self, tree, state, options)

    def checked_state(self, state: State | None) -> State:
        """`state` if it is one of this pipeline's, ``{}`` for the ``None`` of a stateless one."""
        expected = (["step"] if self.stateful else []) + list(self.begin_keys())
        if state is None and self.stateful:
            raise PipelineError(self._needs_state("given no state"))
        if set(state or {}) != set(expected):
            raise PipelineError(
                f"state is not that of {self!r}: expected the keys {expected}, got {list(state or {})}; make it with "
                "pipeline.init(params) or load the one saved with this pipeline"
            )
        return state or {}

    def begin_keys(self) -> list[str]:
        """Keys of the stages' state, without the step counter."""
        return numbered(self.state_names)

    def _needs_state(self, what: str) -> str:
        stages = ", ".join(self.state_names) or "a stage that counts steps"
        return (
            f"{self!r} keeps state ({stages}) and was {what}; write\n"
            "    state = pipeline.init(params)\n"
            "    grads, state = pipeline.update(grads, state)"
        )


async def apply_settled(inner: Pipeline, tree: Leaves, state: State, comm: Comm) -> tuple[Leaves, State]:
    """``inner.apply``, after waiting for values that `inner` would not wait for itself."""
    if not inner.streams:
        tree, comm = await comm.settled(tree)
    return await inner.apply(tree, state, comm)


class Transform(Value):
    """A function from pipelines to pipelines, such as `bucketize`: treats what goes in and what comes out.

    Subclass as a frozen dataclass. `update` awaits ``inner.apply(tree, inner_state, comm)``, where trees are flat dicts
    from path to tensor, and may do anything before and after. A transform with state of its own sets ``stateful =
    True`` and keeps the state of the pipeline inside under ``"inner"``:

    >>> import torch, ptcollect as pc
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, repr=False)
    ... class momentum(pc.Transform):
    ...     '''Average m = decay * m + g instead of g.'''
    ...
    ...     decay: float = 0.9
    ...     stateful = True
    ...
    ...     def init(self, inner, params):
    ...         return {"m": {path: torch.zeros_like(p) for path, p in params.items()}, "inner": inner.begin(params)}
    ...
    ...     async def update(self, inner, tree, state, comm):
    ...         m = {path: self.decay * state["m"][path] + g for path, g in tree.items()}
    ...         out, inner_state = await inner.apply(m, state["inner"], comm)
    ...         return out, {"m": m, "inner": inner_state}
    >>> pipeline = pc.chain(momentum(0.5), pc.ring_reduce())
    >>> grads = [{"w": torch.ones(2)}, {"w": torch.zeros(2)}]
    >>> once = pc.simulate(pipeline, grads)
    >>> twice = pc.simulate(pipeline, grads, once.states)
    >>> twice.trees[0]["w"], twice.states[0]["momentum"]["m"]["w"], twice.states[0]["step"]
    (tensor([0.7500, 0.7500]), tensor([1.5000, 1.5000]), 2)
    """

    stateful: ClassVar[bool] = False
    """Whether `init` returns anything beside ``"inner"``."""
    keeps_inner_state: ClassVar[bool] = False
    """Whether it keeps the inner pipeline's state under names of its own and not under ``"inner"``."""
    works_in_buckets: ClassVar[bool] = False
    """Whether it means the same on flat buckets as on parameters, and so may stand inside `bucketize`."""

    lossy: ClassVar[bool] = False
    """Whether some of what goes in does not arrive, and is booked as residual."""
    goes_outside_error_feedback: ClassVar[bool] = False
    """Whether `error_feedback` refuses to wrap it."""
    streams: ClassVar[bool] = False
    """Whether it asks ``comm.arrived`` for each leaf's value when it needs it; else all must be there before."""
    sends: ClassVar[bool] = False
    """Whether it communicates by itself, before and after the pipeline inside, with the codec of its own comm."""
    works_on: ClassVar[str] = "any"
    """``"parameters"`` where it makes no sense on gradients, ``"gradients"`` the other way round."""
    uses_step: ClassVar[bool] = False
    """Whether what it does depends on the step count."""
    manages_ownership: ClassVar[bool] = False
    """Whether it minds ``comm.owned``: the pipeline inside may overwrite tensors only where that is set. Where a
    transform does not say so, the pipeline inside always copies."""

    def init(self, inner: Pipeline, params: Leaves) -> State:
        """Own first state, with that of `inner` under ``"inner"``."""
        return {"inner": inner.begin(params)}

    def quiet(self, step: int) -> bool:
        """Whether neither it nor the pipeline inside sends anything at `step`."""
        return False

    async def update(self, inner: Pipeline, tree: Leaves, state: State, comm: Comm) -> tuple[Leaves, State]:
        """One step: treat `tree`, await ``inner.apply``, treat the result."""
        raise NotImplementedError(f"{type(self).__qualname__}.update")

    def check(self, inner: Pipeline) -> None:
        """Raise a PipelineError if this transform cannot wrap `inner`."""

    def example_reducer(self) -> str:
        """A reducer that it can wrap, as code, for messages."""
        return "ring_reduce()"

    def __call__(self, inner: Pipeline) -> Pipeline:
        """Wrap `inner`; ``chain(transform, inner)`` is the readable spelling."""
        refuse_tree(self.name, "inner", inner)
        if not isinstance(inner, Pipeline):
            raise PipelineError(f"{self!r} wraps a pipeline, got {type(inner).__name__}: {inner!r}")
        return Wrapped(self, inner)


@dataclass(frozen=True, repr=False)
class Wrapped(Pipeline):
    """A transform applied to a pipeline."""

    transform: Transform
    inner: Pipeline

    def __post_init__(self) -> None:
        if not self.inner.communicates:
            raise PipelineError(
                f"{self.transform!r} has no reducer to wrap: {self.inner!r} sends nothing; write "
                f"chain({self.inner!r}, {self.transform!r}, {self.transform.example_reducer()})"
            )
        self.transform.check(self.inner)

    def __repr__(self) -> str:
        return f"{self.transform!r}({self.inner!r})"

    def children(self) -> tuple[Pipeline, ...]:
        return (self.inner,)

    @property
    def fresh(self) -> bool:
        return self.transform.manages_ownership and self.inner.fresh

    @property
    def works_on(self) -> str:
        return self.transform.works_on if self.transform.works_on != "any" else super().works_on

    @property
    def uses_step(self) -> bool:
        return self.transform.uses_step or super().uses_step

    def quiet(self, step: int) -> bool:
        return self.transform.quiet(step) or (not self.transform.sends and super().quiet(step))

    @property
    def streams(self) -> bool:
        return self.transform.streams and self.inner.streams

    @property
    def state_names(self) -> tuple[str, ...]:
        own = (self.transform.name,) if self.transform.stateful else ()
        return own if self.transform.keeps_inner_state else (*own, *self.inner.state_names)

    def begin(self, params: Leaves) -> State:
        return self._flat(self.transform.init(self.inner, params))

    async def apply(self, tree: Leaves, state: State, comm: Comm) -> tuple[Leaves, State]:
        if not self.transform.manages_ownership:
            comm = comm.replace(owned=False)
        answer = await self.transform.update(self.inner, tree, self._nested(state), comm)
        out, new_state = self._pair(answer)
        if not self.transform.manages_ownership:  # ours need no checking at every step
            for path in (*tree, *out):
                self._check_leaf(path, tree, out)
            out = {path: restrided(leaf, tree[path]) for path, leaf in out.items()}
        return out, self._flat(new_state)

    def _pair(self, answer: Any) -> tuple[Leaves, State]:
        if not isinstance(answer, tuple) or len(answer) != 2 or not all(isinstance(part, dict) for part in answer):
            raise PipelineError(f"{self._line()} must return (tree, state), two dicts, got {type(answer).__name__}")
        return answer

    def _nested(self, state: State) -> State:
        own = dict(state[self.transform.name]) if self.transform.stateful else {}
        if self.transform.keeps_inner_state:
            return own
        names = self.state_names
        return {**own, "inner": part(state, names, 1 if self.transform.stateful else 0, len(names))}

    def _flat(self, nested: State) -> State:
        own = {key: value for key, value in nested.items() if key != "inner"}
        if ("inner" in nested) == self.transform.keeps_inner_state or (own and not self.transform.stateful):
            fix = "stateful = True" if "inner" in nested else '"inner": inner.begin(params)'
            raise PipelineError(f"{self._line()}: state has the keys {list(nested)}; the class is missing {fix}")
        mine = [{self.transform.name: own}] if self.transform.stateful else []
        return joined(self.state_names, mine if self.transform.keeps_inner_state else [*mine, nested["inner"]])

    def _check_leaf(self, path: str, before: Leaves, after: Leaves) -> None:
        was, now = before.get(path), after.get(path)
        if was is None or now is None or was.shape != now.shape or was.dtype != now.dtype:
            raise PipelineError(
                f"{self._line()} must return what it was given: leaf {path!r} went in as {_kind(was)}, "
                f"came out as {_kind(now)}"
            )

    def _line(self) -> str:
        code = type(self.transform).update.__code__
        return f"{self.transform!r}.update ({code.co_filename}:{code.co_firstlineno})"


def _kind(leaf: torch.Tensor | None) -> str:
    return "nothing" if leaf is None else f"{tuple(leaf.shape)} {leaf.dtype}"
