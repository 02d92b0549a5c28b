#!/usr/bin/env bash
# Runs iterative, speculative and pipeinfer, in that order, and draws results.csv.
# RANKS, TOKENS, REPEATS, MODEL, MODEL_DRAFT and PROMPT in the environment choose what; the shipped pair is the default.
set -euo pipefail
cd "$(dirname "$0")"
PATH="$PWD/.venv/bin:$PATH"

models=()
[ -z "${MODEL:-}" ] || models+=(-m "$MODEL")
[ -z "${MODEL_DRAFT:-}" ] || models+=(-md "$MODEL_DRAFT")
launcher=(mpirun)
if mpirun --version | grep -qi "open.mpi"; then
    launcher+=(--oversubscribe --bind-to none)
fi

for ranks in ${RANKS:-3 4}; do
    for _ in $(seq "${REPEATS:-3}"); do
        for policy in iterative speculative pipeinfer; do
            "${launcher[@]}" -np "$ranks" pipeinfer run "${models[@]}" -p "${PROMPT:-def fibonacci(n):}" \
                -n "${TOKENS:-128}" --temp 0 --ignore-eos --policy "$policy" --results results.csv >/dev/null
        done
    done
done
python plot.py results.csv
