#!/bin/sh
# Train one run on a Ray cluster that is up, then shut the mesh down; the exit code is that of `offbeat runs watch`.
#
#   offbeat-run-once DEPLOY_FILE RUN_FILE [KEY=VALUE]...
#
# For run_nodes.sh beside it, and a RayJob (deploy/kubernetes). A run that exists is resumed, also one that is active in
# Redis since a job that was killed; with OFFBEAT_STOP_OTHERS, other runs that such jobs have left active are stopped, as
# this job's devices are for its own: the Redis must be the job's alone. The token is that of OFFBEAT_TOKEN_FILE,
# OFFBEAT_TOKEN, or runs/control/token in this folder.
set -eu
deploy=$1
run=$2
shift 2
url=${OFFBEAT_URL:-http://127.0.0.1:8000}
export OFFBEAT_URL="$url"
if [ -n "${OFFBEAT_TOKEN_FILE:-}" ]; then
    OFFBEAT_TOKEN=$(cat "$OFFBEAT_TOKEN_FILE")
    export OFFBEAT_TOKEN
fi

# Serve answers a while before its applications do
answers() { python3 -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' "$url/healthz" 2>/dev/null; }

serve deploy "$deploy"
attempts=${OFFBEAT_START_ATTEMPTS:-300}
until answers; do
    attempts=$((attempts - 1))
    if [ "$attempts" -le 0 ]; then
        echo "offbeat-run-once: the control service at $url does not answer:" >&2
        serve status >&2
        serve shutdown -y
        exit 1
    fi
    sleep 1
done

# To be resumed, a run must exist
resume=true
said=$(offbeat runs start --dry-run "$run" resume_from_checkpoint=true "$@" 2>&1) || case $said in
    *"to resume: leave it out"*) resume=false ;;
esac

errors=$(mktemp)
trap 'rm -f "$errors"' EXIT
start() {
    code=0
    name=$(offbeat runs start "$run" resume_from_checkpoint="$resume" "$@" 2>"$errors") || code=$?
    cat "$errors" >&2
}

start "$@"
# A run of a job that was killed is active in Redis, with that job's configuration
active=$(sed -n "s/^offbeat: run '\([^']*\)' is .*/\1/p" "$errors")
if [ "$code" -eq 4 ] && [ -n "$active" ]; then
    echo "offbeat-run-once: run $active is active in Redis since an earlier job: it is stopped, and resumed by this one" >&2
    offbeat runs stop --now "$active" >&2 || :
    offbeat runs watch "$active" >&2 || :
    start "$@"
fi
if [ "$code" -eq 0 ] && [ -n "${OFFBEAT_STOP_OTHERS:-}" ]; then
    active=$(offbeat runs list --json --state preparing --state starting --state running --state paused --state draining |
        python3 -c 'import json, sys; print(*(run["id"] for run in json.load(sys.stdin)["runs"]))') || active=
    for other in $active; do
        [ "$other" != "$name" ] || continue
        echo "offbeat-run-once: run $other is active in Redis since an earlier job: it is stopped" >&2
        offbeat runs stop --now "$other" >&2 || :
    done
fi
if [ "$code" -eq 0 ]; then
    offbeat runs watch "$name" || code=$?
fi
serve shutdown -y
exit "$code"
