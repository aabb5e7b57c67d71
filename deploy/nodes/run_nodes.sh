#!/bin/sh
# Train one run on several nodes: this command runs on every one of them, as a Slurm step or a SkyPilot task does.
#
#   OFFBEAT_SECRET=... run_nodes.sh HEAD NUM_NODES RUN_FILE [KEY=VALUE]...
#
# HEAD is the address of the node that gets Ray's head, Redis and the control service. OFFBEAT_SECRET is the same everywhere,
# and another one in each job: the password of Redis, the API's token, Ray's and the job's id are derived from it. RAY_START
# holds options of `ray start`.
# The current folder holds runs/; where nodes share it, runs can have fs weights in it, else weights.url names a bucket.
# One job at a time uses a folder: every node of it locks runs/redis/job, which has its id. A second job waits ATTEMPTS
# seconds, in which the nodes of one that has ended leave, and is refused.
set -eu
umask 077
head=$1
nodes=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
: "${OFFBEAT_SECRET:?set it to one random text for all nodes}"

ATTEMPTS=100

derive() { printf '%s %s' "$1" "$OFFBEAT_SECRET" | sha256sum | cut -c 1-64; }
put() {
    mkdir -p "$(dirname "$1")"
    part=$(mktemp "$1.XXXXXX")
    printf '%s\n' "$2" > "$part"
    mv "$part" "$1"
}

mkdir -p runs/redis
job=$(derive job)
exec 9<>runs/redis/job # until `ray symmetric-run` ends
attempts=$ATTEMPTS
while :; do
    code=0
    flock -n 9 2>/dev/null || code=$?
    [ "$code" -eq 1 ] || printf '%s\n' "$job" >runs/redis/job # no other job's; or no locks are here
    flock -s 9 2>/dev/null || :
    [ "$(cat runs/redis/job)" != "$job" ] || break
    flock -u 9 2>/dev/null || :
    attempts=$((attempts - 1))
    if [ "$attempts" -le 0 ]; then
        echo "run_nodes.sh: another job uses $PWD/runs/redis: wait for its end, or submit from another folder" >&2
        exit 1
    fi
    sleep 1
done

put runs/redis/url "redis://:$(derive redis)@$head:${OFFBEAT_REDIS_PORT:-6390}/0"
put runs/control/token "$(derive api)"
RAY_AUTH_TOKEN=$(derive ray)
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT="${RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT:-300}"
# Serve kills a proxy that takes longer to start, by default 5 s, and `serve deploy` fails
export RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S="${RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S:-60}"
export OFFBEAT_STOP_OTHERS=true
unset OFFBEAT_SECRET

# shellcheck disable=SC2086 # several options
exec ray symmetric-run --address "$head:${OFFBEAT_RAY_PORT:-6379}" --min-nodes "$nodes" ${RAY_START:-} -- \
    "$here/with_redis.sh" "$here/run_once.sh" "$here/deploy.yaml" "$@"
