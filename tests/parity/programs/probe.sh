#!/bin/sh
# A program that is no Python: writes down its arguments, environment, directory and signals, NUL between them.
out="$PARITY_OUT/$RANK.$TORCHELASTIC_RESTART_COUNT"
printf '%s\0' "$0" "$@" >"$out.argv"
env -0 >"$out.env"
{ pwd; umask; grep '^SigIgn' /proc/$$/status; } >"$out.facts"
echo "probe: out of $RANK.$TORCHELASTIC_RESTART_COUNT"
echo "probe: err of $RANK.$TORCHELASTIC_RESTART_COUNT" >&2
