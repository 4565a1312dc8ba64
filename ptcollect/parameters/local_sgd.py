"""`local_sgd` and `post_local_sgd`: parameters averaged every few steps."""

from __future__ import annotations

from dataclasses import dataclass

from ptcollect.comm import Comm
from ptcollect.pipeline import Pipeline, Transform
from ptcollect.state import State
from ptcollect.tree import Leaves
from ptcollect.value import whole_number


def local_sgd(every: int) -> LocalSgd:
    r"""Average the parameters every H steps, and let the ranks train by themselves in between.

    .. math:: \theta_r \leftarrow \frac{1}{n} \sum_s \theta_s \quad \text{at steps } H, 2H, \dots

    Call the pipeline on the parameters once per step, ``state = sync_params(pipeline, module, state)``: on the other
    steps nothing is sent and the parameters stay as they are. Leaves of integers, such as counters of batches, are
    never averaged. What `compress` inside drops is dropped from the parameters themselves; ``diloco(every,
    outer=sgd(1.0))`` averages as well and sends differences.

    Args:
        every: H, steps from one average to the next.

    Returns:
        A Transform that works on parameters; gradient hooks refuse it.

    Raises:
        ValueError: `every` is no whole number from 1.

    Source: Stich 2018, Local SGD converges fast and communicates little, algorithm 1.

    >>> import torch, ptcollect as pc
    >>> sync = pc.chain(pc.local_sgd(2), pc.ring_reduce())
    >>> once = pc.simulate(sync, [torch.tensor([1.0]), torch.tensor([3.0])])
    >>> once.trees, once.bytes
    ([tensor([1.]), tensor([3.])], [0, 0])
    >>> pc.simulate(sync, once.trees, once.states).trees
    [tensor([2.]), tensor([2.])]
    """
    return LocalSgd(whole_number("local_sgd(every)", every))


def post_local_sgd(dense: int, *, every: int) -> PostLocalSgd:
    """Average the parameters at each of the first steps, and every H steps after them.

    While plain or momentum SGD runs inside, averaging parameters at every step is the same as averaging gradients, so
    this begins as DDP and goes on as `local_sgd`. All ranks are one group.

    Args:
        dense: number of steps at the beginning after which parameters are averaged each time, from 0.
        every: H, steps from one average to the next after that.

    Returns:
        A Transform that works on parameters.

    Raises:
        ValueError: a number that is none.

    Source: Lin et al. 2018, Don't use large mini-batches, use local SGD, section 3.

    >>> import torch, ptcollect as pc
    >>> sync = pc.chain(pc.post_local_sgd(1, every=2), pc.ring_reduce())
    >>> run, sent = pc.simulate(sync, [torch.zeros(2)] * 2), []
    >>> for _ in range(4):
    ...     sent.append(run.messages[0])
    ...     run = pc.simulate(sync, run.trees, run.states)
    >>> sent
    [2, 0, 2, 0]
    """
    return PostLocalSgd(
        whole_number("post_local_sgd(dense)", dense, least=0), whole_number("post_local_sgd(every=...)", every)
    )


class _Averaged(Transform):
    """What both have in common: at some steps the parameters go through the pipeline inside."""

    works_on = "parameters"
    uses_step = True
    goes_outside_error_feedback = True

    def rounds_until(self, step: int) -> int:
        """How many averages there have been before `step`."""
        raise NotImplementedError

    def quiet(self, step: int) -> bool:
        return self.rounds_until(step + 1) == self.rounds_until(step)

    async def update(self, inner: Pipeline, tree: Leaves, state: State, comm: Comm) -> tuple[Leaves, State]:
        if self.quiet(comm.step):
            return tree, state
        moving = {path: leaf for path, leaf in tree.items() if leaf.is_floating_point() or leaf.is_complex()}
        # Inside, steps are rounds: with a topology that changes by step, ranks would else meet the same peers always.
        rounds = comm.replace(step=self.rounds_until(comm.step))
        averaged, after = await inner.apply(moving, state["inner"], rounds)
        return {path: averaged.get(path, leaf) for path, leaf in tree.items()}, {"inner": after}


@dataclass(frozen=True, repr=False)
class LocalSgd(_Averaged):
    """See `local_sgd`."""

    name = "local_sgd"

    every: int

    def rounds_until(self, step: int) -> int:
        return step // self.every


@dataclass(frozen=True, repr=False)
class PostLocalSgd(_Averaged):
    """See `post_local_sgd`."""

    name = "post_local_sgd"

    dense: int
    every: int

    def rounds_until(self, step: int) -> int:
        return min(step, self.dense) + max(step - self.dense, 0) // self.every
