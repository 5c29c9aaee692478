"""`kvferry serve` with fake children, as a process of its own: fake_serve.py [flags of serve]."""

import sys
from pathlib import Path

import kvferry.cli.main
import kvferry.cli.serve
from kvferry.cli.child_commands import Program

FAKE_CHILD = str(Path(__file__).with_name("fake_child.py"))
serve_cluster = kvferry.cli.serve.serve_cluster


def fake_program(subcommand: str) -> list[str]:
    return [sys.executable, FAKE_CHILD, subcommand]


async def serve_fakes(checked: kvferry.cli.serve.Checked, program: Program = fake_program) -> None:
    await serve_cluster(checked, program)


kvferry.cli.serve.serve_cluster = serve_fakes
sys.exit(kvferry.cli.main.run(["serve", *sys.argv[1:]]))
