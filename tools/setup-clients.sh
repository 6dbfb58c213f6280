#!/bin/bash
# Make .venv-clients: an environment on top of .venv with the programs that tests/clients runs.
#
# Rules
# - It sees all of .venv, so that torch and pytest aren't installed again: a few seconds instead of minutes.
# - What it has of its own comes first; .venv itself stays as it is.
# - Does nothing when it is up to date: a stamp in it holds the hash of what it was made from.
set -euo pipefail
cd "$(dirname "$0")/.."
exec 9<tools/setup-clients.sh
flock 9 # two makes at once: the second waits, and finds the work done

venv=.venv-clients
stamp=$venv/.made-from
wanted() { { cut -d' ' -f1 .venv/.made-from && cat tests/clients/requirements.txt tools/setup-clients.sh; } | sha256sum; }

if [ -f "$stamp" ] && [ "$(wanted)" = "$(cat "$stamp")" ]; then exit 0; fi
.venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "setup: the clients need Python 3.11 or newer, and .venv has $(.venv/bin/python --version)" >&2
  exit 1
}
rm -rf "$venv"
.venv/bin/python -m venv --without-pip "$venv"
places() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
# addsitedir also reads the .pth files of .venv, one of which makes elastic_run importable. --preload needs elastic-run's
# .pth file in this environment; Python reads it after a_base.pth, in the order of the names.
echo "import site; site.addsitedir('$(places .venv/bin/python)')" >"$(places "$venv/bin/python")/a_base.pth"
cp elastic_run/compat/*.pth "$(places "$venv/bin/python")"
echo "setup: installing what tests/clients runs into $venv" >&2
# What the clients pin themselves (torchx wants an older urllib3) comes before what .venv has.
sed -n 's/^\([^ #=]*==\).*/^\1/p' tests/clients/requirements.txt | grep -v -f - constraints.txt >"$venv/constraints.txt"
.venv/bin/python -m pip --python "$venv/bin/python" install --quiet --disable-pip-version-check --no-compile \
  -c "$venv/constraints.txt" -r tests/clients/requirements.txt || {
  echo "setup: pip failed (see above). Without a network, give it wheels: PIP_FIND_LINKS=directory make test-clients" >&2
  exit 1
}
wanted >"$stamp"
