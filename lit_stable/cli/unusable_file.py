"""What is said, whatever the command, where the disk is full or a file is not for whoever runs it."""

from __future__ import annotations

import errno
from pathlib import Path

from lit_stable.callbacks.not_written import FORBIDDEN, FULL, caused_by, reason

_NOT_ITS_KIND = (errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
_BROKEN = (errno.EIO, errno.ESTALE)


def unusable_file(error: BaseException) -> str | None:
    """The sentence about the file that an error comes of; None where it comes of something else, or names none."""
    found = caused_by(error, (*FULL, *FORBIDDEN, *_NOT_ITS_KIND, *_BROKEN))
    if found is None or not isinstance(found.filename, str):
        return None
    path = Path(found.filename)
    why = reason(path, found)
    if found.errno in (*FULL, errno.EROFS):
        remedy = "make room, and give the command again" if found.errno in FULL else "name another place"
        return f"{path}: could not be written ({why}); nothing unfinished has that name: {remedy}."
    if found.errno in FORBIDDEN:  # of reading or of writing, the error does not say
        return f"{path}: may not be used ({why}); get the right to read and write there, or name another place."
    return f"{path}: cannot be used ({why}); name another, or mend that."
