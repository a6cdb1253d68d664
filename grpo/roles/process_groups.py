"""Which rank does what, and the process groups that follow from it. The ONLY file that creates process groups.

    launcher rank   0 .. num_trainers-1   then references       then generators (replicas of tensor_parallel neighbours)
    default group   trainer               reference             one per replica
    control         every rank
    learners        every trainer and reference rank
    sync            rank 0                                      every generator rank

Each role has its own default process group, so torchtitan and vLLM see exactly the ranks they expect. Three bridges
join the roles. Colocated, every rank holds every role, one default group serves trainer and generator, `learners` is
`control`, and there is no `sync`. docs/design/process-groups.md says why, and what a new kind of role has to do.
"""

import collections
import ctypes
import datetime
import gc
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store, distributed_c10d
from torch.distributed.elastic.utils.distributed import get_free_port

from grpo.config import RolesConfig
from grpo.config.checks import num_processes

# Seconds between two looks of rank 0 for ranks that have started
MEETING_SECONDS = 0.02
# Seconds after which rank 0 prints which ranks it waits for
MEETING_NOTICE_SECONDS = 60
# Timeout of a collective, in `deadline_minutes`: beyond the deadline of every phase, so that a hang is named first
TIMEOUT_DEADLINES = 4
# Of glibc's malloc.h: how many blocks may be mapped on their own, and the free bytes at the end that are given back
M_MMAP_MAX = -4
M_TRIM_THRESHOLD = -1
# Description of the group whose threads write checkpoints
SAVERS = "checkpoints"

# Forwards that this rank's engine has begun, by the first rank of its replica; torch does not see what vLLM sends.
engine_steps: collections.Counter[int] = collections.Counter()


@dataclass(frozen=True)
class Roles:
    """The roles of this rank, and its groups. Ranks are torchrun's launcher ranks."""

    rank: int
    device: torch.device
    control: ProcessGroup
    """Bridge over all ranks; gloo."""
    learners: ProcessGroup | None
    """Bridge over the ranks that train or hold frozen models, the driver first; gloo. None on the others."""
    sync: ProcessGroup | None
    """Bridge from rank 0 to the generator ranks; None elsewhere and when colocated."""
    trainer_ranks: tuple[int, ...]
    reference_ranks: tuple[int, ...]
    """Ranks that hold a reference, a reward model or both; empty when neither is needed."""
    has_reference: bool
    """Whether they hold a reference."""
    replicas: tuple[tuple[int, ...], ...]
    """Generator ranks, one tuple per vLLM engine."""
    store: Store
    """Keys and values that all ranks of this start share."""

    @property
    def is_driver(self) -> bool:
        """Rank 0 alone draws prompts, scores, decides, logs and writes run files."""
        return self.rank == 0

    @property
    def trains(self) -> bool:
        """True on ranks with a part of the policy."""
        return self.rank in self.trainer_ranks

    @property
    def references(self) -> bool:
        """True on ranks with a part of the reference or the reward model."""
        return self.rank in self.reference_ranks

    @property
    def learns(self) -> bool:
        """True on trainer and reference ranks, which get every batch."""
        return self.trains or self.references

    @property
    def generates(self) -> bool:
        """True on ranks with a part of an engine."""
        return bool(self.replica)

    @property
    def name(self) -> str:
        """Role in messages and file names: `trainer`, `reference`, `generator` or `colocated`."""
        if self.trains:
            return "colocated" if self.generates else "trainer"
        return "generator" if self.generates else "reference"

    @property
    def replica(self) -> tuple[int, ...]:
        """Launcher ranks of this rank's engine; empty on ranks that do not generate."""
        own = [ranks for ranks in self.replicas if self.rank in ranks]
        return own[0] if own else ()

    @property
    def heads(self) -> tuple[int, ...]:
        """First rank of each replica, which hands in the completions."""
        return tuple(ranks[0] for ranks in self.replicas)

    @property
    def world(self) -> tuple[int, ...]:
        """Launcher ranks of this rank's default process group."""
        worlds = (self.trainer_ranks, self.reference_ranks, self.replica)
        return next(ranks for ranks in worlds if self.rank in ranks)


def setup_roles(
    layout: RolesConfig,
    needs_reference: bool = False,
    engine_ranks: int = 1,
    deadline_minutes: float = 20.0,
    needs_reward_model: bool = False,
) -> Roles:
    """Create this rank's groups from torchrun's environment. Collective: every rank of the torchrun calls it once.

    needs_reference, needs_reward_model: what trainers hold if no other rank does. engine_ranks: of one vLLM engine.
    Without torchrun this process is a world of one. Raises TimeoutError on rank 0 if ranks do not start within
    `deadline_minutes`.

    The caller has compared the world size with the layout (`config.check_world_size`). RANK and WORLD_SIZE are
    rewritten to the role's own world, because torchtitan and vLLM read them; LOCAL_RANK stays, it selects the GPU.
    """
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    rank = int(os.environ["RANK"])
    everyone = tuple(range(num_processes()))
    deadline = datetime.timedelta(minutes=deadline_minutes)
    timeout = TIMEOUT_DEADLINES * deadline
    device = torch.device("cpu")
    backend = "gloo"
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        backend = "cuda:nccl,cpu:gloo"
        torch.cuda.set_device(device)
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))  # torchrun's own, no further port
    store.set_timeout(timeout)
    store = meet(
        store,
        rank,
        len(everyone),
        deadline,
    )  # nobody is watched yet, see grpo/watch

    trainer_ranks = learner_ranks = generator_ranks = everyone
    if not layout.colocated:
        num_learners = layout.num_trainers + layout.num_references
        trainer_ranks = everyone[: layout.num_trainers]
        learner_ranks = everyone[:num_learners]
        generator_ranks = everyone[num_learners:]
    reference_ranks = learner_ranks[len(trainer_ranks) :]
    if not reference_ranks and (needs_reference or needs_reward_model):
        reference_ranks = trainer_ranks
    if device.type == "cuda" and rank not in generator_ranks:  # vLLM decides for its own
        _let_segments_grow()
    if device.type == "cpu":
        _keep_freed_memory()

    control = learners = _make_bridge(
        "control",
        everyone,
        "gloo",
        rank,
        store,
        timeout,
    )
    if learner_ranks != everyone:
        learners = _make_bridge(
            "learners",
            learner_ranks,
            "gloo",
            rank,
            store,
            timeout,
        )
    sync = None
    if generator_ranks and 0 not in generator_ranks:
        sync = _make_bridge(
            "sync",
            (0, *generator_ranks),
            backend,
            rank,
            store,
            timeout,
        )
    replicas = []
    for start in range(0, len(generator_ranks), engine_ranks):
        replicas.append(generator_ranks[start : start + engine_ranks])
    roles = Roles(
        rank=rank,
        device=device,
        control=control,
        learners=learners,
        sync=sync,
        trainer_ranks=trainer_ranks,
        reference_ranks=reference_ranks,
        has_reference=needs_reference,
        replicas=tuple(replicas),
        store=store,
    )
    _join_own_world(roles, backend, timeout)
    return roles


def setup_trainers() -> Roles:
    """Make every rank a trainer, and nothing else. Collective over all ranks."""
    layout = RolesConfig(num_trainers=num_processes(), num_references=0, num_generators=0)
    return setup_roles(layout)


def meet(
    store: Store,
    rank: int,
    world_size: int,
    timeout: datetime.timedelta,
) -> PrefixStore:
    """Return the launcher's store under a prefix that only the ranks of this start know. Collective over all ranks.

    torchrun's store outlives a restart, with all its keys. So each rank posts a random word, and rank 0 replies under
    that word with a fresh prefix. What an earlier start left in the store matches no word of this one.

    Raises TimeoutError on rank 0 that names the ranks that did not come.
    """
    if rank != 0:
        word = uuid.uuid4().hex
        store.set(f"hello/{rank}", word)
        prefix = store.get(f"welcome/{word}").decode()
        store.set(f"{prefix}/came/{rank}", "")
        return PrefixStore(prefix, store)
    prefix = uuid.uuid4().hex
    start = time.monotonic()
    notice_seconds = MEETING_NOTICE_SECONDS
    others = range(1, world_size)
    while True:
        missing = [other for other in others if not store.check([f"{prefix}/came/{other}"])]
        if not missing:
            return PrefixStore(prefix, store)
        for other in missing:
            if store.check([f"hello/{other}"]):
                word = store.get(f"hello/{other}").decode()
                store.set(f"welcome/{word}", prefix)
        seconds = time.monotonic() - start
        names = ", ".join(map(str, missing))
        if seconds > timeout.total_seconds():
            raise TimeoutError(f"of {world_size} ranks, these did not start within {seconds:.0f} s: {names}")
        if seconds > notice_seconds:
            print(f"waiting for ranks that have not started, for {seconds:.0f} s: {names}", flush=True)
            notice_seconds = 2 * seconds
        time.sleep(MEETING_SECONDS)


def _make_bridge(
    name: str,
    ranks: Sequence[int],
    backend: str,
    rank: int,
    store: Store,
    timeout: datetime.timedelta,
) -> ProcessGroup | None:
    """Return a group over launcher `ranks`, independent of any default group; None on ranks that are not in it.

    Its group ranks are positions in `ranks`.
    """
    if rank not in ranks:
        return None
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(rank),
        [],
        backend,
        PrefixStore(f"bridge/{name}", store),
        group_name=f"bridge_{name}",
        timeout=timeout,
        group_desc=f"bridge_{name}",
    )
    # torch.distributed's functions look ranks up here; with the identity, they take and return group ranks
    distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(len(ranks))}
    dist.barrier(group=group)  # connect now, before an engine starts
    return group


def _join_own_world(roles: Roles, backend: str, timeout: datetime.timedelta) -> None:
    """Make the default process group of this rank's role. Collective over the role's ranks.

    Without a `device_id`: torch 2.13 would split the groups of TP and of replicas off this one, and crashes there
    because the bridges were made before it.
    """
    rank = roles.world.index(roles.rank)
    world_size = len(roles.world)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # so that nothing meets on torchrun's own store by env://
    store = PrefixStore(f"world/{roles.world[0]}", roles.store)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    if roles.device.type == "cuda":  # NCCL connects here, before an engine changes its environment
        dist.barrier(device_ids=[roles.device.index])


def _keep_freed_memory() -> None:
    """Let malloc keep memory that is freed for the next tensor, instead of giving each page back to the system.

    A micro-batch of a model on a CPU frees a gigabyte, whose pages the system would clear again for the next one.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    if set_option:
        set_option(M_MMAP_MAX, 0)
        set_option(M_TRIM_THRESHOLD, -1)


def _let_segments_grow() -> None:
    """Let torch's allocator extend what it took from the GPU, rather than free it all when a piece is too small.

    It takes effect only before anything is allocated there. A user's own setting of the allocator stays.
    """
    if not os.environ.get("PYTORCH_ALLOC_CONF") and not os.environ.get("PYTORCH_CUDA_ALLOC_CONF"):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


_open_engines: list[Callable[[], None]] = []  # held until the process ends, or vLLM would close what Python frees


def close_roles(
    roles: Roles,
    close_engine: Callable[[], None] | None = None,
    process_goes_on: bool = False,
) -> None:
    """Leave together: wait for all, shut the engine down, destroy this rank's groups. Collective over `control`.

    An engine of one rank, which shares no memory, ends with the process, unless that goes on, as a notebook does:
    closing it would take seconds.
    """
    dist.barrier(group=roles.control)
    if close_engine is not None:
        _open_engines.append(close_engine)
        if process_goes_on or len(roles.replica) > 1:
            close_engine()
        gc.unfreeze()  # vLLM froze its objects, which at the end of a notebook would be reported as leaked
    if dist.is_initialized():  # an engine takes the default group with it
        dist.destroy_process_group()


def make_savers_group(deadline_minutes: float) -> ProcessGroup:
    """Make the group in which threads of the role's ranks write checkpoints. Collective over the role.

    A group of their own keeps their collectives apart from those of training.
    """
    timeout = datetime.timedelta(minutes=TIMEOUT_DEADLINES * deadline_minutes)
    return dist.new_group(backend="gloo", timeout=timeout, group_desc=SAVERS)


def collectives_entered(roles: Roles, is_saving: bool) -> dict[str, int]:
    """Return how many collectives this rank has begun in each group, as torch counts them.

    A rank with a lower count than another rank of the group keeps it waiting. Groups have names that their members
    share. May be called from any thread. is_saving: the rank waits for its thread that writes a checkpoint, so the
    thread's collectives count; otherwise they keep nobody waiting.
    """
    bridges = {roles.control, roles.learners, roles.sync} - {None}
    counts = {group.group_name: _collectives_of(group) for group in bridges}
    world = roles.world[0]
    counts[f"{world}/groups made"] = distributed_c10d._world.group_count  # making one waits for all ranks of the world
    for group in list(distributed_c10d._world.pg_map):  # a copy, because another thread may add groups
        ranks = distributed_c10d._world.pg_group_ranks.get(group, ())
        is_waited_for = is_saving or group.group_desc != SAVERS
        if is_waited_for and group not in bridges and len(ranks) > 1:
            # torch's names are counted in each process: groups of other ranks may have the same
            members = ",".join(map(str, ranks))
            counts[f"{world}/{group.group_name}/{members}"] = _collectives_of(group)
    if len(roles.replica) > 1:
        head = roles.replica[0]
        counts[f"engine/{head}"] = engine_steps[head]
    return counts


def _collectives_of(group: ProcessGroup) -> int:
    """Count the collectives that this rank has begun in a group, on CPU and GPU. A group of one rank has none."""
    backends = {group._get_backend(device) for device in group._device_types}
    count = 0
    for backend in backends:
        if backend.name() != "fake":
            count += backend._get_sequence_number_for_group()
    return count
