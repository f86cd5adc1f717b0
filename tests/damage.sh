#!/usr/bin/env bash
# OUT=folder bash tests/damage.sh CORES SECONDS [BUILD …]: damage to the compiled kernels' builds on a machine with
# many cores, the most valuable first, two at a time. From the repository's root. Restartable: goes on from the records
# in docs/measurements/emulated, ./emu_prev and $OUT, and writes $OUT/mutations-BUILD.jsonl as it goes. SAMPLE=N: only
# N mutations of each build. KNOWN="files": other records than those, or none. Ends with 1 if a build's run has failed.
set -u
cores=$1
seconds=$2
shift 2
builds=${*:-backward-ring backward-direct hopper-pair-direct hopper-backward-direct hopper-pair-ring hopper-backward-ring hopper-direct hopper-ring}
out=${OUT:?}
known=${KNOWN-$(ls docs/measurements/emulated/mutations-*.jsonl emu_prev/*.jsonl 2>/dev/null)}
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
begin=$(date +%s)
one() {
    build=$1
    left=$((begin + seconds - $(date +%s) - 25))
    if [ "$left" -lt 40 ]; then
        echo "$build: no time left"
        return
    fi
    # shellcheck disable=SC2086
    timeout $((left + 20)) python3 -m tests.kernel_mutations run "$build" "$out/mutations-$build.jsonl" \
        --jobs "$jobs" --seconds "$left" ${SAMPLE:+--sample "$SAMPLE"} --known $known >"$out/$build.log" 2>&1
    status=$?
    echo "$build: rc $status, $(($(date +%s) - begin)) s"
    return $status
}
jobs=$((cores * 5 / 8))
[ "$jobs" -gt 0 ] || jobs=1
export -f one
export begin seconds out jobs known
# Compiled once, rather than by both at the same time.
python3 -c 'from tests.kernel_mutations import undamaged; from tests.mutation_builds import BUILDS
print(undamaged(BUILDS["direct"], 0, None)["result"])' || exit 1
failed=0
echo "$builds" | tr ' ' '\n' | xargs -P 2 -I{} bash -c 'one {}' || failed=1
# shellcheck disable=SC2086
python3 -m tests.kernel_mutations table $known "$out"/*.jsonl >"$out/table.txt" 2>&1
exit $failed
