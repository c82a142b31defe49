#!/bin/bash
# run.sh [FOLDER [FLAGS]]   has all measured that needs an accelerator, within ten minutes, set-up included. It leaves
# rows.md (for docs/understand/benchmarks.md), device.json and log.txt in FOLDER (.prfaas/device if none is given), and
# ends with 1 if a value is wrong or a figure is missing that has to be there. FLAGS are those of `prfaas bench device`.
#
# It runs in the checkout's .venv, which `make setup` makes if there is none. A machine without a network needs a
# python3 (or PYTHON) that has torch for its accelerator, and WHEELS: a folder with wheels of what that lacks.
# Needed are cryptography, msgspec, numpy, prometheus-client, rich, torch, typer, xxhash and zstandard.
set -uo pipefail
most_seconds=600
here=$(cd "$(dirname "$0")" && pwd) || exit 2
mkdir -p "${1:-$here/../../.prfaas/device}" || exit 2
folder=$(cd "${1:-$here/../../.prfaas/device}" && pwd) || exit 2
shift $(($# > 0))
wheels=${WHEELS:+$(cd "$WHEELS" && pwd)}
cd "$here/../.." || exit 2

path=
for package in core gateway operator scheduler transfer worker sandbox connectors/vllm .; do path+=$PWD/$package:; done
python=.venv/bin/python
if [ -n "$wheels" ]; then
    python=${PYTHON:-python3} site=$PWD/.prfaas/device-site
    "$python" -m pip install --quiet --no-index --no-deps --upgrade --target "$site" "$wheels"/*.whl || exit 2
    path+=$site:
elif [ ! -x $python ]; then
    make setup >&2 || exit 2
fi
export PYTHONPATH=${path%:} PYTHONUNBUFFERED=1

rm -f "$folder/rows.md"
# Ten seconds for the last part's end and the report, and ten more if that hangs.
seconds=$((most_seconds - SECONDS - 20))
timeout --kill-after=5 $((seconds + 10)) "$python" -m prfaas.cli.main bench device \
    -o json --rows "$folder/rows.md" --seconds $seconds "$@" >"$folder/device.json" 2> >(tee "$folder/log.txt" >&2)
status=$?
[ -s "$folder/rows.md" ] && cat "$folder/rows.md"
exit $status
