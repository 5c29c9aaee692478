"""Stands in for `kvferry router|prefill|decode` in the supervisor's tests: a script without the project's imports.

Behaviour comes from files in the directory named by FAKE_DIR: `NAME.mode` holds one of
    serve (default)   report loading, then ready, then run until SIGTERM
    refuse            one line as the command writes it, exit status 2
    crash             a line and exit status 3 at once
    stubborn          like serve, but SIGTERM and SIGINT are ignored
    unaware           a router that does not see the prefill nodes until there is a file `prefill.seen`
Each start appends its pid to `NAME.pids`, and its arguments and KVFERRY_* variables to `NAME.argv`.
"""

import http.server
import json
import os
import signal
import sys
import threading
from pathlib import Path


class Router(http.server.BaseHTTPRequestHandler):
    folder, mode = Path(), ""

    def do_GET(self) -> None:
        sees = self.mode != "unaware" or (self.folder / "prefill.seen").exists()
        nodes = {"prefill": 9 if sees else 0, "decode": 9}
        body = json.dumps({"data": [{"id": "fake-model"}], "nodes": nodes}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def value(flag: str) -> str:
    return sys.argv[sys.argv.index(flag) + 1] if flag in sys.argv else ""


def report(**status: object) -> None:
    os.write(int(os.environ["KVFERRY_STATUS_FD"]), json.dumps(status).encode() + b"\n")


def main() -> None:
    name = value("--node-id") or sys.argv[1]
    folder = Path(os.environ["FAKE_DIR"])
    mode_file = folder / f"{name}.mode"
    mode = mode_file.read_text().strip() if mode_file.exists() else "serve"
    with (folder / f"{name}.pids").open("a") as pids:
        print(os.getpid(), file=pids)
    seen = {key: text for key, text in os.environ.items() if key.startswith("KVFERRY_")}
    (folder / f"{name}.argv").write_text(json.dumps({"argv": sys.argv[1:], "env": seen}))
    if mode == "refuse":
        print("kvferry: error: out of memory for the KV pool; lower --kv-cache-gib", file=sys.stderr)
        sys.exit(2)
    if mode == "crash":
        print("too deep", file=sys.stderr)
        sys.exit(3)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    Router.folder, Router.mode = folder, mode
    print(f"{name} says hello", flush=True)
    report(status="loading", progress=0.5)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(value("--port") or 0)), Router)
    facts = {"device": "abacus, 3 beads", "kv_pool": "0.50 GiB", "link": "127.0.0.1:7"}
    facts = facts if name != "router" else {"model": "fake-model"}
    report(status="ready", url=f"http://127.0.0.1:{server.server_port}", facts=facts)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        signal.pause()


main()
