"""Print which files a change touched, by their names of today, as CONTRIBUTING.md lists them.

python tools/change_files.py COMMIT
python tools/change_files.py main..BRANCH
"""

from __future__ import annotations

import subprocess
import sys


def git(*arguments: str) -> list[str]:
    """Returns the lines that git prints."""
    return subprocess.run(["git", *arguments], capture_output=True, encoding="utf-8", check=True).stdout.splitlines()


def touched(change: str) -> list[str]:
    """Returns the files of a commit or a range, without those that are gone."""
    first, _, last = change.partition("..") if ".." in change else (f"{change}^", "", change)
    names = set(git("diff", "--name-only", "-M", first, last))
    now = "HEAD" if ".." not in change else last
    for line in git("log", "--reverse", "--format=", "--name-status", "-M", "--diff-filter=R", f"{last}..{now}"):
        _, old, new = line.split("\t")
        names = {new if name == old else name for name in names}
    return sorted(names & set(git("ls-tree", "-r", "--name-only", now)))


def main(change: str) -> None:
    """Print a row of a table: source files, tests, documentation."""
    kinds: dict[str, list[str]] = {"source": [], "tests": [], "docs": []}
    for name in touched(change):
        kind = "tests" if name.startswith("tests/") else "docs" if name.endswith((".md", ".svg")) else "source"
        kinds[kind].append(f"`{name}`")
    print(f"| {change} | {'; '.join(', '.join(names) for names in kinds.values() if names)} |")


if __name__ == "__main__":
    main(sys.argv[1])
