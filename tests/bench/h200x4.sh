#!/usr/bin/env bash
# Four GPUs: Qwen3-1.7B, 2 trainer + 1 reference + 1 generator rank. Prints a table; logs go to $OUT (default runs/h200x4).
set -u
out=${OUT:-runs/h200x4}
mkdir -p "$out"
export OMP_NUM_THREADS=8
model=${MODEL:-/tmp/qwen3-1.7b}
[ -f "$model/config.json" ] || python3 tests/bench/random_checkpoint.py "${SHAPE:-qwen3-1.7b}" "$model" >"$out/model.log" 2>&1

bench() { # NAME FLAGS...
    local name=$1
    shift
    echo "== $name: $*"
    timeout "${LIMIT:-280}" python3 -m torch.distributed.run --standalone --nproc_per_node=4 train_grpo.py \
        tests/bench/split.py --model.path "$model" --data.path "$model/prompts.jsonl" --run-dir "runs/$name" "$@" \
        >"$out/$name.log" 2>&1
    echo "exit code $?"
    grep "^step\|error" "$out/$name.log" | tail -3 | cut -c 1-220
    python3 tests/bench/table.py "runs/$name" || tail -40 "$out/$name.log"
    cp "runs/$name/metrics.jsonl" "$out/$name.jsonl"
}

for variant in "$@"; do
    case $variant in
        split) bench split ;;
        tp) bench tp --trainer.tensor-parallel 2 --num-steps 6 ;;
        replicas) bench replicas --roles.num-references 0 --roles.num-generators 2 --grpo.kl-coef 0 --num-steps 6 ;;
        engine_tp) bench engine_tp --roles.num-references 0 --roles.num-generators 2 --generator.tensor-parallel 2 \
            --grpo.kl-coef 0 --num-steps 6 ;;
        *) echo "unknown variant $variant" ;;
    esac
done
