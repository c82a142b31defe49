#!/bin/bash
# node-image.sh WORK IMAGE   builds a node image for kind from Debian packages and Go modules, where the published one
# cannot be pulled. WORK is an empty folder that the caller removes. From the environment:
#   KUBE COREDNS PAUSE  programs built from tools/node and tools/coredns
#   KIND_FILES          images/base/files of kind's own module
#   VERSION             of Kubernetes, with its v
#   OWNER               label of the container in which images are preloaded, so that an interrupted build can be cleared
# bookworm, because trixie's systemd refuses cgroup v1.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd) image=$2
cd "$1"

echo "== Debian bookworm"
"$here/debian.sh" bookworm "$PWD/node" systemd,systemd-sysv,containerd,runc,containernetworking-plugins,conntrack,iptables,nftables,iproute2,ethtool,kmod,socat,jq,procps,ca-certificates

echo "== images of the control plane"
# One for all its parts: our one program under their names, and the iptables that kube-proxy runs.
mkdir pods
(cd node; for file in usr/sbin/xtables-nft-multi usr/sbin/conntrack usr/lib/*/xtables/*.so; do
	echo "$file"; chroot . ldd "/$file" 2>/dev/null | grep -o '/[^ ]*' | sed 's,^/,,'
done | grep -v : | sort -u | xargs cp -L --parents -t ../pods)
mkdir -p pods/{usr/local/bin,tmp,run,etc}
for name in {ip,ip6}tables{,-save,-restore}; do ln -s xtables-nft-multi "pods/usr/sbin/$name"; done
cp "$KUBE" pods/usr/local/bin/kube; cp "$COREDNS" pods/coredns
for name in etcd kube-apiserver kube-controller-manager kube-scheduler kube-proxy; do ln -s kube "pods/usr/local/bin/$name"; done
tar -C pods --sort=name --mtime=@0 -cf pods.tar .; rm -rf pods
mkdir pause; cp "$PAUSE" pause/pause
tags=$("$KUBE" kubeadm config images list --kubernetes-version "$VERSION")
for tag in $tags; do
	case $tag in
	*/pause:*) tar -C pause -c pause | docker import --change 'ENTRYPOINT ["/pause"]' - "$tag"; pause=$tag ;;
	*/coredns:*) docker import --change 'ENTRYPOINT ["/coredns"]' pods.tar "$tag" ;;
	*) docker import --change 'ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' pods.tar "$tag" ;;
	esac
done
docker save -o images.tar $tags; docker rmi $tags; rm pods.tar

echo "== the node's file system"
cp -r --no-preserve=mode "$KIND_FILES/." node/
chmod 0755 node/usr/local/bin/* node/kind/bin/*
cp "$here/cni.tmpl" node/kind/cni.tmpl
cp "$KUBE" node/usr/local/bin/kube; for name in kubeadm kubelet kubectl; do ln -s ../local/bin/kube "node/usr/bin/$name"; done
ln -s /usr/bin/containerd node/usr/local/bin/containerd # where kind's unit looks for it
mkdir -p node/opt/cni node/etc/kubernetes/manifests; ln -s /usr/lib/cni node/opt/cni/bin
printf %s "$VERSION" >node/kind/version
config=node/etc/containerd/config.toml
sed -i "s,sandbox_image = .*,sandbox_image = \"$pause\"," $config
sed -i 's/restrict_oom_score_adj = false/restrict_oom_score_adj = true/' $config # root may lack CAP_SYS_RESOURCE
printf '\n[plugins."io.containerd.grpc.v1.cri".cni]\n  conf_template = "/kind/cni.tmpl"\n' >>$config
(cd node; rm -f lib/systemd/system/sysinit.target.wants/systemd-tmpfiles-setup.service lib/systemd/system/multi-user.target.wants/* \
	etc/systemd/system/*.wants/* lib/systemd/system/local-fs.target.wants/* lib/systemd/system/sockets.target.wants/*{udev,initctl}* lib/systemd/system/basic.target.wants/*
	echo ReadKMsg=no >>etc/systemd/journald.conf)
chroot node systemctl enable -q kubelet containerd undo-mount-hacks; chroot node systemctl mask -q systemd-binfmt
chroot node sh -c "ctr oci spec | jq '.hooks.createContainer |= [{path: \"/kind/bin/mount-product-files.sh\"}] | del(.process.rlimits)' >/etc/containerd/cri-base.json"
tar -C node -c . | docker import - "$image-base"; rm -rf node

echo "== preloading the images"
container=$(docker run -d --label "$OWNER" --security-opt seccomp=unconfined --entrypoint sleep "$image-base" infinity)
trap 'docker rm -f "$container"; docker rmi "$image-base"' EXIT
docker exec -d "$container" containerd
for _ in {1..300}; do ! docker exec "$container" ctr version >/dev/null 2>&1 || break; sleep 0.2; done
docker exec -i "$container" ctr -n k8s.io images import --all-platforms --no-unpack --digests - <images.tar
docker exec "$container" pkill containerd
for _ in {1..300}; do docker exec "$container" pgrep -x containerd >/dev/null || break; sleep 0.2; done
docker commit --change 'ENTRYPOINT ["/usr/local/bin/entrypoint", "/sbin/init"]' --change 'CMD []' --change 'ENV container=docker' "$container" "$image"
