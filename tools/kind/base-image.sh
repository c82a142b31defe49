#!/bin/bash
# base-image.sh WORK IMAGE   builds an image with Debian's Python, where none can be pulled. WORK is an empty folder that
# the caller removes. SUITE, from the environment, is the release of Debian.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd) work=$1 image=$2
echo "== Debian $SUITE"
# pip is left out on purpose: every virtual environment brings its own.
"$here/debian.sh" "$SUITE" "$work/root" ca-certificates,python3,python3-venv
ln -s /usr/bin/python3 "$work/root/usr/local/bin/python"
echo "== importing it into Docker"
tar -C "$work/root" --numeric-owner --exclude='./dev/*' --exclude='./proc/*' --exclude='./sys/*' -c . |
	docker import --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' --change 'CMD ["python3"]' - "$image"
