"""How the ranks of the model find each other."""

import os
import socket

import psutil
import ray
import torch.distributed as dist
from verl.utils.device import get_device_name, get_nccl_backend
from verl.utils.distributed import initialize_global_process_group_ray

LOOPBACK = "127.0.0.1"


def join_process_group() -> bool:
    """verl's way; with a Ray of our own the meeting point listens on loopback, where torch's listens everywhere.

    False where this process is in a group already.
    """
    if dist.is_initialized():
        return False
    name_own_interface()
    device = get_device_name()
    backend = "gloo" if device == "cpu" else f"cpu:gloo,{device}:{get_nccl_backend()}"
    if os.environ["MASTER_ADDR"] != LOOPBACK or "DIST_INIT_METHOD" in os.environ:
        initialize_global_process_group_ray(backend=backend)
        return True
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = loopback_store(rank, ranks, int(os.environ["MASTER_PORT"]))
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    return True


def name_own_interface() -> None:
    """gloo looks up the machine's own name, which many answer with a loopback address. Ray knows the one to be used."""
    if "GLOO_SOCKET_IFNAME" in os.environ or not ray.is_initialized():
        return
    address = ray.util.get_node_ip_address().strip("[]")
    for interface, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = interface
            return


def loopback_store(rank: int, ranks: int, port: int) -> dist.Store:
    """What torch makes of MASTER_ADDR and MASTER_PORT, with a socket of ours to listen on. One rank needs none."""
    if ranks == 1:
        return dist.HashStore()
    if rank:
        return dist.TCPStore(LOOPBACK, port, ranks, is_master=False, timeout=dist.default_pg_timeout)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((LOOPBACK, port))
    listener.listen(ranks)
    return dist.TCPStore(
        LOOPBACK, port, ranks, is_master=True, timeout=dist.default_pg_timeout, master_listen_fd=listener.detach()
    )


def first_on_its_machine() -> bool:
    """Among the ranks of the model. verl says how many of them a machine has."""
    return dist.get_rank() % int(os.environ.get("RAY_LOCAL_WORLD_SIZE", dist.get_world_size())) == 0
