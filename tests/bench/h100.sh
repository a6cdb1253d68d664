#!/usr/bin/env bash
# One GPU: Qwen3-0.6B with every role on it. Prints a table per variant; logs go to $OUT (default runs/h100).
set -u
out=${OUT:-runs/h100}
mkdir -p "$out"
export OMP_NUM_THREADS=8
model=${MODEL:-/tmp/qwen3-0.6b}
[ -f "$model/config.json" ] || python3 tests/bench/random_checkpoint.py "${SHAPE:-qwen3-0.6b}" "$model" >"$out/model.log" 2>&1

bench() { # NAME FLAGS...
    local name=$1
    shift
    echo "== $name: $*"
    timeout "${LIMIT:-260}" python3 -m torch.distributed.run --standalone --nproc_per_node=1 train_grpo.py \
        tests/bench/colocated.py --model.path "$model" --data.path "$model/prompts.jsonl" --run-dir "runs/$name" "$@" \
        >"$out/$name.log" 2>&1
    echo "exit code $?"
    grep "^step\|error" "$out/$name.log" | tail -3 | cut -c 1-220
    python3 tests/bench/table.py "runs/$name" || tail -40 "$out/$name.log"
    cp "runs/$name/metrics.jsonl" "$out/$name.jsonl"
}

for variant in "$@"; do
    case $variant in
        base) bench base ;;
        no_ac) bench no_ac --trainer.activation-checkpointing none ;;
        full_ac) bench full_ac --trainer.activation-checkpointing full ;;
        sleep) bench sleep --generator.sleep ;;
        eager) bench eager --generator.enforce-eager --trainer.no-compile ;;
        kl) bench kl --grpo.kl-coef 0.01 ;;
        *) echo "unknown variant $variant" ;;
    esac
done
