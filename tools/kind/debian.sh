#!/bin/bash
# debian.sh SUITE TARGET PACKAGES   makes a small Debian root file system in the folder TARGET, from the mirror that this
# machine's apt is set to. Only for a machine that cannot pull images: needs root and debootstrap.
set -euo pipefail
suite=$1 root=$2 packages=$3
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 2>/dev/null | grep -m1 '/debian/*$' || true)
debootstrap --variant=minbase --include="$packages" "$suite" "$root" ${mirror:+"$mirror"} || { tail -20 "$root/debootstrap/debootstrap.log"; exit 1; }
mirror=$(awk '$1 == "deb" {print $2; exit}' "$root/etc/apt/sources.list"); mirror=${mirror%/}
cat >"$root/etc/apt/sources.list" <<S
deb $mirror $suite main
deb $mirror $suite-updates main
deb $mirror-security $suite-security main
S
# Slim, as Debian's own -slim images are.
cat >"$root/etc/dpkg/dpkg.cfg.d/docker-slim" <<S
path-exclude /usr/share/doc/*
path-include /usr/share/doc/*/copyright
path-exclude /usr/share/man/*
path-exclude /usr/share/locale/*
path-include /usr/share/locale/locale.alias
S
echo force-unsafe-io >"$root/etc/dpkg/dpkg.cfg.d/docker-apt-speedup" # a build that is cut off is thrown away
echo 'Acquire::Languages "none";' >"$root/etc/apt/apt.conf.d/99docker"
find "$root/usr/share/doc" -type f ! -name copyright -delete
rm -rf "$root"/usr/share/man/* "$root"/usr/share/locale/*/ "$root"/usr/share/info "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/var/log/*
# Builds reach package registries through whatever this machine trusts beside Debian's list. Never push such an image.
for certificate in /usr/local/share/ca-certificates/*.crt; do
	[ ! -e "$certificate" ] || cp "$certificate" "$root/usr/local/share/ca-certificates/"
done
chroot "$root" update-ca-certificates >/dev/null 2>&1
