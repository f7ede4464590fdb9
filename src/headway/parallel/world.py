"""The workers of a run: rank, device, mesh, and small exchanges between workers."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from headway.config.derived.mesh import MeshShape
from headway.core.coordination.heartbeat import exchanging
from headway.core.coordination.launched import (
    BIND_VARIABLE,
    RENDEZVOUS_VARIABLE,
    place_from_environment,
    world_size_from_environment,
)
from headway.core.errors import ConfigError, HeadwayError
from headway.core.process.exit import has_gpu_groups, keep_gloo_threads
from headway.core.process.waiting import wait_until
from headway.parallel.loopback import keep_to_loopback

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_opened = count()
#: Variables that define the rendezvous.
_stores: dict[tuple[str | None, str | None], Any] = {}
_MEET_AT = (RENDEZVOUS_VARIABLE, "MASTER_ADDR", "MASTER_PORT")
_ALONE = MeshShape()


@dataclass(frozen=True)
class World:
    """One worker's view of all workers. A world of one has no process group, and every exchange is the identity."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    mesh: MeshShape = _ALONE
    """Arrangement of the workers."""
    number: int = 0
    """Number of earlier worlds of this process."""
    timeout_seconds: int = 600
    """Timeout of an exchange."""

    @property
    def data_rank(self) -> int:
        """The part of the global batch that this worker computes, alone or with others."""
        return self.mesh.data_rank(self.rank)

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """The mesh as a PyTorch device mesh, with a process group along every dimension."""
        return self._arranged(self.mesh.sizes)

    def weights_axis(self, name: str) -> DeviceMesh:
        """Return a dimension that shards weights, `dp_shard` or `tp`, of the mesh that has both.

        Context-parallel workers have the same weights and different positions, which for weights is like different
        rows. `dp_shard` is therefore the product of both dimensions here.
        """
        return self._weights_mesh[self.weights_axis_name(name)]

    def weights_axis_name(self, name: str) -> str:
        """Return a name for the dimension that is unique in this process.

        PyTorch caches what it derives from a mesh, groups included, as long as the process lives, and treats meshes
        with equal names as equal.
        """
        return f"{name}_{self.number}"

    @cached_property
    def _weights_mesh(self) -> DeviceMesh:
        sizes = self.mesh.sizes
        sizes["dp_shard"] *= sizes.pop("cp")
        return self._arranged({self.weights_axis_name(name): size for name, size in sizes.items()})

    @cached_property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The workers that compute gradients of the same weights (`MeshShape.replicas`); None for all workers."""
        mesh = self.mesh
        if mesh.replicas == mesh.size:
            return None
        return self._arranged({"pp": mesh.pp, "replica": mesh.replicas, "tp": mesh.tp})["replica"].get_group()

    @cached_property
    def expert_replica_group(self) -> dist.ProcessGroup | None:
        """The workers that have the same experts (`MeshShape.expert_replicas`); None for all workers."""
        mesh = self.mesh
        if mesh.expert_replicas == mesh.size:
            return None
        sizes = {"pp": mesh.pp, "expert_replica": mesh.expert_replicas, "ep": mesh.ep}
        return self._arranged(sizes)["expert_replica"].get_group()

    @property
    def expert_replica_rank(self) -> int:
        """This worker's number in `expert_replica_group`."""
        return self.rank % (self.mesh.expert_replicas * self.mesh.ep) // self.mesh.ep

    def experts_axis(self, name: str) -> DeviceMesh:
        """Return a dimension of the mesh for experts.

        The workers of `ep` share the experts; the workers of `expert_shard` may shard the weights of the same experts.
        """
        return self._experts_mesh[self.experts_axis_name(name)]

    def experts_axis_name(self, name: str) -> str:
        """Return a unique name for the dimension, as `weights_axis_name` does."""
        return f"{name}_{self.number}"

    @cached_property
    def _experts_mesh(self) -> DeviceMesh:
        mesh = self.mesh
        shards = mesh.expert_replicas // mesh.dp_replicate
        sizes = {"pp": mesh.pp, "dp_replicate": mesh.dp_replicate, "expert_shard": shards, "ep": mesh.ep}
        return self._arranged({self.experts_axis_name(name): size for name, size in sizes.items()})

    @cached_property
    def row_group(self) -> dist.ProcessGroup | None:
        """The workers that compute other positions of the same rows; None if rows are whole."""
        mesh = self.mesh
        if mesh.cp * mesh.tp == 1:
            return None
        return self._arranged({"pp": mesh.pp, "data": mesh.data, "row": mesh.cp * mesh.tp})["row"].get_group()

    @cached_property
    def _stage_group(self) -> dist.ProcessGroup | None:
        """The workers that have the same layers; None for all workers."""
        pp = self.mesh.pp
        return None if pp == 1 else self._arranged({"pp": pp, "stage": self.size // pp})["stage"].get_group()

    def make_groups(self) -> None:
        """Create the process groups now, since all workers must create a group at the same time.

        Created on first use, a group could fall into one worker's backward pass.
        """
        _ = self.replica_group, self._stage_group
        if self.mesh.ep > 1:
            _ = self.expert_replica_group

    def connect_groups(self) -> None:
        """Let NCCL connect the workers of these groups; otherwise a group's first exchange takes seconds.

        Call it only once the workers are known to reach each other (`launch.network.assert_same_profile`).
        """
        if not self.queues_exchanges:
            return
        groups = [self.replica_group, self._stage_group, *([self.expert_replica_group] if self.mesh.ep > 1 else [])]
        for group in dict.fromkeys(groups):
            if dist.get_world_size(group) > 1:
                dist.all_reduce(torch.zeros(1, device=self.device), group=group)

    def _arranged(self, sizes: dict[str, int]) -> DeviceMesh:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.distributed_c10d import _set_pg_timeout

        mesh = init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        for (
            group
        ) in mesh.get_all_groups():  # PyTorch gives subgroups its default timeout, not that of the default group
            _set_pg_timeout(timedelta(seconds=self.timeout_seconds), group)
        return mesh

    @property
    def replica_rank(self) -> int:
        """This worker's number in `replica_group`."""
        return self.mesh.replica_rank(self.rank)

    @property
    def counts_items(self) -> bool:
        """Whether this worker counts the items of its micro-batches, which it may compute with others."""
        places = self.mesh.coordinates(self.rank)
        return places["pp"] == places["cp"] == places["tp"] == 0

    @property
    def counts_loss(self) -> bool:
        """Whether this worker's loss enters the sum: tensor-parallel workers all have the same loss."""
        return self.mesh.coordinates(self.rank)["tp"] == 0

    @property
    def queues_exchanges(self) -> bool:
        """Whether exchanges are asynchronous: the worker then waits for the others when it reads from its device."""
        return self.size > 1 and self.device.type == "cuda"

    @property
    def is_first(self) -> bool:
        """Whether this is the worker that writes what only one worker may write."""
        return self.rank == 0

    def seed(self, seed: int) -> None:
        """Seed the random numbers of this worker on the CPU and on its device.

        `torch.manual_seed` does this too, but for every absent kind of device it records the call stack: 1 ms per
        micro-batch.
        """
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            torch.cuda.default_generators[index].manual_seed(seed)
        elif self.device.type == "mps":
            torch.mps.manual_seed(seed)

    def gather(self, values: list[float]) -> list[list[float]]:
        """Return the values of every worker, by rank. All workers must pass equally many.

        Uses the CPU group (gloo) on every device, so that it does not wait for queued GPU work.
        """
        if self.size == 1:
            return [values]
        mine = torch.tensor(values, dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        with exchanging("gather of numbers", everyone=True):
            dist.all_gather(everyone, mine)
        return [worker.tolist() for worker in everyone]

    def sum_integers(self, counts: torch.Tensor) -> torch.Tensor:
        """Sum over all workers, exactly; `counts` is int64, on the CPU, and may be overwritten."""
        if self.size > 1:
            with exchanging("sum of integers", everyone=True):
                dist.all_reduce(counts)
        return counts

    def gather_json(self, value: Any) -> list[Any]:
        """Return the value of every worker, by rank: any JSON value of any length. Tuples become lists."""
        if self.size == 1:
            return [json.loads(json.dumps(value))]
        text = json.dumps(value).encode()
        lengths = [int(worker[0]) for worker in self.gather([float(len(text))])]
        mine = torch.zeros(max(lengths), dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        with exchanging("gather of JSON", everyone=True):
            dist.all_gather(everyone, mine)
        return [json.loads(bytes(received[:n].tolist())) for received, n in zip(everyone, lengths, strict=True)]

    @property
    def is_copied(self) -> bool:
        """Whether this worker is the source of `broadcast_`: the first of the workers with the same tensors."""
        return self.rank % (self.size // self.mesh.pp) == 0

    @torch.no_grad()
    def broadcast_(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite the tensors of every worker, of any type and layout, with those of the first worker.

        Pipeline stages have different tensors: there the source is the first worker of each stage (`is_copied`).
        """
        group = self._stage_group
        if self.size > self.mesh.pp:
            for tensor in tensors:
                content = tensor.detach().contiguous().flatten().view(torch.uint8)
                with exchanging("broadcast of the first worker's tensors"):
                    dist.broadcast(content, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
                tensor.copy_(content.view(tensor.dtype).view(tensor.shape))

    def broadcast_number(self, number: int) -> int:
        """Return the first worker's number on every worker."""
        return int(self.gather([float(number)])[0][0])

    def barrier(self) -> None:
        """Wait for every worker."""
        self.gather([0.0])


def pick_device(wanted: str, local_rank: int = 0) -> torch.device:
    """Choose the device of a worker.

    Raises:
        ConfigError: the requested device is missing, or there are more local workers than GPUs.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    kind = next(k for k in ("cuda", "mps", "cpu") if available[k]) if wanted == "auto" else wanted
    if not available[kind]:
        there = ", ".join(k for k, yes in available.items() if yes)
        raise ConfigError(
            f"this machine has no {kind} device; it has: {there}", where="train.device", fix="train.device=auto"
        )
    if kind != "cuda":
        return torch.device(kind)
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"worker {local_rank} of this machine has no GPU: there are {torch.cuda.device_count()}",
            where="parallel.workers",
            fix=f"parallel.workers={torch.cuda.device_count()}, or train.device=cpu",
        )
    return torch.device("cuda", local_rank)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its queued work; a CPU has no queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@contextmanager
def open_world(device: str, timeout_seconds: int, mesh: MeshShape | None = None) -> Iterator[World]:
    """Join the other workers for the duration of a block; the mesh is data-parallel by default.

    CPU tensors travel over gloo and GPU tensors over NCCL. After an error NCCL groups are left as they are
    (`core.process.exit`); a caller that does not end the process must call `abort_groups`.

    Raises:
        ConfigError: the launcher's variables do not fit each other or this machine.
        HeadwayError: the workers do not find each other in time.
    """
    size = world_size_from_environment()
    if size is None or size == 1:
        yield World(0, 1, 0, pick_device(device))
        return
    rank, local_rank = place_from_environment(size)
    mesh = mesh or MeshShape(dp_shard=size)
    number = next(_opened)
    world = World(rank, size, local_rank, pick_device(device, local_rank), mesh, number, timeout_seconds)
    if world.device.type == "mps":
        raise ConfigError("mps has no process groups", where="train.device", fix="train.device=cpu, or one worker")
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    keep_to_loopback(size)
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    try:
        store = _meet(rank, size, number, timeout)
        keep_gloo_threads()
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:  # PyTorch raises it for any failure of the rendezvous
        raise HeadwayError(
            f"worker {rank} of {size} did not meet the others: {str(error).splitlines()[0]}",
            where=" ".join(f"{name}={os.environ[name]}" for name in _MEET_AT if name in os.environ),
            fix="check that all workers were started and can reach this address; the timeout is"
            " parallel.timeout_seconds",
        ) from error
    try:
        world.make_groups()
        yield world
    except BaseException:
        if not has_gpu_groups():
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _meet(rank: int, size: int, number: int, timeout: timedelta) -> Any:
    """Open the store in which the workers of this start find each other.

    Args:
        number: How often this process has joined other workers before.
    """
    # A process that trains twice needs new keys: the old ones hold addresses of closed connections.
    prefix = str(number)
    if file := os.environ.get(RENDEZVOUS_VARIABLE):
        store = dist.FileStore(file, -1)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
    else:
        # The store at MASTER_ADDR and MASTER_PORT, which is opened once in the life of a process. The first worker
        # may serve the store itself. If it closed it after a training, a worker that is already at the next one could
        # connect to the store that is about to close.
        place = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if place not in _stores:
            _stores[place] = _bound_store(timeout) if BIND_VARIABLE in os.environ else _any_store(timeout)
        _stores[place].set_timeout(timeout)
        store = _stores[place]
        # torchrun's store also holds the addresses of workers from earlier starts.
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            prefix = _agree_on_name(store, rank, size, timeout.total_seconds())
    return dist.PrefixStore(f"headway-{prefix}", store)  # type: ignore[attr-defined]


def _any_store(timeout: timedelta) -> Any:
    from torch.distributed.rendezvous import rendezvous

    return next(rendezvous("env://", timeout=timeout))[0]


def _bound_store(timeout: timedelta) -> Any:
    """Return the store at MASTER_ADDR, which listens on that address only; PyTorch's own listens on all of them."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    serves = os.environ["RANK"] == "0"
    if not serves:
        return TCPStore(address, port, is_master=False, timeout=timeout)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=1024)
    return TCPStore(
        address, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def abort_groups() -> None:
    """Abort the groups that `open_world` left after an error, including operations in progress.

    For a process that continues without the other workers.
    """
    if has_gpu_groups():
        dist.distributed_c10d._abort_process_group()


def _agree_on_name(store: Any, rank: int, size: int, timeout_seconds: float) -> str:
    """Agree on a name that is shared by the workers of this start and unique to it.

    No environment variable distinguishes starts: torchrun counts restarts per machine. So every worker publishes a
    random word, and the first worker answers that word with its own, until all workers have confirmed. Answers to words
    of dead workers are harmless.

    Raises:
        DistStoreError: not all workers arrive in time.
    """
    mine = secrets.token_hex(8)
    if rank:
        store.set(f"headway/word-{rank}", mine)
        name: str = store.get(f"headway/answer-{mine}").decode()
        store.set(f"headway/taken-{name}-{rank}", "")
        return name
    missing = set(range(1, size))
    answered = set[str]()

    def all_have_come() -> bool:
        for other in sorted(missing):
            if store.check([f"headway/taken-{mine}-{other}"]):
                missing.discard(other)
            elif store.check([f"headway/word-{other}"]):
                word = store.get(f"headway/word-{other}").decode()
                if word not in answered:
                    store.set(f"headway/answer-{word}", mine)
                    answered.add(word)
        return not missing

    if not wait_until(all_have_come, timeout_seconds, 0.01):
        raise dist.DistStoreError(f"{size - len(missing)}/{size} workers came within {timeout_seconds} s")
    return mine
