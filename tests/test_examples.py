"""Every example as a user runs it: a command, its exit code and what it prints. Warnings are errors in there too."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from torch.multiprocessing import ProcessRaisedException

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import digits_demo
from digits_report import STYLES
from launch import launch

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def start(*arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
    """Run ``python *arguments`` in a session of its own."""
    of_a_launch = ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")
    env = {name: value for name, value in os.environ.items() if name not in of_a_launch}
    env |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "COLUMNS": "100", **environment}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def output_of(process: subprocess.Popen[str], seconds: float = 100) -> str:
    """What it prints until it and all ranks have ended; kills them after so many seconds."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the ranks too
        output, _ = process.communicate()
        pytest.fail(f"{process.args} did not end within {seconds} s and printed\n{output}")
    return output


def run(*arguments: str | Path, **environment: str) -> str:
    """What ``python *arguments`` prints; fails if it does not succeed."""
    process = start(*arguments, **environment)
    output = output_of(process)
    assert process.returncode == 0, output
    return output


# The small ones -----------------------------------------------------------------------------------------------------


def test_custom_loop():
    output = run(EXAMPLES / "custom_loop.py")
    losses = [float(loss) for loss in re.findall(r"step +\d+   loss on rank 0: (\S+)", output)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    assert output.splitlines()[-1] == (
        'chain(bucketize("25MiB"), ring_reduce(), clip_by_global_norm(5.0)) on 2 ranks found [1.0, -2.0, 3.0] and 0.5'
    )


def test_ddp_hook():
    output = run(EXAMPLES / "ddp_hook.py")
    losses = re.findall(r"loss on rank 0 after 50 steps (\d\.\d+)", output)
    assert len(losses) == 2
    assert losses[0] == losses[1]
    assert float(re.findall(r"any two parameters: (\S+)", output)[0]) <= 1e-5


def test_overlap():
    output = run(EXAMPLES / "overlap.py", GLOO_SOCKET_IFNAME="lo")
    losses = [float(loss) for loss in re.findall(r"step \d+   loss on rank 0: (\S+)", output)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert "the same bits as sync_grads" in output


def test_torch_func():
    output = run(EXAMPLES / "torch_func.py")
    assert 'chain(bucketize("25MiB"), all_to_all_avg()) on 2 ranks: loss on rank 0 0.0' in output
    assert float(re.findall(r"one process on the whole data: (\S+)", output)[0]) <= 1e-5


def test_torch_func_torchopt():
    pytest.importorskip("torchopt")
    output = run(EXAMPLES / "torch_func_torchopt.py")
    assert 'chain(bucketize("25MiB"), all_to_all_avg()) on 2 ranks, TorchOpt' in output
    first, last = map(float, re.findall(r"from (\S+) to (\S+) in 30 steps", output)[0])
    assert 0 < last < first / 2
    assert float(re.findall(r"samples and torch\.optim: (\S+)", output)[0]) <= 1e-9


def test_token_weights():
    output = run(*TORCHRUN, EXAMPLES / "token_weights.py", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    assert "weights 1 and 3, gradients 1 and 5: both ranks get 4.0" in output
    assert float(re.findall(r"one process on all tokens: (\S+)", output)[0]) <= 1e-5
    assert float(re.findall(r"a mean of the ranks' means: +(\S+)", output)[0]) > 0.01  # so that weights matter here
    assert "sent in each step: 816 bytes" in output  # 12 * 8 + 8 * 12 + 12 numbers of 4 bytes: half of them twice


@pytest.mark.parametrize("how", ["itself", "torchrun"])
def test_hsdp_mesh(how):
    start_it = (*TORCHRUN[:-1], "4") if how == "torchrun" else ()
    output = run(*start_it, EXAMPLES / "hsdp_mesh.py", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    assert output.count("one process on all the data") == 1
    assert "chain(bucketize(), ring_reduce()) on 2 replicas of 2 shards" in output
    dense, compressed = map(float, re.findall(r"any two parameters: (\S+)", output))
    assert dense <= 1e-5
    assert 1e-5 < compressed <= 5e-3
    # A half of 32 * 16 + 32 numbers, and of 2 * 32 + 2 with the zeros that fill them up: 272 + 33, half of them twice.
    # In int8 one byte each, and a scale of 4 bytes for each half of either module.
    assert re.findall(r"in each step: (\d+) bytes", output) == ["1220", "321"]


def test_lightning_ddp():
    pytest.importorskip("lightning")
    # Lightning 2.6 uses a class of torch's pytrees that 2.13 deprecates.
    output = run(
        EXAMPLES / "lightning_ddp.py",
        GLOO_SOCKET_IFNAME="lo",
        PYTHONWARNINGS="error,ignore:`isinstance(treespec",
    )
    assert 'chain(bucketize("25MiB"), ring_reduce(), clip_by_global_norm(1.0)) under Lightning on 2 ranks' in output
    assert float(re.findall(r"one process on all samples: (\S+)", output)[0]) <= 1e-5
    # 4 numbers of 4 bytes, half of them twice, in 12 steps; a ddp_comm_hook is never called on CPU, as the docs say.
    assert "bytes sent by the pipeline: with the callback 192, with ddp_comm_hook 0" in output


def test_batch_isend_irecv():
    output = run(EXAMPLES / "batch_isend_irecv.py")
    assert "5 simulated ranks end with the same bits" in output
    assert "rounds  recursive doubling [4, 2, 2, 2, 2], ring [8, 8, 8, 8, 8]" in output
    assert 'chain(bucketize("25MiB"), compress("bf16"), recursive_doubling_avg()) on 3 processes:' in output
    # 110 numbers in bf16, once to its partner and once beyond.
    assert "the bits and the bytes of the simulation; rank 0 sent 440 bytes" in output


# The demo -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["itself", "torchrun", "one rank"])
def test_digits_demo(how, tmp_path):
    picture = tmp_path / "curves.png"
    options = ("--steps", "20", "--output", picture)
    if how == "torchrun":
        output = run(*TORCHRUN, EXAMPLES / "digits_demo.py", *options, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    else:
        output = run(EXAMPLES / "digits_demo.py", "--ranks", "1" if how == "one rank" else "2", *options)

    ranks = "1 rank x 96 images" if how == "one rank" else "2 ranks x 48 images"
    assert output.count(f"Digits: 38,282 parameters, 20 steps of {ranks}") == 1  # from one rank only
    assert f"Loss curves: {picture}" in output
    assert max(map(len, output.splitlines())) <= 100

    number = r"(\S+)"
    way = r"(plain DDP|custom loop, ring|DDP hook, ring|custom loop, bf16 ring)"
    rows = {
        title: (accuracy, loss, float(sent), difference)
        for title, accuracy, loss, sent, difference in re.findall(
            rf"^  {way} +{number}% +{number} +{number} kB \*? +{number} *$", output, flags=re.MULTILINE
        )
    }
    assert list(rows) == ["plain DDP", "custom loop, ring", "DDP hook, ring", "custom loop, bf16 ring"]
    assert rows["DDP hook, ring"] == rows["custom loop, ring"]
    assert rows["plain DDP"] == (*rows["DDP hook, ring"][:3], "-")
    assert rows["DDP hook, ring"][3] == "0"  # two numbers have one sum, whoever forms it
    ring, bf16 = rows["custom loop, ring"][2], rows["custom loop, bf16 ring"][2]
    assert ring == (0 if how == "one rank" else 153.1)  # 38,282 * 4 B, half of it twice
    assert bf16 == pytest.approx(ring / 2, abs=0.1)
    assert (float(rows["custom loop, bf16 ring"][3]) > 0) == (how != "one rank")

    pixels = imread(picture)[..., :3]
    assert pixels.shape[0] > 800
    assert pixels.shape[1] > 1000
    for style in STYLES:
        drawn = (np.abs(pixels - to_rgb(style["color"])) < 0.01).all(axis=-1).sum()
        assert drawn > 100, style["color"]


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--output", "/nowhere/curves.png", "--output: there is no folder /nowhere"),
        ("--ranks", "0", "--ranks: from 1 to 96, the number of images in a batch"),
        ("--steps", "0", "--steps: at least 1"),
    ],
)
def test_the_demo_refuses_what_cannot_work_before_it_starts(option, value, reason, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["digits_demo.py", option, value])
    with pytest.raises(SystemExit, match="2"):
        digits_demo.main()
    assert reason in capsys.readouterr().err


# The launcher -------------------------------------------------------------------------------------------------------


def rank_1_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 has had enough")
    time.sleep(300)


def test_a_rank_that_raises_ends_the_launch_with_its_traceback():
    with pytest.raises(ProcessRaisedException, match="rank 1 has had enough"):
        launch(rank_1_raises, ranks=2, timeout=100)


def test_ranks_that_never_end_are_killed():
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"not all of the 2 ranks ended within 0\.5 s"):
        launch(rank_1_raises, ranks=2, timeout=0.5)
    assert time.monotonic() - begin < 30


def test_ranks_do_not_outlive_the_process_that_started_them():
    process = start(EXAMPLES / "custom_loop.py")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(children.read_text().split()) < 3:  # two ranks and multiprocessing's tracker of resources
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    assert "found" not in output_of(process)  # what the last line of a whole run says
