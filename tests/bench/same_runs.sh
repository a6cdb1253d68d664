#!/usr/bin/env bash
# Twenty small runs of a checkout on a CPU, whose numbers a change that computes the same must keep to the last digit:
#
#   bash tests/bench/same_runs.sh CHECKOUT OUT         (with the environment that is active; about ten minutes)
#   for run in OUT_OLD/*/; do python tests/bench/same_numbers.py "$run" "OUT_NEW/$(basename "$run")"; done
set -euo pipefail
checkout=$1 out=$(mkdir -p "$2" && cd "$2" && pwd)
cd "$checkout"
export OMP_NUM_THREADS=1

# run NAME RANKS SCRIPT RECIPE FLAGS...
run() {
    local name=$1 ranks=$2
    shift 2
    torchrun --standalone --nproc_per_node="$ranks" "$@" --run-dir "$out/$name" >"$out/$name.log" 2>&1 ||
        echo "$name failed, see $out/$name.log"
}
every=(--num-steps 4 --prompts-per-step 8 --metrics.samples-interval 1 --checkpoint.no-export)
every+=(--evaluation.interval 2 --evaluation.num-prompts 32)
grpo() { run "$1" "$2" train_grpo.py configs/toy_arithmetic.py --model.path "$out/sft/model" "${every[@]}" "${@:3}"; }
two() { grpo "$1" 2 --roles.num-trainers 1 --roles.num-references 0 --algorithm.kl-coef 0 "${@:2}"; }

run sft 2 train_sft.py configs/toy_sft.py --num-steps 60
run toolsft 2 train_sft.py configs/toy_tools_sft.py --num-steps 60
run guesssft 2 train_sft.py configs/toy_guess_sft.py --num-steps 60
grpo split4 4 --algorithm.kl-coef 0.05
two sapo --algorithm.loss sapo
two dapo --algorithm.loss dapo --algorithm.num-mini-batches 2 --algorithm.num-epochs 2
two dynamic --sampling.dynamic --generator.stop "</answer>"
two gspo --algorithm.loss gspo --algorithm.num-mini-batches 2
two kl_reward --algorithm.kl-coef 0.1 --algorithm.kl-in reward --algorithm.advantages rloo
two cispo --algorithm.loss cispo --evaluation.num-samples 4 --generator.temperature 0.8 1.0
two overlap --overlap-steps 1 --algorithm.importance-correction truncate
two carry --sampling.carry-over 4 --algorithm.importance-correction mask_tokens --generator.max-completion-tokens 48
two lora --trainer.lora-rank 4 --trainer.learning-rate 1e-3
# After 60 steps of SFT all rewards of a group are equal, and no gradient shows anything, unless the temperature is high.
run calc 2 train_grpo.py configs/toy_calculator.py --model.path "$out/toolsft/model" "${every[@]}" \
    --environment.answer-steps 16 --generator.temperature 1.3 --reward.functions math_reward 1.0 regex_match 0.2 \
    --reward.options regex_match '{"pattern": "[1-9].*answer"}'
run guess 2 train_grpo.py configs/toy_guess.py --model.path "$out/guesssft/model" "${every[@]}" \
    --environment.rounds --algorithm.advantages return_to_go
two kept --generator.sampling top_p 0.98 --generator.temperature 1.3 --algorithm.num-mini-batches 2 --record
run early 2 train_sft.py configs/toy_sft.py --num-steps 20
two teacher --model.reference-path "$out/early/model" --algorithm.distill-coef 0.5
python - "$out" <<'PROGRAM'
import pathlib, sys
from transformers import AutoTokenizer
from tests.tiny_models import make_reward_model
out = pathlib.Path(sys.argv[1])
make_reward_model(out / "judge_model", "qwen2-untied", AutoTokenizer.from_pretrained(out / "sft/model"))
PROGRAM
two judge --reward.model "$out/judge_model" --reward.model-weight 0.5
run replay 1 -m grpo.replay "$out/kept" --algorithm.loss dapo
run evaluate 1 -m grpo.evaluate "$out/early/model" configs/toy_arithmetic.py --evaluation.num-samples 2 \
    --evaluation.num-prompts 64
