#!/usr/bin/env bash
# The experiments of PipeInfer's evaluation: iterative, speculative, pipeinfer and its ablations, or other policies and
# theirs, for every model pair, number of ranks and prompt; then the figures. Every round measures all of them once, so
# that what changes on the machine meanwhile changes all alike. Run it again after an interruption: it goes on.
#
#   PAIRS      model pairs, TARGET:DRAFT, separated by spaces. [the shipped pair, and a target grown from it]
#   RANKS      numbers of MPI ranks. [3 4; under Slurm the tasks of the allocation, or its nodes]
#   TOKENS     tokens to generate. [128]     REPEATS  of everything. [3]      SEED [0]
#   QUESTIONS  folder with .jsonl question sets [../shared/prompts, if there], N_QUESTIONS of each [1]; these are asked
#              once, after all rounds, and without ablations
#   CUT        tokens of a prompt at most. [128]
#   LAYERS     of the grown target. [48]
#   POLICIES   what to measure. [iterative,speculative,pipeinfer]
#   ABLATE     what to leave out [cancel,partitions,continuous,asynchronous, or nothing with POLICIES]
#   RESULTS    the table. [results.csv]      FIGURES  folder for the pictures; empty: none [figures]
set -euo pipefail
case ${1-} in # a word that is not understood must not start hours of measurements
"") ;;
-h | --help)
    sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "$0"
    exit
    ;;
*)
    echo "experiments.sh: $1: settings are variables, as in TOKENS=64 ./experiments.sh; --help lists them" >&2
    exit 2
    ;;
esac
here=$(dirname "$0")
# sbatch runs a copy of this file, from a folder of its own
[ -d "$here/pipeinfer" ] || here=${SLURM_SUBMIT_DIR:-$here}
cd "$here"
PATH="$PWD/.venv/bin:$PATH"

for setting in RANKS TOKENS REPEATS SEED N_QUESTIONS CUT LAYERS; do # mpirun starts one rank for a number that is none
    case $setting in
    RANKS) number='^ *[1-9][0-9]*( +[1-9][0-9]*)* *$' words="numbers of MPI ranks, separated by spaces" ;;
    SEED | CUT | N_QUESTIONS) number='^[0-9]+$' words="a whole number from 0 on" ;;
    *) number='^[1-9][0-9]*$' words="a whole number from 1 on" ;;
    esac
    if [ -n "${!setting:-}" ] && ! [[ ${!setting} =~ $number ]]; then
        echo "experiments.sh: $setting=${!setting}: give $words" >&2
        exit 2
    fi
done
for pair in ${PAIRS:-}; do
    case $pair in
    ?*:?*) ;;
    *)
        echo "experiments.sh: PAIRS has $pair: give TARGET:DRAFT" >&2
        exit 2
        ;;
    esac
done

results=${RESULTS:-results.csv}
questions=${QUESTIONS-../shared/prompts}
figures=${FIGURES-figures}
if [ -n "$figures" ] && ! missing=$(python -c 'import matplotlib, pandas' 2>&1); then # not after hours of measurements
    echo "experiments.sh: figures need matplotlib and pandas (${missing##*$'\n'}): $(command -v python) -m pip install" \
        "'pipeinfer[plot]', or FIGURES= to draw none" >&2
    exit 2
fi

open_mpi=
if mpirun --version 2>/dev/null | grep -i "open.mpi" >/dev/null; then open_mpi=1; fi
# what the shell was started with counts for it alone, and Slurm's default is often none
slurm_mpi=${SLURM_MPI_TYPE:-none}
[ "$slurm_mpi" != none ] || slurm_mpi=${open_mpi:+pmix}

launch() { # RANKS COMMAND...
    local ranks=$1
    shift
    if [ -n "${SLURM_JOB_ID:-}" ] && command -v srun >/dev/null; then
        # -X: the first Ctrl-C goes to the ranks; -c: srun does not take it from the allocation
        srun -X --mpi="${slurm_mpi:-pmi2}" ${SLURM_CPUS_PER_TASK:+-c "$SLURM_CPUS_PER_TASK"} -n "$ranks" "$@"
    elif [ -n "$open_mpi" ]; then
        mpirun --oversubscribe --bind-to none -np "$ranks" "$@"
    else
        mpirun -np "$ranks" "$@"
    fi
}

shipped=pipeinfer/models/demo
if [ -z "${PAIRS:-}" ]; then
    grown=build/grown-${LAYERS:-48}.gguf
    if ! mkdir -p build 2>/dev/null; then
        echo "experiments.sh: $PWD/build, for the grown target, cannot be made: copy the project to where it can, or" \
            "give PAIRS" >&2
        exit 2
    fi
    # made anew where the shipped target is newer
    [ "$grown" -nt $shipped/target.gguf ] || python experiments/grow.py -m $shipped/target.gguf -o "$grown" \
        --layers "${LAYERS:-48}" -md $shipped/draft.gguf
    PAIRS="$shipped/target.gguf:$shipped/draft.gguf $grown:$shipped/draft.gguf"
fi

texts=pipeinfer/job/requests/prompts
prompts=(-p $texts/program.txt -p $texts/tale.txt -p $texts/excerpt.txt)
sets=()
for file in "$questions"/*.jsonl; do
    [ ! -e "$file" ] || sets+=(-p "$file")
done

policies=${POLICIES:-iterative,speculative,pipeinfer}
ablate=${ABLATE-$([ -n "${POLICIES-}" ] || echo cancel,partitions,continuous,asynchronous)}

for pair in $PAIRS; do
    for ranks in ${RANKS:-${SLURM_NTASKS:-${SLURM_JOB_NUM_NODES:-3 4}}}; do
        common=(pipeinfer bench -m "${pair%%:*}" -md "${pair#*:}" -n "${TOKENS:-128}" -s "${SEED:-0}" --temp 0
            --cut "${CUT:-128}" --results "$results" --resume)
        echo "== ${pair%%:*}, $ranks ranks" >&2
        for round in $(seq "${REPEATS:-3}"); do
            # up to this round: --resume leaves out the ones before
            launch "$ranks" "${common[@]}" "${prompts[@]}" -r "$round" --policy "$policies" \
                ${ablate:+--ablate "$ablate"}
        done
        if [ "${#sets[@]}" -gt 0 ]; then
            launch "$ranks" "${common[@]}" "${sets[@]}" --questions "${N_QUESTIONS:-1}" -r 1 \
                --policy "$policies"
        fi
    done
done
[ -z "$figures" ] || python plot.py "$results" -o "$figures"
