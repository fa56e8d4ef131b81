#!/bin/sh
# Three network namespaces (router, prefill, decode), joined by a bridge in a fourth or to be joined by a program that carries
# frames between tap devices; nothing of the host is touched.
# 10.77.0.1 is the router's address, .2 the prefill worker's, .3 the decode worker's.
#
#   tests/netns.sh up NAME      makes NAME-router, NAME-prefill, NAME-decode, NAME-hub
#   tests/netns.sh taps NAME    makes NAME-router, NAME-prefill, NAME-decode, each with a tap device eth0
#   tests/netns.sh down NAME    kills what runs in them and removes them
set -eu
[ $# = 2 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
name=$2
roles="router prefill decode"

up() {
    ip netns add "$name-hub"
    ip -n "$name-hub" link add bridge type bridge
    ip -n "$name-hub" link set bridge up
    i=0
    for role in $roles; do
        i=$((i + 1))
        ip netns add "$name-$role"
        ip -n "$name-hub" link add "$role" type veth peer name eth0 netns "$name-$role"
        ip -n "$name-hub" link set "$role" master bridge up
        ip -n "$name-$role" link set lo up
        ip -n "$name-$role" address add "10.77.0.$i/24" dev eth0
        ip -n "$name-$role" link set eth0 up
    done
}

taps() {
    i=0
    for role in $roles; do
        i=$((i + 1))
        ip netns add "$name-$role"
        ip -n "$name-$role" tuntap add dev eth0 mode tap
        ip -n "$name-$role" link set lo up
        ip -n "$name-$role" address add "10.77.0.$i/24" dev eth0
        ip -n "$name-$role" link set eth0 up
    done
}

down() {
    for role in $roles hub; do
        for pid in $(ip netns pids "$name-$role" 2>/dev/null); do kill -9 "$pid" 2>/dev/null || :; done
        ip netns delete "$name-$role" 2>/dev/null || :
    done
}

case $1 in
up) up || { down; exit 1; } ;;
taps) taps || { down; exit 1; } ;;
down) down ;;
*) echo "netns.sh: $1 is none of up, taps, down" >&2; exit 2 ;;
esac
