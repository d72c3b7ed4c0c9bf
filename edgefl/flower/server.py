"""The server of a Flower app that runs on emulated phones. This separate process starts a SuperLink (Flower's
server process) and then ``flwr run``.

    python -m edgefl.flower.server APP PORT SUPERNODES LOG [KEY=VALUE …]

The exit code is 0 if the app's run completed, 1 if it did not, and 130 after SIGINT. The caller tracks all
processes that are started here, and ends them when this process ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from edgefl.terminal import say

CONNECTION = "edgefl"
"""Name of the SuperLink in the Flower configuration file that `edgefl.flower.runtime` writes."""
POLL_S = 1.0


def flwr(*words: str) -> dict[str, Any] | None:
    """Run a ``flwr`` command; return its JSON output, or None if it failed, as before the SuperLink is up."""
    process = subprocess.run(
        ["flwr", *words, CONNECTION, "--format", "json"], capture_output=True, text=True, check=False
    )
    return json.loads(process.stdout) if process.returncode == 0 else None


def wait_for(superlink: subprocess.Popen[bytes], nodes: int) -> bool:
    """Wait until the given number of SuperNodes are online; return False if the SuperLink ends before
    that."""
    while superlink.poll() is None:
        answer = flwr("supernode", "list") or {}
        if sum(node["status"] == "online" for node in answer.get("nodes", [])) >= nodes:
            return True
        time.sleep(POLL_S)
    return False


def main(app: str, port: str, nodes: str, log: str, *config: str) -> int:
    command = ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", port]
    with Path(log).open("wb") as file:
        superlink = subprocess.Popen(
            [*command, "--disable-runtime-dependency-installation"], stdout=file, stderr=file
        )
    if not wait_for(superlink, int(nodes)):
        tail = Path(log).read_text(errors="replace").strip().splitlines()[-1:]
        say(f"edgefl: the SuperLink ended: {''.join(tail)}", err=True)
        return 1
    values = [word for value in config for word in ("--run-config", value)]
    subprocess.run(["flwr", "run", app, CONNECTION, "--stream", *values], check=False)
    runs = (flwr("list") or {}).get("runs", [])
    status = str(runs[0]["status"]) if runs else "not started"
    superlink.terminate()
    if status != "finished:completed":
        say(f"edgefl: the Flower run is {status}", err=True)
    return int(status != "finished:completed")


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
