"""`python -m runner`: which word runs what; everything else is a run."""

import sys
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

# Each module has main(arguments) -> exit code, and is imported only when its word is used.
WORDS = {
    "compare": ("runner.compare", "DIR...: runs side by side: what differs, and what it did"),
    "diagnose": ("runner.diagnose", "RUN: where the time went, and the override to try next"),
    "doctor": ("runner.doctor", "what this machine grants, and what is missing for which lever"),
    "report": ("runner.report", "RUN: the panel of a run, again"),
}
_HERE = Path(__file__).resolve().parent
CONF = _HERE / "conf" if (_HERE / "conf").is_dir() else _HERE.parent / "conf"  # in a wheel, or a checkout


def main() -> None:
    """Dispatch the command line."""
    sys.exit(dispatch(sys.argv[1:]))


def dispatch(arguments: list[str]) -> int:
    """Run a word, show the help, or start a run; returns the exit code."""
    if arguments and arguments[0] in WORDS:
        return int(import_module(WORDS[arguments[0]][0]).main(arguments[1:]))
    if {"--help", "-h"} & set(arguments):
        from runner import usage

        print(usage.text({word: does for word, (_, does) in WORDS.items()}, [CONF, *usage.config_dirs(arguments)]))
        return 0
    if arguments and arguments[0].isidentifier():
        near = get_close_matches(arguments[0], WORDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the words are {', '.join(WORDS)}"
        print(f"{arguments[0]}: neither a word nor KEY=VALUE; {hint}", file=sys.stderr)
        return 2
    from runner.run import main as run

    return run(arguments, conf=CONF)


if __name__ == "__main__":
    main()
