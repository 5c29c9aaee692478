#!/usr/bin/env bash
# What `make test` runs: linters and all tests, so that two cores always have something to do.
#   tests/all.sh PYTHON LOGS LINT...    Python of the environment, an existing folder for logs, command of the linters
#
# first     in a fresh clone, pytest's rewritten tests: otherwise each of the processes below makes all of them
# linters   at idle priority, from the beginning
# beside    tests that only compute and time nothing: the same, until the end; most of their time is what clusters leave
# tests without clusters, in five processes, which mostly wait, the longest files first (tests/longest.py)
# clusters  three at a time: they mostly wait; then, one by one, those that tests/alone.py names
#
# Long matrices run in a short form (tests/short_form.py), all of them in `make test-matrix`.
# A pytest that still runs after 40 minutes tells where each of its threads is, and ends.
set -uo pipefail
python=$1 logs=$2
shift 2

# Engine tests that look at clocks, or wait for threads or processes only so long.
WAITING="canary|core_lock|core_turns|fault_isolation|grammar_masks|grammars|leak_detector|local_embeddings|loop|models_memory\
|models_one_copy|newcomer_priority|unrunnable"
BESIDE="tests/kernels tests/virtual tests/simulate tests/placement $(ls tests/engine/test_*.py | grep -vE "/test_($WAITING)\.py")"
CLUSTERS="tests/cluster tests/chaos tests/clients tests/attack"
SELECTED="not clients and not images and not engines"
idle="nice -n 19"
command -v chrt > /dev/null && idle="chrt --idle 0"
failed=0
KVFERRY_TEST_RUN=$(mktemp -d) # tests/once_a_run.py
export KVFERRY_TEST_RUN KVFERRY_TEST_SHORT=1 PYTHONUNBUFFERED=1
bounded="timeout --foreground --signal=ABRT --kill-after=30 2400"

# shellcheck disable=SC2086
run() { $bounded "$python" -m pytest "$@" || { echo "failed: pytest $*"; failed=1; }; }

# As soon as a job in the background has ended, its output comes at once and whole.
job() {
  local log="$logs/$1.log"
  shift
  "$@" > "$log" 2>&1 &
  local child=$! status
  trap "kill $child 2> /dev/null" TERM
  wait $child
  status=$?
  cat "$log"
  return $status
}

# shellcheck disable=SC2086
job lint $idle "$@" & lint=$!
trap 'kill $lint 2> /dev/null; rm -rf "$KVFERRY_TEST_RUN"' EXIT
trap 'exit 130' INT TERM
# shellcheck disable=SC2046,SC2086
if [ ! -d tests/__pycache__ ]; then
  "$python" -m pytest --collect-only -qq $CLUSTERS $BESIDE > "$logs/collected-beside.log" 2>&1 & half=$!
  "$python" -m pytest --collect-only -qq $(printf -- '--ignore=%s ' $CLUSTERS $BESIDE) > "$logs/collected.log" 2>&1
  wait $half
fi
# shellcheck disable=SC2086
job beside $idle "$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --timeout 3000 -o faulthandler_timeout=3100 \
  $BESIDE & beside=$!
trap 'kill $beside $lint 2> /dev/null; rm -rf "$KVFERRY_TEST_RUN"' EXIT

# shellcheck disable=SC2086
run -n 5 --dist loadfile --no-loadscope-reorder $(printf -- '--ignore=%s ' $CLUSTERS $BESIDE)
# shellcheck disable=SC2086
run -n 3 --dist loadfile --no-loadscope-reorder -m "$SELECTED and not alone" $CLUSTERS
# shellcheck disable=SC2086
run -m "$SELECTED and alone" $CLUSTERS
echo "waiting for $BESIDE"
wait $lint || { echo "failed: $*"; failed=1; }
wait $beside || { echo "failed: $BESIDE"; failed=1; }
exit $failed
