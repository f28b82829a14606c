"""What the tests showed with each release of vLLM: the source of the README's support table.

As a pytest plugin (``--support-file FILE``) it writes one release's outcome. As a program it
compares outcomes with the committed ones, or with ``--write`` replaces those:

    python tests/support.py [--write] FILE...
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

COMMITTED = Path(__file__).with_name("support.json")
LIBRARIES = ("torch", "triton", "flashinfer-python")
SUITES = ("unit", "selection", "selftest")
#: Files that ask vLLM's processes and its own selection; what stands elsewhere is unit tests.
SELECTION = (
    *("tests/serve/", "tests/simulate/", "tests/test_plugin.py", "tests/cli/test_cli_doctor.py"),
    *("tests/backends/test_members.py", "tests/compat/test_promises.py"),
)


def suite_of(nodeid):
    if nodeid.startswith("tests/selftest/"):
        return "selftest"
    return "selection" if nodeid.startswith(SELECTION) else "unit"


class Recorder:
    """Notes what a whole run shows of the installed release."""

    def __init__(self, file):
        from release_marks import RELEASE

        self.file = Path(file)
        self.prefix = f"vLLM {RELEASE.series}: "
        self.ran, self.failed, self.lacks = set(), set(), set()

    def pytest_runtest_logreport(self, report):
        suite = suite_of(report.nodeid)
        if report.failed:
            self.failed.add(suite)
        elif report.when == "call" and report.passed:
            self.ran.add(suite)
        elif report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            if reason.startswith(self.prefix):
                self.lacks.add(reason.removeprefix(self.prefix))

    def pytest_sessionfinish(self):
        outcome = {
            **{name: version(name) for name in LIBRARIES},
            **{s: s not in self.failed if s in self.ran | self.failed else None for s in SUITES},
            "lacks": sorted(self.lacks),
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps({version("vllm"): outcome}, indent=2) + "\n")


def load(path=COMMITTED):
    return json.loads(path.read_text()) if path.exists() else {}


def differences(found):
    """How outcomes differ from the committed ones, one sentence each."""
    committed = load()
    return [
        f"vLLM {release}: {key} is {outcome.get(key)!r}, and {known.get(key)!r} in {COMMITTED.name}"
        for release, outcome in found.items()
        for known in [committed.get(release, {})]
        for key in dict.fromkeys((*outcome, *known))
        if outcome.get(key) != known.get(key)
    ]


def main(arguments):
    write = "--write" in arguments
    found = {}
    for name in arguments:
        if name != "--write":
            found |= load(Path(name))
    if write:
        merged = load() | found
        order = sorted(merged, key=lambda r: tuple(map(int, r.split("."))))
        COMMITTED.write_text(json.dumps({r: merged[r] for r in order}, indent=2) + "\n")
        return 0
    different = differences(found)
    for sentence in different:
        print(sentence, file=sys.stderr)
    if different:
        print(
            f"If that is right: python tests/support.py --write {' '.join(arguments)}, and then "
            "python tests/readme/readme_tables.py",
            file=sys.stderr,
        )
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
