"""The volumes of a pod as folders. Their content is fetched, written, and kept up to date while the pod runs."""

import base64
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prfaas.errors import ConfigError
from prfaas.kube import KubeSession
from prfaas.kube.session import Object
from prfaas.util import replace_file
from prfaas_sandbox.node.variables import ConfigSource, SourceKind
from prfaas_sandbox.node.variables import field as pod_field

DEFAULT_MODE = 0o644
DEFAULT_TOKEN_SECONDS = 3600
# The kubelet's rule: a token is renewed when 80% of its life is over.
TOKEN_LIFE_USED = 0.8
KINDS = ("emptyDir", "configMap", "secret", "projected", "downwardAPI")
CONTENT_KINDS = ("configMap", "secret", "downwardAPI", "serviceAccountToken")

VolumeFiles = dict[str, tuple[bytes, int]]  # relative path -> (content, mode)


def unsupported_volumes(pod: Object) -> list[str]:
    """Return the names and kinds of the volumes that the process node cannot provide."""
    volumes = pod["spec"].get("volumes", [])
    return [f"{volume['name']} ({_kind(volume)})" for volume in volumes if not any(kind in volume for kind in KINDS)]


def _kind(volume: Object) -> str:
    return next((key for key in volume if key != "name"), "no source")


@dataclass
class _Token:
    value: bytes
    renew_at: float


@dataclass
class PodVolumes:
    """The volumes of one pod, each in a folder below `folder`."""

    api: KubeSession
    pod: Object
    folder: Path
    addresses: tuple[str, str]
    _tokens: dict[tuple[str, str], _Token] = field(default_factory=dict[tuple[str, str], _Token])

    async def write(self) -> None:
        """Bring every volume up to date; raise ConfigError for a missing source, PeerError for an API failure."""
        for volume in self.pod["spec"].get("volumes", []):
            target = self.folder / volume["name"]
            if "emptyDir" in volume:
                target.mkdir(parents=True, exist_ok=True)
            else:
                write_files(target, await self._files(volume))

    async def data(self, sources: Iterable[ConfigSource]) -> dict[ConfigSource, dict[str, bytes] | None]:
        """Return the content of ConfigMaps and Secrets, None for missing ones."""
        return {source: await self._read(source) for source in sources}

    async def _files(self, volume: Object) -> VolumeFiles:
        projected = volume.get("projected")
        if projected is None:
            kind = next(kind for kind in CONTENT_KINDS if kind in volume)
            return await self._content(kind, volume[kind], volume[kind].get("defaultMode", DEFAULT_MODE))
        files: VolumeFiles = {}
        for source in projected.get("sources", []):
            kind = next((kind for kind in CONTENT_KINDS if kind in source), None)
            if kind is None:
                raise ConfigError(f"volume {volume['name']}: cannot project {', '.join(source)}")
            files |= await self._content(kind, source[kind], projected.get("defaultMode", DEFAULT_MODE))
        return files

    async def _content(self, kind: str, source: Object, mode: int) -> VolumeFiles:
        if kind == "serviceAccountToken":
            return {source["path"]: (await self._token(source), mode)}
        if kind == "downwardAPI":
            return {item["path"]: (self._field(item), item.get("mode", mode)) for item in source.get("items", [])}
        kinds: dict[str, SourceKind] = {"configMap": "configmaps", "secret": "secrets"}
        # A volume says secretName where a projected source says name.
        wanted = ConfigSource(kinds[kind], source.get("secretName") or source["name"])
        found = await self._read(wanted)
        if found is None:
            if source.get("optional"):
                return {}
            raise ConfigError(f"{wanted.kind} {wanted.name!r} not found")
        return choose_items(wanted, found, source, mode)

    def _field(self, item: Object) -> bytes:
        if "fieldRef" not in item:
            raise ConfigError(f"downwardAPI file {item['path']}: the process node supports only fieldRef")
        return pod_field(self.pod, item["fieldRef"]["fieldPath"], self.addresses).encode()

    async def _read(self, source: ConfigSource) -> dict[str, bytes] | None:
        namespace = self.pod["metadata"]["namespace"]
        found = await self.api.find(f"/api/v1/namespaces/{namespace}/{source.kind}/{source.name}")
        return None if found is None else decode(found, source.kind)

    async def _token(self, source: Object) -> bytes:
        key = (source["path"], source.get("audience", ""))
        held = self._tokens.get(key)
        if held is None or time.monotonic() >= held.renew_at:
            held = self._tokens[key] = await self._new_token(source)
        return held.value

    async def _new_token(self, source: Object) -> _Token:
        metadata, account = self.pod["metadata"], self.pod["spec"].get("serviceAccountName", "default")
        seconds = source.get("expirationSeconds", DEFAULT_TOKEN_SECONDS)
        bound = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
        spec: dict[str, Any] = {"expirationSeconds": seconds, "boundObjectRef": bound}
        if audience := source.get("audience"):
            spec["audiences"] = [audience]
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        path = f"/api/v1/namespaces/{metadata['namespace']}/serviceaccounts/{account}/token"
        answer = await self.api.call("POST", path, body=body)
        return _Token(answer["status"]["token"].encode(), time.monotonic() + seconds * TOKEN_LIFE_USED)


def decode(found: Object, kind: SourceKind) -> dict[str, bytes]:
    encoded = found.get("data", {}) if kind == "secrets" else found.get("binaryData", {})
    result = {key: base64.b64decode(value) for key, value in (encoded or {}).items()}
    if kind == "configmaps":
        result |= {key: value.encode() for key, value in (found.get("data") or {}).items()}
    return result


def choose_items(source: ConfigSource, found: dict[str, bytes], spec: Object, mode: int) -> VolumeFiles:
    """Return all keys as files, or only those of spec.items under their paths."""
    if not spec.get("items"):
        return {key: (value, mode) for key, value in found.items()}
    files: VolumeFiles = {}
    for item in spec["items"]:
        if item["key"] in found:
            files[item["path"]] = (found[item["key"]], item.get("mode", mode))
        elif not spec.get("optional"):
            raise ConfigError(f"{source.kind} {source.name!r} has no key {item['key']!r}")
    return files


def write_files(folder: Path, files: VolumeFiles) -> None:
    """Make the folder hold exactly `files`; a reader sees each file whole, old or new."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (content, mode) in files.items():
        path = folder / name
        if path.is_file() and path.read_bytes() == content:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content, mode)
    for path in [each for each in folder.rglob("*") if each.is_file()]:
        if str(path.relative_to(folder)) not in files:
            path.unlink()
