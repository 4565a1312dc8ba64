"""Gradient synchronisation for PyTorch as pure functions that compose.

>>> import torch, ptcollect as pc
>>> pc.simulate(pc.ring_reduce(), [{"w": torch.ones(2)}, {"w": torch.zeros(2)}]).trees[0]
{'w': tensor([0.5000, 0.5000])}
"""

from ptcollect import codecs, topologies
from ptcollect.adapters.ddp import as_ddp_hook
from ptcollect.adapters.fsdp import as_fsdp_hook
from ptcollect.adapters.loop import sync_grads, sync_params
from ptcollect.adapters.overlap import Overlap, overlap
from ptcollect.chain import chain
from ptcollect.checkpoint import from_rank_local, rank_local, reshard, state_summary
from ptcollect.codecs.codec import Codec
from ptcollect.comm import Comm, Packet
from ptcollect.errors import NonFiniteError, PeerLostError, PipelineError, PtcollectError, TreeMismatchError
from ptcollect.link import Link, two_level
from ptcollect.maps import clip_by_global_norm, clip_by_value, scale, stateless
from ptcollect.options import RunOptions
from ptcollect.parameters.diloco import diloco
from ptcollect.parameters.local_sgd import local_sgd, post_local_sgd
from ptcollect.parameters.outer import nesterov, sgd
from ptcollect.parameters.streaming_diloco import streaming_diloco
from ptcollect.partition import partition
from ptcollect.pending import Pending
from ptcollect.piecewise import piecewise
from ptcollect.pipeline import Pipeline, Transform
from ptcollect.plan import Plan, plan
from ptcollect.reducers.all_gather import all_gather_avg
from ptcollect.reducers.all_to_all import all_to_all_avg
from ptcollect.reducers.auto import auto_reduce
from ptcollect.reducers.broadcast import broadcast
from ptcollect.reducers.gather import gather_avg
from ptcollect.reducers.gossip import gossip_avg
from ptcollect.reducers.native import all_reduce
from ptcollect.reducers.push_sum import push_sum
from ptcollect.reducers.reducer import reducer
from ptcollect.reducers.ring import ring_reduce
from ptcollect.simulate import Simulation, simulate
from ptcollect.timeline import Timeline
from ptcollect.topologies.draw import draw_topology
from ptcollect.topologies.mixing import mixing_matrix, rounds_to_consensus, spectral_gap
from ptcollect.traffic import Traffic, traffic
from ptcollect.transforms.bucketize import bucketize
from ptcollect.transforms.compress import compress
from ptcollect.transforms.error_feedback import error_feedback
from ptcollect.transforms.low_rank import low_rank
from ptcollect.transforms.shard import shard
from ptcollect.transforms.skip_nonfinite import skip_nonfinite

__version__ = "0.1.0"

__all__ = [
    "Codec",
    "Comm",
    "Link",
    "NonFiniteError",
    "Overlap",
    "Packet",
    "PeerLostError",
    "Pending",
    "Pipeline",
    "PipelineError",
    "Plan",
    "PtcollectError",
    "RunOptions",
    "Simulation",
    "Timeline",
    "Traffic",
    "Transform",
    "TreeMismatchError",
    "all_gather_avg",
    "all_reduce",
    "all_to_all_avg",
    "as_ddp_hook",
    "as_fsdp_hook",
    "auto_reduce",
    "broadcast",
    "bucketize",
    "chain",
    "clip_by_global_norm",
    "clip_by_value",
    "codecs",
    "compress",
    "diloco",
    "draw_topology",
    "error_feedback",
    "from_rank_local",
    "gather_avg",
    "gossip_avg",
    "local_sgd",
    "low_rank",
    "mixing_matrix",
    "nesterov",
    "overlap",
    "partition",
    "piecewise",
    "plan",
    "post_local_sgd",
    "push_sum",
    "rank_local",
    "reducer",
    "reshard",
    "ring_reduce",
    "rounds_to_consensus",
    "scale",
    "sgd",
    "shard",
    "simulate",
    "skip_nonfinite",
    "spectral_gap",
    "state_summary",
    "stateless",
    "streaming_diloco",
    "sync_grads",
    "sync_params",
    "topologies",
    "traffic",
    "two_level",
]
