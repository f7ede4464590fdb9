"""The secret of the machines of a run, which a process takes out of its environment before it starts any other.

Otherwise every process of the run would show it: started programs inherit the variables, and copies (`fork`) the memory
with which this program was started, which `/proc/PID/environ` shows whatever becomes of the variables.
"""

from __future__ import annotations

import ctypes
import os

from headway.core.coordination.launch_variables import SECRET
from headway.core.credentials.secrets import remember

_taken = ""


def take_secret() -> str:
    """Return the secret that this process was given in a variable, and remove it there; empty without one.

    A further call returns the same secret, for another training of the same process.
    """
    global _taken
    if SECRET in os.environ:
        _taken = os.environ[SECRET].strip()
        remember(_taken, SECRET)  # values of variables are redacted; this one still has to be
        # Overwrite the value of a variable where the program has got it from the kernel.
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_void_p
        getenv.argtypes = (ctypes.c_char_p,)
        address = getenv(SECRET.encode())
        if address is not None:
            ctypes.memset(address, 0, len(ctypes.string_at(address)))
        del os.environ[SECRET]
    return _taken
