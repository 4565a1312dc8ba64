"""`low_rank`: PowerSGD, two thin matrices travel in place of each big one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ptcollect.codecs.codec import Key
from ptcollect.comm import Comm
from ptcollect.dtypes import fresh_copy, from_flat, restrided, wide_dtype
from ptcollect.errors import PipelineError
from ptcollect.pipeline import Pipeline, Transform, Wrapped
from ptcollect.state import State
from ptcollect.tree import Leaves
from ptcollect.value import refuse_tree, whole_number


def low_rank(rank: int = 4) -> Transform:
    r"""Send P and Q with :math:`M \approx \hat P Q^\top` for each matrix, one power iteration per step, warm-started.

    .. math::
        P = \text{mean}_r(M_r Q), \quad \hat P = \text{orth}(P), \quad Q' = \text{mean}_r(M_r^\top \hat P), \quad
        y = \hat P Q'^\top

    A leaf of two or more dims is seen as out x rest. Vectors, and matrices that P and Q together would not be smaller
    than, are sent dense, with the Ps. The pipeline inside runs twice, once for all Ps and dense leaves and once for all
    Qs, so it composes with any codec and reducer. The residual is :math:`M_r - \hat P (Q_r - e_r)^\top` with
    :math:`e_r` what was lost of Q; what was lost of P needs none, since P is only a basis.

    Args:
        rank: columns of P and Q, from 1.

    Returns:
        A Transform with state ``{"basis": {path: Q}, "p": {...}, "q": {...}}``; the latter two belong to the pipeline
        inside.

    Raises:
        ValueError: `rank` is not a positive int.
        PipelineError: when it wraps a pipeline without consensus.

    Source: Vogels, Karimireddy and Jaggi 2019, PowerSGD, algorithm 1.

    >>> import torch, ptcollect as pc
    >>> sync = pc.chain(pc.error_feedback(), pc.low_rank(1), pc.ring_reduce())
    >>> run = pc.simulate(sync, [{"w": torch.ones(8, 8)}, {"w": torch.ones(8, 8) * 3}])
    >>> run.trees[0]["w"][0, :2], run.bytes  # 2 x 8 numbers instead of 64
    (tensor([2.0000, 2.0000]), [64, 64])
    """
    refuse_tree("low_rank", "rank", rank)
    whole_number("low_rank(rank)", rank)
    return LowRank(rank)


@dataclass(frozen=True, repr=False)
class LowRank(Transform):
    """See `low_rank`."""

    name = "low_rank"
    stateful = True
    keeps_inner_state = True
    lossy = True
    manages_ownership = True

    rank: int = 4

    def check(self, inner: Pipeline) -> None:
        if not inner.consensus:
            raise PipelineError(
                f"{self!r} around {inner!r}: all ranks need the same P and Q; use a reducer with consensus"
            )
        for stage in inner.walk():
            transform = stage.transform if isinstance(stage, Wrapped) else None
            if transform is not None and (transform.goes_outside_error_feedback or isinstance(transform, LowRank)):
                raise PipelineError(
                    f"{transform!r} inside {self!r} would see P and Q; write chain({transform!r}, {self!r}, ...)"
                )
            if not stage.communicates:
                raise PipelineError(
                    f"{stage!r} inside {self!r} would see P and Q; write chain({stage!r}, {self!r}, ...)"
                )

    def init(self, inner: Pipeline, params: Leaves) -> State:
        basis, p, q = {}, {}, {}
        for path, leaf in params.items():
            size = self._thin(leaf)
            if size is None:
                p[path] = leaf
                continue
            rows, columns, rank = size
            generator = Key(0, path, 0, 0).generator(0, torch.device("cpu"))
            start = torch.randn(columns, rank, generator=generator, dtype=torch.float32)
            basis[path] = _orthonormal(start.to(device=leaf.device, dtype=wide_dtype(leaf.dtype)))
            p[path] = leaf.new_empty((rows, rank), dtype=wide_dtype(leaf.dtype))
            q[path] = basis[path]
        return {"basis": basis, "p": inner.begin(p), "q": inner.begin(q)}

    async def update(self, inner: Pipeline, tree: Leaves, state: State, comm: Comm) -> tuple[Leaves, State]:
        if all(axis.size == 1 for axis in comm.axes.values()):  # alone: nothing to send, so nothing to lose
            return {path: leaf if comm.owned else fresh_copy(leaf) for path, leaf in tree.items()}, state
        basis: Leaves = state["basis"]
        matrices = {path: _matrix(leaf) for path, leaf in tree.items() if self._thin(leaf) is not None}
        self._check_basis(matrices, basis)

        lost_p: Leaves | None = None if comm.residuals is None else {}
        multiplications = sum(m.numel() * basis[path].shape[1] for path, m in matrices.items())
        numbers = sum(m.numel() for m in matrices.values())
        comm.works("multiply", multiplications)
        ps = {
            path: _bounded(_times, matrices[path], basis[path]) if path in matrices else leaf
            for path, leaf in tree.items()
        }
        # Dense leaves may be the caller's own, so nothing in this round is overwritten.
        first, p_state = await inner.apply(ps, state["p"], comm.replace(owned=False, residuals=lost_p))
        comm.works("orthonormal", 2 * sum(first[path].numel() for path in matrices))
        orthogonal = {path: _orthonormal(first[path]) for path in matrices}

        lost_q: Leaves | None = None if comm.residuals is None else {}
        comm.works("multiply", multiplications)
        qs = {path: _bounded(_transposed_times, matrix, orthogonal[path]) for path, matrix in matrices.items()}
        mine = {path: q.clone() for path, q in qs.items()} if comm.residuals is not None else {}
        second, q_state = await inner.apply(qs, state["q"], comm.replace(owned=True, residuals=lost_q, scope="Q of "))

        comm.works("multiply", multiplications * (1 if comm.residuals is None else 2))
        comm.works("copy", numbers * (1 if comm.residuals is None else 3))
        out = dict(first)
        for path in matrices:
            product = _outer(orthogonal[path], second[path])
            out[path] = restrided(product.view(tree[path].shape).to(tree[path].dtype), tree[path])
        if comm.residuals is not None and lost_p is not None and lost_q is not None:
            comm.residuals.update({path: lost for path, lost in lost_p.items() if path not in matrices})
            for path, matrix in matrices.items():
                sent = mine[path] - from_flat(lost_q[path], mine[path]) if path in lost_q else mine[path]
                arrived = _outer(orthogonal[path], sent)
                comm.residuals[path] = torch.sub(matrix, arrived, out=arrived).view(-1)
        new_basis = {**basis, **{path: _orthonormal(second[path]) for path in matrices}}
        return {path: out[path] for path in tree}, {"basis": new_basis, "p": p_state, "q": q_state}

    def _thin(self, leaf: Tensor) -> tuple[int, int, int] | None:
        """Rows, columns and rank of P and Q for `leaf`; None where it is sent dense."""
        if leaf.dim() < 2 or leaf.numel() == 0 or not leaf.is_floating_point():
            return None
        rows, columns = leaf.shape[0], leaf.numel() // leaf.shape[0]
        rank = min(self.rank, rows, columns)
        return (rows, columns, rank) if (rows + columns) * rank < rows * columns else None

    def _check_basis(self, matrices: Leaves, basis: Leaves) -> None:
        for path, matrix in matrices.items():
            if path not in basis or basis[path].shape[0] != matrix.shape[1]:
                raise PipelineError(
                    f"{self!r}: the state has no basis for leaf {path!r} seen as {tuple(matrix.shape)}; make the state "
                    "with init(params) for these parameters"
                )


def _matrix(leaf: Tensor) -> Tensor:
    return _aligned(leaf.reshape(leaf.shape[0], -1).to(wide_dtype(leaf.dtype)))


def _aligned(x: Tensor) -> Tensor:
    """`x` at an address as allocations have it: the last bits of a product depend on where its factors lie.

    A gradient that is a view of DDP's bucket lies anywhere.
    """
    return x if x.is_meta or x.data_ptr() % _ALIGNMENT == 0 else x.clone()


_ALIGNMENT = 64  # bytes


# Products with thin matrices, in the forms that MKL is fast at: measured for 1024 x 1024 and 4 columns.


def _times(matrix: Tensor, thin: Tensor) -> Tensor:
    """``matrix @ thin``; by columns it takes a quarter of the time that it takes by rows."""
    return (matrix @ thin.t().contiguous().t()).contiguous()


def _transposed_times(matrix: Tensor, thin: Tensor) -> Tensor:
    """``matrix.t() @ thin``; so spelt it takes twelve times as long."""
    return (thin.t().contiguous() @ matrix).t().contiguous()


def _outer(p: Tensor, q: Tensor) -> Tensor:
    """``p @ q.t()``; with zeros added up to 16 columns it takes two thirds of the time."""
    short = -p.shape[1] % 16 if p.shape[1] > 1 else 0
    p, q = (_aligned(torch.nn.functional.pad(each, (0, short))) for each in (p, q))
    return p @ q.t()


def _bounded(multiply: Callable[[Tensor, Tensor], Tensor], matrix: Tensor, thin: Tensor) -> Tensor:
    """A product without overflow on the way, and bounded by the largest finite number."""
    product = multiply(matrix, thin)
    if product.is_meta or bool(torch.isfinite(product).all()):
        return product
    size = float(matrix.abs().amax())
    if not size < float("inf"):
        return product
    largest = torch.finfo(matrix.dtype).max
    return multiply(matrix / size, thin).mul_(size).clamp_(-largest, largest)


def _orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis of the space that `columns` span; a whole one also where they are dependent or zero."""
    size = columns.abs().amax()
    scaled = columns / torch.where((size > 0) & torch.isfinite(size), size, 1.0)
    # The QR decomposition of a matrix that lacks rank, or is zero, still has a whole orthonormal Q.
    basis: Tensor = torch.linalg.qr(scaled).Q
    return basis.contiguous()
