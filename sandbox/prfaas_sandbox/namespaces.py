"""How the sandbox gets namespaces of its own: network, mount and PID, and user when we are not root."""

import os
import shutil
import subprocess

from prfaas.errors import ConfigError

PROGRAMS = {"unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux", "mount": "util-linux"} | {
    "ip": "iproute2",
    "tc": "iproute2",
}
SYSTEM_FOLDERS = "/usr/local/sbin:/usr/sbin:/sbin"
TIMEOUT_SECONDS = 10.0

_NAMESPACES = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
_USER_NAMESPACE = ["--user", "--map-root-user"]


def search_path() -> str:
    """Return PATH with the folders of system programs, which many users' lacks."""
    return f"{os.environ.get('PATH', os.defpath)}:{SYSTEM_FOLDERS}"


def unshare_command() -> list[str]:
    """Return the command that runs a program, given as further arguments, in new namespaces, tried out.

    Raises:
        ConfigError: a program is missing, or the kernel refuses namespaces to us.

    """
    missing = {package for program, package in PROGRAMS.items() if not shutil.which(program, path=search_path())}
    if missing:
        raise ConfigError(f"the sandbox needs programs of {' and '.join(sorted(missing))}: install these packages")
    candidates = [[*_USER_NAMESPACE, *_NAMESPACES]]
    if os.geteuid() == 0:
        candidates.insert(0, _NAMESPACES)  # root in a container may lack the capability, but have user namespaces
    reason = ""
    for flags in candidates:
        command = ["unshare", *flags]
        tried = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
        if tried.returncode == 0:
            return command
        reason = tried.stderr.strip()
    raise ConfigError(
        f"neither root's rights nor user namespaces are to be had here ({reason}), so the sandbox cannot run: "
        "use two kind clusters instead"
    )
