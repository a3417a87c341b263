"""Leave children that use shared memory, with the name given, and have much of their own, so that they die slowly."""

import mmap
import os
import sys
import time
from pathlib import Path

name = Path(sys.argv[1])
with name.open("w+b") as file:
    file.truncate(1 << 20)
    memory = mmap.mmap(file.fileno(), 0)

os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
os.dup2(1, 2)
ready, say_ready = os.pipe()
for _ in range(2):
    if os.fork() == 0:
        much = bytearray(1 << 27)
        os.write(say_ready, b"1")
        time.sleep(60)
for _ in range(2):
    os.read(ready, 1)
