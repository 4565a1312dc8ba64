"""`@reducer`: turns a coroutine over one flat tensor into a factory of pipelines."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, overload

from torch import Tensor

from ptcollect.comm import Comm
from ptcollect.dtypes import flat_copy, flat_view, fresh_copy, from_flat, overwrite
from ptcollect.errors import PipelineError
from ptcollect.pipeline import Pipeline
from ptcollect.state import State
from ptcollect.tree import Leaves
from ptcollect.value import refuse_tree

ReducerFunction = Callable[..., Coroutine[Any, Any, Tensor]]


class OptionCheck(Protocol):
    """Raises for options that cannot work; called when a pipeline is built (`size` None) and when it runs."""

    def __call__(self, options: Mapping[str, Any], size: int | None) -> None: ...


@overload
def reducer(function: ReducerFunction) -> ReducerFactory: ...
@overload
def reducer(
    *,
    consensus: bool = True,
    averages: bool = True,
    native: bool = False,
    same_peers: bool = False,
    keeps_dropped: bool = False,
    check: OptionCheck | None = None,
    convert: Mapping[str, Callable[[Any], Any]] | None = None,
) -> Callable[[ReducerFunction], ReducerFactory]: ...
def reducer(
    function: ReducerFunction | None = None,
    *,
    consensus: bool = True,
    averages: bool = True,
    native: bool = False,
    same_peers: bool = False,
    keeps_dropped: bool = False,
    check: OptionCheck | None = None,
    convert: Mapping[str, Callable[[Any], Any]] | None = None,
) -> ReducerFactory | Callable[[ReducerFunction], ReducerFactory]:
    """Make a reducer out of ``async def name(x, comm, *, option=default)``.

    The coroutine gets `x`, one leaf as a flat private tensor in the accumulation dtype (float32 at least; int64 for
    integers), which it may overwrite, and a `Comm`. It returns the reduced values, flat and in the same dtype. Leaves
    run concurrently. World size 1, empty leaves, dtypes, shapes and strides never reach it. Its keyword options become
    those of the factory, the first of them positional, and every factory has ``axis=None`` beside them.

    Args:
        function: the coroutine function.
        consensus: whether all ranks end with the same bits.
        averages: whether every rank gets a mean (unless ``op="sum"``), so that a call may be weighted.
        native: whether it uses ``comm.all_reduce``, which only carries codecs whose packets are numbers, and books no
            residual.
        same_peers: whether it exchanges with the same peers in all its rounds, and asks for nothing but exchanges. Then
            leaves may start in the order in which backward delivers them, which can differ between ranks.
        keeps_dropped: whether what encoding drops stays in the result of the rank that encoded it, so that the sum over
            ranks is kept without residuals.
        check: raises for bad options; called with ``(options, size)``, `size` None when the pipeline is built.
        convert: option -> what makes its value of what was given, such as a topology of a name.

    Returns:
        A factory: calling it with options gives a Pipeline.

    Raises:
        PipelineError: while running, with the file and line, if the coroutine returns another shape or dtype, forgets
            to await a request, or awaits something that is not one.

    >>> import torch, ptcollect as pc
    >>> @pc.reducer
    ... async def neighbour_avg(x, comm):
    ...     '''The mean of this rank's tensor and its left neighbour's.'''
    ...     left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    ...     received = await comm.exchange(send={right: comm.encode(x)}, recv={left: x.numel()})
    ...     return (x + comm.decode(received[left])) / 2
    >>> neighbour_avg()
    neighbour_avg()
    >>> run = pc.simulate(neighbour_avg(), [torch.tensor([2.0]), torch.tensor([4.0]), torch.tensor([9.0])])
    >>> run.trees, run.bytes
    ([tensor([5.5000]), tensor([3.]), tensor([6.5000])], [4, 4, 4])
    """

    def made(function: ReducerFunction) -> ReducerFactory:
        return ReducerFactory(
            function,
            consensus=consensus,
            averages=averages,
            native=native,
            same_peers=same_peers,
            keeps_dropped=keeps_dropped,
            check=check,
            convert=convert or {},
        )

    return made if function is None else made(function)


class ReducerFactory:
    """What `@reducer` puts in place of the coroutine function: options in, Pipeline out."""

    is_factory = True

    def __init__(
        self,
        function: ReducerFunction,
        *,
        consensus: bool,
        averages: bool,
        native: bool,
        same_peers: bool,
        keeps_dropped: bool,
        check: OptionCheck | None,
        convert: Mapping[str, Callable[[Any], Any]],
    ) -> None:
        if not inspect.iscoroutinefunction(function):
            raise PipelineError(
                f"@reducer needs an async def; {getattr(function, '__qualname__', function)} is not one"
            )
        parameters = list(inspect.signature(function).parameters.values())
        options = parameters[2:]
        if len(parameters) < 2 or any(option.default is option.empty for option in options):
            raise PipelineError(
                f"@reducer {function.__qualname__}: expected (x, comm, *, option=default, ...), every option with a "
                f"default; got {inspect.signature(function)}"
            )
        self.function = function
        self.consensus = consensus
        self.averages = averages
        self.native = native
        self.same_peers = same_peers
        self.keeps_dropped = keeps_dropped
        self.check = check
        self.convert = convert
        self.defaults = self._converted({option.name: option.default for option in options} | {"axis": None})
        self.__name__ = function.__name__
        self.__qualname__ = function.__qualname__
        self.__module__ = function.__module__
        self.__doc__ = function.__doc__
        signature = [
            option.replace(kind=option.KEYWORD_ONLY if i else option.POSITIONAL_OR_KEYWORD)
            for i, option in enumerate(options)
        ]
        axis = inspect.Parameter("axis", inspect.Parameter.KEYWORD_ONLY, default=None)
        self.__signature__ = inspect.Signature([*signature, axis])

    def __call__(self, *args: Any, **options: Any) -> Pipeline:
        """A Pipeline with these options."""
        for value in args:
            if not self.convert:  # a matrix is a tensor, and no tree
                refuse_tree(self.__name__, next(iter(self.defaults)), value)
        try:
            bound = self.__signature__.bind(*args, **options).arguments
        except TypeError as error:
            raise TypeError(f"{self.__name__}{self.__signature__}: {error}") from None
        bound = self._converted(bound)
        for name, value in bound.items():
            refuse_tree(self.__name__, name, value)
        chosen = self.defaults | bound
        if chosen["axis"] is not None and not isinstance(chosen["axis"], str):
            raise TypeError(f"{self.__name__}(axis=...): expected the name of a mesh dim, got {chosen['axis']!r}")
        if self.check is not None:
            self.check(chosen, None)
        return Reducer(self, tuple(chosen.items()))

    def _converted(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.convert[name](value) if name in self.convert else value for name, value in options.items()}

    def __repr__(self) -> str:
        return f"<reducer {self.__module__}.{self.__qualname__}>"

    def __reduce__(self) -> str:
        return self.__qualname__  # pickled by name, as functions are


@dataclass(frozen=True, repr=False)
class Reducer(Pipeline):
    """A pipeline that reduces every leaf over the ranks of one axis."""

    factory: ReducerFactory
    options: tuple[tuple[str, Any], ...]

    def __repr__(self) -> str:
        parts = [
            self._show(name, value) if name in self.factory.convert else f"{name}={self._show(name, value)}"
            for name, value in self.options
            if value != self.factory.defaults[name]
        ]
        return f"{self.factory.__name__}({', '.join(parts)})"

    @property
    def communicates(self) -> bool:
        return True

    @property
    def consensus(self) -> bool:
        return self.factory.consensus

    @property
    def streams(self) -> bool:
        return True

    @property
    def fresh(self) -> bool:
        return True

    @property
    def averages(self) -> bool:
        """Whether every rank gets a mean."""
        return self.factory.averages and dict(self.options).get("op") != "sum"

    @property
    def uses_step(self) -> bool:
        return any(getattr(value, "varies", False) for _, value in self.options)

    @property
    def axis(self) -> str | None:
        """The mesh dim it works along."""
        axis: str | None = dict(self.options)["axis"]
        return axis

    async def apply(self, tree: Leaves, state: State, comm: Comm) -> tuple[Leaves, State]:
        comm = comm.on_axis(self.axis, self.factory.__name__)
        options = dict(self.options)
        if self.factory.check is not None:
            self.factory.check(options, comm.size)
        del options["axis"]
        # Dtypes first, all of them: a leaf that cannot be treated is an error before any traffic.
        comms = {path: comm.for_leaf(path, leaf) for path, leaf in tree.items()}
        if comm.size == 1:
            for own in comms.values():
                own.close_books()
            tree, _ = await comm.settled(tree)
            return (tree if comm.owned else {path: fresh_copy(leaf) for path, leaf in tree.items()}), state
        out = {path: leaf if comm.owned else fresh_copy(leaf) for path, leaf in tree.items() if leaf.numel() == 0}
        full = [path for path in tree if path not in out]
        work = [self._reduce(path, tree, comms[path], options) for path in full]
        reduced = [await work[0]] if len(work) == 1 else await comm.fork(work)
        out |= dict(zip(full, reduced, strict=True))
        return {path: out[path] for path in tree}, state

    async def _reduce(self, path: str, tree: Leaves, comm: Comm, options: Mapping[str, Any]) -> Tensor:
        leaf = (await comm.arrived(tree, [path]))[path]
        view = flat_view(leaf) if comm.owned else None
        x = view if view is not None and view.dtype == comm.dtype else flat_copy(leaf, comm.dtype)
        numel = x.numel()
        comm.works("copy", 0 if x is view else numel)
        stand_in = None if comm.observer is None else comm.observer.reduces(self, x, comm)
        value = await (self.factory.function(x, comm, **options) if stand_in is None else stand_in)
        self._check(value, numel, comm)
        comm.close_books()
        result = from_flat(value, leaf)
        return overwrite(leaf, result) if comm.owned else result

    def _check(self, value: Any, numel: int, comm: Comm) -> None:
        where = f"{self.factory.__name__} ({_line(self.factory.function)})"
        forgotten = comm.forgotten()
        if forgotten is not None:
            raise PipelineError(
                f"{where} made a request and never awaited it: {type(forgotten).__name__} at {forgotten.origin}; "
                "write await before it"
            )
        if not isinstance(value, Tensor) or value.dtype != comm.dtype or value.shape != (numel,):
            got = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise PipelineError(
                f"{where}, leaf {comm.leaf!r}: expected a tensor ({numel},) {comm.dtype} back, got {got}"
            )


def _line(function: ReducerFunction) -> str:
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


def mean_or_sum(options: Mapping[str, Any], size: int | None) -> None:
    """The check of reducers with an option ``op``."""
    if options["op"] not in ("mean", "sum"):
        raise ValueError(f'op: expected "mean" or "sum", got {options["op"]!r}')


def existing_root(options: Mapping[str, Any], size: int | None) -> None:
    """The check of reducers with an option ``root``: a group rank."""
    root = options["root"]
    if isinstance(root, bool) or not isinstance(root, int) or root < 0:
        raise ValueError(f"root: expected a group rank, an int from 0, got {root!r}")
    if size is not None and root >= size:
        raise ValueError(
            f"root={root} is out of range: the group has the ranks 0 to {size - 1} (group ranks, not global ones)"
        )
