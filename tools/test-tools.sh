#!/bin/bash
# See that the programs the tests call are there: installed when we are root, else the line that mends it.
set -euo pipefail
# program and the Debian package it comes in
tools=(
  "unshare util-linux"
  "mount mount"
  "etcd etcd-server"
  "openssl openssl"
  "ip iproute2"
  "nft nftables"
  "cc gcc"
  "slurmctld slurm-wlm"
  "munged munge"
)
missing=()
for tool in "${tools[@]}"; do
  command -v "${tool%% *}" >/dev/null || missing+=("${tool##* }")
done
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "setup: installing ${missing[*]} with apt-get" >&2
  apt-get update -qq || true
  if DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null; then exit 0; fi
fi
echo "setup: the tests need more programs. This line mends it: sudo apt-get install -y ${missing[*]}" >&2
exit 1
