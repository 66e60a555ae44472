"""Let the kernel refuse to map files, in this process and its children, for good: a seccomp filter.

Refused are shared mappings of files, with which data is mapped; those of libraries are private, those of memory
anonymous.
"""

from __future__ import annotations

import ctypes
import platform
import struct

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
NUMBER_OF_MMAP = {"x86_64": 9, "aarch64": 222}
LOAD, EQUAL, AND, RETURN = 0x20, 0x15, 0x54, 0x06
MAP_SHARED, MAP_ANONYMOUS = 0x01, 0x20
ALLOW, REFUSE = 0x7FFF0000, 0x00050000


def refuse_maps(errno: int) -> None:
    """Answer every shared mapping of a file with an error number.

    Raises:
        OSError: the kernel has no seccomp filters, or allows none.
    """
    mmap = NUMBER_OF_MMAP[platform.machine()]
    program = [
        (LOAD, 0, 0, 0),  # the number of the system call
        (EQUAL, 0, 4, mmap),
        (LOAD, 0, 0, 16 + 8 * 3),  # its fourth argument: flags
        (AND, 0, 0, MAP_SHARED | MAP_ANONYMOUS),
        (EQUAL, 0, 1, MAP_SHARED),
        (RETURN, 0, 0, REFUSE | errno),
        (RETURN, 0, 0, ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    described = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value, argument in (
        (PR_SET_NO_NEW_PRIVS, 1, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(described)),
    ):
        if libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(argument), ctypes.c_ulong(0), ctypes.c_ulong(0)):
            raise OSError(ctypes.get_errno(), "prctl")
