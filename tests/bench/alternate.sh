#!/usr/bin/env bash
# The speed of two checkouts in turns, on one machine in one session: the first of each pair alternates too.
#
#   bash tests/bench/alternate.sh OLD_CHECKOUT NEW_CHECKOUT ROUNDS STEPS RANKS [--field value ...]
#
# Every run is tests/bench/colocated.py of its own checkout with these flags, and is ended before its last step, which
# saves. SHAPE names the checkpoint (tests/bench/random_checkpoint.py). Logs and metrics go to $OUT (default runs/bench).
set -u
old=$1 new=$2 rounds=$3 steps=$4 ranks=$5
shift 5
out=$(realpath -m "${OUT:-runs/bench}")
shape=${SHAPE:-qwen3-0.6b}
model=/tmp/$shape
mkdir -p "$out"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
[ -f "$model/prompts.jsonl" ] || (cd "$new" && python3 tests/bench/random_checkpoint.py "$shape" "$model" >"$out/model.log" 2>&1)

run() { # CHECKOUT NAME FLAGS...
    local run_dir=$out/$2
    cd "$1" || exit 1
    setsid python3 -m torch.distributed.run --standalone --nproc_per_node="$ranks" train_grpo.py tests/bench/colocated.py \
        --model.path "$model" --data.path "$model/prompts.jsonl" --run-dir "$run_dir" --num-steps "$steps" \
        "${@:3}" >"$out/$2.log" 2>&1 &
    local group=$!
    until [ "$(grep -c time/step "$run_dir/metrics.jsonl" 2>/dev/null)" = $((steps - 1)) ] || ! kill -0 $group 2>/dev/null; do
        sleep 0.3
    done
    kill -9 -- -$group 2>/dev/null && wait $group 2>/dev/null
    pkill -9 -f -- "--run-dir $run_dir" # ranks have process groups of their own
    sleep 2
    echo "$2: $(tail -n 1 "$out/$2.log" | cut -c 1-120)"
}

for round in $(seq "$rounds"); do
    names=(old new)
    if ((round % 2 == 0)); then names=(new old); fi
    for name in "${names[@]}"; do run "${!name}" "${name}_$round" "$@"; done
done
for name in old new; do
    echo "== $name"
    cat "$out/${name}"_*/metrics.jsonl >"$out/$name.jsonl"
    mkdir -p "$out/all_$name" && mv "$out/$name.jsonl" "$out/all_$name/metrics.jsonl"
    (cd "$new" && python3 tests/bench/table.py "$out/all_$name" 4)
done
