"""How far a rank has come in each of its process groups. Torch counts the collectives; nothing is added to them."""

import collections

from torch.distributed import ProcessGroup, distributed_c10d

from grpo.roles.process_groups import Roles

# Sends and receives by group. Gloo counts them with the collectives, but only some members of the group make them.
direct_messages: collections.Counter[str] = collections.Counter()
# Forwards that this rank's engine has begun, by the first rank of its replica; torch does not see what vLLM sends.
engine_steps: collections.Counter[int] = collections.Counter()


def collectives_entered(roles: Roles) -> dict[str, int]:
    """Collectives that this rank has begun, by group, under names that the group's members share.

    A rank with fewer than another one of the group keeps it waiting. May be called from any thread.
    """
    bridges = [group for group in (roles.control, roles.learners, roles.weights) if group is not None]
    entered = {group.group_name: _begun(group) - direct_messages[group.group_name] for group in bridges}
    worlds = (roles.trainer_ranks, roles.reference_ranks, *roles.replicas)
    my_world = next(world for world in worlds if roles.rank in world)
    # making a group waits for all ranks of the world too
    entered[f"{my_world[0]}/groups made"] = distributed_c10d._world.group_count
    for group in list(distributed_c10d._world.pg_map):  # a copy, because another thread may add groups
        ranks = distributed_c10d._world.pg_group_ranks.get(group)
        if group not in bridges and ranks and len(ranks) > 1:
            # torch's names are counted in each process: groups of other ranks may have the same
            members = ",".join(map(str, ranks))
            entered[f"{my_world[0]}/{group.group_name}/{members}"] = _begun(group)
    if roles.generates and len(ranks := roles.replicas[roles.replica]) > 1:
        entered[f"engine/{ranks[0]}"] = engine_steps[ranks[0]]
    return entered


def _begun(group: ProcessGroup) -> int:
    """Over the group's backends, one or two for CPU and GPU; torchtitan's groups of one rank have a fake one."""
    backends = {group._get_backend(device) for device in group._device_types}
    return sum(backend._get_sequence_number_for_group() for backend in backends if backend.name() != "fake")
