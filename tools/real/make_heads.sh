#!/usr/bin/env bash
# Makes prompts, answers and the three heads of SmolLM2-135M-Instruct from nothing, on a GPU where there is one:
#
#     tools/real/make_heads.sh WORK QUESTIONS     (QUESTIONS: a folder of held-out question sets, as JSONL)
#
# Finished steps are kept in WORK, and a stopped one goes on: run it again. PROMPTS, STEPS, BATCH (answers at once) and
# WINDOWS (of a training step) change the amounts; the defaults write about 1.5 million tokens of answers. On one GPU that
# takes less than an hour (an H200 with BATCH=2048 writes 50,000 tokens of answers a second; with WINDOWS=192 EAGLE-3 learns
# 730,000), on two cores of a processor a day, with WINDOWS=8. The heads are in WORK/eagle3, WORK/eagle1 and WORK/block,
# their curves in training/log.jsonl of each.
set -euo pipefail
work=${1:?a folder to work in}
questions=${2:?a folder of question sets that stay out of the training data}
python=${PYTHON:-python}
train() { "$python" -m eagle_train.cli "$@"; }
prompts() { "$python" -m eagle_tools.prompts "$@"; }
mkdir -p "$work"
target=$work/target
[ -d "$target" ] || "$python" "$(dirname "$0")/smollm2.py" "$target"

# The target asks itself, and answers that and prompts over open text. Each file goes on where it stopped.
[ -f "$work/headers.jsonl" ] || prompts headers "$target" --count "${PROMPTS:-8000}" -o "$work/headers.jsonl"
answer() {
  [ -f "$2" ] || train generate "$target" --data "$1" -o "$2" --resume --cut-loops --temperature 0.2 --top-p 0.9 \
    --max-new-tokens 384 --batch-size "${BATCH:-192}"
}
answer "$work/headers.jsonl" "$work/asked.jsonl"
[ -f "$work/requests.jsonl" ] || prompts articles "$target" --count "$((${PROMPTS:-8000} / 10))" -o "$work/requests.jsonl"
answer "$work/requests.jsonl" "$work/articles.jsonl"
[ -d "$work/prompts" ] || prompts mix "$target" --headers "$work/headers.jsonl" --asked "$work/asked.jsonl" \
  --articles "$work/articles.jsonl" \
  --held-out "$questions"/*.jsonl --count "${PROMPTS:-8000}" --shards 4 --evaluation 64 -o "$work/prompts"
mkdir -p "$work/answers"
# JOBS: files that are answered at once; more than one gain nothing on a GPU, which then changes from one to the next.
running=0
for prompts_file in "$work"/prompts/*.jsonl; do
  answer "$prompts_file" "$work/answers/$(basename "$prompts_file")" &
  running=$((running + 1))
  if [ "$running" -ge "${JOBS:-1}" ]; then wait -n; running=$((running - 1)); fi
done
while [ "$running" -gt 0 ]; do wait -n; running=$((running - 1)); done  # one by one: a failed one ends the script

# EAGLE-1 first: the block head begins with its layer.
data=("$work"/answers/train-*.jsonl)
cache="--cache $work/cache"
if "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then cache=; fi  # its memory is the cache
head() {
  read -ra kind <<<"$1"
  out=$2; shift 2
  resume=(); [ -d "$out/training" ] && resume=(--resume)
  train "${kind[@]}" "$target" --data "${data[@]}" --eval-data "$work/answers/eval.jsonl" -o "$out" \
    $cache --batch-size "${WINDOWS:-128}" --seq-len 1536 --steps "${STEPS:-6000}" "${resume[@]}" "$@"
}
head "head --kind eagle3" "$work/wide" --draft-vocab 8192 --ttt-steps 6 --ttt-share 0.4 --lr 0.0012
[ -f "$work/eagle3/config.json" ] || train head --kind eagle3 "$target" --data "${data[@]}" --init "$work/wide" \
  --draft-vocab 4864 --steps 0 -o "$work/eagle3"  # the most frequent draft tokens, for a file below 16 MB
head "head --kind eagle1" "$work/eagle1" --classification 0.5 --lr 0.0015
head block "$work/block" --init "$work/eagle1" --layers 2 --draft-vocab 4864 --lr 0.001
