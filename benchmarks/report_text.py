"""The words of docs/performance.md; every figure in it comes from `report.py`."""

HEAD = """# Performance

Made by `python benchmarks/report.py` from the files named below, and never edited by hand. Every figure is a median.
In a table all contenders ran in one run, in turn, round after round, and the slowest rank counts. A ratio is the median
over the rounds of a contender's time over the baseline's of the same round, with quartiles in parentheses.
`benchmarks/README.md` says how each scenario is measured.

Beside every time stands the limit, and the share of it that is reached. Behind a shaped link it is what one rank must
send, headers not counted, over the rate of the link. On loopback it is the time to copy what one rank sends twice, into
a socket and out of it, while all ranks do so on the same cores; sums and system calls are not in it, so nothing comes
near. For a training step it is never less than computing alone takes. For codecs it is the bytes read and written over
those of a copy."""

SIZES = """4 ranks; one leaf up to 4 MiB, above that leaves of 4 MiB in buckets of 4 MiB. `all_reduce` is
`dist.all_reduce` of one flat buffer in place, not even divided; `ring` is `ring_reduce()`, `direct` `all_to_all_avg()`,
`all_gather` `all_gather_avg()`, *donated* with `donate=True`, *unchecked* with `check="first"`. Cells: ratio to
`all_reduce`, share of the limit.

![ratios by size](images/performance-sizes.svg)"""

DENSE = """25 MB in 25 matrices and 50 vectors, by number of ranks. The baseline is what one writes by hand."""

SMALL = """200 leaves of 1 KB, against one `dist.all_reduce` of a tensor that is flat already."""

COMPRESSION = """The same 25 MB through `error_feedback` and compression; one `update` with its state."""

TRAINING = """A perceptron of 6.57 million parameters (256, seven times 1024, 10), batch 16 on each of 4 ranks: forward,
backward, synchronisation, SGD.

![milliseconds of a step](images/performance-training.svg)"""

HIERARCHICAL = """2 nodes of 2 ranks, one uplink each; the limit counts what leaves a node."""

MEMORY = """How far resident memory rises during a call above its level before the first, on the rank where it is most;
82 MB of gradients. Without `donate=True` the result itself is one tree of it.

![peaks](images/performance-memory.svg)"""

OVERHEAD = """A warm `update` on rank 0 of 4 in one process, over a transport that answers at once with what was sent:
what is left is the library, packing and codecs included. Leaves of 1 KiB."""

CODECS = """32 MiB of float32 on one core, in copies of the same numbers into memory that is there."""

SECTIONS = [
    ("dense", "Dense sync of a transformer's gradients", DENSE),
    ("small", "Many small leaves", SMALL),
    ("compression", "Compressed sync", COMPRESSION),
    ("training", "Whole training steps", TRAINING),
    ("hierarchical", "Hierarchical sync", HIERARCHICAL),
    ("memory", "Peak memory", MEMORY),
    ("overhead", "Python overhead of a cached plan", OVERHEAD),
    ("codecs", "Codecs alone", CODECS),
    ("import", "Import", "In a new process each time."),
]
"""Scenario, heading, what stands below it."""
