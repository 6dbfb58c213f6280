#!/bin/bash
# Make .venv: an environment inside this clone with what the demo, the tests or all commands of the Makefile need.
#
#   tools/setup.sh [demo|test|all]    Each level has all of the one before; all unless given.
#
# Rules
# - Needs git, make, bash and a Python 3.10 or later; copes with what is missing beyond that, or prints the line that
#   mends it. It touches nothing outside the clone, except that root's apt-get may install what Debian left out.
# - Does nothing when .venv is up to date: a stamp in it holds the hash of what it was made from, and its levels.
# - An environment that is there and works is kept; one that is broken is made anew.
#
# PYTHON=python3.12 tools/setup.sh chooses the interpreter; only a new .venv asks for it.
set -euo pipefail
cd "$(dirname "$0")/.."
exec 9<tools/setup.sh
flock 9 # two makes at once: the second waits, and finds the work done

venv=.venv
stamp=$venv/.made-from
say() { echo "setup: $*" >&2; }
die() { say "$*"; exit 1; }

level=${1:-all}
case $level in # what pip installs, and the levels that .venv has then
  demo) packages=(-e . numpy) levels=demo ;; # without numpy torch prints a warning
  test) packages=(-e '.[test,docs]') levels="demo test" ;;
  all) packages=(-e '.[dev]') levels="demo test all" ;;
  *) die "no such level: $level" ;;
esac

wanted() { cat pyproject.toml constraints.txt tools/setup.sh elastic_run/compat/*.pth tests/support/*.pth | sha256sum | cut -d' ' -f1; }
works() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }
is_made() { [[ "$(cat "$stamp" 2>/dev/null) " == "$(wanted)"*" $level "* ]] && works "$venv/bin/python"; }
has_pip() { "$venv/bin/python" -m pip --version >/dev/null 2>&1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10 /usr/bin/python3}; do
    if works "$candidate"; then echo "$candidate"; return; fi
  done
  [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON does not run, or is older than 3.10"
  die "no Python 3.10 or later found. On Debian or Ubuntu: sudo apt-get install -y python3 python3-venv"
}

# Each way leaves an environment with a working pip, or fails; the next one starts from nothing.
with_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null && "$1" -m venv "$venv"; }
with_virtualenv() { "$1" -c 'import virtualenv' 2>/dev/null && "$1" -m virtualenv --quiet "$venv"; }
with_apt() { # only root can, and only where apt-get is
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
  local version package
  version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  say "installing python$version-venv with apt-get"
  apt-get update -qq || true
  for package in "python$version-venv" python3-venv; do
    if DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package" >/dev/null; then break; fi
  done
  with_venv "$1"
}

make_environment() {
  local python way
  python=$(find_python)
  for way in with_venv with_virtualenv with_apt; do
    if "$way" "$python" && has_pip; then
      say "made $venv with $("$python" --version), $way"
      return
    fi
    rm -rf "$venv"
  done
  die "this Python can't make an environment. This line mends it: sudo apt-get install -y python3-venv"
}

# The workers of the tests run on the CPU, and PyTorch's CPU builds are smaller by gigabytes: name their index in
# PIP_EXTRA_INDEX_URL, or their wheels in PIP_FIND_LINKS, to have one of them.
install() {
  say "installing what pyproject.toml asks for ($level), in the versions of constraints.txt"
  # A recent pip first: the command that an old one writes imports `re`, which takes as long as a tenth of the start.
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade -c constraints.txt pip || true
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
    -c constraints.txt "${packages[@]}" ||
    die "pip failed (see above). Without a network, give it wheels: PIP_FIND_LINKS=directory make setup"
  # This file makes the tests' processes cheaper. Its first line says how.
  [ "$level" = demo ] ||
    cp tests/support/elastic-run-tests.pth "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  # pip is told not to compile, since it compiles all modules. This import compiles those that a training needs.
  env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -c 'import torch._dynamo, torch.distributed.run, torch.distributed.fsdp' ||
    true
}

if is_made; then exit 0; fi
if [ ! -x "$venv/bin/python" ] || ! works "$venv/bin/python" || ! has_pip; then
  rm -rf "$venv"
  make_environment
fi
install
echo "$(wanted) $levels" >"$stamp"
say "$venv is ready"
