"""Which rank does what, and the process groups that follow from it. The ONLY file that creates process groups.

Every role is a world of its own: it has its own default process group, so torchtitan and vLLM each see exactly the
ranks they expect. Roles talk over bridges, further groups built from torchrun's store: `control` over all ranks (CPU
tensors, gloo), `learners` over trainers and references (gloo too) and `weights` from trainer rank 0 to every generator
rank (NCCL on GPUs). All groups are created here, in one order, the bridges first.

    launcher rank   0 .. num_trainers-1   then references       then generators (replicas of tensor_parallel neighbours)
    default group   trainer               reference             one per replica
    control         every rank
    learners        every trainer and reference rank
    weights         rank 0                                      every generator rank

What only learners need never waits for a generator. Colocated, every rank holds every role, one default group serves
trainer and generator, and `learners` is `control`.
"""

import collections
import datetime
import functools
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

# Between two looks of rank 0 for ranks that have started
MEETING_SECONDS = 0.02
# After which rank 0 says whom it waits for
MEETING_NOTICE_SECONDS = 60
# Timeout of a collective, in `deadline_minutes`: beyond the deadline of every phase, so that a hang is named first
TIMEOUT_DEADLINES = 4
SAVERS = "checkpoints"  # describes the group of the threads that write them

# Forwards that this rank's engine has begun, by the first rank of its replica; torch does not see what vLLM sends.
engine_steps: collections.Counter[int] = collections.Counter()


@dataclass(frozen=True)
class Roles:
    """What this rank does, and its groups. Ranks here are torchrun's launcher ranks."""

    rank: int
    name: str
    """`trainer`, `reference`, `generator` or `colocated`; for messages, decisions ask the three flags."""
    device: torch.device
    control: ProcessGroup
    """Bridge over all ranks; gloo."""
    learners: ProcessGroup | None
    """Bridge over the ranks that train or hold frozen models, the driver first; gloo. None on the others."""
    weights: ProcessGroup | None
    """Bridge from rank 0 to the generator ranks; None elsewhere and when colocated."""
    trains: bool
    references: bool
    generates: bool
    trainer_ranks: tuple[int, ...]
    reference_ranks: tuple[int, ...]
    """Ranks that hold a reference, a reward model or both; empty when neither is needed."""
    has_reference: bool
    """Whether they hold a reference."""
    replicas: tuple[tuple[int, ...], ...]
    """Generator ranks, one tuple per vLLM engine."""
    store: Store
    """Keys and values that all ranks share, of this start alone."""

    @property
    def is_driver(self) -> bool:
        """Rank 0 alone draws prompts, scores, decides, logs and writes run files."""
        return self.rank == 0

    @property
    def learns(self) -> bool:
        """Trainer and reference ranks, which get every batch."""
        return self.trains or self.references

    @property
    def replica(self) -> int | None:
        """Index of this rank's engine replica, None on ranks that do not generate."""
        return next((index for index, ranks in enumerate(self.replicas) if self.rank in ranks), None)

    @property
    def heads(self) -> tuple[int, ...]:
        """First rank of each replica: the one that hands in the completions."""
        return tuple(ranks[0] for ranks in self.replicas)

    @property
    def world(self) -> tuple[int, ...]:
        """The ranks of this rank's default process group."""
        worlds = (self.trainer_ranks, self.reference_ranks, *self.replicas)
        return next(world for world in worlds if self.rank in world)


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
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    soon = datetime.timedelta(minutes=deadline_minutes)
    timeout = TIMEOUT_DEADLINES * soon
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "cuda:nccl,cpu:gloo" if on_gpu else "gloo"
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))  # torchrun's own, no further port
    store.set_timeout(timeout)
    store = meet(store, rank, world_size, soon)  # nobody is watched yet, see grpo/watch

    trainer_ranks, own_reference_ranks, generator_ranks = ranks_of_roles(layout, world_size)
    learner_ranks = (*trainer_ranks, *own_reference_ranks)
    if on_gpu and rank not in generator_ranks:  # vLLM decides for its own
        _let_segments_grow()

    bridge = functools.partial(_bridge, rank=rank, store=store, timeout=timeout)
    control = bridge("control", range(world_size))
    learners = bridge("learners", learner_ranks) if len(learner_ranks) < world_size else control
    is_split = generator_ranks and 0 not in generator_ranks
    reference_ranks = own_reference_ranks or (trainer_ranks if needs_reference or needs_reward_model else ())
    trains, generates = rank in trainer_ranks, rank in generator_ranks
    roles = Roles(
        rank=rank,
        name="colocated" if layout.colocated else "trainer" if trains else "generator" if generates else "reference",
        device=device,
        control=control,
        learners=learners,
        weights=bridge("weights", (0, *generator_ranks), backend) if is_split else None,
        trains=trains,
        references=rank in reference_ranks,
        generates=generates,
        trainer_ranks=trainer_ranks,
        reference_ranks=reference_ranks,
        has_reference=needs_reference,
        replicas=tuple(generator_ranks[i : i + engine_ranks] for i in range(0, len(generator_ranks), engine_ranks)),
        store=store,
    )
    _join_own_world(roles, backend, timeout)
    return roles


def ranks_of_roles(layout: RolesConfig, world_size: int) -> tuple[tuple[int, ...], ...]:
    """(Trainer ranks, ranks that are only a reference, generator ranks), as the picture above has them."""
    everyone = tuple(range(world_size))
    if layout.colocated:
        return everyone, (), everyone
    num_learners = layout.num_trainers + layout.num_references
    return everyone[: layout.num_trainers], everyone[layout.num_trainers : num_learners], everyone[num_learners:]


def _join_own_world(roles: Roles, backend: str, timeout: datetime.timedelta) -> None:
    """Make the default process group of this rank's role. Collective over the role's ranks.

    Without a `device_id`: torch 2.13 would split the groups of TP and of replicas off this one, and crashes there
    because the bridges were made before it.
    """
    own_rank, own_size = roles.world.index(roles.rank), len(roles.world)
    os.environ.update(RANK=str(own_rank), WORLD_SIZE=str(own_size))
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # so that nothing meets on torchrun's own store by env://
    own_store = PrefixStore(f"world/{roles.world[0]}", roles.store)
    dist.init_process_group(backend, store=own_store, rank=own_rank, world_size=own_size, timeout=timeout)
    if roles.device.type == "cuda":  # NCCL connects here, before an engine changes its environment
        dist.barrier(device_ids=[roles.device.index])


def setup_trainers() -> Roles:
    """Make every rank a trainer, and nothing else. Collective over all ranks."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return setup_roles(RolesConfig(num_trainers=world_size, num_references=0, num_generators=0))


def meet(store: Store, rank: int, world_size: int, timeout: datetime.timedelta) -> PrefixStore:
    """The launcher's store under a prefix that only the processes of this start know. Collective over all ranks.

    torchrun's store outlives a restart with all that is in it. So rank 0 draws a name and tells it to each rank that
    says hello, with a word that only this process knows: what an earlier start left there answers nobody.

    Raises TimeoutError on rank 0 that names the ranks that did not come.
    """
    if rank != 0:
        word = uuid.uuid4().hex
        store.set(f"hello/{rank}", word)
        name = store.get(f"welcome/{word}").decode()
        store.set(f"{name}/came/{rank}", "")
        return PrefixStore(name, store)
    name, start, notice = uuid.uuid4().hex, time.monotonic(), MEETING_NOTICE_SECONDS
    while missing := [other for other in range(1, world_size) if not store.check([f"{name}/came/{other}"])]:
        for other in missing:
            if store.check([f"hello/{other}"]):
                store.set(f"welcome/{store.get(f'hello/{other}').decode()}", name)
        waited, who = time.monotonic() - start, ", ".join(map(str, missing))
        if waited > timeout.total_seconds():
            raise TimeoutError(f"of {world_size} ranks, these did not start within {waited:.0f} s: {who}")
        if waited > notice:
            print(f"waiting for ranks that have not started, for {waited:.0f} s: {who}", flush=True)
            notice = 2 * waited
        time.sleep(MEETING_SECONDS)
    return PrefixStore(name, store)


_open_engines: list[Callable[[], None]] = []  # held until the process ends, or vLLM would close what Python frees


def close_roles(roles: Roles, close_engine: Callable[[], None] | None = None) -> None:
    """Leave together: wait for all, shut the engine down, destroy this rank's groups. Collective over `control`.

    An engine of one rank, which shares no memory, ends with the process: closing it would take seconds.
    """
    dist.barrier(group=roles.control)
    if close_engine is not None:
        _open_engines.append(close_engine)
        if len(roles.replicas[roles.replica]) > 1:
            close_engine()
        gc.unfreeze()  # vLLM froze its objects, which at the end of a notebook would be reported as leaked
    if dist.is_initialized():  # an engine takes the default group with it
        dist.destroy_process_group()


def _let_segments_grow() -> None:
    """Have torch's allocator extend what it took from the GPU, rather than free it all when a piece is too small.

    Before anything is allocated there. A user's own setting of the allocator stays.
    """
    if not os.environ.get("PYTORCH_ALLOC_CONF") and not os.environ.get("PYTORCH_CUDA_ALLOC_CONF"):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def _bridge(
    name: str, ranks: Sequence[int], backend: str = "gloo", *, rank: int, store: Store, timeout: datetime.timedelta
) -> ProcessGroup | None:
    """A group over launcher `ranks`, independent of any default group; group ranks are positions in `ranks`.

    None on ranks that are not in it.
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
    # torch.distributed's functions look ranks up here; with the identity, group ranks are what they take and give.
    distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(len(ranks))}
    dist.barrier(group=group)  # connect now, before an engine starts
    return group


def make_savers_group(deadline_minutes: float) -> ProcessGroup:
    """Make the group in which threads of the role's ranks write checkpoints. Collective over the role.

    It is apart, so that their collectives do not meet those of training.
    """
    timeout = datetime.timedelta(minutes=TIMEOUT_DEADLINES * deadline_minutes)
    return dist.new_group(backend="gloo", timeout=timeout, group_desc=SAVERS)


def collectives_entered(roles: Roles, is_saving: bool) -> dict[str, int]:
    """Collectives that this rank has begun, as torch counts them, by group, under names that its members share.

    A rank with fewer than another one of the group keeps it waiting. May be called from any thread. is_saving: the
    rank waits for its thread that writes a checkpoint, so the thread's collectives count.
    """
    bridges = [group for group in (roles.control, roles.learners, roles.weights) if group is not None]
    entered, first = {group.group_name: _begun(group) for group in bridges}, roles.world[0]
    entered[f"{first}/groups made"] = distributed_c10d._world.group_count  # which waits for all ranks of the world too
    for group in list(distributed_c10d._world.pg_map):  # a copy, because another thread may add groups
        ranks = distributed_c10d._world.pg_group_ranks.get(group)
        if group.group_desc == SAVERS and not is_saving:
            continue  # a thread keeps nobody waiting until a rank waits for it
        if group not in bridges and ranks and len(ranks) > 1:
            # torch's names are counted in each process: groups of other ranks may have the same
            entered[f"{first}/{group.group_name}/{','.join(map(str, ranks))}"] = _begun(group)
    if roles.generates and len(ranks := roles.replicas[roles.replica]) > 1:
        entered[f"engine/{ranks[0]}"] = engine_steps[ranks[0]]
    return entered


def _begun(group: ProcessGroup) -> int:
    """Collectives of all backends of a group, for CPU and GPU; torchtitan's groups of one rank have a fake one."""
    backends = {group._get_backend(device) for device in group._device_types}
    return sum(backend._get_sequence_number_for_group() for backend in backends if backend.name() != "fake")
