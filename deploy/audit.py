"""Look up known vulnerabilities in the packages that the images install (`make audit`); arguments go to pip-audit.

pip-audit skips a package that the vulnerability service does not know, and succeeds. Behind a mirror that knows no
vulnerabilities it skips every package. So a release known to be vulnerable is looked up too; if nothing is reported for
it, nothing counts as answered.

Exit status: 0 if no package has a known vulnerability, 1 if one has, 3 if not all of them could be looked up."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LOCKED = Path(__file__).resolve().parent / "docker" / "locked"
KNOWN_BAD = ("django", "3.2.0")
"""A release with dozens of published vulnerabilities, which nothing here installs."""
FOUND, UNANSWERED = 1, 3
Pins = Mapping[tuple[str, str], Sequence[str]]
Json = Mapping[str, Any]


class AuditIncomplete(Exception):
    """The vulnerability service did not answer for all packages."""


def pins(folder: Path = LOCKED) -> Pins:
    """Return, by package and version, the lock files that pin it. A local version (+cpu) is dropped."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted(folder.glob("*.txt")):
        for name, version in re.findall(r"(?m)^([\w.-]+)==([^\s;+]+)", path.read_text()):
            found.setdefault((re.sub(r"[-_.]+", "-", name).lower(), version), []).append(path.stem)
    return found


def audit_entries(program: Sequence[str], wanted: Sequence[tuple[str, str]]) -> list[Json]:
    """Return pip-audit's entry of each package. Raises AuditIncomplete if it gives none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requirements.txt"
        path.write_text("".join(f"{name}=={version}\n" for name, version in wanted))
        command = [*program, "--disable-pip", "--no-deps", "--progress-spinner=off", "--format=json", f"-r{path}"]
        done = subprocess.run(command, capture_output=True, text=True)
    try:
        return list(json.loads(done.stdout)["dependencies"])
    except (ValueError, KeyError) as error:
        message = done.stderr.strip().rpartition("\n")[2]
        raise AuditIncomplete(f"pip-audit ended with status {done.returncode}: {message}") from error


def vulnerable(program: Sequence[str], locks: Pins) -> dict[tuple[str, str], list[Json]]:
    """Return the vulnerabilities of each package that has some. Raises AuditIncomplete if one was not looked up."""
    entries: dict[tuple[str, str], list[Json]] = {}
    skipped: dict[str, str] = {}
    # Several versions of a package, of which each lock holds one, do not fit into one call.
    for call in _calls(locks):
        for entry in audit_entries(program, [KNOWN_BAD, *call]):
            if "skip_reason" in entry:
                skipped[entry["name"]] = entry["skip_reason"]
            else:
                entries[entry["name"].lower(), entry["version"]] = entry["vulns"]
    if not entries.get(KNOWN_BAD):
        raise AuditIncomplete(f"the vulnerability service knows nothing of {'=='.join(KNOWN_BAD)}; is it a mirror?")
    missing = [f"{name}=={version}" for name, version in locks if (name, version) not in entries]
    if missing:
        reason = next(iter(skipped.values()), "pip-audit does not mention them")
        raise AuditIncomplete(f"not looked up: {', '.join(missing)} ({reason})")
    return {pin: found for pin, found in entries.items() if found and pin != KNOWN_BAD}


def _calls(locks: Pins) -> list[list[tuple[str, str]]]:
    """Split the packages so that none has two versions in one part."""
    calls: list[dict[str, str]] = [{}]
    for name, version in locks:
        free = next((call for call in calls if name not in call), None)
        if free is None:
            calls.append(free := {})
        free[name] = version
    return [list(call.items()) for call in calls]


def main(arguments: Sequence[str], folder: Path = LOCKED, program: Sequence[str] = ()) -> int:
    """Print what was found and return the exit status."""
    locks = pins(folder)
    try:
        found = vulnerable([*(program or (sys.executable, "-m", "pip_audit")), *arguments], locks)
    except AuditIncomplete as error:
        print(f"NOT AUDITED: {error}", file=sys.stderr)
        return UNANSWERED
    for (name, version), vulnerabilities in found.items():
        for each in vulnerabilities:
            fixed = ", ".join(each.get("fix_versions", ())) or "no release yet"
            print(f"{name}=={version} ({', '.join(locks[name, version])}): {each['id']}, fixed in {fixed}")
    print(f"{len(locks)} packages looked up, {len(found)} with known vulnerabilities")
    return FOUND if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
