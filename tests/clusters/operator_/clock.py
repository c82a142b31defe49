"""A wrong clock for one process: a shared library that adds to what the kernel says of the time of day.

Only Python asks for it this way. OpenSSL has another call and sees the true time, because what is tested is what the
operator makes of a wrong clock, and not that an API server's certificate must be valid for its clients.
"""

import mmap
import os
import struct
import subprocess
from pathlib import Path

SOURCE = """
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static volatile long *off_seconds;

__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("CLOCK_OFF_FILE"), O_RDONLY);
    void *page = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    off_seconds = page == MAP_FAILED ? 0 : page;
    close(file);
}

int clock_gettime(clockid_t which, struct timespec *time) {
    int failed = syscall(SYS_clock_gettime, which, time);
    if (!failed && which == CLOCK_REALTIME && off_seconds) time->tv_sec += *off_seconds;
    return failed;
}
"""


class WrongClock:
    """A clock that can be set while the process runs; `variables` are what its environment needs."""

    def __init__(self, folder: Path, off_seconds: int = 0):
        library, self._file = folder / "clock.so", folder / "off"
        (folder / "clock.c").write_text(SOURCE)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "clock.c"], check=True, timeout=60)
        self._file.write_bytes(bytes(mmap.PAGESIZE))
        self.variables = {"LD_PRELOAD": str(library), "CLOCK_OFF_FILE": str(self._file)}
        self.set(off_seconds)

    def set(self, off_seconds: int) -> None:
        """Have the process see a time that many seconds later than the true one."""
        with self._file.open("r+b") as file:
            os.pwrite(file.fileno(), struct.pack("l", off_seconds), 0)
