#!/usr/bin/env bash
# From nothing to a model that GRPO made better, in minutes, on two CPU cores or on GPUs, without a download of weights
# or data: a tiny model learns to add numbers from examples (SFT), then from rewards alone (GRPO).
#
#   bash launch/quickstart.sh
#
# The supervised start is kept in runs/toy_sft and reused; remove that folder to train it again.
set -euo pipefail
# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# With more threads than cores per rank, vLLM on a CPU is up to 100 times slower.
export OMP_NUM_THREADS=1

# Run a command under a title and say how long it took.
stage() {
    local title=$1 start=$SECONDS
    shift
    printf '\n== %s\n' "$title"
    "$@"
    printf '== %s: %d s\n' "$title" "$((SECONDS - start))"
}

torchrun=(python -m torch.distributed.run --standalone)
num_processes=4
sft_processes=2
layout=()
num_gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
if ((num_gpus > 0 && num_gpus < 4)); then
    # One process per GPU is all that NCCL allows: one GPU holds every role.
    num_processes=1
    sft_processes=1
    layout=(--roles.colocated --roles.num-trainers 1 --roles.num-references 0)
fi

if [[ -d runs/toy_sft/model ]]; then
    printf '\n== SFT: reusing runs/toy_sft/model\n'
else
    # --overwrite: what an interrupted run left is of no use.
    stage "SFT" "${torchrun[@]}" --nproc_per_node="$sft_processes" train_sft.py configs/toy_sft.py --overwrite \
        --num-trainers "$sft_processes"
fi
stage "GRPO" "${torchrun[@]}" --nproc_per_node="$num_processes" train_grpo.py configs/toy_arithmetic.py --overwrite \
    "${layout[@]}"
printf '\n'
python -m grpo.look runs/toy_arithmetic
cat <<'NEXT'

What next, after `source .venv/bin/activate`:
  watch the curves   tensorboard --logdir runs
  pass@k             python -m grpo.evaluate runs/toy_arithmetic/model runs/toy_arithmetic/config.py \
                         --evaluation.num-samples 8
  change something   the recipe configs/toy_arithmetic.py, the loss with --algorithm.loss dapo, or train_grpo.py itself
  a real model       torchrun --nproc_per_node=8 train_grpo.py configs/qwen3_1_7b_gsm8k.py
NEXT
printf '\nquickstart took %d s\n' "$SECONDS"
