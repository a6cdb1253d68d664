#!/usr/bin/env bash
# A real language model that GRPO makes better, in minutes, on two CPU cores or on a GPU: SmolLM2-135M-Instruct learns
# from rewards alone which of three numbers is the smallest.
#
#   bash launch/quickstart.sh
#
# It downloads the model once (launch/smollm2.py says from where and how large) and keeps it in runs/smollm2-135m.
set -euo pipefail
# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# Run a command under a title and say how long it took.
stage() {
    local title=$1 start=$SECONDS
    shift
    printf '\n== %s\n' "$title"
    "$@"
    printf '== %s: %d s\n' "$title" "$((SECONDS - start))"
}

flags=()
if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    # Rounding to bfloat16 hides small updates, so it takes more steps; on a GPU they take a second each.
    flags=(--model.dtype bfloat16 --num-steps 60 --evaluation.interval 30)
else
    # One thread for each core of this process: with more, a CPU is many times slower.
    OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}
    export OMP_NUM_THREADS
fi

stage "the model" python launch/smollm2.py runs/smollm2-135m
stage "GRPO" python train_grpo.py configs/smollm2_smallest.py --overwrite "${flags[@]}"
printf '\n'
python -m grpo.look runs/smollm2_smallest
cat <<'NEXT'

What next, after `source .venv/bin/activate`:
  watch the curves   tensorboard --logdir runs
  pass@k             python -m grpo.evaluate runs/smollm2_smallest/model runs/smollm2_smallest/config.py \
                         --evaluation.num-samples 8
  your own task      the rows and the reward in configs/examples/smallest.py, the recipe configs/smollm2_smallest.py
  the algorithm      train_grpo.py, or --algorithm.loss dapo
  a GPU              python train_grpo.py configs/qwen2_5_coder_0_5b_gsm8k.py
NEXT
printf '\nquickstart took %d s\n' "$SECONDS"
