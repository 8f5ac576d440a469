"""Blocks network access in every process that tests start (`runs.environment`).

Python imports this module at the start. Only this machine can be reached.

Code outside Python, like gRPC, is not blocked.
"""

import ipaddress
import socket
import sys
from typing import Any


def _is_here(host: Any) -> bool:
  host = host.decode() if isinstance(host, bytes) else host
  if host in (None, "", "localhost", socket.gethostname()):
    return True
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
  if event in ("socket.connect", "socket.sendto"):
    address = arguments[1]
    host = address[0] if isinstance(address, tuple) else None  # else a file system socket
  elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
    host = arguments[0]
  else:
    return
  if not _is_here(host):
    raise PermissionError(f"{event} to {host}: no network unless asked (tests/support/offline)")


sys.addaudithook(_watch)
