#!/bin/bash
# Install the programs that the tests with the marker `system` call. Needs root, as these tests do.
set -euo pipefail
if [ "$(id -u)" != 0 ]; then
  echo "setup: this needs root: it makes virtual hosts, mounts and control groups. make test and make test-long don't." >&2
  exit 1
fi
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
  "sshd openssh-server"
)
missing=()
for tool in "${tools[@]}"; do
  command -v "${tool%% *}" >/dev/null || missing+=("${tool##* }")
done
[ ${#missing[@]} -gt 0 ] || exit 0
if command -v apt-get >/dev/null; then
  echo "setup: installing ${missing[*]} with apt-get" >&2
  apt-get update -qq || true
  if DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 install -y -qq "${missing[@]}" >/dev/null; then exit 0; fi
fi
echo "setup: apt-get can't install these Debian packages; install the programs by hand: ${missing[*]}" >&2
exit 1
