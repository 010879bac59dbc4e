"""The text of `--help`: every word, and every group with its options, read from the folders alone."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

_HEAD = """\
runner: config-driven PyTorch training runs that measure where their time goes

  python -m runner [GROUP=OPTION] [KEY=VALUE] ...     one run
  python -m runner -m parallel=single,ddp ...         a sweep: one fresh process and directory a job
  python -m runner WORD ...                           WORD --help says more

Words"""
_FOOT = """
Keys (KEY=VALUE): --cfg job prints all of them with their values, --cfg job -p GROUP those of one group.
--config-dir DIR adds groups of your own; +experiment is never needed: experiment=NAME.
Exit codes: 0 ok, 1 failed, 2 bad input, 3 out of memory, 4 diverged, 130/143 interrupted."""


def text(words: Mapping[str, str], config_dirs: Sequence[Path]) -> str:
    """The help; groups of several config directories are merged."""
    groups: dict[str, set[str]] = {}
    for folder in config_dirs:
        for path in folder.rglob("*.yaml"):
            if path.parent != folder:
                groups.setdefault(path.parent.relative_to(folder).as_posix(), set()).add(path.stem)
    lines = [_HEAD, *(f"  {word:<12}{does}" for word, does in words.items()), "", "Groups (GROUP=OPTION)"]
    lines += [f"  {group:<12}{', '.join(sorted(options))}" for group, options in sorted(groups.items())]
    return "\n".join([*lines, _FOOT])


def config_dirs(arguments: Sequence[str]) -> list[Path]:
    """The directories named by ``--config-dir`` (``-cd``) in the arguments."""
    named = [word.split("=", 1)[1] for word in arguments if word.startswith(("--config-dir=", "-cd="))]
    named += [after for word, after in pairwise(arguments) if word in ("--config-dir", "-cd")]
    return [Path(name) for name in named]
