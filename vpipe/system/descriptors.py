"""File descriptors of a process: errors that come from having none left, in words."""

import errno
import os
import resource

_EXHAUSTED = {errno.EMFILE: "ulimit -n", errno.ENFILE: "the whole host: fs.file-max"}


def exhausted(error: BaseException) -> str:
    """What to tell the user if no descriptor was left when this error was raised, or is left now; else ""."""
    number = _cause(error)
    if number is None:
        try:
            os.close(os.dup(2))
        except OSError as now:
            number = now.errno if now.errno in _EXHAUSTED else None
    if number is None:
        return ""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"no file descriptor is left: a process may have {limit} ({_EXHAUSTED[number]}); "
        f"raise the limit before the start (ulimit -n {4 * limit}), or open fewer files"
    )


def _cause(error: BaseException | None) -> int | None:
    """The number of the system's error, where this error is one of these or was raised because of one."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in _EXHAUSTED:
            return error.errno
        for number in _EXHAUSTED:  # libraries tell it in words only
            if os.strerror(number) in str(error):
                return number
        error = error.__cause__ or error.__context__
    return None
