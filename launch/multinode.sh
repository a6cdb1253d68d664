#!/usr/bin/env bash
# GRPO or SFT on several machines without SLURM. Start it on each of them, inside the repository, with the same arguments,
# which are those of the script; only NODE_RANK differs:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node7 bash launch/multinode.sh configs/qwen3_32b_gsm8k.py --checkpoint.interval 20
#
# Environment:
#   NNODES          machines (1)
#   NODE_RANK       which one this is, from 0 (0); 0 is where all meet. It does not say which ranks are here: torchrun
#                   counts through the machines in the order of their names, so rank 0, which prints and saves, is on
#                   the machine whose name (hostname -f) is the first of the alphabet
#   MASTER_ADDR     name or address of machine 0, which all others reach (127.0.0.1 on one machine)
#   MASTER_PORT     a free port there (29500)
#   GPUS_PER_NODE   processes to start here (as many as nvidia-smi lists)
#   MAX_RESTARTS    failures survived: all processes of all machines are then started again (3)
#   RUN_ID          name of the meeting place, where several runs share machine 0 (grpo)
#   TRAIN_SCRIPT    train_grpo.py or train_sft.py (train_grpo.py)
#
# --resume is always added: what is started again continues from its last checkpoint. So RUN_DIR must be on a file system
# that all machines see.
set -euo pipefail
# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

fail() {
    printf 'multinode: %s\n' "$1" >&2
    exit 1
}

script=${TRAIN_SCRIPT:-train_grpo.py} num_nodes=${NNODES:-1} node_rank=${NODE_RANK:-0}
for argument in "$@"; do
    [[ "$argument" != --overwrite ]] || fail "--overwrite would delete the run at every restart; remove its folder by hand"
done
if ((num_nodes > 1)) && [[ -z "${MASTER_ADDR:-}" ]]; then
    fail "NNODES=$num_nodes needs MASTER_ADDR, the name or address of the machine with NODE_RANK=0"
fi
((node_rank >= 0 && node_rank < num_nodes)) || fail "NODE_RANK=$node_rank is none of 0 to $((num_nodes - 1)) (NNODES - 1)"
# || true: with pipefail, a machine without nvidia-smi would end this script without a word
gpus_per_node=${GPUS_PER_NODE:-$(nvidia-smi -L 2>/dev/null | wc -l || true)}
((gpus_per_node > 0)) || fail "nvidia-smi lists no GPU; set GPUS_PER_NODE to the number of processes to start here"

# A rank needs few threads: data and rewards run in processes of their own.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
# Machine 0 holds the meeting place, which torchrun would otherwise guess from MASTER_ADDR and the machine's names.
is_host=$((node_rank == 0))

# exec: signals reach torchrun. --shutdown-timeout: after a SIGTERM the ranks may finish their step.
exec python -m torch.distributed.run \
    --nnodes="$num_nodes" \
    --nproc_per_node="$gpus_per_node" \
    --max_restarts="${MAX_RESTARTS:-3}" \
    --shutdown-timeout=600 \
    --rdzv_id="${RUN_ID:-grpo}" \
    --rdzv_backend=c10d \
    --rdzv_endpoint="${MASTER_ADDR:-127.0.0.1}:${MASTER_PORT:-29500}" \
    --rdzv_conf="is_host=$is_host" \
    "$script" "$@" --resume
