#!/usr/bin/env bash
# The runs of configs/RESULTS.md: each variant prints a table; logs go to $OUT (default runs/bench).
#
#   bash tests/bench/gpu.sh base kl sleep      one GPU, Qwen3-0.6B, every role on it
#   bash tests/bench/gpu.sh updates stop eval  one GPU: several updates per batch, stop strings, evaluation on and off
#   bash tests/bench/gpu.sh colocated2 updates2  two GPUs, the same over FSDP 2 and one engine of tensor_parallel 2
#   bash tests/bench/gpu.sh split              four GPUs, Qwen3-1.7B, 2 trainers + 1 reference + 1 generator
#   bash tests/bench/gpu.sh split_all          the same with dynamic sampling, two updates, a sync every second step
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
updates=(--algorithm.loss gspo --algorithm.num-mini-batches 4 --generator.temperature 0.8 1.0 1.2)
updates+=(--algorithm.entropy-coef 0.001)
# half of all groups of two coins are equal, so that dynamic sampling has something to do
everything=(--group-size 2 --prompts-per-step 64 --sampling.dynamic --algorithm.loss dapo --algorithm.kl-in reward)
everything+=(--algorithm.num-mini-batches 2 --evaluation.interval 4 --evaluation.num-samples 4
    --trainer.learning-rate 1e-5)
evaluation=(--evaluation.interval 1 --evaluation.num-prompts 32 --evaluation.num-samples 4)
for variant in "$@"; do
    case $variant in
        base) bench base "${one[@]}" ;;
        kl) bench kl "${one[@]}" --algorithm.kl-coef 0.01 ;;
        sleep) bench sleep "${one[@]}" --generator.sleep ;;
        updates) bench updates "${one[@]}" "${updates[@]}" ;;
        stop) bench stop "${one[@]}" --num-steps 4 --generator.stop ab cd ;;
        eval)
            # what training does must not depend on it: the completions of both runs are compared
            bench plain "${one[@]}" --num-steps 3 --metrics.samples-interval 1
            bench eval "${one[@]}" --num-steps 3 --metrics.samples-interval 1 "${evaluation[@]}"
            cut -d, -f1-6 runs/plain/completions.jsonl | md5sum
            cut -d, -f1-6 runs/eval/completions.jsonl | md5sum
            cmp runs/plain/completions.jsonl runs/eval/completions.jsonl && echo "evaluation changed nothing"
            grep '"eval/' runs/eval/metrics.jsonl | cut -c 1-400
            ;;
        no_ac) bench no_ac "${one[@]}" --trainer.activation-checkpointing none ;;
        full_ac) bench full_ac "${one[@]}" --trainer.activation-checkpointing full ;;
        colocated2) bench colocated2 2 "${one[@]:1}" --roles.num-trainers 2 --generator.tensor-parallel 2 ;;
        updates2)
            bench updates2 2 "${one[@]:1}" --roles.num-trainers 2 --generator.tensor-parallel 2 "${updates[@]}"
            ;;
        split) bench split "${four[@]}" ;;
        split_all) bench split_all "${four[@]}" "${everything[@]}" ;;
        tp) bench tp "${four[@]}" --trainer.tensor-parallel 2 ;;
        replicas) bench replicas "${four[@]}" "${no_reference[@]}" ;;
        engine_tp) bench engine_tp "${four[@]}" "${no_reference[@]}" --generator.tensor-parallel 2 ;;
        *) echo "unknown variant $variant" ;;
    esac
done
