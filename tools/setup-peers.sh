#!/bin/bash
# Fill .peers with the launchers that `make bench` runs beside: ft_launcher, of NVIDIA's resiliency extension.
#
# Rules
# - A directory, not an environment: the benchmarks make their own, without what tests and tools put into .venv.
# - torch is .venv's.
# - What can't be had here is left out, with a line that says so: the benchmarks do without.
# - Does nothing when it is up to date: a stamp in it holds the hash of what it was made from.
set -euo pipefail
cd "$(dirname "$0")/.."
exec 9<tools/setup-peers.sh
flock 9 # two makes at once: the second waits, and finds the work done

peers=.peers
stamp=$peers/.made-from
wanted() { { cut -d' ' -f1 .venv/.made-from && cat benchmarks/requirements.txt tools/setup-peers.sh; } | sha256sum; }

if [ -f "$stamp" ] && [ "$(wanted)" = "$(cat "$stamp")" ]; then exit 0; fi
rm -rf "$peers"
echo "setup: installing what the benchmarks run beside into $peers" >&2
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --target "$peers" \
  -r benchmarks/requirements.txt || {
  rm -rf "$peers"
  echo "setup: pip failed (see above): the benchmarks will have no column for ft_launcher" >&2
  exit 0
}
wanted >"$stamp"
