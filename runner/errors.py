"""How a run may end badly, and the status and exit code that each ending gets."""


class BadInput(ValueError):
    """Something a user stated cannot be done: one sentence with the key, the value, why, and what would work."""


class Diverged(ArithmeticError):
    """The loss is no longer a finite number, so further steps would train nothing."""


class Interrupted(Exception):
    """The run was told to stop by a signal.

    Args:
        signal_number: as the kernel counts them; the exit code is 128 plus it.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by signal {signal_number}")
        self.signal_number = signal_number


class RankFailed(Exception):
    """The first rank that failed, in its own words.

    Args:
        status, exit_code: what that rank's error maps to (see `ending`).
        traceback: the rank's own, or empty where it was killed.
    """

    def __init__(self, reason: str, *, status: str, exit_code: int, traceback: str) -> None:
        super().__init__(reason)
        self.status, self.exit_code, self.traceback = status, exit_code, traceback


EXIT_CODES = {"ok": 0, "failed": 1, "bad_input": 2, "oom": 3, "diverged": 4}


def ending(error: BaseException) -> tuple[str, int]:
    """The record's status and the process's exit code for an exception that ended a run.

    Out of memory is told by name and words, not by class, so that this file needs no torch: the accelerator raises
    ``OutOfMemoryError``, the CPU allocator a plain ``RuntimeError`` that says ``can't allocate memory``.
    """
    if isinstance(error, RankFailed):
        return error.status, error.exit_code
    if isinstance(error, Interrupted):
        return "interrupted", 128 + error.signal_number
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    if isinstance(error, BadInput):
        return "failed", EXIT_CODES["bad_input"]
    if isinstance(error, Diverged):
        return "diverged", EXIT_CODES["diverged"]
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & {"OutOfMemoryError", "MemoryError"} or "can't allocate memory" in str(error):
        return "oom", EXIT_CODES["oom"]
    return "failed", EXIT_CODES["failed"]
