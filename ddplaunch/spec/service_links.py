"""Variables by which Kubernetes tells each pod of the Services in its namespace, and Docker a container of its links.

For a Service `master` a pod has MASTER_SERVICE_HOST, MASTER_SERVICE_PORT, MASTER_SERVICE_PORT_HTTP (a port's name),
MASTER_PORT=tcp://10.1.2.3:29500, MASTER_PORT_29500_TCP, MASTER_PORT_29500_TCP_ADDR and more (kubernetes.io, "Accessing the
Service"). `docker run --link CONTAINER:master` sets most of these, MASTER_NAME and MASTER_ENV_NAME. Nobody has set such a
variable as an option of ddplaunch or torchrun, even if it has the name of one. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_URL = re.compile(r"(?:tcp|udp|sctp)://[^\s/]+:\d+")
_SUFFIX = r"_SERVICE_HOST|_SERVICE_PORT(_.+)?|_PORT(_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO|START|END))?)?|_NAME|_ENV_.+"
_PORT = "_PORT"


def is_link(name: str, value: str) -> bool:
    """Return whether a variable with the name of a port holds the address of a Service: MASTER_PORT=tcp://10.1.2.3:29500."""
    return name.endswith(_PORT) and _URL.fullmatch(value) is not None


def without_service_links(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables but for all those of Services and of linked containers."""
    linked = [name.removesuffix(_PORT) for name, value in env.items() if is_link(name, value)]
    if not linked:
        return dict(env)
    of_link = re.compile(f"(?:{'|'.join(map(re.escape, linked))})(?:{_SUFFIX})")
    return {name: value for name, value in env.items() if not of_link.fullmatch(name)}


def why_ignored(env: Mapping[str, str], name: str) -> str:
    """Return the sentence that says who has set this link, as the user finds it: by the name of the Service or container."""
    stem = name.removesuffix(_PORT)
    service = stem.lower().replace("_", "-")  # whose name has no underscore and no capital
    if "KUBERNETES_SERVICE_HOST" in env:
        maker = (
            f"Kubernetes sets it in each pod for the Service {service} (unless the pod has `enableServiceLinks: false`)"
        )
    else:
        maker = f"Docker sets it for a linked container {service}"
    return f"{name}={env[name]} is ignored: {maker}"
