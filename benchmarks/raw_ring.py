"""What a link gives to plain TCP: every rank sends to the right and receives from the left, in one stream each."""

from __future__ import annotations

import os
import socket
import threading

import torch.distributed as dist


class RawRing:
    """Connections to the neighbours; a call moves `size` bytes, which nobody looks at, and waits for as many."""

    def __init__(self, size: int) -> None:
        rank, n = dist.get_rank(), dist.get_world_size()
        with socket.create_server((_own_address(), 0)) as server:
            addresses: list[tuple[str, int] | None] = [None] * n
            dist.all_gather_object(addresses, server.getsockname())
            right = addresses[(rank + 1) % n]
            assert right is not None
            self.right = socket.create_connection(right)  # the listener's backlog takes it before anybody accepts
            self.left, _ = server.accept()
        self.data, self.room = bytearray(size), bytearray(2**20)

    def __call__(self, _: object) -> None:
        sender = threading.Thread(target=self.right.sendall, args=(self.data,))
        sender.start()
        missing = len(self.data)
        while missing:
            got = self.left.recv_into(self.room, min(missing, len(self.room)))  # no more: the next call's may follow
            if not got:
                raise RuntimeError("the left neighbour closed its connection")
            missing -= got
        sender.join()

    def close(self) -> None:
        """Close both connections."""
        self.right.close()
        self.left.close()


def _own_address() -> str:
    """This rank's address on the network that rank 0 is reached by."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 1))  # sends nothing
        address: str = probe.getsockname()[0]
        return address
