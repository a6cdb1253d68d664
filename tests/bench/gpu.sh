#!/usr/bin/env bash
# The runs of configs/RESULTS.md: each variant prints a table; logs go to $OUT (default runs/bench).
#
#   bash tests/bench/gpu.sh base kl sleep      one GPU, Qwen3-0.6B, every role on it
#   bash tests/bench/gpu.sh colocated2         two GPUs, the same over FSDP 2 and one engine of tensor_parallel 2
#   bash tests/bench/gpu.sh split              four GPUs, Qwen3-1.7B, 2 trainers + 1 reference + 1 generator
#
# SHAPE and MODEL (a folder) override the checkpoint, LIMIT the seconds one variant may take.
set -u
out=${OUT:-runs/bench}
mkdir -p "$out"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"

bench() { # NAME RANKS SHAPE RECIPE FLAGS...
    local name=$1 ranks=$2 shape=${SHAPE:-$3} recipe=$4
    shift 4
    local model=${MODEL:-/tmp/$shape}
    if [ ! -f "$model/prompts.jsonl" ]; then
        python3 tests/bench/random_checkpoint.py "$shape" "$model" >"$out/model.log" 2>&1
    fi
    echo "== $name: $*"
    timeout "${LIMIT:-400}" python3 -m torch.distributed.run --standalone --nproc_per_node="$ranks" train_grpo.py \
        "$recipe" --model.path "$model" --data.path "$model/prompts.jsonl" --run-dir "runs/$name" "$@" \
        >"$out/$name.log" 2>&1
    echo "exit code $?"
    grep "^step\|^error" "$out/$name.log" | tail -3 | cut -c 1-220
    python3 tests/bench/table.py "runs/$name"
    cp "runs/$name/metrics.jsonl" "$out/$name.jsonl"
}

one=(1 qwen3-0.6b tests/bench/colocated.py)
four=(4 qwen3-1.7b tests/bench/split.py)
no_reference=(--roles.num-references 0 --roles.num-generators 2 --algorithm.kl-coef 0)
for variant in "$@"; do
    case $variant in
        base) bench base "${one[@]}" ;;
        kl) bench kl "${one[@]}" --algorithm.kl-coef 0.01 ;;
        sleep) bench sleep "${one[@]}" --generator.sleep ;;
        no_ac) bench no_ac "${one[@]}" --trainer.activation-checkpointing none ;;
        full_ac) bench full_ac "${one[@]}" --trainer.activation-checkpointing full ;;
        colocated2) bench colocated2 2 "${one[@]:1}" --roles.num-trainers 2 --generator.tensor-parallel 2 ;;
        split) bench split "${four[@]}" ;;
        tp) bench tp "${four[@]}" --trainer.tensor-parallel 2 ;;
        replicas) bench replicas "${four[@]}" "${no_reference[@]}" ;;
        engine_tp) bench engine_tp "${four[@]}" "${no_reference[@]}" --generator.tensor-parallel 2 ;;
        *) echo "unknown variant $variant" ;;
    esac
done
