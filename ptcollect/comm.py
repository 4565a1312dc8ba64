"""What a reducer or transform may ask of the network, as values: the requests, and `Comm`, which makes them.

Nothing here sends anything. A coroutine awaits a request; `schedule.drive` hands it to an interpreter (`engine` or
`simulate`), which performs it and resumes the coroutine with the answer.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from ptcollect.arrivals import Arrivals
from ptcollect.codecs.cast import Cast
from ptcollect.codecs.codec import Codec, Key
from ptcollect.dtypes import accumulation_dtype, flat_numel, real_dtype
from ptcollect.errors import PipelineError
from ptcollect.profiling import span
from ptcollect.tree import Leaves, Structure

T = TypeVar("T")


@dataclass(frozen=True)
class Axis:
    """One dimension of the launch as a rank sees it: its group rank and the group's size."""

    rank: int
    size: int


@dataclass(frozen=True)
class Packet:
    """What travels: `data` (flat uint8) stands for `numel` numbers.

    >>> import torch, ptcollect as pc
    >>> pc.Packet(torch.zeros(4, dtype=torch.uint8), numel=2)
    Packet(data=tensor([0, 0, 0, 0], dtype=torch.uint8), numel=2)
    """

    data: Tensor
    numel: int


class Gate(Protocol):
    """What must be known before anything is sent."""

    open: bool

    async def passed(self) -> None:
        """Wait until it is known; raises if nothing may be sent."""


@dataclass(eq=False)
class Request(Generic[T]):
    """Something a coroutine asks for by ``await``; made by the methods of `Comm`."""

    gated: ClassVar[bool] = False
    """Whether it waits for the gate of its comm."""

    made_at: tuple[str, int, str]
    """File, line and function where it was made, for errors."""
    axis: str | None
    leaf: str
    stage: str
    outstanding: list[Request[Any]] = field(repr=False)
    gate: Gate | None = field(repr=False)

    def __post_init__(self) -> None:
        self.outstanding.append(self)

    @property
    def origin(self) -> str:
        """``file:line in function`` where it was made."""
        return _shown(self.made_at)

    def __await__(self) -> Generator[Request[T], T, T]:
        if self in self.outstanding:
            self.outstanding.remove(self)
        if self.gated and self.gate is not None and not self.gate.open:
            yield from self.gate.passed().__await__()
        return (yield self)


@dataclass(eq=False)
class Exchange(Request["dict[int, Packet]"]):
    """One batch of sends and receives, at most one of each per peer."""

    gated = True

    send: Mapping[int, Packet]
    receive: Mapping[int, tuple[int, int]]
    """Peer -> (numbers, bytes) that it will send."""
    device: torch.device
    places: Mapping[int, Tensor]
    """Peer -> where its bytes go; elsewhere the interpreter allocates."""
    control: bool = False
    """Agreement traffic, counted apart from the payload."""


@dataclass(eq=False)
class AllReduce(Request[Tensor]):
    """The process group's own all-reduce (sum) of `tensor`, in place."""

    gated = True

    tensor: Tensor


@dataclass(eq=False)
class Begin(Request[Any]):
    """Make the request `exchange` and go on; answers with a ticket for `End`."""

    exchange: Exchange


@dataclass(eq=False)
class End(Request["dict[int, Packet]"]):
    """What was received by an exchange that has begun; any number of coroutines may ask."""

    ticket: Any


@dataclass(eq=False)
class Fork(Request["list[Any]"]):
    """Run `children` concurrently; answers with their results in order."""

    children: Sequence[Coroutine[Any, Any, Any]]


@dataclass(eq=False)
class Arrival(Request[Leaves]):
    """The leaves `paths`, as soon as the backward pass has delivered them."""

    arrivals: Arrivals
    paths: Sequence[str]


class Observer:
    """What an interpreter wants to know of a rank's work, or to do itself; the planner's clock is one."""

    def works(self, what: str, numbers: int) -> None:
        """This rank now does `what`, such as ``"encode int8()"`` or ``"copy"``, on so many numbers."""

    def encodes(self, packet: Packet, at: int) -> None:
        """This rank has made `packet` of the numbers from position `at` of a leaf on; told on the meta device only."""

    def reduces(self, reducer: Any, x: Tensor, comm: Comm) -> Awaitable[Tensor] | None:
        """What stands in for a reducer on one leaf; ``None``: the reducer itself."""
        return None


class Comm:
    """How a stage sees the launch: who it is, and what it may ask for.

    A reducer gets one `Comm` per leaf and awaits what it asks for:

    * `rank`, `size`: this rank and the number of ranks on the reducer's axis;
    * `encode`, `decode`, `accumulate`: the codec that an enclosing `compress` chose, or else the leaf's own dtype;
    * `exchange`, `all_reduce`, `fork`: the requests.

    A transform passes its `Comm` on to the pipeline inside it.

    >>> import torch, ptcollect as pc
    >>> @pc.reducer
    ... async def rank_and_size(x, comm):
    ...     return x * 0 + torch.tensor([comm.rank, comm.size])
    >>> pc.simulate(rank_and_size(), [torch.zeros(2)] * 3).trees[1]
    tensor([1., 3.])
    """

    def __init__(
        self,
        axes: Mapping[str | None, Axis],
        *,
        step: int = 0,
        structure: Structure | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.axes = dict(axes)
        """Axis name -> this rank's place on it; ``{None: ...}`` where the group has one dimension."""
        self.axis: str | None = None
        self.step = step
        """The state's step counter; 0 in stateless pipelines."""
        self.structure = structure
        """Structure of the tree that the user passed."""
        self.codec: Codec | None = None
        """What an enclosing `compress` chose; ``None``: each leaf's own dtype travels."""
        self.compressed: torch.dtype | None = None
        """The dtype in which an enclosing `compress` wants this leaf summed natively; ``None``: as it is."""
        self.wire_dtypes: Mapping[str, torch.dtype] = {}
        """Path -> the dtype that a leaf's numbers travel in without `compress`, where a stage outside made it wider."""
        self.owned = False
        """Whether the tensors handed down belong to the pipeline, which may then overwrite them."""
        self.incoming: Callable[[Sequence[str], Comm], Awaitable[Leaves]] | None = None
        """Where the values of leaves come from while backward still runs; ``None``: the tree has them."""
        self.gate: Gate | None = None
        """What must be known before anything is sent; ``None``: nothing."""
        self.stage = ""
        self.leaf = ""
        self.scope = ""
        """Distinguishes several packets of one leaf in a call, for codecs that draw random numbers."""
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self.residuals: dict[str, Tensor] | None = None
        """Path -> what encoding dropped, flat and in units of this rank's input; ``None``: nobody asked."""
        self.observer = observer
        """Who is told of the work done, beside what is sent; ``None``: nobody."""
        self._hop = 0
        self._booked: list[tuple[int, int]] = []
        """Bounds of what is booked in this leaf's residual so far; the rest of it is not even zero yet."""
        self._outstanding: list[Request[Any]] = []

    def replace(self, **changes: Any) -> Comm:
        """A copy with other values, for the pipeline inside: ``comm.replace(codec=..., owned=True)``."""
        other = object.__new__(Comm)
        other.__dict__.update(self.__dict__, _outstanding=[], **changes)
        return other

    async def arrived(self, tree: Leaves, paths: Iterable[str] | None = None) -> Leaves:
        """Those leaves of `tree`, with their values: in the overlapped mode a tree comes before its gradients do."""
        wanted = list(tree if paths is None else paths)
        if self.incoming is None:
            return {path: tree[path] for path in wanted}
        return await self.incoming(wanted, self)

    async def settled(self, tree: Leaves) -> tuple[Leaves, Comm]:
        """All of `tree` with its values, and the comm to go on with."""
        if self.incoming is None:
            return tree, self
        return await self.arrived(tree), self.replace(incoming=None)

    def arrival(self, arrivals: Arrivals, paths: Sequence[str]) -> Arrival:
        """The request for leaves that a backward pass delivers."""
        return Arrival(*self._about(), arrivals, paths)

    def on_axis(self, axis: str | None, stage: str) -> Comm:
        """This comm seen along `axis`.

        Raises:
            PipelineError: there is no such axis, or there are several and `axis` names none.
        """
        if axis is None and len(self.axes) == 1:
            axis = next(iter(self.axes))
        if axis not in self.axes:
            names = ", ".join(repr(name) for name in self.axes if name is not None)
            if axis is None:
                raise PipelineError(
                    f"{stage}: the group is a mesh with the dims {names}; say which: "
                    f"{stage}(axis={names.split(',')[0]})"
                )
            known = f"its dims are {names}" if names else "it has one unnamed dim; leave axis out"
            raise PipelineError(f"{stage}: the group has no dim {axis!r}; {known}")
        return self.replace(axis=axis, stage=stage)

    def for_leaf(self, path: str, leaf: Tensor) -> Comm:
        """This comm for the reduction of one leaf."""
        total = accumulation_dtype(leaf.dtype, path)
        # Integers travel as the int64 they are summed in, exactly; codecs are for floating numbers.
        own = Cast(self.wire_dtype(path, leaf) if total.is_floating_point else total)
        codec = self.codec if self.codec is not None and total.is_floating_point else own
        if self.residuals is not None and total.is_floating_point:
            self.residuals[path] = torch.empty(flat_numel(leaf), dtype=total, device=leaf.device)
        return self.replace(
            leaf=path,
            dtype=total,
            device=leaf.device,
            codec=codec,
            compressed=codec.sum_dtype if codec is self.codec else None,
            _hop=0,
            _booked=[],
        )

    def wire_dtype(self, path: str, leaf: Tensor) -> torch.dtype:
        """The dtype in which the numbers of a floating or complex leaf travel without `compress`: its own."""
        return self.wire_dtypes.get(path, real_dtype(leaf.dtype))

    @property
    def rank(self) -> int:
        """This rank's number in the group, from 0."""
        return self.axes[self.axis].rank

    @property
    def size(self) -> int:
        """How many ranks the group has; never 1 inside a reducer."""
        return self.axes[self.axis].size

    def wire_bytes(self, numel: int) -> int:
        """How many bytes a packet of `numel` numbers has."""
        return self._codec().wire_bytes(numel)

    def encode(self, x: Tensor, *, at: int = 0, scale: float = 1.0) -> Packet:
        """Pack `x` (flat, accumulation dtype) for the wire, and book what the codec dropped.

        Args:
            x: the numbers to send; they may be sent from where they are, so leave them alone until the exchange is
                done.
            at: position of ``x[0]`` in the leaf, in numbers.
            scale: what the numbers are, in units of this rank's input: 1 for a sum of inputs, 1/n for a mean of n.
        """
        codec = self._codec()
        books = self.residuals is not None and self.leaf in self.residuals
        self._works("encode", codec, x.numel())
        if books:
            self._works("decode", codec, x.numel())
            self.works("copy", x.numel())
        if x.is_meta:  # nothing to look at: a packet of the size that was promised
            packet = Packet(torch.empty(codec.wire_bytes(x.numel()), dtype=torch.uint8, device="meta"), x.numel())
            if self.observer is not None:
                self.observer.encodes(packet, at)
            return packet
        with span(f"encode {codec!r}, {self.leaf}"):
            data = codec.encode(x, Key(self.step, self.scope + self.leaf, self.rank, self._hop))
        self._hop += 1
        if data.dtype != torch.uint8 or data.numel() != codec.wire_bytes(x.numel()):
            raise PipelineError(
                f"codec {codec!r} packed {x.numel()} numbers of leaf {self.leaf!r} into {data.numel()} x {data.dtype}; "
                f"its wire_bytes promises {codec.wire_bytes(x.numel())} x torch.uint8"
            )
        if self.residuals is not None and books:
            with span(f"book what was lost, {self.leaf}"):
                place = self.residuals[self.leaf][at : at + x.numel()]
                codec.book(data, x, place, self._keep(at, at + x.numel()), 1 / scale)
        return Packet(data, x.numel())

    def _keep(self, start: int, stop: int) -> float:
        """1 if something is booked in that part of the residual; 0 if it is still to be written for the first time."""
        new = all(stop <= begin or end <= start for begin, end in self._booked)
        if new:
            self._booked.append((start, stop))
        else:
            self.close_books(start, stop)
        return 0.0 if new else 1.0

    def close_books(self, start: int = 0, stop: int | None = None) -> None:
        """Write zeros where nothing has been booked in this leaf's residual, between two positions."""
        if self.residuals is None or self.leaf not in self.residuals:
            return
        residual = self.residuals[self.leaf]
        stop = len(residual) if stop is None else stop
        done = start
        for begin, end in sorted([*self._booked, (stop, stop)]):
            if begin > done and begin <= stop:
                residual[done:begin].zero_()
            done = max(done, end)
        self._booked.append((start, stop))

    def decode(self, packet: Packet) -> Tensor:
        """The numbers in `packet`, flat and in the accumulation dtype; may share its storage."""
        codec = self._codec()
        self._works("decode", codec, packet.numel)
        if self.device.type == "meta":
            return torch.empty(packet.numel, dtype=self.dtype, device="meta")
        return codec.decode(packet.data, packet.numel, self.dtype)

    def accumulate(self, packet: Packet, into: Tensor, *, keep: float = 1.0, alpha: float = 1.0) -> None:
        """``into = keep * into + alpha * decode(packet)``, without the whole decoded row where the codec can."""
        codec = self._codec()
        self._works("decode", codec, packet.numel)
        if into.is_meta:
            return
        with span(f"decode and add {codec!r}, {self.leaf}"):
            codec.accumulate(packet.data, into, keep, alpha)

    @property
    def plain(self) -> bool:
        """Whether packets are the numbers themselves: ``decode(encode(x))`` is `x`, in the same place."""
        return isinstance(self.codec, Cast) and self.codec.dtype == self.dtype

    def exchange(self, *, send: Mapping[int, Packet], recv: Mapping[int, int | Tensor]) -> Exchange:
        """One batch of sends and receives; ``await`` gives the packets received, by peer.

        Args:
            send: group rank of the peer -> packet.
            recv: group rank of the peer -> how many numbers it sends; a peer that sends none may be left out. Where
                packets are `plain`, the flat tensor that is to receive the numbers, instead.
        """
        for peer in (*send, *recv):
            if not 0 <= peer < self.size or peer == self.rank:
                what = (
                    "itself"
                    if peer == self.rank
                    else f"rank {peer}, which does not exist: ranks are 0 to {self.size - 1}"
                )
                raise PipelineError(
                    f"{self.stage}: rank {self.rank} was told to exchange with {what} ({_shown(_caller())})"
                )
        sizes, places = {}, {}
        for peer, expected in recv.items():
            numel = expected if isinstance(expected, int) else expected.numel()
            sizes[peer] = (numel, self._codec().wire_bytes(numel))
            if not isinstance(expected, int):
                places[peer] = self._place(expected)
        return Exchange(*self._about(), send, sizes, self.device, places)

    def exchange_bytes(self, send: Mapping[int, Tensor], recv: Mapping[int, int]) -> Exchange:
        """An exchange of raw bytes on the CPU that carries control information, counted apart from the payload."""
        packets = {peer: Packet(data, data.numel()) for peer, data in send.items()}
        sizes = {peer: (size, size) for peer, size in recv.items()}
        return Exchange(*self._about(), packets, sizes, torch.device("cpu"), {}, control=True)

    async def allowed(self) -> None:
        """Wait until something may be sent, as every exchange does by itself."""
        if self.gate is not None and not self.gate.open:
            await self.gate.passed()

    def begin(self, exchange: Exchange) -> Begin:
        """Post an exchange without waiting for it; ``await`` gives a ticket for `end`."""
        exchange.outstanding.remove(exchange)
        return Begin(*self._about(), exchange)

    def end(self, ticket: Any) -> End:
        """Wait for an exchange that `begin` has posted."""
        return End(*self._about(), ticket)

    def all_reduce(self, x: Tensor, op: Literal["sum"] = "sum") -> AllReduce:
        """The native collective: ``await`` gives `x` summed over the ranks, in place, in `x`'s dtype."""
        if op != "sum":
            raise PipelineError(f'comm.all_reduce: expected op="sum", got {op!r} ({_shown(_caller())})')
        return AllReduce(*self._about(), x)

    def fork(self, children: Sequence[Coroutine[Any, Any, T]]) -> Fork:
        """Run coroutines concurrently, a few in flight at a time; ``await`` gives the list of their results."""
        return Fork(*self._about(), children)

    def forgotten(self) -> Request[Any] | None:
        """A request that was made on this comm and never awaited, if there is one."""
        return self._outstanding[0] if self._outstanding else None

    def works(self, what: str, numbers: int) -> None:
        """Say that this rank does `what` on so many numbers, for a plan to take the time into account."""
        if self.observer is not None:
            self.observer.works(what, numbers)

    def _works(self, what: str, codec: Codec, numbers: int) -> None:
        if self.observer is not None:
            self.observer.works(f"{what} {named(codec)}", numbers)

    def _place(self, tensor: Tensor) -> Tensor:
        if not self.plain or tensor.dtype != self.dtype or not tensor.is_contiguous():
            raise PipelineError(
                f"{self.stage}: recv of a tensor needs plain packets and a contiguous tensor of {self.dtype}, got "
                f"{tensor.dtype} and {self.codec!r}; receive a number of elements and decode ({_shown(_caller())})"
            )
        return tensor.view(torch.uint8)

    def _codec(self) -> Codec:
        if self.codec is None:
            raise PipelineError(f"{self.stage or 'a transform'} used the codec of a comm that is not for one leaf")
        return self.codec

    def _about(self) -> tuple[tuple[str, int, str], str | None, str, str, list[Request[Any]], Gate | None]:
        return _caller(), self.axis, self.leaf, self.stage, self._outstanding, self.gate


def named(codec: Codec) -> str:
    """What a plan calls a codec: as code, or the dtype of numbers that travel as they are."""
    return str(codec.dtype).removeprefix("torch.") if type(codec) is Cast else repr(codec)


def _shown(place: tuple[str, int, str]) -> str:
    file, line, function = place
    return f"{file}:{line} in {function}"


def _caller() -> tuple[str, int, str]:
    """File, line and function of the code that called a method of `Comm`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
